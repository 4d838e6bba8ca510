//! How much of a prompt each engine holds, for all engines at once.
//!
//! Engines evict leaves first, so what one holds of a chain is a beginning of it: along the chain the set of engines only
//! loses members. Between two places with the same set nothing needs a look; where they differ, the middle decides.
//! Hot path: no log; locks are held for one block.

use contract::hash::BlockHash;

use super::Slot;
use super::roster::Roster;
use super::sets::ones;
use super::shard::{Home, Shards};

/// What each engine holds of one prompt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Matches {
    by_slot: Vec<Found>,
}

/// What one engine holds of a prompt, counted from its beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Match {
    /// Blocks that are cached or promised.
    pub n_blocks: usize,
    /// Of these, blocks that are only promised.
    pub n_promised: usize,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Found {
    generation: u16,
    n_cached: u32,
    n_promised: u32,
}

impl Matches {
    /// What the engine of a slot holds; nothing when it was removed.
    #[inline]
    pub fn of(&self, slot: Slot) -> Match {
        let found = self.by_slot.get(usize::from(slot.index)).filter(|found| found.generation == slot.generation);
        found.map_or(Match::default(), |found| {
            let (n_cached, n_promised) = (found.n_cached as usize, found.n_promised as usize);
            Match { n_blocks: n_cached.max(n_promised), n_promised: n_promised.saturating_sub(n_cached) }
        })
    }
}

/// One lookup under way.
pub(super) struct Lookup<'a> {
    shards: &'a Shards,
    roster: &'a Roster,
    hashes: &'a [BlockHash],
    now_ms: u64,
    /// Words of the columns, and of columns and slots together.
    widths: (usize, usize),
    /// Sets of columns that cache a block, then slots that are promised it: a stack.
    sets: Vec<u64>,
    found: Vec<Found>,
}

/// A block of the chain and where its set begins.
#[derive(Clone, Copy)]
struct Probe {
    block: usize,
    set: usize,
}

impl<'a> Lookup<'a> {
    pub(super) fn new(shards: &'a Shards, roster: &'a Roster, hashes: &'a [BlockHash], now_ms: u64) -> Self {
        let found: Vec<Found> =
            roster.generations().map(|generation| Found { generation, ..Found::default() }).collect();
        let n_words = roster.live().len();
        let widths = (n_words, n_words + found.len().div_ceil(64));
        // A search halves at each level, and two sets begin it.
        let n_sets = 2 + hashes.len().checked_ilog2().map_or(0, |depth| depth as usize + 1);
        Self { shards, roster, hashes, now_ms, widths, sets: Vec::with_capacity(n_sets * widths.1), found }
    }

    pub(super) fn run(mut self) -> Matches {
        if !self.hashes.is_empty() && self.widths.1 > 0 {
            // Behind the last block nothing is held.
            let end = Probe { block: self.hashes.len(), set: self.sets.len() };
            self.sets.resize(self.widths.1, 0);
            let first = self.probe(0);
            self.refine(first, end);
        }
        Matches { by_slot: self.found }
    }

    /// Finds the last blocks of engines that hold `low` and not `high`.
    fn refine(&mut self, low: Probe, high: Probe) {
        let n_words = self.widths.1;
        if (0..n_words).all(|word| self.sets[low.set + word] & !self.sets[high.set + word] == 0) {
            return;
        }
        if high.block - low.block == 1 {
            return self.credit(low, high);
        }
        let middle = self.probe(low.block.midpoint(high.block));
        // A block counts only where those before it do.
        (0..n_words).for_each(|word| self.sets[middle.set + word] &= self.sets[low.set + word]);
        self.refine(low, middle);
        self.refine(middle, high);
        self.sets.truncate(middle.set);
    }

    /// Engines in `low` and not in `high` hold the chain up to `low`.
    fn credit(&mut self, low: Probe, high: Probe) {
        let n_blocks = low.block as u32 + 1;
        let (n_columns, n_words) = self.widths;
        for word in 0..n_words {
            let lost = self.sets[low.set + word] & !self.sets[high.set + word];
            for bit in ones(&[lost]) {
                if word >= n_columns {
                    self.found[(word - n_columns) * 64 + bit].n_promised = n_blocks;
                } else if let Some(slot) = self.roster.owner(word * 64 + bit) {
                    self.found[usize::from(slot)].n_cached = n_blocks;
                }
            }
        }
    }

    /// Puts the set of a block onto the stack.
    fn probe(&mut self, block: usize) -> Probe {
        let set = self.sets.len();
        self.sets.resize(set + self.widths.1, 0);
        let (columns, slots) = self.sets[set..].split_at_mut(self.widths.0);
        let home = Home::of(self.hashes[block]);
        let shard = self.shards.read(home.shard);
        shard.add_cached_to(home.key, columns);
        // Retired columns are nobody's; without them there is less to look closer at.
        columns.iter_mut().zip(self.roster.live()).for_each(|(word, live)| *word &= live);
        if shard.promises.len() > 0 {
            shard.promises.add_to(home.key, self.now_ms, |slot| self.roster.is_current(slot), slots);
        }
        Probe { block, set }
    }
}
