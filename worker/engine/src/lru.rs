//! Order of release of unused cached blocks: a list threaded through an array, every operation constant time.

use contract::ids::BlockId;

const NONE: u32 = u32::MAX;

/// Blocks from longest to shortest unused; each block at most once.
#[derive(Debug)]
pub(crate) struct LruList {
    links: Vec<Link>,
    oldest: u32,
    newest: u32,
    len: u32,
}

#[derive(Clone, Copy, Debug)]
struct Link {
    older: u32,
    newer: u32,
    is_listed: bool,
}

impl LruList {
    pub(crate) fn new(n_blocks: u32) -> Self {
        let link = Link { older: NONE, newer: NONE, is_listed: false };
        Self { links: vec![link; n_blocks as usize], oldest: NONE, newest: NONE, len: 0 }
    }

    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    pub(crate) fn contains(&self, block: BlockId) -> bool {
        self.links[block.0 as usize].is_listed
    }

    /// Adds a block as the one used last.
    pub(crate) fn push_newest(&mut self, block: BlockId) {
        debug_assert!(!self.contains(block), "{block:?} is listed already");
        self.links[block.0 as usize] = Link { older: self.newest, newer: NONE, is_listed: true };
        match self.newest {
            NONE => self.oldest = block.0,
            newest => self.links[newest as usize].newer = block.0,
        }
        self.newest = block.0;
        self.len += 1;
    }

    /// Takes a block out of the middle.
    pub(crate) fn remove(&mut self, block: BlockId) {
        let Link { older, newer, is_listed } = self.links[block.0 as usize];
        debug_assert!(is_listed, "{block:?} is not listed");
        match older {
            NONE => self.oldest = newer,
            older => self.links[older as usize].newer = newer,
        }
        match newer {
            NONE => self.newest = older,
            newer => self.links[newer as usize].older = older,
        }
        self.links[block.0 as usize].is_listed = false;
        self.len -= 1;
    }

    /// Takes the block that was unused longest.
    pub(crate) fn pop_oldest(&mut self) -> Option<BlockId> {
        let block = BlockId(Some(self.oldest).filter(|&oldest| oldest != NONE)?);
        self.remove(block);
        Some(block)
    }

    /// Blocks from longest to shortest unused.
    pub(crate) fn iter(&self) -> impl Iterator<Item = BlockId> + '_ {
        let some = |block| Some(block).filter(|&block| block != NONE);
        std::iter::successors(some(self.oldest), move |&block| some(self.links[block as usize].newer)).map(BlockId)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(list: &LruList) -> Vec<u32> {
        list.iter().map(|block| block.0).collect()
    }

    #[test]
    fn pops_in_order_of_release_whatever_is_removed_between() {
        let mut list = LruList::new(5);
        for block in [3, 0, 4, 1] {
            list.push_newest(BlockId(block));
        }
        list.remove(BlockId(0));
        list.remove(BlockId(1));
        list.push_newest(BlockId(0));
        assert_eq!((order(&list), list.len()), (vec![3, 4, 0], 3));
        assert_eq!(list.pop_oldest(), Some(BlockId(3)));
        assert_eq!(list.pop_oldest(), Some(BlockId(4)));
        assert_eq!(list.pop_oldest(), Some(BlockId(0)));
        assert_eq!((list.pop_oldest(), list.len()), (None, 0));
    }
}
