//! Index of full computed blocks by chained hash, its digest, and the events that tell routers of its changes.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use contract::hash::BlockHash;
use contract::ids::BlockId;
use contract::kv::{KvDigest, KvEvent};

/// One entry for each hash, and news of each change.
#[derive(Debug)]
pub(crate) struct PrefixCache {
    index: HashMap<BlockHash, BlockId, BuildHasherDefault<TakeFirstBytes>>,
    digest: KvDigest,
    events: Vec<KvEvent>,
    events_max: usize,
    /// Number of the last event, counted from 1.
    sequence: u64,
    n_dropped: u64,
}

impl PrefixCache {
    /// Makes an empty index; `events_max` bounds the events kept for a reader that does not come.
    pub(crate) fn new(events_max: usize) -> Self {
        Self {
            index: HashMap::default(),
            digest: KvDigest::default(),
            events: Vec::new(),
            events_max,
            sequence: 0,
            n_dropped: 0,
        }
    }

    pub(crate) fn get(&self, hash: BlockHash) -> Option<BlockId> {
        self.index.get(&hash).copied()
    }

    pub(crate) fn insert(&mut self, hash: BlockHash, parent: Option<BlockHash>, block: BlockId) {
        let before = self.index.insert(hash, block);
        debug_assert!(before.is_none(), "{hash:?} is indexed already");
        self.digest.insert(hash);
        self.emit(KvEvent::BlockStored { hash, parent });
    }

    pub(crate) fn remove(&mut self, hash: BlockHash) {
        let before = self.index.remove(&hash);
        debug_assert!(before.is_some(), "{hash:?} is not indexed");
        self.digest.remove(hash);
        self.emit(KvEvent::BlockRemoved { hash });
    }

    pub(crate) fn clear(&mut self) {
        self.index.clear();
        self.digest = KvDigest::default();
        self.emit(KvEvent::AllBlocksCleared);
    }

    /// Length of the longest indexed prefix of a chain of hashes.
    ///
    /// An indexed block's parent is indexed too, so a binary search finds it.
    pub(crate) fn n_matched(&self, chain: &[BlockHash]) -> usize {
        chain.partition_point(|hash| self.index.contains_key(hash))
    }

    /// Moves the events to `events` and returns the number of the first.
    pub(crate) fn drain_events(&mut self, events: &mut Vec<KvEvent>) -> u64 {
        let first = self.sequence - self.events.len() as u64 + 1;
        events.append(&mut self.events);
        first
    }

    pub(crate) fn sequence(&self) -> u64 {
        self.sequence
    }

    pub(crate) fn digest(&self) -> KvDigest {
        self.digest
    }

    pub(crate) fn n_dropped(&self) -> u64 {
        self.n_dropped
    }

    pub(crate) fn entries(&self) -> impl Iterator<Item = (BlockHash, BlockId)> + '_ {
        self.index.iter().map(|(&hash, &block)| (hash, block))
    }

    fn emit(&mut self, event: KvEvent) {
        if self.events.len() == self.events_max {
            self.n_dropped += self.events.len() as u64;
            self.events.clear();
        }
        self.events.push(event);
        self.sequence += 1;
    }
}

/// Hashes of keyed BLAKE3 are uniform and secret already: their first bytes do.
#[derive(Debug, Default)]
struct TakeFirstBytes(u64);

impl Hasher for TakeFirstBytes {
    fn write(&mut self, bytes: &[u8]) {
        for (i, &byte) in bytes.iter().take(8).enumerate() {
            self.0 ^= u64::from(byte) << (8 * i);
        }
    }

    fn write_usize(&mut self, _length: usize) {}

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(i: u8) -> BlockHash {
        BlockHash([i; 16])
    }

    #[test]
    fn matches_the_longest_indexed_prefix() {
        let mut cache = PrefixCache::new(100);
        for i in 0..5 {
            cache.insert(hash(i), i.checked_sub(1).map(hash), BlockId(i.into()));
        }
        let chain: Vec<_> = [0, 1, 2, 9, 8, 7].map(hash).into();
        assert_eq!(cache.n_matched(&chain), 3);
        assert_eq!(cache.n_matched(&chain[..2]), 2);
        assert_eq!(cache.n_matched(&[]), 0);
    }

    #[test]
    fn numbers_events_from_one_and_shows_a_gap_when_nobody_drained() {
        let mut cache = PrefixCache::new(2);
        let mut events = Vec::new();
        assert_eq!(cache.drain_events(&mut events), 1);
        cache.insert(hash(1), None, BlockId(0));
        cache.insert(hash(2), Some(hash(1)), BlockId(1));
        assert_eq!((cache.drain_events(&mut events), events.len()), (1, 2));
        for _ in 0..3 {
            cache.clear();
        }
        events.clear();
        assert_eq!((cache.drain_events(&mut events), events.len()), (5, 1), "events 3 and 4 were dropped");
        assert_eq!((cache.sequence(), cache.n_dropped()), (5, 2));
    }
}
