//! A router: the real placer over what reached this router, a queue of what waits, and the streams it reads.

mod placing;
mod resuming;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use contract::error::RequestError;
use contract::ids::{EngineId, Incarnation, RequestId, TenantId};
use contract::ledger::{LedgerEvent, PlacedWork, PlacementKey};
use contract::view::ClusterView;
use engine::{Output, OutputEvent};
use router::admission::{Ask, FairQueue, Order, QueueBounds, Ticket};
use router::route::RoutePolicy;
use router::route::directory::Update;
use router::route::placer::{NotPlaced, PlacedPrefill, Placer, PlacerSettings};

use crate::book::{Book, End};
use crate::checker::Violation;
use crate::event::{Event, KvMessage, RequestIdx, ToRouter, ToWorker};
use crate::network::Network;
use crate::options::{Planted, Waiting};
use crate::prepared::Prepared;
use resuming::Resuming;

/// After so long without a snapshot, beside the time that one takes, it is asked for again.
const SNAPSHOT_PATIENCE: Duration = Duration::from_secs(2);
/// Longest time until requests that wait are looked at again.
const RETRY_MS_MAX: f64 = 1_000.0;

/// One router.
pub(crate) struct Router {
    index: usize,
    incarnation: Incarnation,
    pub(crate) placer: Placer,
    waiting_mode: Option<Waiting>,
    dispatch_ahead_ms: f64,
    planted: Option<Planted>,
    peers: Vec<Incarnation>,
    /// What can be reached, by worker.
    pub(crate) peered: Vec<Option<Peer>>,
    view: Arc<ClusterView>,
    waiting: FairQueue<RequestIdx>,
    tickets: HashMap<RequestIdx, Ticket>,
    /// Who waits here as others were told, and who waits at each of them.
    told: BTreeSet<TenantId>,
    elsewhere: Vec<BTreeSet<TenantId>>,
    flights: HashMap<RequestIdx, Flight>,
    /// What lost its worker and waits for another.
    resuming: Resuming,
    retry_at: Option<Duration>,
}

/// A worker that this router knows.
#[derive(Clone, Debug)]
pub(crate) struct Peer {
    pub(crate) engine: EngineId,
    connection: u32,
    /// Its snapshot has come; requests can be placed there.
    pub(crate) is_ready: bool,
    /// A snapshot was asked for and has not come since then.
    syncing_since: Option<Duration>,
}

/// A request that is placed.
#[derive(Clone, Debug)]
struct Flight {
    worker: usize,
    attempt: u32,
    key: PlacementKey,
    work: PlacedWork,
    /// The share of the engine that computes the prompt, while it does.
    prefill: Option<PlacedPrefill>,
    has_first_token: bool,
}

/// What a router acts with.
pub(crate) struct Surroundings<'a> {
    pub(crate) prepared: &'a Prepared,
    pub(crate) book: &'a mut Book,
    pub(crate) network: &'a mut Network,
}

/// How routers are made.
#[derive(Clone, Copy)]
pub(crate) struct RouterSettings {
    pub(crate) policy: &'static dyn RoutePolicy,
    pub(crate) placer: PlacerSettings,
    pub(crate) waiting: Option<Waiting>,
    pub(crate) planted: Option<Planted>,
}

impl Router {
    pub(crate) fn new(
        index: usize,
        settings: &RouterSettings,
        n_routers: usize,
        n_workers: usize,
        origin: Instant,
    ) -> Self {
        let incarnation = |index: usize| Incarnation(index as u64 + 1);
        Self {
            index,
            incarnation: incarnation(index),
            placer: Placer::new(settings.policy, settings.placer, incarnation(index)),
            waiting_mode: settings.waiting,
            dispatch_ahead_ms: settings.placer.dispatch_ahead_ms,
            planted: settings.planted,
            peers: (0..n_routers).map(incarnation).collect(),
            peered: vec![None; n_workers],
            view: Arc::default(),
            waiting: queue(settings.waiting, origin),
            tickets: HashMap::new(),
            told: BTreeSet::new(),
            elsewhere: vec![BTreeSet::new(); n_routers],
            flights: HashMap::new(),
            resuming: Resuming::default(),
            retry_at: None,
        }
    }

    /// Takes a request from a client.
    pub(crate) fn arrive(&mut self, request: RequestIdx, around: &mut Surroundings<'_>) -> Result<(), Violation> {
        around.book.of(request).arrived = around.network.now;
        self.enqueue(request, around);
        self.dispatch(around);
        Ok(())
    }

    pub(crate) fn hear(&mut self, message: ToRouter, around: &mut Surroundings<'_>) -> Result<(), Violation> {
        match message {
            ToRouter::Frames { worker, connection, outputs } => {
                if self.peered[worker].as_ref().is_some_and(|peer| peer.connection == connection) {
                    self.read(worker, outputs, around)?;
                    self.dispatch(around);
                }
            }
            ToRouter::Kv { worker, connection, message } => {
                self.follow(worker, connection, message, around);
                if !self.resuming.is_empty() || !self.waiting.is_empty() && self.flights.is_empty() {
                    self.dispatch(around);
                }
            }
            ToRouter::View(view) => {
                if (view.epoch, view.version) >= (self.view.epoch, self.view.version) {
                    let before = std::mem::replace(&mut self.view, view);
                    if self.view.engines.iter().any(|view| view.role.is_none()) {
                        let known = |engine: &EngineId| placing::viewed(&before, engine)?.role;
                        Arc::make_mut(&mut self.view).keep_roles(known);
                    }
                }
            }
            ToRouter::Ledger(event) => {
                let makes_room = match &event {
                    LedgerEvent::Placed(key, work) => {
                        self.waiting.charge(Some(key.router), &work.tenant, 1, u64::from(work.tokens_new));
                        false
                    }
                    _ => true,
                };
                self.placer.tell(event, around.network.instant());
                if makes_room {
                    self.dispatch(around);
                }
            }
            ToRouter::Waiting { at, tenants } => {
                self.elsewhere[at] = tenants;
                let mut all: BTreeMap<TenantId, BTreeSet<Incarnation>> = BTreeMap::new();
                for (&router, tenants) in self.peers.iter().zip(&self.elsewhere) {
                    tenants.iter().for_each(|tenant| all.entry(tenant.clone()).or_default().extend([router]));
                }
                self.waiting.set_elsewhere(all);
                self.dispatch(around);
            }
            ToRouter::Joined { worker, connection, engine } => self.join(worker, connection, engine, around),
            ToRouter::Lost { worker, connection } => {
                if self.peered[worker].as_ref().is_some_and(|peer| peer.connection == connection) {
                    self.lose(worker, around);
                    self.dispatch(around);
                }
            }
            ToRouter::Scheduler { is_up } => self.scheduler(is_up, around),
            ToRouter::Retry => {
                if self.retry_at.is_some_and(|at| at <= around.network.now) {
                    self.retry_at = None;
                    self.dispatch(around);
                }
            }
        }
        Ok(())
    }

    /// Knows a worker from the start, with an empty cache.
    pub(crate) fn know(&mut self, worker: usize, engine: EngineId, connection: u32) {
        self.placer.directory().begin(&engine);
        self.peered[worker] = Some(Peer { engine, connection, is_ready: false, syncing_since: Some(Duration::ZERO) });
    }

    /// Ends, and all requests that it has with it; others hear that it is gone.
    pub(crate) fn end(mut self, book: &mut Book, network: &mut Network) {
        let mut lost: Vec<RequestIdx> = self.flights.into_keys().collect();
        lost.extend(self.resuming.into_requests().chain(std::iter::from_fn(|| self.waiting.pop())));
        lost.sort_unstable();
        for request in lost {
            book.of(request).refusal = Some("router_lost");
            book.end(request, network.now, End::Badly);
        }
        network.ledger(self.index, LedgerEvent::RouterGone(self.incarnation));
        network.waiting(self.index, BTreeSet::new());
    }

    /// Placed or waiting requests.
    pub(crate) fn n_open(&self) -> usize {
        self.waiting.len() + self.resuming.len() + self.flights.len()
    }

    fn join(&mut self, worker: usize, connection: u32, engine: EngineId, around: &mut Surroundings<'_>) {
        if self.peered[worker].as_ref().is_some_and(|peer| peer.connection >= connection) {
            return;
        }
        // The end of the earlier connection may come to notice only after the next has begun.
        self.lose(worker, around);
        self.placer.directory().begin(&engine);
        let syncing_since = Some(around.network.now);
        self.peered[worker] = Some(Peer { engine, connection, is_ready: false, syncing_since });
        around.network.request(self.index, worker, ToWorker::Watch { router: self.index, connection });
    }

    /// Takes a worker out, with all that is known of its cache; what ran there is placed anew.
    fn lose(&mut self, worker: usize, around: &mut Surroundings<'_>) {
        let Some(peer) = self.peered[worker].take() else { return };
        self.placer.directory().remove(&peer.engine);
        let mut lost: Vec<RequestIdx> =
            self.flights.iter().filter(|(_, flight)| flight.worker == worker).map(|(&request, _)| request).collect();
        lost.sort_unstable();
        for request in lost {
            let n_tokens = around.book.of(request).n_tokens;
            let (worker, reason) = (peer.engine.worker.to_string(), "the connection broke".to_owned());
            self.fail(request, &RequestError::WorkerLost { worker, n_tokens, reason }, around);
        }
    }

    /// Takes what a worker says of its cache, and asks for a snapshot when that does not continue what is known.
    fn follow(&mut self, worker: usize, connection: u32, message: KvMessage, around: &mut Surroundings<'_>) {
        let Some(peer) = &mut self.peered[worker] else { return };
        if connection != peer.connection && self.planted != Some(Planted::SkipIncarnation) {
            return;
        }
        let now = around.network.now;
        let is_snapshot = matches!(message, KvMessage::Snapshot { .. });
        let result = match (peer.syncing_since, is_snapshot) {
            (Some(since), false) if now < since + SNAPSHOT_PATIENCE + around.network.kv_longest() => return,
            (Some(_), false) => None,
            _ => {
                let (sequence, update) = match message {
                    KvMessage::Snapshot { sequence, blocks } => (sequence, Update::Snapshot { blocks, last: true }),
                    KvMessage::Events { sequence, events } => (sequence, Update::Events(events.to_vec())),
                    KvMessage::Heartbeat { sequence, digest } => (sequence, Update::Heartbeat(digest)),
                };
                self.placer.directory().apply(&peer.engine, sequence, update).ok()
            }
        };
        if result.is_some() {
            peer.syncing_since = None;
            peer.is_ready = true;
        } else {
            self.placer.directory().begin(&peer.engine);
            peer.syncing_since = Some(now);
            let connection = peer.connection;
            around.network.request(self.index, worker, ToWorker::Watch { router: self.index, connection });
        }
    }

    /// Reads tokens and ends of streams.
    fn read(&mut self, worker: usize, outputs: Vec<Output>, around: &mut Surroundings<'_>) -> Result<(), Violation> {
        let now = around.network.now;
        for Output { request: RequestId(id), attempt, event, .. } in outputs {
            let request = id as RequestIdx;
            let Some(flight) = self.flights.get_mut(&request) else { continue };
            if (flight.worker, flight.attempt) != (worker, attempt) {
                continue;
            }
            let (first_position, tokens, finish, cached_tokens) = match event {
                OutputEvent::Tokens { first_position, tokens, finish, cached_tokens } => {
                    (first_position, tokens, finish, cached_tokens)
                }
                OutputEvent::Prefilled => continue,
                OutputEvent::Failed(error) => {
                    self.fail(request, &error, around);
                    continue;
                }
            };
            let progress = around.book.of(request);
            if first_position != progress.n_tokens {
                return Err(Violation::Stream { request, expected: progress.n_tokens, got: first_position });
            }
            if let (Some(cached), true) = (cached_tokens, progress.first_token.is_none()) {
                progress.n_cached = cached;
            }
            around.book.take_tokens(request, &tokens, now);
            let (key, is_first) = (flight.key, !std::mem::replace(&mut flight.has_first_token, true));
            if finish.is_some() {
                self.land(request, around.network);
                around.book.end(request, now, End::Well);
            } else if is_first {
                let prefill = flight.prefill.take();
                prefill.into_iter().for_each(|it| self.tell(LedgerEvent::Finished(it.key), around.network));
                self.tell(LedgerEvent::FirstToken(key), around.network);
            }
        }
        Ok(())
    }

    /// A client has gone away: its request ends here and at its worker.
    pub(crate) fn abort(&mut self, request: RequestIdx, around: &mut Surroundings<'_>) {
        if let Some(ticket) = self.tickets.remove(&request) {
            self.waiting.remove(ticket);
        }
        self.resuming.remove(request);
        if let Some(Flight { worker, attempt, .. }) = self.land(request, around.network)
            && let Some(&Peer { connection, .. }) = self.peered[worker].as_ref()
        {
            let message = ToWorker::Cancel { router: self.index, connection, request, attempt };
            around.network.request(self.index, worker, message);
        }
        around.book.end(request, around.network.now, End::Aborted);
        self.dispatch(around);
    }

    /// Takes a placement out of the ledger.
    fn land(&mut self, request: RequestIdx, network: &mut Network) -> Option<Flight> {
        let flight = self.flights.remove(&request)?;
        let prefill = flight.prefill.as_ref().map(|prefill| prefill.key);
        prefill.into_iter().chain([flight.key]).for_each(|key| self.tell(LedgerEvent::Finished(key), network));
        Some(flight)
    }

    /// Puts a request among those that wait.
    fn enqueue(&mut self, request: RequestIdx, around: &mut Surroundings<'_>) {
        let arrived = around.network.at_instant(around.book.of(request).arrived);
        let asked = &around.prepared.requests()[request as usize];
        let prefill_ms = if self.waiting_mode.is_some() { self.prefill_ms_least(request, around) } else { 0.0 };
        let ask = Ask {
            tenant: around.prepared.tenant(asked.tenant),
            weight: 1,
            tokens: u64::from(asked.n_prompt),
            priority: 0,
            deadline: None,
            prefill_ms,
        };
        let ticket = self.waiting.push(arrived, ask, request).expect("the queue has no bound");
        self.tickets.insert(request, ticket);
    }

    /// Places what waits, in order, as far as there is room.
    fn dispatch(&mut self, around: &mut Surroundings<'_>) {
        self.resume(around);
        let mut wait_ms_min = f64::INFINITY;
        while !self.waiting.is_empty() && (self.waiting_mode.is_none() || self.has_room(around)) {
            let nothing = queue(None, around.network.instant());
            let mut waiting = std::mem::replace(&mut self.waiting, nothing);
            // By worker: what was passed over goes before what is looked at later.
            let mut backlog_ms = vec![0.0; self.peered.len()];
            wait_ms_min = f64::INFINITY;
            let taken = waiting.pop_where(|&request, turn| {
                match self.place(request, &self.wish(turn), &mut backlog_ms, around) {
                    Ok(tokens) => Some(tokens),
                    Err(NotPlaced::Busy { wait_ms, .. }) => {
                        wait_ms_min = wait_ms_min.min(wait_ms);
                        None
                    }
                    Err(NotPlaced::NoEngine) => None,
                }
            });
            self.waiting = waiting;
            let Some(taken) = taken else { break };
            self.tickets.remove(&taken);
        }
        if wait_ms_min.is_finite() {
            self.retry_after(wait_ms_min.clamp(1.0, RETRY_MS_MAX), around.network);
        }
        self.tell_waiting(around.network);
    }

    /// Tells the others who waits here, if that has changed.
    fn tell_waiting(&mut self, network: &mut Network) {
        let tenants: BTreeSet<TenantId> = self.waiting.tenants().cloned().collect();
        if self.peers.len() > 1 && tenants != self.told {
            self.told.clone_from(&tenants);
            network.waiting(self.index, tenants);
        }
    }

    /// Whether any engine takes more; if not, it is looked again when the first of them might.
    fn has_room(&mut self, around: &mut Surroundings<'_>) -> bool {
        let now = around.network.instant();
        let ledger = self.placer.ledger();
        let ready = self.peered.iter().flatten().filter(|peer| peer.is_ready);
        let least = ready.map(|peer| ledger.load(&peer.engine, now).wait_ms).fold(f64::INFINITY, f64::min);
        drop(ledger);
        if least < self.dispatch_ahead_ms {
            return true;
        }
        if least.is_finite() {
            self.retry_after((least - self.dispatch_ahead_ms).clamp(1.0, RETRY_MS_MAX), around.network);
        }
        false
    }

    fn retry_after(&mut self, wait_ms: f64, network: &mut Network) {
        let at = network.now + Duration::from_secs_f64(wait_ms / 1e3);
        if self.retry_at.is_none_or(|known| at < known || known <= network.now) {
            self.retry_at = Some(at);
            network.at(at, Event::Router(self.index, ToRouter::Retry));
        }
    }

    /// Enters a change of an own placement and tells the others.
    fn tell(&self, event: LedgerEvent, network: &mut Network) {
        self.placer.tell(event.clone(), network.instant());
        network.ledger(self.index, event);
    }

    /// Without a scheduler the other routers' placements are forgotten; with one again all tell theirs anew.
    fn scheduler(&mut self, is_up: bool, around: &mut Surroundings<'_>) {
        let now = around.network.instant();
        if !is_up {
            for &peer in self.peers.iter().filter(|&&peer| peer != self.incarnation) {
                self.placer.tell(LedgerEvent::RouterGone(peer), now);
            }
            self.elsewhere.iter_mut().for_each(BTreeSet::clear);
            self.waiting.set_elsewhere(BTreeMap::new());
        } else {
            self.tell_all(around.network);
        }
    }

    /// Tells the others anew what runs and who waits here.
    pub(crate) fn tell_all(&self, network: &mut Network) {
        network.ledger(self.index, LedgerEvent::RouterGone(self.incarnation));
        network.waiting(self.index, self.told.clone());
        let mut flights: Vec<&Flight> = self.flights.values().collect();
        flights.sort_unstable_by_key(|flight| flight.key);
        for flight in flights {
            network.ledger(self.index, LedgerEvent::Placed(flight.key, flight.work.clone()));
            if let Some(prefill) = &flight.prefill {
                network.ledger(self.index, LedgerEvent::Placed(prefill.key, prefill.work.clone()));
            }
            if flight.has_first_token {
                network.ledger(self.index, LedgerEvent::FirstToken(flight.key));
            }
        }
    }
}

/// A queue without bounds but for what one search looks at.
fn queue(waiting: Option<Waiting>, now: Instant) -> FairQueue<RequestIdx> {
    let Waiting { slack, n_scan_max, n_overtakes_max } = waiting.unwrap_or_default();
    let bounds = QueueBounds {
        n_requests_max: usize::MAX,
        tokens_max: u64::MAX,
        n_requests_per_tenant_max: usize::MAX,
        tokens_per_tenant_max: u64::MAX,
        n_scan_per_tenant_max: n_scan_max,
        n_overtakes_max,
        ..QueueBounds::default()
    };
    FairQueue::new(bounds, Order { slack, ..Order::default() }, now)
}
