//! Promises: an engine that was sent a prompt will soon hold its blocks.
//!
//! One entry of a table for each block and engine. Time is in milliseconds since the directory's first, in 32 bits that wrap
//! after 49 days; an expired promise is swept within a small part of that.

use super::Slot;
use super::budget::Budget;
use super::table::{Changed, Table};

/// Longest promise: what lies further ahead would look expired.
pub(super) const PROMISE_MS_MAX: u64 = 1 << 30;

/// The promises of one shard.
#[derive(Debug, Default)]
pub(super) struct Promises {
    table: Table,
}

/// A promise as the table holds it: 32 bits of time, 16 of slot, 15 of generation, and whether its block was stored.
#[derive(Clone, Copy)]
struct Promise(u64);

const KEPT: u64 = 1 << 63;

impl Promise {
    fn new(slot: Slot, until_ms: u64, is_kept: bool) -> Self {
        let name = u64::from(slot.index) << 32 | u64::from(slot.generation) << 48;
        Self(until_ms & 0xffff_ffff | name | if is_kept { KEPT } else { 0 })
    }

    fn slot(self) -> Slot {
        Slot { index: (self.0 >> 32) as u16, generation: (self.0 >> 48) as u16 & 0x7fff }
    }

    fn is_kept(self) -> bool {
        self.0 & KEPT != 0
    }

    fn ms_left(self, now_ms: u64) -> i32 {
        (self.0 as u32).wrapping_sub(now_ms as u32) as i32
    }
}

impl Promises {
    pub(super) fn len(&self) -> usize {
        self.table.len()
    }

    /// Memory held.
    #[cfg(test)]
    pub(super) fn bytes(&self) -> usize {
        self.table.bytes()
    }

    /// Makes or prolongs a promise, and returns whether one before it was missed; a block that is stored keeps it at once.
    pub(super) fn make(&mut self, key: u64, slot: Slot, times: (u64, u64), is_stored: bool, budget: &Budget) -> bool {
        let (now_ms, until_ms) = times;
        let new = Promise::new(slot, until_ms, is_stored);
        let Some((place, before)) = self.find(key, slot) else {
            // Beyond the bound nothing is promised.
            self.table.insert(key, new.0, budget);
            return false;
        };
        let holds = before.slot() == slot && before.ms_left(now_ms) > 0;
        if !holds {
            self.table.change(place, Changed::to(new.0));
            return before.slot() == slot && !before.is_kept();
        }
        let longest = if before.ms_left(now_ms) > new.ms_left(now_ms) { before } else { new };
        self.table.change(place, Changed::to(longest.0 | (before.0 | new.0) & KEPT));
        false
    }

    /// The engine stored the block.
    #[inline]
    pub(super) fn keep(&mut self, key: u64, slot: Slot, now_ms: u64) {
        if let Some((place, promise)) = self.find(key, slot)
            && promise.slot() == slot
            && promise.ms_left(now_ms) > 0
        {
            self.table.change(place, Changed::to(promise.0 | KEPT));
        }
    }

    /// Sets the bits of slots that are promised the block.
    #[inline]
    pub(super) fn add_to(&self, key: u64, now_ms: u64, is_current: impl Fn(Slot) -> bool, bits: &mut [u64]) {
        let mut place = self.table.seek(key);
        while self.table.at(place).is_of(key) {
            let promise = Promise(self.table.at(place).value);
            let slot = promise.slot();
            if promise.ms_left(now_ms) > 0 && is_current(slot) {
                bits[usize::from(slot.index) / 64] |= 1 << (slot.index % 64);
            }
            place += 1;
        }
    }

    /// Drops what expired in `n_places` places from `key` on; returns where to go on, none at the end, and the promises missed.
    pub(super) fn sweep(
        &mut self,
        key: u64,
        n_places: usize,
        now_ms: u64,
        is_current: impl Fn(Slot) -> bool,
        budget: &Budget,
    ) -> (Option<u64>, u64) {
        let mut n_missed = 0;
        let next = self.table.walk(key, n_places, |entry| {
            let promise = Promise(entry.value);
            let is_moot = !is_current(promise.slot());
            if promise.ms_left(now_ms) > 0 && !is_moot {
                return Changed::to(entry.value);
            }
            n_missed += u64::from(!promise.is_kept() && !is_moot);
            Changed::to(0)
        });
        self.table.shrink(budget);
        (next, n_missed)
    }

    fn find(&self, key: u64, slot: Slot) -> Option<(usize, Promise)> {
        let mut place = self.table.seek(key);
        while self.table.at(place).is_of(key) {
            let promise = Promise(self.table.at(place).value);
            if promise.slot().index == slot.index {
                return Some((place, promise));
            }
            place += 1;
        }
        None
    }
}
