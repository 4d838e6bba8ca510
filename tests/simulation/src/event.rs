//! What happens when: messages on their way, and a queue of them in virtual time.

use std::cmp::Ordering;
use std::collections::{BTreeSet, BinaryHeap};
use std::sync::Arc;
use std::time::Duration;

use contract::hash::BlockHash;
use contract::ids::{BlockId, EngineId, TenantId, Token};
use contract::kv::KvDigest;
use contract::kv::KvEvent;
use contract::ledger::LedgerEvent;
use contract::occupancy::Occupancy;
use contract::view::ClusterView;
use engine::{Output, SequenceKey};
use membership::WatchEvent;
use worker::transfer::{Header, Order};

use crate::faults::Fault;

/// A place in the list of all requests.
pub(crate) type RequestIdx = u32;

/// Something that happens at one moment.
#[derive(Debug)]
pub(crate) enum Event {
    /// A client asks.
    Arrive(RequestIdx),
    /// A client goes away, whatever has become of its request.
    Abort(RequestIdx),
    Router(usize, ToRouter),
    Worker(usize, ToWorker),
    Scheduler(ToScheduler),
    Fault(Fault),
}

/// What a router hears.
#[derive(Debug)]
pub(crate) enum ToRouter {
    /// News of requests that it placed.
    Frames { worker: usize, connection: u32, outputs: Vec<Output> },
    /// A worker's cache.
    Kv { worker: usize, connection: u32, message: KvMessage },
    /// The scheduler's view.
    View(Arc<ClusterView>),
    /// What another router placed, through the scheduler.
    Ledger(LedgerEvent),
    /// Who waits at another router.
    Waiting { at: usize, tenants: BTreeSet<TenantId> },
    /// A worker can be reached, as this engine.
    Joined { worker: usize, connection: u32, engine: EngineId },
    /// A connection broke.
    Lost { worker: usize, connection: u32 },
    /// The scheduler came or went.
    Scheduler { is_up: bool },
    /// Time to look at what waits.
    Retry,
}

/// What a worker tells of its cache.
#[derive(Clone, Debug)]
pub(crate) enum KvMessage {
    Snapshot { sequence: u64, blocks: Vec<BlockHash> },
    Events { sequence: u64, events: Arc<[KvEvent]> },
    Heartbeat { sequence: u64, digest: KvDigest },
}

/// What a worker hears.
#[derive(Debug)]
pub(crate) enum ToWorker {
    /// A request that a router placed here.
    Submit(Submission),
    /// Nobody reads a stream any more.
    Cancel { router: usize, connection: u32, request: RequestIdx, attempt: u32 },
    /// A router wants to follow the cache, from a snapshot on.
    Watch { router: usize, connection: u32 },
    /// A router's connection broke.
    Lost { router: usize, connection: u32 },
    /// The step that runs is over.
    Done { life: u32 },
    /// Another worker about a prompt that moves.
    Peer { from: usize, message: PeerMessage },
    /// Blocks of a prompt that another computes.
    Blocks(Box<Blocks>),
    /// The connections with another worker broke.
    PeerLost { peer: usize },
    /// Others fill a hold's blocks no more: so many tokens are there.
    Filled { life: u32, key: SequenceKey, n_tokens: usize },
    /// A prompt may have been waited for too long.
    FetchDue { fetch: u64 },
    /// Time to tell whoever ordered a prompt that it is being computed.
    Working { ticket: u64 },
    /// Nobody acknowledged a prompt that was computed for others.
    LeaseOver { ticket: u64 },
    /// Time to look whether anything is due.
    Wake,
    /// To leave: nothing new is taken, and what runs after the grace is handed over.
    Drain { grace: Duration },
    /// The grace is over.
    HandOver { life: u32 },
    /// Time for a sign of life.
    Heartbeat { life: u32 },
    /// Time to report, if something has changed.
    Report { life: u32 },
}

/// A request as a router sends it.
#[derive(Debug)]
pub(crate) struct Submission {
    pub(crate) router: usize,
    pub(crate) connection: u32,
    pub(crate) request: RequestIdx,
    pub(crate) attempt: u32,
    /// What was generated of it before.
    pub(crate) generated: Vec<Token>,
    /// Who computes its prompt, if others do, in the order in which they are asked.
    pub(crate) prefill_on: Vec<(usize, EngineId)>,
}

/// What workers tell each other about a prompt that moves; each number of a `fetch` is used once by whoever orders.
#[derive(Debug)]
pub(crate) enum PeerMessage {
    /// A prompt is wanted of this engine.
    Order { fetch: u64, order: Box<Order>, engine: EngineId },
    /// All that was sent is read.
    Ack { fetch: u64 },
    /// Whoever ordered has gone.
    Close { fetch: u64 },
    /// Nothing is ready to be sent.
    Working { fetch: u64 },
    /// All was sent.
    Done { fetch: u64 },
    /// It will get no further.
    Failed { fetch: u64 },
    /// Whoever computes has gone.
    Closed { fetch: u64 },
}

/// A frame of blocks, which are read from the other's pool when it comes.
#[derive(Debug)]
pub(crate) struct Blocks {
    pub(crate) from: usize,
    pub(crate) fetch: u64,
    /// Names what is computed there.
    pub(crate) ticket: u64,
    pub(crate) header: Header,
    /// Numbers there.
    pub(crate) table: Vec<BlockId>,
}

/// What the scheduler hears.
#[derive(Debug)]
pub(crate) enum ToScheduler {
    Member(WatchEvent),
    Report {
        worker: usize,
        occupancy: Box<Occupancy>,
    },
    Ledger {
        from: usize,
        event: LedgerEvent,
    },
    Waiting {
        at: usize,
        tenants: BTreeSet<TenantId>,
    },
    /// Time to publish what has changed.
    Publish,
    /// Time to look at the roles of workers.
    GiveRoles,
}

/// Events by time; those of one time in the order in which they were put in.
#[derive(Debug, Default)]
pub(crate) struct EventQueue {
    heap: BinaryHeap<Entry>,
    n_pushed: u64,
}

#[derive(Debug)]
struct Entry {
    at: Duration,
    number: u64,
    event: Event,
}

impl EventQueue {
    pub(crate) fn push(&mut self, at: Duration, event: Event) {
        self.heap.push(Entry { at, number: self.n_pushed, event });
        self.n_pushed += 1;
    }

    pub(crate) fn pop(&mut self) -> Option<(Duration, Event)> {
        self.heap.pop().map(|Entry { at, event, .. }| (at, event))
    }
}

impl Ord for Entry {
    /// The heap yields the greatest, which is the earliest here.
    fn cmp(&self, other: &Self) -> Ordering {
        (other.at, other.number).cmp(&(self.at, self.number))
    }
}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Entry {}
