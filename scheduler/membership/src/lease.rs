//! A lease that keeps itself alive, and is made again with the next epoch when it was lost.

use std::time::Duration;

use contract::view::{Member, MemberKey, MemberKind};
use daemon::clock;
use daemon::task::Tasks;
use daemon::telemetry::metrics::{self, Gauge};
use daemon::telemetry::names;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use crate::backend::{Backend, StoreError};
use crate::backoff::Backoff;
use crate::config::{check_id, check_ttl};
use crate::error::Error;

/// Longest time for one call to the store.
const CALL_DEADLINE: Duration = Duration::from_secs(2);
/// Longest wait between two attempts to make a lease.
const RETRY_MAX: Duration = Duration::from_secs(2);
/// A lease is prolonged this many times in its life.
const RENEWALS: u32 = 3;

/// A registration that is kept as long as this exists.
///
/// Dropping it stops keeping the lease alive, as a crash would: it ends within its time to live.
/// [`Lease::revoke`] ends it at once.
#[derive(Debug)]
pub struct Lease {
    key: MemberKey,
    wish: watch::Sender<Wish>,
    state: watch::Receiver<LeaseState>,
    task: JoinHandle<()>,
}

/// Where a lease stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeaseState {
    /// Whether the store is known to hold it now.
    pub held: bool,
    /// Epoch of the last lease made; 0 before the first.
    pub epoch: u64,
}

impl Lease {
    /// Says whether the store is known to hold the lease now.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.state.borrow().held
    }

    /// Epoch of the last lease made; 0 before the first.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.state.borrow().epoch
    }

    /// Follows the lease's state, such as for readiness.
    #[must_use]
    pub fn state(&self) -> watch::Receiver<LeaseState> {
        self.state.clone()
    }

    /// Lets the lease hold another state of its member, as soon as the store can be reached.
    ///
    /// # Errors
    /// When `member` is another member or another life of it.
    pub fn update(&self, member: Member) -> Result<(), Error> {
        let theirs = member.key();
        if theirs != self.key {
            return Err(Error::OtherMember { ours: self.key.clone(), theirs });
        }
        self.wish.send_modify(|wish| wish.member = member);
        Ok(())
    }

    /// Ends the lease at once; if the store cannot be reached it ends within its time to live.
    pub async fn revoke(self) {
        self.wish.send_modify(|wish| wish.revoked = true);
        // The task bounds its own last call; this is the second line.
        let _ = timeout(CALL_DEADLINE * 2, self.task).await;
    }
}

/// What the holder of a lease wants.
#[derive(Debug)]
struct Wish {
    member: Member,
    revoked: bool,
}

/// Starts to keep a lease for `member` in the store.
pub(crate) fn start<B: Backend>(backend: B, member: Member, ttl: Duration, tasks: &Tasks) -> Result<Lease, Error> {
    check_id(&member.id)?;
    check_ttl(ttl)?;
    let key = member.key();
    let epoch = member.epoch + 1;
    let gauges = Gauges::new(&member);
    let (wish_sender, wish) = watch::channel(Wish { member, revoked: false });
    let (state_sender, state) = watch::channel(LeaseState::default());
    let keeper = Keeper { backend, ttl, epoch, wish, state: state_sender, gauges };
    let task = tasks.spawn("membership-lease", keeper.run());
    Ok(Lease { key, wish: wish_sender, state, task })
}

struct Keeper<B> {
    backend: B,
    ttl: Duration,
    /// Epoch of the present lease, or of the next while there is none.
    epoch: u64,
    wish: watch::Receiver<Wish>,
    state: watch::Sender<LeaseState>,
    gauges: Gauges,
}

/// Why a lease is no longer kept.
enum Ended {
    /// The store forgot it.
    Lost,
    /// Its holder no longer wants it.
    Unwanted,
}

impl<B: Backend> Keeper<B> {
    async fn run(mut self) {
        let mut wish = self.wish.clone();
        loop {
            let mut session = tokio::select! {
                _ = wish.wait_for(|wish| wish.revoked) => break,
                session = self.acquire() => session,
            };
            match self.hold(&mut session).await {
                Ended::Lost => {
                    self.set_held(false);
                    tracing::warn!(
                        endpoints = self.backend.endpoints(),
                        epoch = self.epoch,
                        "the membership lease was lost; registering again"
                    );
                    self.epoch += 1;
                }
                Ended::Unwanted => {
                    if self.wish.borrow().revoked {
                        self.end(session).await;
                    }
                    break;
                }
            }
        }
        self.set_held(false);
    }

    /// Tries until the store grants a lease.
    async fn acquire(&mut self) -> B::Session {
        let mut backoff = Backoff::new(RETRY_MAX.min(self.ttl));
        loop {
            let member = self.wanted();
            let reason = match timeout(CALL_DEADLINE, self.backend.grant(&member, self.ttl)).await {
                Ok(Ok(session)) => {
                    self.set_held(true);
                    tracing::info!(
                        endpoints = self.backend.endpoints(),
                        id = member.id,
                        epoch = self.epoch,
                        "registered"
                    );
                    return session;
                }
                Ok(Err(error)) => error.to_string(),
                Err(_) => format!("no answer within {} ms", CALL_DEADLINE.as_millis()),
            };
            let wait = backoff.fail(daemon::random::u64());
            if backoff.is_worth_a_line() {
                let endpoints = self.backend.endpoints();
                tracing::warn!(endpoints, reason, id = member.id, "cannot register; trying again");
            }
            sleep(wait).await;
        }
    }

    /// Keeps the lease alive and up to date until it is lost or no longer wanted.
    async fn hold(&mut self, session: &mut B::Session) -> Ended {
        let interval = self.ttl / RENEWALS;
        let mut backoff = Backoff::new(interval);
        let mut renewed = clock::now();
        let mut wait = interval;
        // The wish may have changed while the lease was being made.
        let mut is_stale = self.wish.has_changed().unwrap_or(false);
        loop {
            if self.wish.borrow().revoked {
                return Ended::Unwanted;
            }
            if !is_stale {
                tokio::select! {
                    changed = self.wish.changed() => match changed {
                        Ok(()) => is_stale = true,
                        Err(_) => return Ended::Unwanted,
                    },
                    () = sleep(wait) => {}
                }
                if is_stale {
                    continue;
                }
            }
            let asked = clock::now();
            match self.renew(session, is_stale, interval.min(CALL_DEADLINE)).await {
                Ok(()) => {
                    (is_stale, renewed, wait) = (false, asked, interval);
                    backoff.succeed();
                    self.set_held(true);
                    continue;
                }
                Err(StoreError::Lost) => return Ended::Lost,
                Err(StoreError::Unavailable(reason)) => {
                    wait = backoff.fail(daemon::random::u64());
                    if backoff.is_worth_a_line() {
                        let endpoints = self.backend.endpoints();
                        tracing::warn!(endpoints, reason, "cannot prolong the membership lease; trying again");
                    }
                }
            }
            if clock::now().saturating_duration_since(renewed) >= self.ttl {
                self.set_held(false);
            }
            if is_stale {
                let mut wish = self.wish.clone();
                tokio::select! {
                    _ = wish.wait_for(|wish| wish.revoked) => return Ended::Unwanted,
                    () = sleep(wait) => {}
                }
            }
        }
    }

    /// One call that prolongs the lease or, when `is_stale`, tells the store what it should hold.
    async fn renew(&mut self, session: &mut B::Session, is_stale: bool, deadline: Duration) -> Result<(), StoreError> {
        let answer = if is_stale {
            let member = self.wanted();
            timeout(deadline, self.backend.put(session, &member)).await
        } else {
            timeout(deadline, self.backend.keep(session)).await
        };
        answer.unwrap_or_else(|_| Err(StoreError::Unavailable(format!("no answer within {} ms", deadline.as_millis()))))
    }

    async fn end(&self, session: B::Session) {
        match timeout(CALL_DEADLINE, self.backend.end(session)).await {
            Ok(Ok(()) | Err(StoreError::Lost)) => {}
            Ok(Err(StoreError::Unavailable(reason))) => {
                tracing::warn!(endpoints = self.backend.endpoints(), reason, "cannot end the lease; it will run out");
            }
            Err(_) => {
                tracing::warn!(
                    endpoints = self.backend.endpoints(),
                    "no answer while ending the lease; it will run out"
                );
            }
        }
    }

    /// The member as its holder wants it, with the epoch of this lease.
    fn wanted(&mut self) -> Member {
        Member { epoch: self.epoch, ..self.wish.borrow_and_update().member.clone() }
    }

    fn set_held(&self, held: bool) {
        let state = LeaseState { held, epoch: if held { self.epoch } else { self.state.borrow().epoch } };
        self.state.send_replace(state);
        self.gauges.set(held);
    }
}

/// Shows one lease in the process's metrics for as long as it is kept.
struct Gauges {
    held: Gauge,
    lost: Gauge,
}

impl Gauges {
    fn new(member: &Member) -> Self {
        let role = match member.kind {
            MemberKind::Worker => "worker",
            MemberKind::Router => "router",
            MemberKind::Scheduler => "scheduler",
        };
        let scope = metrics::scope(role, &member.id);
        let gauges = Self {
            held: scope.gauge(&names::MEMBERSHIP_LEASES, &["held"]),
            lost: scope.gauge(&names::MEMBERSHIP_LEASES, &["lost"]),
        };
        gauges.set(false);
        gauges
    }

    fn set(&self, held: bool) {
        self.held.set(i64::from(held));
        self.lost.set(i64::from(!held));
    }
}

impl Drop for Gauges {
    fn drop(&mut self) {
        self.held.set(0);
        self.lost.set(0);
    }
}
