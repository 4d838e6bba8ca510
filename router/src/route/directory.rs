//! Which engine caches which blocks, as their events say, and which will because a prompt was just placed there.
//!
//! Each engine has a set of its own, so that forgetting one costs the same however much it held.

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::Instant;

use contract::hash::BlockHash;
use contract::ids::EngineId;
use contract::kv::{KvDigest, KvEvent};

/// Memory of one block in a set, its share of empty places included.
const BYTES_PER_BLOCK: usize = 40;
/// Promises of one engine at most.
const N_PROMISES_MAX: usize = 1 << 16;

/// Cached blocks by engine.
#[derive(Debug)]
pub struct PrefixDirectory {
    engines: HashMap<EngineId, Blocks>,
    n_blocks: usize,
    n_blocks_max: usize,
}

/// What an engine says of its cache.
#[derive(Clone, Debug, PartialEq)]
pub enum Update {
    /// Part of everything there is.
    Snapshot {
        /// Blocks of this part.
        blocks: Vec<BlockHash>,
        /// No part follows.
        last: bool,
    },
    /// Changes, oldest first.
    Events(Vec<KvEvent>),
    /// What everything adds up to.
    Heartbeat(KvDigest),
}

/// Why only a new snapshot helps: a bounded set, for metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Resync {
    /// Events are missing.
    Gap,
    /// The engine's blocks are others than those known here.
    Digest,
    /// An update came before the snapshot was complete, or for an engine that is not watched.
    Order,
}

#[derive(Debug, Default)]
struct Blocks {
    cached: HashSet<BlockHash>,
    /// Over all that the engine said, also what the bound left out of `cached`.
    digest: KvDigest,
    /// Number of the last event.
    sequence: u64,
    is_complete: bool,
    /// Some blocks were left out.
    is_cut: bool,
    promised: HashMap<BlockHash, u32>,
    /// Oldest first.
    promises: VecDeque<(Instant, BlockHash)>,
}

impl Resync {
    /// Lower-case name for metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gap => "gap",
            Self::Digest => "digest",
            Self::Order => "order",
        }
    }
}

impl PrefixDirectory {
    /// Makes an empty directory of about `bytes_max` bytes at most; blocks beyond it are not known.
    pub fn new(bytes_max: usize) -> Self {
        Self { engines: HashMap::new(), n_blocks: 0, n_blocks_max: bytes_max / BYTES_PER_BLOCK }
    }

    /// Begins a watch of `engine`: nothing is known until its snapshot, promises stay.
    pub fn begin(&mut self, engine: &EngineId) {
        let (promised, promises) = match self.engines.remove(engine) {
            Some(before) => {
                self.n_blocks -= before.cached.len();
                (before.promised, before.promises)
            }
            None => Default::default(),
        };
        self.engines.insert(engine.clone(), Blocks { promised, promises, ..Blocks::default() });
    }

    /// Takes what `engine` says; `sequence` numbers the last event that is included.
    ///
    /// # Errors
    /// When the engine's events do not continue what is known: watch anew.
    pub fn apply(&mut self, engine: &EngineId, sequence: u64, update: Update) -> Result<(), Resync> {
        let room = self.n_blocks_max - self.n_blocks;
        let blocks = self.engines.get_mut(engine).ok_or(Resync::Order)?;
        let before = blocks.cached.len();
        let result = blocks.apply(sequence, update, before + room);
        let after = blocks.cached.len();
        self.n_blocks = self.n_blocks - before + after;
        result
    }

    /// Forgets an engine, in constant time.
    pub fn remove(&mut self, engine: &EngineId) {
        if let Some(blocks) = self.engines.remove(engine) {
            self.n_blocks -= blocks.cached.len();
        }
    }

    /// Credits `engine` with blocks of a prompt that was placed there, until `until`.
    pub fn promise(&mut self, engine: &EngineId, hashes: &[BlockHash], now: Instant, until: Instant) {
        if let Some(blocks) = self.engines.get_mut(engine) {
            blocks.expire(now);
            hashes.iter().take(N_PROMISES_MAX).for_each(|&hash| blocks.promise(hash, until));
        }
    }

    /// Counts the blocks at the beginning of a prompt that `engine` holds or was promised.
    pub fn count(&self, engine: &EngineId, hashes: &[BlockHash], now: Instant) -> usize {
        let Some(blocks) = self.engines.get(engine) else { return 0 };
        let promises_hold = blocks.promises.back().is_some_and(|&(until, _)| until > now);
        let known =
            |hash: &&BlockHash| blocks.cached.contains(*hash) || (promises_hold && blocks.promised.contains_key(*hash));
        hashes.iter().take_while(known).count()
    }

    /// Blocks known over all engines.
    pub fn n_blocks(&self) -> usize {
        self.n_blocks
    }
}

impl Blocks {
    fn apply(&mut self, sequence: u64, update: Update, n_max: usize) -> Result<(), Resync> {
        match update {
            Update::Snapshot { blocks, last } => {
                if self.is_complete {
                    return Err(Resync::Order);
                }
                blocks.into_iter().try_for_each(|hash| self.store(hash, n_max))?;
                self.sequence = sequence;
                self.is_complete = last;
                Ok(())
            }
            _ if !self.is_complete => Err(Resync::Order),
            Update::Events(events) => {
                if self.sequence.checked_add(events.len() as u64) != Some(sequence) {
                    return Err(Resync::Gap);
                }
                self.sequence = sequence;
                events.into_iter().try_for_each(|event| self.change(event, n_max))
            }
            Update::Heartbeat(_) if sequence != self.sequence => Err(Resync::Gap),
            Update::Heartbeat(digest) if digest != self.digest => Err(Resync::Digest),
            Update::Heartbeat(_) => Ok(()),
        }
    }

    fn change(&mut self, event: KvEvent, n_max: usize) -> Result<(), Resync> {
        match event {
            KvEvent::BlockStored { hash, .. } => self.store(hash, n_max),
            KvEvent::BlockRemoved { hash } => {
                if self.digest.n_blocks == 0 || !(self.cached.remove(&hash) || self.is_cut) {
                    return Err(Resync::Digest);
                }
                self.digest.remove(hash);
                Ok(())
            }
            KvEvent::AllBlocksCleared => {
                self.cached = HashSet::new();
                self.digest = KvDigest::default();
                self.is_cut = false;
                Ok(())
            }
        }
    }

    fn store(&mut self, hash: BlockHash, n_max: usize) -> Result<(), Resync> {
        if self.cached.len() >= n_max {
            self.is_cut = true;
        } else if !self.cached.insert(hash) {
            return Err(Resync::Digest);
        }
        self.digest.insert(hash);
        Ok(())
    }

    fn promise(&mut self, hash: BlockHash, until: Instant) {
        if self.promises.len() >= N_PROMISES_MAX {
            self.drop_oldest_promise();
        }
        self.promises.push_back((until, hash));
        *self.promised.entry(hash).or_default() += 1;
    }

    fn expire(&mut self, now: Instant) {
        while self.promises.front().is_some_and(|&(until, _)| until <= now) {
            self.drop_oldest_promise();
        }
    }

    fn drop_oldest_promise(&mut self) {
        let Some((_, hash)) = self.promises.pop_front() else { return };
        if let Some(n) = self.promised.get_mut(&hash) {
            *n -= 1;
            if *n == 0 {
                self.promised.remove(&hash);
            }
        }
    }
}

#[cfg(test)]
#[path = "directory_tests.rs"]
mod tests;
