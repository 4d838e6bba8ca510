//! Where keys and values lie in a block pool, and the events that tell routers which blocks a worker holds.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::hash::BlockHash;
use crate::ids::{BlockId, EngineId};

/// Number format of cached keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvDtype {
    /// Four bytes.
    F32,
    /// Two bytes, 8 bits of exponent.
    Bf16,
    /// Two bytes, 5 bits of exponent.
    F16,
    /// One byte, and one f32 scale for each head's row of a token.
    Int8,
}

impl KvDtype {
    /// Bytes of one head's key or value of one token, its scale included.
    pub fn row_bytes(self, dim: usize) -> usize {
        match self {
            Self::F32 => 4 * dim,
            Self::Bf16 | Self::F16 => 2 * dim,
            Self::Int8 => dim + size_of::<f32>(),
        }
    }
}

/// Order of a block's elements, as the device's attention reads them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum BlockOrder {
    /// `[kv_heads, block, dim]`: a head is one contiguous run, in which elements lie as the device likes. CPU.
    HeadsFirst,
    /// `[block, kv_heads, dim]`: a token is one contiguous run. NPU.
    TokensFirst,
}

/// Layout of a layer's key or value region in a block pool: `[n_blocks, block]` with the block in `order`.
///
/// The pool is layer-major: each layer has one K and one V region of equal layout but for `dim`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct KvLayout {
    /// Order inside a block.
    pub order: BlockOrder,
    /// Layers of the model (or of this pipeline stage).
    pub n_layers: u32,
    /// Key and value heads on this rank.
    pub kv_heads: u32,
    /// Tokens in a block.
    pub block_size: u32,
    /// Elements of a key per head.
    pub key_dim: u32,
    /// Elements of a value per head.
    pub value_dim: u32,
    /// Number format.
    pub dtype: KvDtype,
}

/// Which of a layer's two regions a run lies in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvPart {
    /// Keys (MLA: the latent).
    Key,
    /// Values (MLA: the rotary part).
    Value,
}

/// A contiguous run of bytes in one region of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvRun {
    /// The region.
    pub part: KvPart,
    /// Bytes from the region's start.
    pub offset: usize,
    /// Bytes in the run.
    pub len: usize,
}

impl KvLayout {
    /// Bytes of one block in one region of one layer.
    pub fn block_bytes(&self, part: KvPart) -> usize {
        self.kv_heads as usize * self.block_size as usize * self.row_bytes(part)
    }

    /// Bytes of one block over all layers and both regions.
    pub fn block_bytes_total(&self) -> usize {
        self.n_layers as usize * (self.block_bytes(KvPart::Key) + self.block_bytes(KvPart::Value))
    }

    /// Contiguous runs that hold `heads` of `block`, the same in every layer: keys first, then values.
    ///
    /// # Panics
    /// When `heads` reaches beyond `kv_heads`.
    pub fn runs(&self, block: BlockId, heads: Range<u32>) -> impl Iterator<Item = KvRun> + use<> {
        assert!(heads.start <= heads.end && heads.end <= self.kv_heads, "heads {heads:?} of {}", self.kv_heads);
        let layout = *self;
        let whole = heads == (0..layout.kv_heads);
        let n_heads = (heads.end - heads.start) as usize;
        [KvPart::Key, KvPart::Value].into_iter().flat_map(move |part| {
            let row = layout.row_bytes(part);
            let base = block.0 as usize * layout.block_bytes(part);
            let (n_runs, stride, first, len) = match layout.order {
                BlockOrder::HeadsFirst => {
                    let head = layout.block_size as usize * row;
                    (1, 0, heads.start as usize * head, n_heads * head)
                }
                BlockOrder::TokensFirst if whole => (1, 0, 0, layout.block_bytes(part)),
                BlockOrder::TokensFirst => (
                    layout.block_size as usize,
                    layout.kv_heads as usize * row,
                    heads.start as usize * row,
                    n_heads * row,
                ),
            };
            (0..if len == 0 { 0 } else { n_runs }).map(move |i| KvRun { part, offset: base + first + i * stride, len })
        })
    }

    fn row_bytes(&self, part: KvPart) -> usize {
        let dim = match part {
            KvPart::Key => self.key_dim,
            KvPart::Value => self.value_dim,
        };
        self.dtype.row_bytes(dim as usize)
    }
}

/// A change of a worker's prefix cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum KvEvent {
    /// A full block became available for reuse.
    BlockStored {
        /// The block's hash.
        hash: BlockHash,
        /// Hash of the block before it, none for a first block.
        parent: Option<BlockHash>,
    },
    /// A cached block was evicted.
    BlockRemoved {
        /// The block's hash.
        hash: BlockHash,
    },
    /// Nothing is cached any more.
    AllBlocksCleared,
}

/// Events numbered `first_sequence..` of one engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvEventBatch {
    /// Whose cache changed.
    pub engine: EngineId,
    /// Number of the first event; numbers start at 1 and leave no gap.
    pub first_sequence: u64,
    /// The changes, oldest first.
    pub events: Vec<KvEvent>,
}

/// Summary of a prefix cache, to find out that two sides differ.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvDigest {
    /// Cached full blocks, those in use by running requests among them.
    pub n_blocks: u64,
    /// Exclusive or of `BlockHash::low_u64` of them all.
    pub digest: u64,
}

impl KvDigest {
    /// Adds a stored block.
    pub fn insert(&mut self, hash: BlockHash) {
        self.n_blocks += 1;
        self.digest ^= hash.low_u64();
    }

    /// Takes a removed block away.
    pub fn remove(&mut self, hash: BlockHash) {
        self.n_blocks -= 1;
        self.digest ^= hash.low_u64();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(order: BlockOrder) -> KvLayout {
        KvLayout { order, n_layers: 2, kv_heads: 4, block_size: 16, key_dim: 8, value_dim: 6, dtype: KvDtype::Bf16 }
    }

    #[test]
    fn runs_of_all_heads_cover_a_block_once() {
        for order in [BlockOrder::HeadsFirst, BlockOrder::TokensFirst] {
            let layout = layout(order);
            for part in [KvPart::Key, KvPart::Value] {
                let mut covered = vec![0; layout.block_bytes(part)];
                for heads in [0..1, 1..3, 3..4] {
                    for run in layout.runs(BlockId(3), heads).filter(|run| run.part == part) {
                        let start = run.offset - 3 * layout.block_bytes(part);
                        covered[start..start + run.len].iter_mut().for_each(|n| *n += 1);
                    }
                }
                assert!(covered.iter().all(|&n| n == 1), "{order:?} {part:?}");
            }
            assert_eq!(layout.runs(BlockId(0), 0..4).count(), 2, "a whole block is one run a region");
        }
    }

    #[test]
    fn a_block_takes_its_elements_and_the_scales_of_int8() {
        let bytes = |dtype| KvLayout { dtype, ..layout(BlockOrder::HeadsFirst) }.block_bytes_total();
        let rows = 2 * 4 * 16;
        assert_eq!(bytes(KvDtype::F32), rows * 4 * (8 + 6));
        assert_eq!(bytes(KvDtype::Bf16), rows * 2 * (8 + 6));
        assert_eq!(bytes(KvDtype::F16), bytes(KvDtype::Bf16));
        assert_eq!(bytes(KvDtype::Int8), rows * (8 + 4 + 6 + 4));
    }

    #[test]
    fn no_heads_are_no_runs() {
        assert_eq!(layout(BlockOrder::TokensFirst).runs(BlockId(0), 2..2).count(), 0);
    }
}
