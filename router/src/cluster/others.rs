//! What other routers run and are asked for, as schedulers tell it, pure: each event counts once, whoever told it first.
//!
//! A router is there as long as one stream says so; a stream that broke goes on saying so for a grace.
//! So the loss of one scheduler of two loses nothing, and that of all leaves each router with its own placements.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::{Duration, Instant};

use contract::demand::RouterDemand;
use contract::ids::Incarnation;
use contract::ledger::LedgerEvent;
use contract::placements::{LedgerBatch, LedgerNews, MissedEvents, Placements};

/// Names one stream from one scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct StreamId(u64);

/// All other routers.
pub(super) struct Others {
    own: Incarnation,
    grace: Duration,
    n_streams: u64,
    /// Streams that live, and until when those count that broke.
    streams: BTreeMap<StreamId, Option<Instant>>,
    routers: HashMap<Incarnation, Other>,
    n_routers: usize,
    /// Who is there, or what one is asked for, may have changed.
    is_demand_new: bool,
}

#[derive(Default)]
struct Other {
    placements: Placements,
    told_by: BTreeSet<StreamId>,
}

impl Others {
    /// Knows nobody; `own` is the router that asks.
    pub(super) fn new(own: Incarnation, grace: Duration) -> Self {
        Self {
            own,
            grace,
            n_streams: 0,
            streams: BTreeMap::new(),
            routers: HashMap::new(),
            n_routers: 1,
            is_demand_new: false,
        }
    }

    /// Begins a stream.
    pub(super) fn begin(&mut self) -> StreamId {
        let stream = StreamId(self.n_streams);
        self.n_streams += 1;
        self.streams.insert(stream, None);
        self.is_demand_new = true;
        stream
    }

    /// Takes a batch from a stream and returns what it changes.
    ///
    /// # Errors
    /// When events are missing; the stream must begin anew.
    pub(super) fn take(&mut self, stream: StreamId, batch: &LedgerBatch) -> Result<Vec<LedgerEvent>, MissedEvents> {
        if batch.router == self.own {
            return Ok(Vec::new());
        }
        let changes = match &batch.news {
            LedgerNews::Gone => self.untell(batch.router, stream).into_iter().collect(),
            LedgerNews::Snapshot { .. } => {
                self.is_demand_new = true;
                let other = self.routers.entry(batch.router).or_default();
                other.told_by.insert(stream);
                other.placements.take(&batch.news)?
            }
            LedgerNews::Events { sequence, .. } => {
                let missed = MissedEvents { expected: 0, found: *sequence };
                self.told(batch.router, stream).ok_or(missed)?.placements.take(&batch.news)?
            }
            LedgerNews::Demand(_) => {
                self.is_demand_new = true;
                let missed = MissedEvents { expected: 0, found: 0 };
                self.told(batch.router, stream).ok_or(missed)?.placements.take(&batch.news)?
            }
        };
        self.count();
        Ok(changes)
    }

    /// A stream broke at `now`.
    pub(super) fn ended(&mut self, stream: StreamId, now: Instant) {
        self.streams.insert(stream, Some(now + self.grace));
    }

    /// Forgets what only streams told that broke long before `now`, and returns what that changes.
    pub(super) fn tick(&mut self, now: Instant) -> Vec<LedgerEvent> {
        let is_over = |until: Option<Instant>| until.is_some_and(|until| until <= now);
        let over = self.streams.iter().filter(|(_, until)| is_over(**until)).map(|(&stream, _)| stream);
        let mut changes = Vec::new();
        for stream in over.collect::<Vec<_>>() {
            self.streams.remove(&stream);
            self.is_demand_new = true;
            let told: Vec<Incarnation> = self.routers.keys().copied().collect();
            changes.extend(told.into_iter().filter_map(|router| self.untell(router, stream)));
        }
        self.count();
        changes
    }

    /// When [`Self::tick`] has something to do next.
    pub(super) fn next_tick(&self) -> Option<Instant> {
        self.streams.values().filter_map(|until| *until).min()
    }

    /// Routers that share the ledger, the one that asks among them; with no stream, as many as there were.
    pub(super) fn n_routers(&self) -> usize {
        self.n_routers
    }

    /// What each of the others is asked for; none where no stream tells, not even one in its grace.
    pub(super) fn demands(&self) -> Option<BTreeMap<Incarnation, RouterDemand>> {
        let demands = || self.routers.iter().map(|(&router, other)| (router, other.placements.demand().clone()));
        (!self.streams.is_empty()).then(|| demands().collect())
    }

    /// Whether [`Self::demands`] may have changed since this was last asked.
    pub(super) fn take_is_demand_new(&mut self) -> bool {
        std::mem::take(&mut self.is_demand_new)
    }

    /// Placements of other routers that have not ended.
    pub(super) fn n_placements(&self) -> usize {
        self.routers.values().map(|other| other.placements.len()).sum()
    }

    /// A router of which a stream has told a snapshot.
    fn told(&mut self, router: Incarnation, stream: StreamId) -> Option<&mut Other> {
        self.routers.get_mut(&router).filter(|other| other.told_by.contains(&stream))
    }

    /// A stream no longer says that a router is there; gone is one of whom none says so.
    fn untell(&mut self, router: Incarnation, stream: StreamId) -> Option<LedgerEvent> {
        let other = self.routers.get_mut(&router)?;
        other.told_by.remove(&stream);
        let is_gone = other.told_by.is_empty();
        is_gone.then(|| {
            self.routers.remove(&router);
            self.is_demand_new = true;
            LedgerEvent::RouterGone(router)
        })
    }

    fn count(&mut self) {
        if self.streams.values().any(Option::is_none) {
            self.n_routers = self.routers.len() + 1;
        }
    }
}

#[cfg(test)]
mod tests;
