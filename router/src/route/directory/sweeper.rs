//! What goes on in the background, a little at each change: columns of engines that are gone, promises that are over.

use std::sync::atomic::Ordering;

use super::PrefixDirectory;
use super::shard::N_SHARDS;

/// Where two walks over all shards stand.
#[derive(Debug, Default)]
pub(super) struct Sweeper {
    /// Columns that this walk empties; those retired meanwhile wait for the next.
    dead: Vec<u64>,
    columns: Cursor,
    promises: Cursor,
}

#[derive(Clone, Copy, Debug, Default)]
struct Cursor {
    shard: usize,
    key: u64,
}

impl Cursor {
    /// Goes on to a key, or to the next shard; true when that was the last.
    fn advance(&mut self, next: Option<u64>) -> bool {
        match next {
            Some(key) => self.key = key,
            None => *self = Self { shard: (self.shard + 1) % N_SHARDS, key: 0 },
        }
        next.is_none() && self.shard == 0
    }
}

impl Sweeper {
    /// Sweeps about `n_places` places of both tables.
    pub(super) fn sweep(&mut self, n_places: usize, directory: &PrefixDirectory) {
        self.sweep_columns(n_places, directory);
        if directory.shards.promised.bytes() > 0 {
            self.sweep_promises(n_places, directory);
        }
    }

    /// Sweeps all there is to sweep now.
    pub(super) fn finish(&mut self, directory: &PrefixDirectory) {
        // One walk may be under way; the next takes all that was retired since it began.
        for _ in 0..2 {
            while self.sweep_columns(usize::MAX, directory) {}
        }
        self.promises = Cursor::default();
        while !self.sweep_promises(usize::MAX, directory) {}
    }

    /// Returns whether there is more to do.
    fn sweep_columns(&mut self, n_places: usize, directory: &PrefixDirectory) -> bool {
        if self.dead.is_empty() {
            self.dead = directory.roster().retired();
        }
        if self.dead.is_empty() {
            return false;
        }
        let Cursor { shard, key } = self.columns;
        let next = directory.shards.write(shard).sweep(key, n_places, &self.dead, &directory.shards.cached);
        let is_over = self.columns.advance(next);
        if is_over {
            directory.roster_mut().free(&self.dead);
            self.dead.clear();
        }
        !is_over
    }

    /// Returns whether the last shard was reached.
    fn sweep_promises(&mut self, n_places: usize, directory: &PrefixDirectory) -> bool {
        let Cursor { shard, key } = self.promises;
        let roster = directory.roster();
        let (next, n_missed) = directory.shards.write(shard).promises.sweep(
            key,
            n_places,
            directory.clock.latest_ms(),
            |slot| roster.is_current(slot),
            &directory.shards.promised,
        );
        directory.n_missed.fetch_add(n_missed, Ordering::Relaxed);
        self.promises.advance(next)
    }
}
