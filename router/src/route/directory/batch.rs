//! Blocks to be changed, sorted by shard, so that a lock is taken once for many and their waits for memory overlap.
//!
//! Hot path: no allocation, no lock, no log.

use contract::hash::BlockHash;

use super::shard::{Home, N_SHARDS};

/// Blocks in a batch.
pub(super) const N_CHANGES_MAX: usize = 256;

/// A block, and what happens to it: stored if true, removed if false.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Change {
    pub(super) key: u64,
    pub(super) is_stored: bool,
}

/// At most [`N_CHANGES_MAX`] changes.
pub(super) struct Batch {
    changes: [Change; N_CHANGES_MAX],
    shards: [u8; N_CHANGES_MAX],
    counts: [u16; N_SHARDS],
    n_changes: usize,
}

impl Batch {
    pub(super) fn new() -> Self {
        Self {
            changes: [Change::default(); N_CHANGES_MAX],
            shards: [0; N_CHANGES_MAX],
            counts: [0; N_SHARDS],
            n_changes: 0,
        }
    }

    pub(super) fn is_full(&self) -> bool {
        self.n_changes == N_CHANGES_MAX
    }

    /// Adds a change to a batch that is not full.
    #[inline]
    pub(super) fn push(&mut self, hash: BlockHash, is_stored: bool) {
        let home = Home::of(hash);
        self.changes[self.n_changes] = Change { key: home.key, is_stored };
        self.shards[self.n_changes] = home.shard as u8;
        self.counts[home.shard] += 1;
        self.n_changes += 1;
    }

    /// Hands each shard's changes over, in the order they came, and empties the batch.
    pub(super) fn drain(&mut self, mut take: impl FnMut(usize, &[Change])) {
        let mut ends = [0; N_SHARDS];
        let mut start = 0;
        for (end, count) in ends.iter_mut().zip(self.counts) {
            *end = start;
            start += usize::from(count);
        }
        let mut sorted = [Change::default(); N_CHANGES_MAX];
        for (change, &shard) in self.changes[..self.n_changes].iter().zip(&self.shards) {
            let end = &mut ends[usize::from(shard)];
            sorted[*end] = *change;
            *end += 1;
        }
        for (shard, count) in self.counts.iter_mut().enumerate().filter(|(_, count)| **count > 0) {
            take(shard, &sorted[ends[shard] - usize::from(*count)..ends[shard]]);
            *count = 0;
        }
        self.n_changes = 0;
    }
}
