//! Where requests wait for room at a worker, and are placed in fair order as it appears.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use contract::error::RequestError;
use contract::ids::{Incarnation, TenantId};
use daemon::telemetry::metrics::Gauge;
use tokio::sync::{Notify, oneshot};

use crate::admission::{AdmissionSettings, Ask, FairQueue, Outlook, Tenant, Ticket, Turn};

/// Requests `W` that wait to be placed as `P`.
pub(crate) struct Gate<W, P> {
    queue: Mutex<FairQueue<Waiting<W, P>>>,
    settings: AdmissionSettings,
    /// When to come back where the backlog does not tell.
    retry_after_ms: u64,
    queued: Gauge,
    entered: Notify,
    n_tenants: AtomicUsize,
    tenants_changed: Notify,
}

/// What an attempt to place a request comes to.
pub(crate) enum Attempt<P> {
    /// It is placed, with so many tokens to compute.
    Placed(P, u64),
    /// No worker that it may go to has room, as far as is predicted for so long.
    NotNow(Duration),
    /// It cannot be placed at all.
    Never(RequestError),
}

/// What is predicted for a request that cannot be placed at once.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Forecast {
    /// Prompt tokens that are to be computed.
    pub(crate) tokens: u64,
    /// Time in which they are, in milliseconds.
    pub(crate) prefill_ms: f64,
    /// Least time to first token once it is placed, in milliseconds.
    pub(crate) first_token_ms: f64,
    /// Tokens per millisecond that all workers together take; 0 is unknown.
    pub(crate) tokens_per_ms: f64,
}

/// Who asks, how urgently and until when.
pub(crate) struct Claim<'a> {
    pub(crate) tenant: &'a Tenant,
    /// Lower is more urgent.
    pub(crate) priority: i32,
    pub(crate) deadline: Instant,
    /// A later prompt of a request that was let in: what is ahead is its own for the most part, so it is not refused for
    /// that, and waits up to the deadline.
    pub(crate) is_later: bool,
}

struct Waiting<W, P> {
    what: W,
    answer: oneshot::Sender<Result<P, RequestError>>,
}

/// Takes a request out of the queue when its client goes away.
struct Place<'a, W, P> {
    gate: &'a Gate<W, P>,
    ticket: Ticket,
}

impl<W, P> Gate<W, P> {
    /// Makes a gate that nobody waits at; `queued` counts who does.
    pub(crate) fn new(settings: AdmissionSettings, retry_after_ms: u64, queued: Gauge) -> Self {
        let queue = FairQueue::new(settings.queue, settings.order, daemon::clock::now());
        Self {
            queue: Mutex::new(queue),
            settings,
            retry_after_ms,
            queued,
            entered: Notify::new(),
            n_tenants: AtomicUsize::new(0),
            tenants_changed: Notify::new(),
        }
    }

    /// Places a request by `try_place` if nobody waits and there is room, else waits until [`Gate::pump`] has placed it.
    ///
    /// # Errors
    /// `Overloaded` when too much waits, when the first token would come too late, or after the longest wait;
    /// `DeadlineExceeded` at the deadline; and what an attempt ended with.
    pub(crate) async fn acquire(
        &self,
        claim: Claim<'_>,
        what: W,
        try_place: impl FnOnce(&W, Turn) -> Attempt<P>,
        forecast: impl FnOnce(&W) -> Forecast,
    ) -> Result<P, RequestError> {
        if let Some(result) = self.pass(claim.tenant, &what, try_place) {
            return result;
        }
        let now = daemon::clock::now();
        let forecast = forecast(&what);
        let longest = now + Duration::from_millis(self.settings.wait_ms_max);
        let until = if claim.is_later { claim.deadline } else { claim.deadline.min(longest) };
        let is_patient = until < claim.deadline;
        let (answer, placed) = oneshot::channel();
        let ticket = self.enter(now, &claim, forecast, Waiting { what, answer })?;
        let place = Place { gate: self, ticket };
        self.entered.notify_one();
        let answer = tokio::time::timeout_at(until.into(), placed).await;
        drop(place);
        match answer {
            Ok(Ok(placed)) => placed,
            Err(_) if is_patient => Err(RequestError::Overloaded {
                reason: format!("no worker had room for {} ms", self.settings.wait_ms_max),
                retry_after_ms: self.retry_after(forecast),
            }),
            // The sender is dropped unused only when the queue found the deadline first.
            Ok(Err(_)) | Err(_) => Err(RequestError::DeadlineExceeded { n_tokens: 0 }),
        }
    }

    /// Returns when a request has begun to wait since it did last.
    pub(crate) async fn entered(&self) {
        self.entered.notified().await;
    }

    /// Tenants that wait.
    pub(crate) fn tenants(&self) -> BTreeSet<TenantId> {
        self.queue().tenants().cloned().collect()
    }

    /// Returns when [`Gate::tenants`] has changed since it did last.
    pub(crate) async fn tenants_changed(&self) {
        self.tenants_changed.notified().await;
    }

    /// Counts tokens that other routers served tenants.
    pub(crate) fn charge<'a>(&self, served: impl Iterator<Item = (Incarnation, &'a Tenant, u64)>) {
        let mut queue = self.queue();
        served.for_each(|(by, tenant, tokens)| queue.charge(Some(by), &tenant.name, tenant.limits.weight, tokens));
    }

    /// Tells who waits at which other routers.
    pub(crate) fn set_elsewhere(&self, tenants: BTreeMap<TenantId, BTreeSet<Incarnation>>) {
        self.queue().set_elsewhere(tenants);
    }

    /// Places whatever can be placed, in fair order: to be called when room may have appeared. Returns after which time it
    /// is to be called again at the latest, if anything waits.
    ///
    /// `try_place` runs under the queue's lock, so it neither waits nor comes back here; the lock is let go between any two
    /// placements.
    pub(crate) fn pump(&self, now: Instant, mut try_place: impl FnMut(&W, Turn) -> Attempt<P>) -> Option<Duration> {
        let mut again: Option<Duration> = None;
        loop {
            let mut result = None;
            let mut queue = self.queue();
            let expired = queue.pop_expired(now);
            let taken = queue.pop_where(|waiting, turn| {
                if waiting.answer.is_closed() {
                    // Its client went away: it is taken out, and has no result.
                    return Some(0);
                }
                match try_place(&waiting.what, turn) {
                    Attempt::Placed(placement, tokens) => {
                        result = Some(Ok(placement));
                        Some(tokens)
                    }
                    Attempt::Never(error) => {
                        result = Some(Err(error));
                        Some(0)
                    }
                    Attempt::NotNow(wait) => {
                        again = Some(again.map_or(wait, |again| again.min(wait)));
                        None
                    }
                }
            });
            self.count(&queue);
            drop(queue);
            let is_done = expired.is_none() && taken.is_none();
            // A placement that nobody waits for any more is dropped here, outside the lock.
            if let (Some(waiting), Some(result)) = (taken, result) {
                drop(waiting.answer.send(result));
            }
            if is_done {
                return again;
            }
        }
    }

    /// Tries to place a request at once, past a queue that is empty.
    fn pass(
        &self,
        tenant: &Tenant,
        what: &W,
        try_place: impl FnOnce(&W, Turn) -> Attempt<P>,
    ) -> Option<Result<P, RequestError>> {
        let mut queue = self.queue();
        if !queue.is_empty() {
            return None;
        }
        match try_place(what, queue.newcomer(&tenant.name)) {
            Attempt::Placed(placement, tokens) => {
                queue.charge(None, &tenant.name, tenant.limits.weight, tokens);
                Some(Ok(placement))
            }
            Attempt::Never(error) => Some(Err(error)),
            Attempt::NotNow(_) => None,
        }
    }

    fn enter(
        &self,
        now: Instant,
        claim: &Claim<'_>,
        forecast: Forecast,
        waiting: Waiting<W, P>,
    ) -> Result<Ticket, RequestError> {
        let (name, weight) = (&claim.tenant.name, claim.tenant.limits.weight);
        let ask = Ask {
            tenant: name.clone(),
            weight,
            tokens: forecast.tokens,
            priority: claim.priority,
            deadline: Some(claim.deadline),
            prefill_ms: forecast.prefill_ms,
        };
        let left = claim.deadline.saturating_duration_since(now);
        let left_ms = u64::try_from(left.as_millis()).unwrap_or(u64::MAX);
        let mut queue = self.queue();
        let outlook = Outlook {
            tokens_ahead: queue.tokens_ahead(name, weight, forecast.tokens),
            tokens_per_ms: forecast.tokens_per_ms,
            first_token_ms: forecast.first_token_ms,
        };
        if !claim.is_later {
            outlook.judge(self.settings.first_token_goal_ms, Some(left_ms))?;
        }
        let entered = queue.push(now, ask, waiting);
        self.count(&queue);
        drop(queue);
        entered.map_err(|refused| RequestError::Overloaded {
            reason: refused.to_string(),
            retry_after_ms: self.retry_after(forecast),
        })
    }

    /// The time in which half of what waits will have been placed.
    fn retry_after(&self, forecast: Forecast) -> u64 {
        let half_ms = self.queue().tokens() as f64 / forecast.tokens_per_ms / 2.0;
        if forecast.tokens_per_ms > 0.0 && half_ms.is_finite() { (half_ms as u64).max(1) } else { self.retry_after_ms }
    }

    fn count(&self, queue: &FairQueue<Waiting<W, P>>) {
        self.queued.set(i64::try_from(queue.len()).unwrap_or(i64::MAX));
        // Between two counts tenants only come or only go.
        let n_tenants = queue.tenants().len();
        if self.n_tenants.swap(n_tenants, Ordering::Relaxed) != n_tenants {
            self.tenants_changed.notify_one();
        }
    }

    fn queue(&self) -> MutexGuard<'_, FairQueue<Waiting<W, P>>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<W, P> Drop for Place<'_, W, P> {
    fn drop(&mut self) {
        let mut queue = self.gate.queue();
        let left = queue.remove(self.ticket);
        self.gate.count(&queue);
        drop(queue);
        // Whatever it holds is dropped outside the lock.
        drop(left);
    }
}

#[cfg(test)]
#[path = "gate_tests.rs"]
mod tests;
