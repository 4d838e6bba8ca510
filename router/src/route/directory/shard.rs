//! One part of all blocks, chosen by their hashes: which engines cache them, and which are promised to.
//!
//! Hot path: no log; allocates only to grow or shrink. Its lock is held for a few entries at a time.

use std::hint::black_box;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use contract::hash::BlockHash;

use super::Slot;
use super::batch::Change;
use super::budget::Budget;
use super::promises::Promises;
use super::sets::Sets;
use super::table::{Changed, Table};

/// Bits of a hash that choose the shard.
const SHARD_BITS: u32 = 5;
/// Shards.
pub(super) const N_SHARDS: usize = 1 << SHARD_BITS;

/// All shards, each behind its own lock.
#[derive(Debug)]
pub(super) struct Shards {
    shards: Box<[RwLock<Shard>]>,
    /// Memory of what engines cache.
    pub(super) cached: Budget,
    /// Memory of promises.
    pub(super) promised: Budget,
}

/// Where a block is: its shard, and the key there.
///
/// Eight bytes of the hash are enough: at worst a request is misplaced, because the worker compares whole hashes. Two blocks
/// of one engine that share them would look like a repetition, with a chance of 3e-8 among a million.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Home {
    pub(super) shard: usize,
    pub(super) key: u64,
}

#[derive(Debug, Default)]
#[repr(align(128))]
pub(super) struct Shard {
    /// Sets of columns by key.
    cached: Table,
    sets: Sets,
    pub(super) promises: Promises,
}

/// Whether a block could be stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stored {
    New,
    Known,
    NoRoom,
}

impl Home {
    #[inline]
    pub(super) fn of(hash: BlockHash) -> Self {
        let low = hash.low_u64();
        Self { shard: (low >> (u64::BITS - SHARD_BITS)) as usize, key: low << SHARD_BITS }
    }
}

impl Shards {
    pub(super) fn new(cached_bytes_max: usize, promised_bytes_max: usize) -> Self {
        Self {
            shards: (0..N_SHARDS).map(|_| RwLock::default()).collect(),
            cached: Budget::new(cached_bytes_max),
            promised: Budget::new(promised_bytes_max),
        }
    }

    #[inline]
    pub(super) fn read(&self, shard: usize) -> RwLockReadGuard<'_, Shard> {
        self.shards[shard].read().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    pub(super) fn write(&self, shard: usize) -> RwLockWriteGuard<'_, Shard> {
        self.shards[shard].write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Memory of the shards themselves, empty.
    pub(super) const fn bytes_fixed() -> usize {
        N_SHARDS * size_of::<RwLock<Shard>>()
    }
}

impl Shard {
    /// Reads where the blocks of a batch are, one after another, so that the waits for memory overlap.
    pub(super) fn touch(&self, changes: &[Change]) {
        let read = changes.iter().fold(0, |sum, change| sum ^ self.cached.touch(change.key));
        black_box(read);
    }

    pub(super) fn holds(&self, key: u64, column: usize) -> bool {
        self.sets.contains(self.cached.get(key), column)
    }

    pub(super) fn store(&mut self, key: u64, column: usize, budget: &Budget) -> Stored {
        let place = self.cached.seek(key);
        let entry = self.cached.at(place);
        if !entry.is_of(key) {
            let set = Sets::of(column);
            return if self.cached.insert(key, set, budget) { Stored::New } else { Stored::NoRoom };
        }
        if self.sets.contains(entry.value, column) {
            return Stored::Known;
        }
        let Some(set) = self.sets.insert(key, entry.value, column, budget) else { return Stored::NoRoom };
        self.cached.change(place, Changed::to(set));
        Stored::New
    }

    /// Takes a block from a column; false when it is not there.
    pub(super) fn remove(&mut self, key: u64, column: usize, budget: &Budget) -> bool {
        let place = self.cached.seek(key);
        let entry = self.cached.at(place);
        if !entry.is_of(key) || !self.sets.contains(entry.value, column) {
            return false;
        }
        let changed = self.sets.remove(entry.value, column, budget);
        self.cached.change(place, changed);
        self.cached.shrink(budget);
        true
    }

    /// Adds the columns that hold a block to a bitset.
    #[inline]
    pub(super) fn add_cached_to(&self, key: u64, columns: &mut [u64]) {
        self.sets.add_to(self.cached.get(key), columns);
    }

    /// Takes the columns of the bitset `dead` out of about `n_places` places from `key` on.
    ///
    /// Returns where to go on, none at the end.
    pub(super) fn sweep(&mut self, key: u64, n_places: usize, dead: &[u64], budget: &Budget) -> Option<u64> {
        let sets = &mut self.sets;
        let next = self.cached.walk(key, n_places, |entry| sets.remove_all(entry.value, dead, budget));
        self.cached.shrink(budget);
        next
    }

    /// The promise to `slot` was kept, if there was one.
    #[inline]
    pub(super) fn keep_promise(&mut self, key: u64, slot: Slot, now_ms: u64) {
        if self.promises.len() > 0 {
            self.promises.keep(key, slot, now_ms);
        }
    }

    /// Memory held, without the shard itself.
    #[cfg(test)]
    pub(super) fn bytes(&self) -> (usize, usize) {
        (self.cached.bytes() + self.sets.bytes(), self.promises.bytes())
    }
}
