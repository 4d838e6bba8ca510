//! One engine's cache as its events tell it.

use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, PoisonError};

use contract::hash::BlockHash;
use contract::ids::EngineId;
use contract::kv::{KvDigest, KvEvent};

use super::batch::Batch;
use super::shard::{Home, Stored};
use super::{PrefixDirectory, Resync, Slot, Update};

/// From an engine's first watch to its removal.
#[derive(Debug)]
pub(super) struct Watch {
    engine: EngineId,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    slot: Slot,
    /// Where its blocks are stored; none when there are too many engines.
    column: Option<usize>,
    /// Blocks stored there.
    n_blocks: usize,
    /// Over all that the engine said, also what was left out.
    digest: KvDigest,
    /// Number of the last event.
    sequence: u64,
    is_complete: bool,
    /// Some blocks were left out.
    is_cut: bool,
    is_removed: bool,
}

impl Watch {
    pub(super) fn new(engine: EngineId, slot: Slot) -> Self {
        let state = State {
            slot,
            column: None,
            n_blocks: 0,
            digest: KvDigest::default(),
            sequence: 0,
            is_complete: false,
            is_cut: false,
            is_removed: false,
        };
        Self { engine, state: Mutex::new(state) }
    }

    pub(super) fn engine(&self) -> &EngineId {
        &self.engine
    }

    /// Forgets all blocks until a snapshot comes; false when the engine was removed meanwhile.
    pub(super) fn begin(&self, directory: &PrefixDirectory) -> bool {
        let mut state = self.state();
        if state.is_removed {
            return false;
        }
        state.clear(directory);
        state.is_complete = false;
        true
    }

    pub(super) fn apply(&self, sequence: u64, update: Update, directory: &PrefixDirectory) -> Result<(), Resync> {
        let mut state = self.state();
        if state.is_removed {
            return Err(Resync::Order);
        }
        state.apply(sequence, update, directory)
    }

    pub(super) fn remove(&self, directory: &PrefixDirectory) {
        let mut state = self.state();
        if !state.is_removed {
            state.is_removed = true;
            directory.n_blocks.fetch_sub(state.n_blocks, Ordering::Relaxed);
            directory.roster_mut().remove(state.slot);
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn apply(&mut self, sequence: u64, update: Update, directory: &PrefixDirectory) -> Result<(), Resync> {
        match update {
            Update::Snapshot { blocks, last } => {
                if self.is_complete {
                    return Err(Resync::Order);
                }
                let stored = blocks.into_iter().map(|hash| KvEvent::BlockStored { hash, parent: None });
                self.change(stored, directory)?;
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
                self.change(events.into_iter(), directory)
            }
            Update::Heartbeat(_) if sequence != self.sequence => Err(Resync::Gap),
            Update::Heartbeat(digest) if digest != self.digest => Err(Resync::Digest),
            Update::Heartbeat(_) => Ok(()),
        }
    }

    fn change(&mut self, events: impl Iterator<Item = KvEvent>, directory: &PrefixDirectory) -> Result<(), Resync> {
        let mut batch = Batch::new();
        for event in events {
            match event {
                KvEvent::BlockStored { hash, parent } => {
                    self.digest.insert(hash);
                    if self.is_cut {
                        // Whether a block is left out depends on those before it.
                        self.flush(&mut batch, directory)?;
                    }
                    // A snapshot tells no parents, but they come first: what follows a gap is left out.
                    let follows = |parent| self.is_complete && self.holds(parent, directory);
                    if !self.is_cut || parent.map_or(self.is_complete, follows) {
                        batch.push(hash, true);
                    }
                }
                KvEvent::BlockRemoved { hash } => {
                    if self.digest.n_blocks == 0 {
                        return Err(Resync::Digest);
                    }
                    self.digest.remove(hash);
                    batch.push(hash, false);
                }
                KvEvent::AllBlocksCleared => {
                    self.flush(&mut batch, directory)?;
                    self.clear(directory);
                }
            }
            if batch.is_full() {
                self.flush(&mut batch, directory)?;
            }
        }
        self.flush(&mut batch, directory)
    }

    /// Brings a batch of changes into the shards.
    fn flush(&mut self, batch: &mut Batch, directory: &PrefixDirectory) -> Result<(), Resync> {
        let Some(column) = self.column else {
            batch.drain(|_, _| self.is_cut = true);
            return Ok(());
        };
        let (shards, now_ms) = (&directory.shards, directory.clock.latest_ms());
        let (mut n_stored, mut n_removed, mut differs) = (0, 0, false);
        batch.drain(|index, changes| {
            let mut shard = shards.write(index);
            shard.touch(changes);
            for change in changes {
                if !change.is_stored {
                    let was_there = shard.remove(change.key, column, &shards.cached);
                    n_removed += usize::from(was_there);
                    differs |= !was_there && !self.is_cut;
                    continue;
                }
                match shard.store(change.key, column, &shards.cached) {
                    Stored::New => n_stored += 1,
                    Stored::Known => differs = true,
                    Stored::NoRoom => self.is_cut = true,
                }
                shard.keep_promise(change.key, self.slot, now_ms);
            }
        });
        self.n_blocks = self.n_blocks + n_stored - n_removed;
        directory.n_blocks.fetch_add(n_stored, Ordering::Relaxed);
        directory.n_blocks.fetch_sub(n_removed, Ordering::Relaxed);
        if differs { Err(Resync::Digest) } else { Ok(()) }
    }

    fn clear(&mut self, directory: &PrefixDirectory) {
        directory.n_blocks.fetch_sub(self.n_blocks, Ordering::Relaxed);
        if self.n_blocks > 0 || self.column.is_none() {
            self.column = directory.roster_mut().renew_column(self.slot);
        }
        if self.column.is_none() {
            // All columns are in use or wait to be swept.
            directory.sweeper().finish(directory);
            self.column = directory.roster_mut().renew_column(self.slot);
        }
        self.n_blocks = 0;
        self.digest = KvDigest::default();
        self.is_cut = false;
    }

    fn holds(&self, hash: BlockHash, directory: &PrefixDirectory) -> bool {
        let home = Home::of(hash);
        self.column.is_some_and(|column| directory.shards.read(home.shard).holds(home.key, column))
    }
}
