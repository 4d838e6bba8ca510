//! Carries messages between routers, workers and the scheduler, with delays, in order per link, and not at all while cut.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use contract::ids::TenantId;
use contract::ledger::LedgerEvent;
use contract::view::ClusterView;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

use crate::event::{Blocks, Event, EventQueue, KvMessage, PeerMessage, ToRouter, ToScheduler, ToWorker};
use crate::random::Random;

/// How long messages take.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Delays {
    /// From a change of a worker's occupancy to the routers, by way of the scheduler, in milliseconds.
    pub view_ms: f64,
    /// From a change of a worker's cache to the routers, in milliseconds.
    pub kv_ms: f64,
    /// From a placement to the other routers, in milliseconds: at least,
    pub ledger_ms_min: f64,
    /// and at most.
    pub ledger_ms_max: f64,
    /// Of a request or an answer, in milliseconds, at most.
    pub request_ms_max: f64,
}

/// How prompts move between workers.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Links {
    /// Tokens whose keys and values a worker sends in a second, to all others together.
    pub tokens_per_s: f64,
    /// Layers that go one after the other, while later ones are computed.
    pub n_layers: u32,
    /// Longest time from an order to its last block; then the rest is computed by whoever ordered.
    pub deadline: Duration,
    /// Longest silence of who computes; then the rest is computed by whoever ordered.
    pub silence: Duration,
    /// Longest time that computed blocks are kept without an acknowledgement.
    pub lease: Duration,
    /// Longest time until a worker that cannot be reached is given up.
    pub pairing: Duration,
}

impl Default for Links {
    /// What workers default to, over 200 Gbit/s of which 80 % are reached, with 57 kB a token as of `ascend-910b`.
    fn default() -> Self {
        let usual = worker::TransferConfig::default();
        Self {
            tokens_per_s: 350_000.0,
            n_layers: 28,
            deadline: Duration::from_millis(usual.deadline_ms),
            silence: Duration::from_millis(usual.silence_ms),
            lease: Duration::from_millis(usual.lease_ms),
            pairing: Duration::from_millis(usual.pairing_timeout_ms),
        }
    }
}

impl Default for Delays {
    fn default() -> Self {
        Self { view_ms: 50.0, kv_ms: 50.0, ledger_ms_min: 2.0, ledger_ms_max: 5.0, request_ms_max: 1.0 }
    }
}

impl Delays {
    /// All ways, one after the other.
    pub(crate) fn sum_ms(&self) -> f64 {
        self.view_ms + self.kv_ms + self.ledger_ms_max + self.request_ms_max
    }
}

/// Time until a broken connection is noticed when the other side does not say so, at most.
const DETECTION_MS: f64 = 500.0;

/// How late a message between workers comes at most while some are lost.
const PEER_LATE_MS_MAX: f64 = 100.0;

/// How many times as long news of a cache take at most while some are lost.
const LATE_MAX: f64 = 4.0;

/// A connection between a router and a worker.
#[derive(Clone, Copy, Debug, Default)]
struct Link {
    /// Counts connections; messages of earlier ones do not arrive.
    connection: u32,
    is_cut: bool,
    /// Messages do not overtake one another.
    last_request: Duration,
    last_answer: Duration,
    last_kv: Duration,
}

/// A way from one worker to another.
#[derive(Clone, Copy, Debug, Default)]
struct Way {
    is_cut: bool,
    last: Duration,
}

/// Everything on its way, and the clock.
#[derive(Debug)]
pub(crate) struct Network {
    pub(crate) now: Duration,
    origin: Instant,
    pub(crate) random: Random,
    delays: Delays,
    events: EventQueue,
    n_workers: usize,
    links: Vec<Link>,
    /// Between workers that have spoken or were cut.
    ways: BTreeMap<(usize, usize), Way>,
    last_ledger: Vec<Duration>,
    pub(crate) is_scheduler_up: bool,
    /// Chance of a message about a cache to be lost, and of one to be late.
    pub(crate) kv_loss: f64,
    /// Chance of a message between workers to be lost, and of one to be late.
    pub(crate) peer_loss: f64,
}

impl Network {
    pub(crate) fn new(n_routers: usize, n_workers: usize, delays: Delays, origin: Instant, random: Random) -> Self {
        Self {
            now: Duration::ZERO,
            origin,
            random,
            delays,
            events: EventQueue::default(),
            n_workers,
            links: vec![Link::default(); n_routers * n_workers],
            last_ledger: vec![Duration::ZERO; n_routers],
            is_scheduler_up: true,
            kv_loss: 0.0,
            peer_loss: 0.0,
            ways: BTreeMap::new(),
        }
    }

    /// Virtual time as components take it.
    pub(crate) fn instant(&self) -> Instant {
        self.origin + self.now
    }

    /// A moment of virtual time as components take it.
    pub(crate) fn at_instant(&self, at: Duration) -> Instant {
        self.origin + at
    }

    /// The next event; time goes on to it.
    pub(crate) fn next(&mut self) -> Option<Event> {
        let (at, event) = self.events.pop()?;
        debug_assert!(at >= self.now, "time does not go back");
        self.now = at;
        Some(event)
    }

    pub(crate) fn at(&mut self, at: Duration, event: Event) {
        self.events.push(at, event);
    }

    pub(crate) fn after(&mut self, delay: Duration, event: Event) {
        self.events.push(self.now + delay, event);
    }

    pub(crate) fn after_ms(&mut self, delay_ms: f64, event: Event) {
        self.after(Duration::from_secs_f64(delay_ms.max(0.0) / 1e3), event);
    }

    /// The present connection of a router with a worker.
    pub(crate) fn connection(&self, router: usize, worker: usize) -> u32 {
        self.links[router * self.n_workers + worker].connection
    }

    /// Breaks a connection: both sides notice sooner or later.
    pub(crate) fn disconnect(&mut self, router: usize, worker: usize) {
        let link = self.link(router, worker);
        let connection = link.connection;
        link.connection += 1;
        let noticed = [(); 2].map(|()| self.random.between(1.0, DETECTION_MS));
        self.after_ms(noticed[0], Event::Router(router, ToRouter::Lost { worker, connection }));
        self.after_ms(noticed[1], Event::Worker(worker, ToWorker::Lost { router, connection }));
    }

    /// Cuts a link or heals it.
    pub(crate) fn cut(&mut self, router: usize, worker: usize, is_cut: bool) {
        self.link(router, worker).is_cut = is_cut;
    }

    pub(crate) fn is_cut(&self, router: usize, worker: usize) -> bool {
        self.links[router * self.n_workers + worker].is_cut
    }

    /// From a router to a worker.
    pub(crate) fn request(&mut self, router: usize, worker: usize, message: ToWorker) {
        let at = self.now + self.hop();
        let link = self.link(router, worker);
        if !link.is_cut {
            link.last_request = at.max(link.last_request);
            let at = link.last_request;
            self.at(at, Event::Worker(worker, message));
        }
    }

    /// From a worker to a router, in answer to requests; nothing goes over a connection that is gone, even if one side has not
    /// noticed yet and there is another.
    pub(crate) fn answer(&mut self, router: usize, worker: usize, connection: u32, message: ToRouter) {
        let at = self.now + self.hop();
        let link = self.link(router, worker);
        if !link.is_cut && link.connection == connection {
            link.last_answer = at.max(link.last_answer);
            let at = link.last_answer;
            self.at(at, Event::Router(router, message));
        }
    }

    /// From a worker to a router that follows its cache.
    pub(crate) fn kv(&mut self, router: usize, worker: usize, connection: u32, message: KvMessage) {
        if self.kv_loss > 0.0 && self.random.unit() < self.kv_loss {
            return;
        }
        let late = if self.kv_loss > 0.0 { self.random.between(0.0, LATE_MAX) } else { 1.0 };
        let at = self.now + Duration::from_secs_f64(self.delays.kv_ms * late / 1e3);
        let link = self.link(router, worker);
        if !link.is_cut && link.connection == connection {
            link.last_kv = at.max(link.last_kv);
            let at = link.last_kv;
            self.at(at, Event::Router(router, ToRouter::Kv { worker, connection, message }));
        }
    }

    /// From a worker to another; false where it cannot be reached.
    pub(crate) fn tell_peer(&mut self, from: usize, to: usize, message: PeerMessage) -> bool {
        let at = self.now;
        self.between(from, to, at, ToWorker::Peer { from, message })
    }

    /// Blocks that have been sent at `at`.
    pub(crate) fn blocks(&mut self, to: usize, at: Duration, blocks: Blocks) {
        self.between(blocks.from, to, at, ToWorker::Blocks(Box::new(blocks)));
    }

    fn between(&mut self, from: usize, to: usize, sent: Duration, message: ToWorker) -> bool {
        let late_ms = match self.peer_loss {
            0.0 => 0.0,
            loss if self.random.unit() < loss => return true,
            loss if self.random.unit() < loss => self.random.between(0.0, PEER_LATE_MS_MAX),
            _ => 0.0,
        };
        let at = sent + self.hop() + Duration::from_secs_f64(late_ms / 1e3);
        let way = self.ways.entry((from, to)).or_default();
        if way.is_cut {
            return false;
        }
        way.last = at.max(way.last);
        let at = way.last;
        self.at(at, Event::Worker(to, message));
        true
    }

    /// Cuts the ways between two workers, which both notice sooner or later, or heals them.
    pub(crate) fn cut_peers(&mut self, one: usize, two: usize, is_cut: bool) {
        for (from, to) in [(one, two), (two, one)] {
            self.ways.entry((from, to)).or_default().is_cut = is_cut;
            if is_cut {
                self.lose_peer(to, from);
            }
        }
    }

    /// Heals what is cut between workers.
    pub(crate) fn heal_peers(&mut self) {
        self.ways.values_mut().for_each(|way| way.is_cut = false);
    }

    /// Lets a worker notice that another cannot be reached.
    pub(crate) fn lose_peer(&mut self, worker: usize, peer: usize) {
        let noticed = self.random.between(1.0, DETECTION_MS);
        self.after_ms(noticed, Event::Worker(worker, ToWorker::PeerLost { peer }));
    }

    /// Longest way of news of a cache, but for what waits for news before it.
    pub(crate) fn kv_longest(&self) -> Duration {
        Duration::from_secs_f64(self.delays.kv_ms * LATE_MAX / 1e3)
    }

    /// From a router to all others, through the scheduler; lost when there is none.
    pub(crate) fn ledger(&mut self, from: usize, event: LedgerEvent) {
        self.share(from, ToScheduler::Ledger { from, event });
    }

    /// Who waits at a router, to all others.
    pub(crate) fn waiting(&mut self, at: usize, tenants: BTreeSet<TenantId>) {
        self.share(at, ToScheduler::Waiting { at, tenants });
    }

    fn share(&mut self, from: usize, message: ToScheduler) {
        if self.last_ledger.len() == 1 || !self.is_scheduler_up {
            return;
        }
        let ms = self.random.between(self.delays.ledger_ms_min, self.delays.ledger_ms_max);
        let at = (self.now + Duration::from_secs_f64(ms / 1e3)).max(self.last_ledger[from]);
        self.last_ledger[from] = at;
        self.at(at, Event::Scheduler(message));
    }

    /// From a worker to the scheduler: half the way to the routers.
    pub(crate) fn report(&mut self, message: ToScheduler) {
        if self.is_scheduler_up {
            self.after_ms(self.delays.view_ms / 2.0, Event::Scheduler(message));
        }
    }

    /// From the scheduler to a router: the other half.
    pub(crate) fn view(&mut self, router: usize, view: Arc<ClusterView>) {
        self.after_ms(self.delays.view_ms / 2.0, Event::Router(router, ToRouter::View(view)));
    }

    fn hop(&mut self) -> Duration {
        Duration::from_secs_f64(self.random.unit() * self.delays.request_ms_max / 1e3)
    }

    fn link(&mut self, router: usize, worker: usize) -> &mut Link {
        &mut self.links[router * self.n_workers + worker]
    }
}
