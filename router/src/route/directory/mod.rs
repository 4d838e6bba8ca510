//! Which engine caches which blocks, as their events say, and which will because a prompt was just placed there.
//!
//! Blocks lie in shards by their hashes, each with the set of engines that hold it, so that one search answers for all
//! engines. Sets name engines by columns; to forget an engine is to retire its column, and a sweeper that does a little at
//! each change empties it later.

mod batch;
mod budget;
mod clock;
mod lookup;
mod promises;
mod roster;
mod sets;
mod shard;
mod sweeper;
mod table;
mod watch;

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Instant;

use contract::hash::BlockHash;
use contract::ids::EngineId;
use contract::kv::{KvDigest, KvEvent};

use batch::Batch;
use clock::Clock;
use lookup::Lookup;
pub use lookup::{Match, Matches};
use roster::Roster;
use shard::Shards;
use sweeper::Sweeper;
use watch::Watch;

/// Places swept at each change, beside two for each block of it.
const N_SWEPT: usize = 256;
/// One part in so many of all bytes is for promises.
const PROMISED_SHARE: usize = 8;
/// One part in so many of all bytes is left to the list of engines; what it takes beyond, blocks have to leave to it.
const ROSTER_SHARE: usize = 32;
/// Memory of an empty directory.
const BYTES_FIXED: usize = size_of::<PrefixDirectory>() + Shards::bytes_fixed();

/// Cached and promised blocks by engine; all methods may be called at once.
#[derive(Debug)]
pub struct PrefixDirectory {
    // Locks are taken in this order: an engine's watch, the sweeper, the roster, a shard.
    sweeper: Mutex<Sweeper>,
    roster: RwLock<Roster>,
    shards: Shards,
    clock: Clock,
    /// Blocks over all engines.
    n_blocks: AtomicUsize,
    /// Promises that were not kept and are not told yet.
    n_missed: AtomicU64,
    bytes_max: usize,
}

/// An engine in the directory, from its first watch until it is removed; never valid again after.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Slot {
    index: u16,
    generation: u16,
}

/// Names an engine: by its slot, which never means a later watch of it, or by its id.
pub trait Whose {
    /// Its slot, none when it is not watched.
    fn slot(self, directory: &PrefixDirectory) -> Option<Slot>;
}

/// What an engine says of its cache.
#[derive(Clone, Debug, PartialEq)]
pub enum Update {
    /// Part of everything there is.
    Snapshot {
        /// Blocks of this part, each after the block before it in its chain.
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

impl Whose for Slot {
    fn slot(self, _: &PrefixDirectory) -> Option<Slot> {
        Some(self)
    }
}

impl Whose for &EngineId {
    fn slot(self, directory: &PrefixDirectory) -> Option<Slot> {
        directory.slot(self)
    }
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
    /// The least bound that leaves room for blocks.
    pub const BYTES_MAX_LEAST: usize = 64 << 10;

    /// Makes an empty directory that takes `bytes_max` bytes at most, of which an eighth is for promises and as much as
    /// needed for the list of engines.
    ///
    /// Blocks beyond are left out, and with them all that follow. An engine that comes when blocks fill all there is, and
    /// engines take more than a part in 32 already, is let in at the cost of a few hundred bytes too much.
    pub fn new(bytes_max: usize) -> Self {
        let bytes = bytes_max.saturating_sub(BYTES_FIXED + bytes_max / ROSTER_SHARE);
        let promised = bytes / PROMISED_SHARE;
        Self {
            sweeper: Mutex::default(),
            roster: RwLock::default(),
            shards: Shards::new(bytes - promised, promised),
            clock: Clock::default(),
            n_blocks: AtomicUsize::new(0),
            n_missed: AtomicU64::new(0),
            bytes_max,
        }
    }

    /// Begins a watch of `engine`: nothing is known until its snapshot; its slot and its promises stay if it has some.
    pub fn begin(&self, engine: &EngineId) -> Slot {
        loop {
            let (slot, watch) = self.roster_mut().seat(engine);
            if watch.begin(self) {
                let of_roster = self.roster().bytes();
                self.shards.cached.reserve(of_roster.saturating_sub(self.bytes_max / ROSTER_SHARE));
                self.sweep(0);
                return slot;
            }
        }
    }

    /// Takes what an engine says; `sequence` numbers the last event that is included.
    ///
    /// # Errors
    /// When the engine's events do not continue what is known: watch anew. Also when the engine was removed, whatever it says.
    pub fn apply(&self, engine: impl Whose, sequence: u64, update: Update) -> Result<(), Resync> {
        let n_blocks = match &update {
            Update::Snapshot { blocks, .. } => blocks.len(),
            Update::Events(events) => events.len(),
            Update::Heartbeat(_) => 0,
        };
        let watch = self.watch(engine).ok_or(Resync::Order)?;
        let result = watch.apply(sequence, update, self);
        self.sweep(n_blocks);
        result
    }

    /// Forgets an engine in constant time, however much it held; its memory comes back with the changes that follow.
    pub fn remove(&self, engine: impl Whose) {
        if let Some(watch) = self.watch(engine) {
            watch.remove(self);
            self.sweep(0);
        }
    }

    /// Credits an engine with the blocks of a prompt that was placed there, until `until`, at most twelve days on.
    ///
    /// Nothing is promised beyond the bound on bytes.
    pub fn promise(&self, engine: impl Whose, hashes: &[BlockHash], now: Instant, until: Instant) {
        let Some(slot) = engine.slot(self) else { return };
        let now_ms = self.clock.see(now);
        let until_ms = self.clock.ms(until).min(now_ms + promises::PROMISE_MS_MAX);
        let column = {
            let roster = self.roster();
            if !roster.is_current(slot) || until_ms <= now_ms {
                return;
            }
            roster.column(slot)
        };
        let mut batch = Batch::new();
        let mut n_missed = 0;
        for part in hashes.chunks(batch::N_CHANGES_MAX) {
            part.iter().for_each(|&hash| batch.push(hash, true));
            batch.drain(|index, changes| {
                let mut shard = self.shards.write(index);
                shard.touch(changes);
                for change in changes {
                    let is_stored = column.is_some_and(|column| shard.holds(change.key, column));
                    let times = (now_ms, until_ms);
                    n_missed +=
                        u64::from(shard.promises.make(change.key, slot, times, is_stored, &self.shards.promised));
                }
            });
        }
        self.n_missed.fetch_add(n_missed, Ordering::Relaxed);
        self.sweep(hashes.len());
    }

    /// Finds how many blocks at the beginning of a prompt each engine holds or was promised.
    ///
    /// Never more than the engine itself would say, but for promises: also of an engine some of whose blocks were left out.
    pub fn lookup(&self, hashes: &[BlockHash], now: Instant) -> Matches {
        // A lookup may ask about another time than the present, so only promises move the clock.
        let now_ms = self.clock.ms(now);
        Lookup::new(&self.shards, &self.roster(), hashes, now_ms).run()
    }

    /// Like `lookup`, for one engine: blocks at the beginning of a prompt that it holds or was promised.
    pub fn count(&self, engine: impl Whose, hashes: &[BlockHash], now: Instant) -> usize {
        engine.slot(self).map_or(0, |slot| self.lookup(hashes, now).of(slot).n_blocks)
    }

    /// The slot of an engine that is watched.
    pub fn slot(&self, engine: &EngineId) -> Option<Slot> {
        self.roster().slot(engine)
    }

    /// Blocks known over all engines.
    pub fn n_blocks(&self) -> usize {
        self.n_blocks.load(Ordering::Relaxed)
    }

    /// Promised blocks that were not stored in time, each counted once over all calls, soon after its time.
    pub fn take_promises_missed(&self) -> u64 {
        self.n_missed.swap(0, Ordering::Relaxed)
    }

    /// Memory of every structure.
    pub fn bytes(&self) -> usize {
        BYTES_FIXED + self.roster().bytes() + self.shards.cached.bytes() + self.shards.promised.bytes()
    }

    /// Does at once what else goes on a little at each change: frees what removed engines held and what promises are over.
    pub fn settle(&self, now: Instant) {
        self.clock.see(now);
        self.sweeper().finish(self);
    }

    fn watch(&self, engine: impl Whose) -> Option<Arc<Watch>> {
        let slot = engine.slot(self)?;
        self.roster().watch(slot).cloned()
    }

    fn sweep(&self, n_changed: usize) {
        if let Ok(mut sweeper) = self.sweeper.try_lock() {
            sweeper.sweep(N_SWEPT + 2 * n_changed, self);
        }
    }

    fn sweeper(&self) -> MutexGuard<'_, Sweeper> {
        self.sweeper.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn roster(&self) -> RwLockReadGuard<'_, Roster> {
        self.roster.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn roster_mut(&self) -> RwLockWriteGuard<'_, Roster> {
        self.roster.write().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
