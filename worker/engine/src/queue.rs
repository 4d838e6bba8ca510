//! Requests that wait for a slot, by priority and arrival.

use std::collections::BTreeMap;

use contract::cost::StepLoad;

use crate::sequence::{Rank, SequenceIdx};

/// Bounded for newcomers; preempted requests come back beyond the bound, at most one for each slot.
#[derive(Debug)]
pub(crate) struct WaitingQueue {
    entries: BTreeMap<Rank, Entry>,
    n_max: usize,
    load: StepLoad,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    idx: SequenceIdx,
    n_tokens: u64,
}

impl WaitingQueue {
    pub(crate) fn new(n_max: usize) -> Self {
        Self { entries: BTreeMap::new(), n_max, load: StepLoad::default() }
    }

    pub(crate) fn is_full(&self) -> bool {
        self.entries.len() >= self.n_max
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// What is to be computed over all of them, whatever is cached.
    pub(crate) fn load(&self) -> StepLoad {
        self.load
    }

    pub(crate) fn push(&mut self, rank: Rank, idx: SequenceIdx, n_tokens: usize) {
        let n_tokens = n_tokens as u64;
        self.load.add_prefill(n_tokens, 0);
        let before = self.entries.insert(rank, Entry { idx, n_tokens });
        debug_assert!(before.is_none(), "{rank:?} waits twice");
    }

    pub(crate) fn first(&self) -> Option<SequenceIdx> {
        self.entries.first_key_value().map(|(_, entry)| entry.idx)
    }

    pub(crate) fn remove(&mut self, rank: Rank) {
        let entry = self.entries.remove(&rank);
        debug_assert!(entry.is_some(), "{rank:?} does not wait");
        let mut one = StepLoad::default();
        one.add_prefill(entry.map_or(0, |entry| entry.n_tokens), 0);
        // Pairs are halves of whole numbers far below 2^52, so that sums are exact and nothing is left of what has left.
        self.load.prefill_tokens -= one.prefill_tokens;
        self.load.prefill_pairs -= one.prefill_pairs;
    }
}
