//! Numbers under 64-bit keys: linear probing in the order of keys (Amble and Knuth, "Ordered hash tables", 1974).
//!
//! Keys are spread evenly already, so a key's home is its share of the places, which rises with the key: the whole table is
//! sorted, with gaps. A search ends at the first greater key, growing copies from front to back, a walk goes on from a key
//! whatever moved meanwhile, and removal leaves no tombstone: the layout is a function of the content.
//! Hot path: no lock, no log; allocates only to grow or shrink.

use super::budget::Budget;

/// Empty places after the last home, for runs that begin there.
const TAIL: usize = 16;
/// Homes of the smallest table that is not empty.
const HOMES_MIN: usize = 8;
/// Places after a key's home that a search, or what it moves, often reaches: in the next cache line.
const N_NEAR: usize = 4;

/// A multimap from keys to numbers other than 0.
#[derive(Debug, Default)]
pub(super) struct Table {
    entries: Vec<Entry>,
    n_homes: usize,
    n_entries: usize,
}

/// A key and its number, which is 0 in an empty place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) key: u64,
    pub(super) value: u64,
}

/// What becomes of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Changed {
    /// Its number from now on, 0 to remove it.
    pub(super) value: u64,
    /// Another key, and its number from now on.
    pub(super) moved: Option<(u64, u64)>,
}

impl Changed {
    pub(super) fn to(value: u64) -> Self {
        Self { value, moved: None }
    }
}

impl Entry {
    #[inline]
    pub(super) fn is_empty(self) -> bool {
        self.value == 0
    }

    /// Whether it is an entry of `key`.
    #[inline]
    pub(super) fn is_of(self, key: u64) -> bool {
        self.value != 0 && self.key == key
    }

    #[inline]
    fn is_below(self, key: u64) -> bool {
        self.value != 0 && self.key < key
    }
}

impl Table {
    /// Entries.
    pub(super) fn len(&self) -> usize {
        self.n_entries
    }

    /// Memory held.
    pub(super) fn bytes(&self) -> usize {
        self.entries.capacity() * size_of::<Entry>()
    }

    /// What is in a place; an empty entry beyond the end.
    #[inline]
    pub(super) fn at(&self, place: usize) -> Entry {
        self.entries.get(place).copied().unwrap_or_default()
    }

    /// The first place, from the key's home on, that is empty or whose key is not below `key`.
    #[inline]
    pub(super) fn seek(&self, key: u64) -> usize {
        let mut place = self.home(key);
        while self.at(place).is_below(key) {
            place += 1;
        }
        place
    }

    /// The number under `key`, 0 when there is none.
    #[inline]
    pub(super) fn get(&self, key: u64) -> u64 {
        let entry = self.at(self.seek(key));
        if entry.is_of(key) { entry.value } else { 0 }
    }

    /// Reads where `key` would be, so that it is near when it is asked for.
    #[inline]
    pub(super) fn touch(&self, key: u64) -> u64 {
        let home = self.home(key);
        self.at(home).key ^ self.at(home + N_NEAR).key
    }

    /// Changes the entry in a place; when that removes it, the next entry may be in this place now.
    #[inline]
    pub(super) fn change(&mut self, place: usize, changed: Changed) {
        if let Some((key, value)) = changed.moved {
            self.set(self.seek(key), value);
        }
        if changed.value == 0 { self.remove(place) } else { self.set(place, changed.value) }
    }

    /// Changes entries in about `n_places` places from `key` on; returns the key to go on with, none at the end.
    pub(super) fn walk(&mut self, key: u64, n_places: usize, mut change: impl FnMut(Entry) -> Changed) -> Option<u64> {
        let mut place = self.seek(key);
        let (mut n_seen, mut last) = (0, None);
        while place < self.entries.len() {
            let entry = self.entries[place];
            // Entries of one key are seen together, so that the next walk begins behind them.
            if n_seen >= n_places && last.is_none_or(|last| !entry.is_of(last)) {
                break;
            }
            n_seen += 1;
            if entry.is_empty() {
                place += 1;
                continue;
            }
            last = Some(entry.key);
            let changed = change(entry);
            if changed != Changed::to(entry.value) {
                self.change(place, changed);
            }
            place += usize::from(changed.value != 0);
        }
        self.entries[place.min(self.entries.len())..].iter().find(|entry| !entry.is_empty()).map(|entry| entry.key)
    }

    /// Puts another number into a place that is not empty.
    #[inline]
    fn set(&mut self, place: usize, value: u64) {
        debug_assert!(value != 0 && !self.at(place).is_empty(), "place {place} gets {value}");
        self.entries[place].value = value;
    }

    /// Adds an entry, after those of the same key; false when the budget does not allow the memory.
    pub(super) fn insert(&mut self, key: u64, value: u64, budget: &Budget) -> bool {
        debug_assert!(value != 0, "0 stands for an empty place");
        if 4 * (self.n_entries + 1) > 3 * self.n_homes {
            let n_homes = roomy(self.n_entries + 1);
            if !budget.claim(bytes_with(n_homes)) {
                return false;
            }
            self.rebuild(n_homes, budget);
        }
        let mut place = self.seek(key);
        while self.at(place).is_of(key) {
            place += 1;
        }
        let mut free = place;
        while !self.at(free).is_empty() {
            free += 1;
        }
        if free == self.entries.len() {
            self.lengthen(budget);
        }
        self.entries.copy_within(place..free, place + 1);
        self.entries[place] = Entry { key, value };
        self.n_entries += 1;
        true
    }

    /// Empties a place; what follows moves up as far as its home.
    fn remove(&mut self, place: usize) {
        debug_assert!(!self.at(place).is_empty(), "place {place} is empty");
        let mut end = place + 1;
        while !self.at(end).is_empty() && self.home(self.at(end).key) < end {
            end += 1;
        }
        self.entries.copy_within(place + 1..end, place);
        self.entries[end - 1] = Entry::default();
        self.n_entries -= 1;
    }

    /// Gives memory back when much is unused; places change.
    #[inline]
    pub(super) fn shrink(&mut self, budget: &Budget) {
        if self.n_entries == 0 && self.n_homes > 0 {
            budget.release(self.bytes());
            *self = Self::default();
        } else if 100 * self.n_entries < 42 * self.n_homes && self.n_homes > HOMES_MIN {
            let n_homes = roomy(self.n_entries);
            budget.take(bytes_with(n_homes));
            self.rebuild(n_homes, budget);
        }
    }

    #[inline]
    fn home(&self, key: u64) -> usize {
        ((u128::from(key) * self.n_homes as u128) >> 64) as usize
    }

    /// Moves everything into a table of `n_homes`, whose memory is claimed already.
    fn rebuild(&mut self, n_homes: usize, budget: &Budget) {
        let bytes_before = self.bytes();
        let before = std::mem::replace(&mut self.entries, vec![Entry::default(); n_homes + TAIL]);
        self.n_homes = n_homes;
        let mut free = 0;
        for entry in before.into_iter().filter(|entry| !entry.is_empty()) {
            let place = self.home(entry.key).max(free);
            if place == self.entries.len() {
                self.lengthen(budget);
            }
            self.entries[place] = entry;
            free = place + 1;
        }
        budget.release(bytes_before);
    }

    /// Adds places for a run that reaches the end; with keys spread evenly this hardly ever happens.
    fn lengthen(&mut self, budget: &Budget) {
        let bytes_before = self.bytes();
        self.entries.reserve_exact(TAIL);
        self.entries.resize(self.entries.len() + TAIL, Entry::default());
        budget.take(self.bytes());
        budget.release(bytes_before);
    }
}

/// Homes of which `n_entries` fill nine sixteenths: a third more until the table grows, a quarter less until it shrinks.
fn roomy(n_entries: usize) -> usize {
    (n_entries * 16 / 9).max(HOMES_MIN)
}

fn bytes_with(n_homes: usize) -> usize {
    (n_homes + TAIL) * size_of::<Entry>()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn content(table: &Table) -> Vec<(u64, u64)> {
        let entries = table.entries.iter().filter(|entry| !entry.is_empty());
        entries.map(|entry| (entry.key, entry.value)).collect()
    }

    /// Keys over the whole range, and many that share a home.
    fn key() -> impl Strategy<Value = u64> {
        prop_oneof![any::<u64>(), (0..40_u64).prop_map(|n| n << 58), (0..40_u64).prop_map(|n| u64::MAX - n), 0..40_u64]
    }

    proptest! {
        #[test]
        fn is_a_sorted_map_in_as_little_memory_as_it_says(steps in proptest::collection::vec((key(), any::<bool>()), 1..600)) {
            let budget = Budget::new(usize::MAX);
            let (mut table, mut model) = (Table::default(), BTreeMap::new());
            for (i, (key, is_removal)) in steps.into_iter().enumerate() {
                let value = i as u64 + 1;
                // Every other removal takes a key that is there.
                let key = if is_removal && i % 2 == 0 { model.range(key..).next().map_or(key, |(&key, _)| key) } else { key };
                let place = table.seek(key);
                let is_there = table.at(place).is_of(key);
                prop_assert_eq!(is_there, model.contains_key(&key));
                match (is_removal, is_there) {
                    (true, true) => {
                        table.change(place, Changed::to(0));
                        table.shrink(&budget);
                        model.remove(&key);
                    }
                    (false, true) => {
                        table.change(place, Changed::to(value));
                        model.insert(key, value);
                    }
                    (false, false) => {
                        prop_assert!(table.insert(key, value, &budget));
                        model.insert(key, value);
                    }
                    (true, false) => {}
                }
                prop_assert_eq!(budget.bytes(), table.bytes());
                prop_assert_eq!(table.len(), model.len());
                prop_assert_eq!(table.get(key), model.get(&key).copied().unwrap_or(0));
            }
            prop_assert_eq!(content(&table), model.into_iter().collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_key_may_stand_for_many_numbers() {
        let budget = Budget::new(usize::MAX);
        let mut table = Table::default();
        (1..=50).for_each(|value| assert!(table.insert(u64::MAX, value, &budget) && table.insert(7, value, &budget)));
        assert_eq!(content(&table)[..50], (1..=50).map(|value| (7, value)).collect::<Vec<_>>());
        assert_eq!(content(&table)[50..], (1..=50).map(|value| (u64::MAX, value)).collect::<Vec<_>>());
    }

    proptest! {
        #[test]
        fn a_walk_in_steps_sees_everything_once(keys in proptest::collection::vec(key(), 0..300), n_places in 1..50_usize) {
            let budget = Budget::new(usize::MAX);
            let mut table = Table::default();
            keys.iter().enumerate().for_each(|(i, &key)| assert!(table.insert(key, i as u64 + 1, &budget)));
            let (mut seen, mut next) = (Vec::new(), Some(0));
            while let Some(key) = next {
                next = table.walk(key, n_places, |entry| {
                    seen.push((entry.key, entry.value));
                    Changed::to(if entry.value % 3 == 0 { 0 } else { entry.value })
                });
                table.shrink(&budget);
            }
            let mut expected: Vec<_> = keys.iter().enumerate().map(|(i, &key)| (key, i as u64 + 1)).collect();
            expected.sort_unstable();
            prop_assert_eq!(&seen, &expected);
            expected.retain(|(_, value)| value % 3 != 0);
            prop_assert_eq!(content(&table), expected);
        }
    }

    #[test]
    fn an_entry_takes_forty_bytes_at_most_and_none_when_gone() {
        let budget = Budget::new(usize::MAX);
        let mut table = Table::default();
        let key = |n: u64| n.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        for n in 0..50_000 {
            table.insert(key(n), 1, &budget);
            assert!(n < 1000 || table.bytes() <= 40 * table.len(), "{} bytes for {}", table.bytes(), table.len());
        }
        for n in 0..50_000 {
            table.change(table.seek(key(n)), Changed::to(0));
            table.shrink(&budget);
            assert!(table.len() < 1000 || table.bytes() <= 40 * table.len(), "{} for {}", table.bytes(), table.len());
        }
        assert_eq!((table.bytes(), budget.bytes()), (0, 0));
    }

    #[test]
    fn the_budget_is_kept() {
        let budget = Budget::new(2000);
        let mut table = Table::default();
        let n_inserted = (0..1000_u64).filter(|n| table.insert(n << 54, 1, &budget)).count();
        assert_eq!(n_inserted, table.len());
        assert!((20..100).contains(&n_inserted) && budget.bytes() <= 2000, "{n_inserted}");
    }
}
