//! The placements of one router and what it is asked for, told in numbered batches: whoever follows them keeps a copy that
//! is like its own.
//!
//! A router counts its events from 1, and a snapshot says which of them it holds.
//! So a batch that comes again over another scheduler changes nothing, however late, and a missed one is noticed.

use std::collections::BTreeMap;

use thiserror::Error;

use crate::demand::RouterDemand;
use crate::ids::Incarnation;
use crate::ledger::{LedgerEvent, PlacedWork, PlacementKey};

/// What is told of one router.
#[derive(Clone, Debug, PartialEq)]
pub struct LedgerBatch {
    /// The life of the router.
    pub router: Incarnation,
    /// Its news.
    pub news: LedgerNews,
}

/// News of one router; events are about its own placements only.
#[derive(Clone, Debug, PartialEq)]
pub enum LedgerNews {
    /// All that it runs after its event `sequence`, as events that make it from nothing.
    Snapshot {
        /// Its last event.
        sequence: u64,
        /// Placements and first tokens.
        events: Vec<LedgerEvent>,
    },
    /// Its events up to `sequence`, one after the other.
    Events {
        /// Number of the last of them.
        sequence: u64,
        /// The events.
        events: Vec<LedgerEvent>,
    },
    /// What it is asked for; apart from its events, and worth nothing when a later one is known.
    Demand(RouterDemand),
    /// It is gone, and its placements with it.
    Gone,
}

/// Events of a router were missed; only a snapshot helps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("event {expected} of a router was missed, {found} came: a snapshot must come first")]
pub struct MissedEvents {
    /// The event that should have come.
    pub expected: u64,
    /// The first that came.
    pub found: u64,
}

/// What one router runs and is asked for.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Placements {
    /// Its last event in here.
    sequence: u64,
    running: BTreeMap<PlacementKey, Running>,
    demand: RouterDemand,
}

#[derive(Clone, Debug, PartialEq)]
struct Running {
    work: PlacedWork,
    is_prefilled: bool,
}

impl Placements {
    /// Enters the router's next event and returns its number.
    pub fn put(&mut self, event: &LedgerEvent) -> u64 {
        self.sequence += 1;
        self.enter(event);
        self.sequence
    }

    /// Takes news from the router and returns the events among them that are new here.
    ///
    /// # Errors
    /// When events are missing in between; nothing has changed then.
    pub fn take(&mut self, news: &LedgerNews) -> Result<Vec<LedgerEvent>, MissedEvents> {
        match news {
            LedgerNews::Snapshot { sequence, events } => Ok(self.take_snapshot(*sequence, events)),
            LedgerNews::Events { sequence, events } => self.take_events(*sequence, events),
            LedgerNews::Demand(demand) => {
                if demand.number > self.demand.number {
                    self.demand.clone_from(demand);
                }
                Ok(Vec::new())
            }
            LedgerNews::Gone => {
                let gone = std::mem::take(self).running.into_keys();
                Ok(gone.map(LedgerEvent::Finished).collect())
            }
        }
    }

    /// News that, one after the other, make nothing like this.
    pub fn all(&self) -> impl Iterator<Item = LedgerNews> + use<> {
        let demand = (self.demand.number > 0).then(|| LedgerNews::Demand(self.demand.clone()));
        std::iter::once(self.snapshot()).chain(demand)
    }

    /// What the router was last asked for.
    #[must_use]
    pub fn demand(&self) -> &RouterDemand {
        &self.demand
    }

    /// News that make all that runs from nothing.
    #[must_use]
    pub fn snapshot(&self) -> LedgerNews {
        let mut events = Vec::with_capacity(self.running.len());
        for (&key, running) in &self.running {
            events.push(LedgerEvent::Placed(key, running.work.clone()));
            if running.is_prefilled {
                events.push(LedgerEvent::FirstToken(key));
            }
        }
        LedgerNews::Snapshot { sequence: self.sequence, events }
    }

    /// Placements that have not ended.
    #[must_use]
    pub fn len(&self) -> usize {
        self.running.len()
    }

    /// Whether nothing is placed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.running.is_empty()
    }

    fn take_events(&mut self, sequence: u64, events: &[LedgerEvent]) -> Result<Vec<LedgerEvent>, MissedEvents> {
        let expected = self.sequence.saturating_add(1);
        let found = sequence.saturating_add(1).saturating_sub(events.len() as u64);
        if found > expected {
            return Err(MissedEvents { expected, found });
        }
        let n_known = usize::try_from(expected - found).unwrap_or(usize::MAX).min(events.len());
        let new = &events[n_known..];
        new.iter().for_each(|event| self.enter(event));
        self.sequence = self.sequence.max(sequence);
        Ok(new.to_vec())
    }

    /// Makes this like the snapshot, unless later events are known already.
    fn take_snapshot(&mut self, sequence: u64, events: &[LedgerEvent]) -> Vec<LedgerEvent> {
        if sequence <= self.sequence {
            return Vec::new();
        }
        let mut told = Self { sequence, running: BTreeMap::new(), demand: std::mem::take(&mut self.demand) };
        events.iter().for_each(|event| told.enter(event));
        let over = self.running.keys().filter(|key| !told.running.contains_key(key));
        let mut changes: Vec<LedgerEvent> = over.map(|&key| LedgerEvent::Finished(key)).collect();
        for (&key, running) in &told.running {
            let known = self.running.get(&key).filter(|known| known.work == running.work);
            if known.is_none() {
                changes.push(LedgerEvent::Placed(key, running.work.clone()));
            }
            if running.is_prefilled && known.is_none_or(|known| !known.is_prefilled) {
                changes.push(LedgerEvent::FirstToken(key));
            }
        }
        *self = told;
        changes
    }

    fn enter(&mut self, event: &LedgerEvent) {
        match event {
            LedgerEvent::Placed(key, work) => {
                self.running.insert(*key, Running { work: work.clone(), is_prefilled: false });
            }
            LedgerEvent::FirstToken(key) => {
                self.running.entry(*key).and_modify(|running| running.is_prefilled = true);
            }
            LedgerEvent::Finished(key) => {
                self.running.remove(key);
            }
            LedgerEvent::RouterGone(router) => self.running.retain(|key, _| key.router != *router),
        }
    }
}

#[cfg(test)]
mod tests;
