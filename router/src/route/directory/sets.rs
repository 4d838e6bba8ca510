//! Sets of columns in 64 bits: up to four inside, more as a bitset in a pool.
//!
//! A set is a number that a table can hold, 0 when it is empty. Four columns are four numbers of 16 bits, each one more than
//! the column; the highest bit says that the low half is an index into the pool. The pool has no holes: its last bitset moves
//! into one that is freed.
//! Hot path: no lock, no log; allocates only to grow or shrink.

use super::budget::Budget;
use super::table::Changed;

/// Columns are below this, so that one more fits into 15 bits.
pub(super) const N_COLUMNS_MAX: usize = 0x7ffe;
/// Columns that a set holds without the pool.
const N_INSIDE: u32 = 4;
/// Marks an index into the pool.
const POOLED: u64 = 1 << 63;
/// Bitsets that the pool grows by at least.
const GROWTH_MIN: usize = 8;

/// The bitsets of one shard.
#[derive(Debug, Default)]
pub(super) struct Sets {
    words: Vec<u64>,
    /// Whose bitset it is: the key in the shard's table.
    owners: Vec<u64>,
    /// Words of each bitset.
    n_words: usize,
}

impl Sets {
    /// The set of one column.
    #[inline]
    pub(super) fn of(column: usize) -> u64 {
        column as u64 + 1
    }

    /// Memory held.
    pub(super) fn bytes(&self) -> usize {
        (self.words.capacity() + self.owners.capacity()) * size_of::<u64>()
    }

    #[inline]
    pub(super) fn contains(&self, set: u64, column: usize) -> bool {
        if set & POOLED == 0 {
            return inside(set).any(|known| known == column);
        }
        let word = column / 64;
        word < self.n_words && self.bits(set)[word] >> (column % 64) & 1 == 1
    }

    /// Adds the columns of a set to a bitset that is wide enough.
    #[inline]
    pub(super) fn add_to(&self, set: u64, bits: &mut [u64]) {
        if set & POOLED == 0 {
            inside(set).for_each(|column| bits[column / 64] |= 1 << (column % 64));
        } else {
            bits.iter_mut().zip(self.bits(set)).for_each(|(sum, word)| *sum |= word);
        }
    }

    /// Adds `column`, which is not in the set of `key`; none when the budget does not allow the memory.
    pub(super) fn insert(&mut self, key: u64, set: u64, column: usize, budget: &Budget) -> Option<u64> {
        if set & POOLED == 0 {
            if let Some(lane) = (0..4).find(|lane| set >> (16 * lane) & 0xffff == 0) {
                return Some(set | (column as u64 + 1) << (16 * lane));
            }
            let n_words = inside(set).chain([column]).max().unwrap_or(0) / 64 + 1;
            if !self.widen(n_words, budget) || !self.grow(budget) {
                return None;
            }
            let pooled = POOLED | self.owners.len() as u64;
            self.owners.push(key);
            self.words.resize(self.words.len() + self.n_words, 0);
            let bits = self.bits_mut(pooled);
            inside(set).chain([column]).for_each(|column| bits[column / 64] |= 1 << (column % 64));
            return Some(pooled);
        }
        if !self.widen(column / 64 + 1, budget) {
            return None;
        }
        self.bits_mut(set)[column / 64] |= 1 << (column % 64);
        Some(set)
    }

    /// Takes `column` out of a set that it is in.
    pub(super) fn remove(&mut self, set: u64, column: usize, budget: &Budget) -> Changed {
        if set & POOLED == 0 {
            return Changed::to(without(set, |known| known == column));
        }
        self.bits_mut(set)[column / 64] &= !(1 << (column % 64));
        self.settle(set, budget)
    }

    /// Takes all columns of the bitset `dead` out of a set.
    pub(super) fn remove_all(&mut self, set: u64, dead: &[u64], budget: &Budget) -> Changed {
        if set & POOLED == 0 {
            let is_dead = |column: usize| dead.get(column / 64).is_some_and(|word| word >> (column % 64) & 1 == 1);
            return Changed::to(without(set, is_dead));
        }
        self.bits_mut(set).iter_mut().zip(dead).for_each(|(word, dead)| *word &= !dead);
        self.settle(set, budget)
    }

    /// Takes a bitset out of the pool when its columns fit inside.
    fn settle(&mut self, set: u64, budget: &Budget) -> Changed {
        let bits = self.bits(set);
        if bits.iter().map(|word| word.count_ones()).sum::<u32>() > N_INSIDE {
            return Changed::to(set);
        }
        let mut small = 0;
        for (lane, column) in ones(bits).enumerate() {
            small |= (column as u64 + 1) << (16 * lane);
        }
        let (index, last) = (set as u32 as usize, self.owners.len() - 1);
        self.owners.swap_remove(index);
        self.words.copy_within(last * self.n_words.., index * self.n_words);
        self.words.truncate(last * self.n_words);
        let moved = (index < last).then(|| (self.owners[index], set));
        self.shrink(budget);
        Changed { value: small, moved }
    }

    fn bits(&self, set: u64) -> &[u64] {
        let index = set as u32 as usize;
        &self.words[index * self.n_words..][..self.n_words]
    }

    fn bits_mut(&mut self, set: u64) -> &mut [u64] {
        let index = set as u32 as usize;
        &mut self.words[index * self.n_words..][..self.n_words]
    }

    /// Makes every bitset `n_words` wide at least.
    fn widen(&mut self, n_words: usize, budget: &Budget) -> bool {
        if n_words <= self.n_words {
            return true;
        }
        let n_sets_max = self.owners.capacity();
        if !budget.claim(n_sets_max * n_words * size_of::<u64>()) {
            return false;
        }
        let mut words = Vec::with_capacity(n_sets_max * n_words);
        for bits in self.words.chunks_exact(self.n_words.max(1)) {
            words.extend_from_slice(bits);
            words.resize(words.len() + n_words - self.n_words, 0);
        }
        budget.release(self.words.capacity() * size_of::<u64>());
        (self.words, self.n_words) = (words, n_words);
        true
    }

    /// Makes room for one more bitset.
    fn grow(&mut self, budget: &Budget) -> bool {
        let n_sets = self.owners.len();
        if n_sets < self.owners.capacity() {
            return true;
        }
        let n_more = (n_sets / 4).max(GROWTH_MIN);
        if !budget.claim(n_more * (1 + self.n_words) * size_of::<u64>()) {
            return false;
        }
        self.owners.reserve_exact(n_more);
        self.words.reserve_exact(n_more * self.n_words);
        true
    }

    /// Gives memory back when a third is unused.
    fn shrink(&mut self, budget: &Budget) {
        let (n_sets, n_sets_max) = (self.owners.len(), self.owners.capacity());
        if n_sets > 0 && 3 * n_sets >= 2 * n_sets_max.saturating_sub(GROWTH_MIN) {
            return;
        }
        let bytes_before = self.bytes();
        if n_sets == 0 {
            *self = Self::default();
        } else {
            let n_sets_max = n_sets + (n_sets / 8).max(1);
            self.owners.shrink_to(n_sets_max);
            self.words.shrink_to(n_sets_max * self.n_words);
        }
        budget.take(self.bytes());
        budget.release(bytes_before);
    }
}

/// Indices of the bits that are set.
pub(super) fn ones(bits: &[u64]) -> impl Iterator<Item = usize> + '_ {
    bits.iter().enumerate().flat_map(|(i, &word)| {
        let mut rest = word;
        std::iter::from_fn(move || {
            let bit = (rest != 0).then(|| rest.trailing_zeros() as usize)?;
            rest &= rest - 1;
            Some(i * 64 + bit)
        })
    })
}

/// Columns of a set that is not pooled.
#[inline]
fn inside(set: u64) -> impl Iterator<Item = usize> {
    (0..4).map(move |lane| (set >> (16 * lane) & 0xffff) as usize).take_while(|&lane| lane != 0).map(|lane| lane - 1)
}

fn without(set: u64, leaves: impl Fn(usize) -> bool) -> u64 {
    let stays = inside(set).filter(|&column| !leaves(column));
    stays.enumerate().fold(0, |rest, (lane, column)| rest | (column as u64 + 1) << (16 * lane))
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::*;

    const N_COLUMNS: usize = 200;

    proptest! {
        #[test]
        fn holds_what_sets_hold_in_as_much_memory_as_it_says(
            steps in proptest::collection::vec((0..12_u64, 0..N_COLUMNS, 0..16_u8), 1..1500),
        ) {
            let budget = Budget::new(usize::MAX);
            let mut pool = Sets::default();
            let mut numbers: BTreeMap<u64, u64> = BTreeMap::new();
            let mut model: BTreeMap<u64, BTreeSet<usize>> = BTreeMap::new();
            for (key, column, what) in steps {
                let set = numbers.get(&key).copied().unwrap_or(0);
                let known = model.entry(key).or_default();
                prop_assert_eq!(pool.contains(set, column), known.contains(&column));
                let changed = match what {
                    0 => {
                        let dead: BTreeSet<usize> = (0..N_COLUMNS).filter(|other| other % 3 == column % 3).collect();
                        let mut bits = [0_u64; N_COLUMNS.div_ceil(64)];
                        dead.iter().for_each(|column| bits[column / 64] |= 1 << (column % 64));
                        known.retain(|column| !dead.contains(column));
                        pool.remove_all(set, &bits, &budget)
                    }
                    1..=4 => {
                        let Some(column) = known.range(column..).next().copied() else { continue };
                        known.remove(&column);
                        pool.remove(set, column, &budget)
                    }
                    _ if known.insert(column) => {
                        Changed::to(pool.insert(key, set, column, &budget).unwrap())
                    }
                    _ => continue,
                };
                numbers.insert(key, changed.value);
                numbers.extend(changed.moved);
                prop_assert_eq!(budget.bytes(), pool.bytes());
            }
            for (key, known) in &model {
                let mut bits = [0; N_COLUMNS.div_ceil(64)];
                pool.add_to(numbers.get(key).copied().unwrap_or(0), &mut bits);
                prop_assert_eq!(&ones(&bits).collect::<BTreeSet<_>>(), known);
            }
            if model.values().all(BTreeSet::is_empty) {
                prop_assert_eq!(pool.bytes(), 0);
            }
        }
    }
}
