//! Tokens of parts of texts, remembered by the parts' text within a bound of bytes; what was used longest ago goes first.

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, PoisonError};

use contract::ids::Token;

/// Bytes of a part beside its text and tokens, counted generously.
const OVERHEAD_BYTES: usize = 192;

/// A part of a text.
#[derive(Debug)]
pub(super) struct Part {
    text: Box<str>,
    /// Its tokens.
    pub(super) tokens: Box<[Token]>,
}

/// What is remembered of all texts.
#[derive(Debug)]
pub(super) struct Parts {
    bytes_max: usize,
    hasher: RandomState,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// By hash of the text; of two with one hash the later stays.
    parts: HashMap<u64, (Arc<Part>, u64)>,
    /// Hashes by the count of uses when they were used last.
    by_use: BTreeMap<u64, u64>,
    n_uses: u64,
    bytes: usize,
}

impl Parts {
    /// Remembers up to `bytes_max` bytes.
    pub(super) fn new(bytes_max: usize) -> Self {
        Self { bytes_max, hasher: RandomState::new(), state: Mutex::default() }
    }

    /// Whether anything is remembered.
    pub(super) fn is_on(&self) -> bool {
        self.bytes_max > 0
    }

    /// The part that reads `text`.
    pub(super) fn get(&self, text: &str) -> Option<Arc<Part>> {
        let hash = self.hasher.hash_one(text);
        let part = self.with(|state| state.touch(hash))?;
        (&*part.text == text).then_some(part)
    }

    /// Remembers that `text` has `tokens`.
    pub(super) fn put(&self, text: &str, tokens: &[Token]) {
        let part = Arc::new(Part { text: text.into(), tokens: tokens.into() });
        if part.bytes() > self.bytes_max {
            return;
        }
        let hash = self.hasher.hash_one(text);
        self.with(|state| {
            state.remove(hash);
            state.insert(hash, part);
            while state.bytes > self.bytes_max {
                let oldest = state.by_use.first_key_value().map(|(_, &hash)| hash);
                state.remove(oldest.expect("bytes are those of parts"));
            }
        });
    }

    /// Bytes of all parts.
    #[cfg(test)]
    pub(super) fn bytes(&self) -> usize {
        self.with(|state| state.bytes)
    }

    fn with<T>(&self, work: impl FnOnce(&mut State) -> T) -> T {
        // Nothing here panics halfway through a change.
        work(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Part {
    fn bytes(&self) -> usize {
        self.text.len() + size_of_val::<[Token]>(&self.tokens) + OVERHEAD_BYTES
    }
}

impl State {
    fn touch(&mut self, hash: u64) -> Option<Arc<Part>> {
        let (part, used) = self.parts.get_mut(&hash)?;
        self.by_use.remove(used);
        self.n_uses += 1;
        *used = self.n_uses;
        self.by_use.insert(self.n_uses, hash);
        Some(Arc::clone(part))
    }

    fn insert(&mut self, hash: u64, part: Arc<Part>) {
        self.bytes += part.bytes();
        self.n_uses += 1;
        self.by_use.insert(self.n_uses, hash);
        self.parts.insert(hash, (part, self.n_uses));
    }

    fn remove(&mut self, hash: u64) {
        if let Some((part, used)) = self.parts.remove(&hash) {
            self.by_use.remove(&used);
            self.bytes -= part.bytes();
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn keeps_the_parts_used_last_within_its_bound(uses in prop::collection::vec(0..12_u32, 1..200)) {
            let text = |number: u32| format!("part {number:04}");
            let one = text(0).len() + 4 + OVERHEAD_BYTES;
            let parts = Parts::new(5 * one + 1);
            let mut model: Vec<u32> = Vec::new();
            for number in uses {
                let found = parts.get(&text(number)).map(|part| part.tokens.to_vec());
                prop_assert_eq!(found, model.contains(&number).then(|| vec![number]));
                if !model.contains(&number) {
                    parts.put(&text(number), &[number]);
                }
                model.retain(|&other| other != number);
                model.push(number);
                if model.len() > 5 {
                    model.remove(0);
                }
                prop_assert_eq!(parts.bytes(), model.len() * one);
            }
        }
    }

    #[test]
    fn a_part_over_the_bound_is_not_remembered() {
        let parts = Parts::new(100);
        parts.put("text", &[1]);
        assert!(parts.get("text").is_none());
        assert_eq!(parts.bytes(), 0);
    }
}
