//! A pool of blocks and what they should hold.

use std::sync::{Arc, Mutex};

use contract::ids::BlockId;
use contract::kv::{KvLayout, KvPart};
use kernels::memory::blocks::{BlockMemory, Region};

use super::super::Share;
use super::random::Random;

/// What blocks hold that nothing was written to.
const UNTOUCHED: u8 = 0xa5;
/// What blocks hold after their sequence let go of them.
const RELEASED: u8 = 0x5a;

#[derive(Clone)]
pub(super) struct Pool {
    pub(super) share: Share,
    pub(super) memory: BlockMemory,
    free: Arc<Mutex<Vec<BlockId>>>,
    n_blocks: u32,
}

impl Pool {
    pub(super) fn new(share: Share, n_blocks: u32, random: &mut Random) -> Self {
        let bytes = [KvPart::Key, KvPart::Value].map(|part| share.layout.block_bytes(part));
        let memory = BlockMemory::zeroed(share.layout.n_layers as usize, n_blocks as usize, bytes).unwrap();
        let mut free: Vec<BlockId> = (0..n_blocks).map(BlockId).collect();
        random.shuffle(&mut free);
        let pool = Self { share, memory, free: Arc::new(Mutex::new(free)), n_blocks };
        (0..n_blocks).for_each(|block| pool.fill(BlockId(block), UNTOUCHED));
        pool
    }

    pub(super) fn take(&self, n: u32) -> Vec<BlockId> {
        let mut free = self.free.lock().unwrap();
        let rest = free.len().checked_sub(n as usize).expect("enough blocks");
        free.split_off(rest)
    }

    /// Gives blocks back and writes over them, as the next owner would.
    pub(super) fn give_back(&self, blocks: &[BlockId]) {
        blocks.iter().for_each(|&block| self.fill(block, RELEASED));
        self.free.lock().unwrap().extend(blocks);
    }

    /// Gives blocks back as if nothing had ever been written to them.
    pub(super) fn wipe(&self, blocks: &[BlockId]) {
        blocks.iter().for_each(|&block| self.fill(block, UNTOUCHED));
        self.free.lock().unwrap().extend(blocks);
    }

    pub(super) fn n_free(&self) -> usize {
        self.free.lock().unwrap().len()
    }

    /// Writes what block `index` of a sequence holds in one layer.
    pub(super) fn compute(&self, block: BlockId, layer: u32, sequence: u64, index: u32) {
        for region in Region::BOTH {
            let bytes = self.content(region, layer, sequence, index);
            self.memory.write(layer as usize, region, block.0 as usize * bytes.len(), &bytes).unwrap();
        }
    }

    pub(super) fn holds(&self, block: BlockId, layer: u32, sequence: u64, index: u32) -> bool {
        Region::BOTH
            .into_iter()
            .all(|region| self.bytes(block, layer, region) == self.content(region, layer, sequence, index))
    }

    pub(super) fn is_untouched(&self, block: BlockId) -> bool {
        let layers = 0..self.share.layout.n_layers;
        let mut regions = layers.flat_map(|layer| Region::BOTH.map(|region| (layer, region)));
        regions.all(|(layer, region)| self.bytes(block, layer, region).iter().all(|&byte| byte == UNTOUCHED))
    }

    /// All blocks but these.
    pub(super) fn others(&self, blocks: &[BlockId]) -> impl Iterator<Item = BlockId> {
        let blocks = blocks.to_vec();
        (0..self.n_blocks).map(BlockId).filter(move |block| !blocks.contains(block))
    }

    fn bytes(&self, block: BlockId, layer: u32, region: Region) -> Vec<u8> {
        let mut bytes = vec![0; self.memory.block_bytes(region)];
        self.memory.read(layer as usize, region, block.0 as usize * bytes.len(), &mut bytes).unwrap();
        bytes
    }

    fn fill(&self, block: BlockId, byte: u8) {
        for layer in 0..self.share.layout.n_layers as usize {
            for region in Region::BOTH {
                let bytes = vec![byte; self.memory.block_bytes(region)];
                self.memory.write(layer, region, block.0 as usize * bytes.len(), &bytes).unwrap();
            }
        }
    }

    /// Each head's row of each token is a function of the model's head, so that pools with other heads agree.
    fn content(&self, region: Region, layer: u32, sequence: u64, index: u32) -> Vec<u8> {
        let KvLayout { kv_heads, block_size, .. } = self.share.layout;
        let part = [KvPart::Key, KvPart::Value][region as usize];
        let mut bytes = vec![0; self.share.layout.block_bytes(part)];
        for head in 0..kv_heads {
            let position = u64::from(layer) << 40 | u64::from(index) << 20 | u64::from(self.share.first_head + head);
            let mut random = Random(sequence ^ position << 1 ^ region as u64);
            let runs = self.share.layout.runs(BlockId(0), head..head + 1).filter(|run| run.part == part);
            for run in runs {
                let row = run.len / if run.len * kv_heads as usize == bytes.len() { block_size as usize } else { 1 };
                for row in bytes[run.offset..run.offset + run.len].chunks_mut(row) {
                    let mut draw = Random(random.next());
                    row.chunks_mut(8).for_each(|word| word.copy_from_slice(&draw.next().to_le_bytes()[..word.len()]));
                }
            }
        }
        bytes
    }
}
