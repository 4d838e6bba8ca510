//! Blocks of the paged KV cache: allocated by reference count, cached when full and unused, or free.
//!
//! A request refers to all blocks of its table and lets go of the last first, and every block in a table is either
//! unindexed or the indexed one of its hash. So a block is unused before, or as soon as, the block before it in the chain,
//! and eviction in order of release takes tails first without counting children.

use contract::hash::BlockHash;
use contract::ids::BlockId;
use contract::occupancy::BlockCounts;

use crate::lru::LruList;
use crate::prefix_cache::PrefixCache;

/// All blocks of one engine.
#[derive(Debug)]
pub(crate) struct BlockPool {
    blocks: Vec<Block>,
    free: Vec<BlockId>,
    unused: LruList,
    prefix: PrefixCache,
}

#[derive(Clone, Copy, Debug, Default)]
struct Block {
    n_references: u32,
    cached: Option<CachedBlock>,
}

/// What is known of a full block whose KV is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CachedBlock {
    pub(crate) hash: BlockHash,
    pub(crate) parent: Option<BlockHash>,
    /// Its place in the chain, from 0.
    pub(crate) depth: u32,
}

impl BlockPool {
    pub(crate) fn new(n_blocks: u32) -> Self {
        Self {
            blocks: vec![Block::default(); n_blocks as usize],
            free: (0..n_blocks).rev().map(BlockId).collect(),
            unused: LruList::new(n_blocks),
            prefix: PrefixCache::new(4 * n_blocks as usize + 16),
        }
    }

    /// Blocks that can be allocated now.
    pub(crate) fn n_available(&self) -> usize {
        self.free.len() + self.unused.len() as usize
    }

    /// Takes a free block, or evicts the cached one that was unused longest.
    pub(crate) fn allocate(&mut self) -> Option<BlockId> {
        let block = self.free.pop().or_else(|| self.evict())?;
        self.blocks[block.0 as usize].n_references = 1;
        Some(block)
    }

    /// Adds a reference to a cached or allocated block.
    pub(crate) fn retain(&mut self, block: BlockId) {
        let entry = &mut self.blocks[block.0 as usize];
        if entry.n_references == 0 {
            self.unused.remove(block);
        }
        entry.n_references += 1;
    }

    /// Drops a reference; with the last one an indexed block becomes cached and any other free.
    pub(crate) fn release(&mut self, block: BlockId) {
        let entry = &mut self.blocks[block.0 as usize];
        assert!(entry.n_references > 0, "{block:?} was released once too often");
        entry.n_references -= 1;
        if entry.n_references > 0 {
            return;
        }
        match entry.cached {
            Some(_) => self.unused.push_newest(block),
            None => self.free.push(block),
        }
    }

    /// Indexes a full block whose KV is computed and returns the block to use from now on.
    ///
    /// When another block with the same hash was computed meanwhile, that one is returned with a reference for the caller,
    /// who releases `block` as soon as no plan in flight names it: two equal blocks are never kept.
    pub(crate) fn commit(&mut self, block: BlockId, cached: CachedBlock) -> BlockId {
        if let Some(first) = self.prefix.get(cached.hash) {
            debug_assert_ne!(first, block, "{block:?} was committed twice");
            self.retain(first);
            return first;
        }
        debug_assert!(cached.parent.is_none_or(|parent| self.prefix.get(parent).is_some()), "parents come first");
        self.blocks[block.0 as usize].cached = Some(cached);
        self.prefix.insert(cached.hash, cached.parent, block);
        block
    }

    /// Blocks of the longest cached prefix of a chain, and how many of them are unused.
    pub(crate) fn n_matched(&self, chain: &[BlockHash]) -> (usize, usize) {
        let n_matched = self.prefix.n_matched(chain);
        let is_used = |hash: &BlockHash| {
            self.prefix.get(*hash).is_some_and(|block| self.blocks[block.0 as usize].n_references > 0)
        };
        (n_matched, n_matched - chain[..n_matched].partition_point(is_used))
    }

    /// The block indexed under a hash.
    pub(crate) fn lookup(&self, hash: BlockHash) -> Option<BlockId> {
        self.prefix.get(hash)
    }

    /// Unindexes every block; unused ones become free.
    pub(crate) fn clear_cache(&mut self) {
        self.prefix.clear();
        while let Some(block) = self.unused.pop_oldest() {
            self.free.push(block);
        }
        for block in &mut self.blocks {
            block.cached = None;
        }
    }

    pub(crate) fn counts(&self) -> BlockCounts {
        let (total, free, cached) = (self.blocks.len() as u32, self.free.len() as u32, self.unused.len());
        BlockCounts { total, allocated: total - free - cached, cached, free }
    }

    pub(crate) fn prefix(&self) -> &PrefixCache {
        &self.prefix
    }

    pub(crate) fn prefix_mut(&mut self) -> &mut PrefixCache {
        &mut self.prefix
    }

    /// Indexed blocks with their parents, parents first.
    pub(crate) fn snapshot(&self) -> Vec<(BlockHash, Option<BlockHash>)> {
        let mut entries: Vec<CachedBlock> =
            self.prefix.entries().filter_map(|(_, block)| self.blocks[block.0 as usize].cached).collect();
        entries.sort_unstable_by_key(|entry| (entry.depth, entry.hash));
        entries.into_iter().map(|entry| (entry.hash, entry.parent)).collect()
    }

    /// Checks the pool against `references`, the references that its users hold, by block.
    ///
    /// # Panics
    /// When a block is lost or counted twice, or a cached block would be evicted before a block that follows it.
    pub(crate) fn check_invariants(&self, references: &[u32]) {
        assert!(self.counts().is_conserved(), "{:?}", self.counts());
        let mut is_free = vec![false; self.blocks.len()];
        for block in &self.free {
            assert!(!std::mem::replace(&mut is_free[block.0 as usize], true), "{block:?} is free twice");
        }
        let mut age = vec![None; self.blocks.len()];
        for (i, block) in self.unused.iter().enumerate() {
            age[block.0 as usize] = Some(i);
        }
        let mut n_cached = 0;
        for (i, block) in self.blocks.iter().enumerate() {
            assert_eq!(block.n_references, references[i], "references of block {i}");
            assert_eq!(is_free[i], block.n_references == 0 && block.cached.is_none(), "block {i} is free");
            assert_eq!(age[i].is_some(), block.n_references == 0 && block.cached.is_some(), "block {i} is unused");
            let Some(cached) = block.cached else { continue };
            n_cached += 1;
            assert_eq!(self.prefix.get(cached.hash), Some(BlockId(i as u32)), "index of block {i}");
            let Some(parent) = cached.parent else { continue };
            let parent = self.prefix.get(parent).expect("an indexed block's parent is indexed").0 as usize;
            let is_kept_longer = match (age[i], age[parent]) {
                (_, None) => true,
                (None, Some(_)) => false,
                (Some(child), Some(parent)) => child < parent,
            };
            assert!(is_kept_longer, "block {parent} would be evicted before block {i} that follows it");
        }
        assert_eq!(self.prefix.digest().n_blocks, n_cached);
        assert_eq!(self.prefix.entries().count() as u64, n_cached);
    }

    fn evict(&mut self) -> Option<BlockId> {
        let block = self.unused.pop_oldest()?;
        let cached = self.blocks[block.0 as usize].cached.take().expect("unused blocks are indexed");
        self.prefix.remove(cached.hash);
        Some(block)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cached(i: u8) -> CachedBlock {
        let hash = |i| BlockHash([i; 16]);
        CachedBlock { hash: hash(i), parent: i.checked_sub(1).map(hash), depth: i.into() }
    }

    fn chain(n: u8) -> Vec<BlockHash> {
        (0..n).map(|i| cached(i).hash).collect()
    }

    /// A pool of four blocks, of which `n` hold a chain that nobody uses.
    fn pool_with_chain(n: u8) -> BlockPool {
        let mut pool = BlockPool::new(4);
        let table: Vec<_> = (0..n).map(|_| pool.allocate().unwrap()).collect();
        for (i, &block) in table.iter().enumerate() {
            assert_eq!(pool.commit(block, cached(i as u8)), block);
        }
        table.iter().rev().for_each(|&block| pool.release(block));
        pool
    }

    #[test]
    fn evicts_tails_first() {
        let mut pool = pool_with_chain(3);
        assert_eq!(pool.n_matched(&chain(4)), (3, 3));
        let _free = pool.allocate().unwrap();
        let _tail = pool.allocate().unwrap();
        assert_eq!(pool.n_matched(&chain(4)), (2, 2));
        assert_eq!(pool.counts(), BlockCounts { total: 4, allocated: 2, cached: 2, free: 0 });
    }

    #[test]
    fn a_block_in_use_is_never_evicted() {
        let mut pool = pool_with_chain(2);
        let first = pool.lookup(cached(0).hash).unwrap();
        pool.retain(first);
        assert_eq!(pool.n_matched(&chain(2)), (2, 1));
        let taken: Vec<_> = std::iter::from_fn(|| pool.allocate()).collect();
        assert_eq!(taken.len(), 3);
        assert!(!taken.contains(&first));
        assert_eq!(pool.n_matched(&chain(2)), (1, 0));
    }

    #[test]
    fn the_second_of_two_equal_blocks_gives_way() {
        let mut pool = BlockPool::new(4);
        let (a, b) = (pool.allocate().unwrap(), pool.allocate().unwrap());
        assert_eq!(pool.commit(a, cached(0)), a);
        assert_eq!(pool.commit(b, cached(0)), a);
        pool.release(b);
        assert_eq!(pool.counts(), BlockCounts { total: 4, allocated: 1, cached: 0, free: 3 });
        pool.release(a);
        assert_eq!(pool.counts().allocated, 1, "both users refer to the first block");
        pool.release(a);
        assert_eq!(pool.counts(), BlockCounts { total: 4, allocated: 0, cached: 1, free: 3 });
    }

    #[test]
    fn clearing_frees_unused_blocks_now_and_used_ones_later() {
        let mut pool = pool_with_chain(2);
        let first = pool.lookup(cached(0).hash).unwrap();
        pool.retain(first);
        pool.clear_cache();
        assert_eq!(pool.counts(), BlockCounts { total: 4, allocated: 1, cached: 0, free: 3 });
        pool.release(first);
        assert_eq!(pool.counts().free, 4);
        assert_eq!(pool.n_matched(&chain(2)), (0, 0));
    }
}
