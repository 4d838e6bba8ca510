//! Which part of a model's keys and values a pool holds, and how blocks of two pools map onto each other.

use std::fmt::Display;
use std::ops::Range;

use contract::ids::BlockId;
use contract::kv::{BlockOrder, KvDtype, KvLayout, KvPart};
use contract::model::Fingerprint;
use kernels::memory::blocks::Region;
use kernels::memory::runs::{RemoteRuns, Runs};
use thiserror::Error;

/// A rank's part: blocks of `layout` with the model's heads from `first_head` on.
///
/// What travels is the same whichever pools it lies in: all keys, then all values; of these block by block; inside a
/// block as the layout orders elements, for those heads that travel. So ranks of unequal sizes exchange heads, and a
/// block of all heads is one run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Share {
    /// How blocks lie in the pool.
    pub(crate) layout: KvLayout,
    /// The first of the model's heads in it.
    pub(crate) first_head: u32,
}

/// Two pools cannot exchange blocks.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{property} differs: {ours} here, {theirs} at the peer")]
pub(crate) struct ShareMismatch {
    /// What differs.
    pub(crate) property: &'static str,
    /// Value on this side.
    pub(crate) ours: String,
    /// Value on the other.
    pub(crate) theirs: String,
}

impl Share {
    /// A rank that holds all heads.
    pub(crate) fn whole(layout: KvLayout) -> Self {
        Self { layout, first_head: 0 }
    }

    /// The model's heads in it.
    pub(crate) fn heads(&self) -> Range<u32> {
        self.first_head..self.first_head + self.layout.kv_heads
    }

    /// The heads that both hold, none when they share none.
    pub(crate) fn shared_heads(&self, other: &Self) -> Range<u32> {
        let (a, b) = (self.heads(), other.heads());
        let start = a.start.max(b.start);
        start..a.end.min(b.end).max(start)
    }

    /// Checks that this pool can take blocks from `source`, which must hold all of its heads.
    ///
    /// # Errors
    /// The first property that differs, with both values.
    pub(crate) fn check_source(&self, source: &Self) -> Result<(), ShareMismatch> {
        fn equal<T: PartialEq + Display>(property: &'static str, ours: T, theirs: T) -> Result<(), ShareMismatch> {
            let differs = ours != theirs;
            let mismatch = || ShareMismatch { property, ours: ours.to_string(), theirs: theirs.to_string() };
            if differs { Err(mismatch()) } else { Ok(()) }
        }
        let (ours, theirs) = (self.layout, source.layout);
        equal("block size", ours.block_size, theirs.block_size)?;
        equal("format of keys and values", dtype_name(ours.dtype), dtype_name(theirs.dtype))?;
        equal("order in a block", order_name(ours.order), order_name(theirs.order))?;
        equal("number of layers", ours.n_layers, theirs.n_layers)?;
        equal("key dimension", ours.key_dim, theirs.key_dim)?;
        equal("value dimension", ours.value_dim, theirs.value_dim)?;
        if self.shared_heads(source) != self.heads() {
            let text = |share: &Self| format!("{:?}", share.heads());
            return Err(ShareMismatch { property: "range of heads", ours: text(self), theirs: text(source) });
        }
        Ok(())
    }

    /// Stands for a pair of pools, in frames between them.
    pub(crate) fn pairing(&self, destination: &Self) -> u64 {
        let numbers = |share: &Self| {
            let KvLayout { order, n_layers, kv_heads, block_size, key_dim, value_dim, dtype } = share.layout;
            let (order, dtype) = (order as u32, dtype as u32);
            [order, n_layers, kv_heads, block_size, key_dim, value_dim, dtype, share.first_head].map(u32::to_le_bytes)
        };
        let (source, destination) = (numbers(self), numbers(destination));
        let fingerprint = Fingerprint::of(&[source.as_flattened(), destination.as_flattened()]);
        let (low, _) = fingerprint.0.split_first_chunk().expect("a fingerprint has 16 bytes");
        u64::from_le_bytes(*low)
    }

    /// Bytes that a block's `heads` take in one layer, keys and values together.
    pub(crate) fn block_bytes(&self, heads: &Range<u32>) -> usize {
        self.layout.runs(BlockId(0), self.own(heads)).map(|run| run.len).sum()
    }

    /// Lists where `heads` of `blocks` lie in one layer of the pool, in the order in which they travel.
    ///
    /// # Errors
    /// When the pool has no such layer or block.
    pub(crate) fn list(
        &self,
        heads: &Range<u32>,
        layer: u32,
        blocks: &[BlockId],
        runs: &mut Runs,
    ) -> Result<(), kernels::Error> {
        runs.clear();
        self.each(heads, blocks, |region, offset, len| runs.push(layer as usize, region, offset, len))
    }

    /// The same in another process's pool whose regions of the layer begin at `regions`.
    pub(crate) fn list_remote(&self, heads: &Range<u32>, regions: [u64; 2], blocks: &[BlockId], runs: &mut RemoteRuns) {
        runs.clear();
        let listed = self.each(heads, blocks, |region, offset, len| {
            runs.push(regions[region as usize].wrapping_add(offset as u64), len);
            Ok(())
        });
        debug_assert!(listed.is_ok(), "listing addresses cannot fail");
    }

    fn each(
        &self,
        heads: &Range<u32>,
        blocks: &[BlockId],
        mut take: impl FnMut(Region, usize, usize) -> Result<(), kernels::Error>,
    ) -> Result<(), kernels::Error> {
        for (part, region) in [(KvPart::Key, Region::Key), (KvPart::Value, Region::Value)] {
            for &block in blocks {
                for run in self.layout.runs(block, self.own(heads)).filter(|run| run.part == part) {
                    take(region, run.offset, run.len)?;
                }
            }
        }
        Ok(())
    }

    /// The model's heads as this rank numbers them.
    fn own(&self, heads: &Range<u32>) -> Range<u32> {
        heads.start - self.first_head..heads.end - self.first_head
    }
}

pub(super) fn order_name(order: BlockOrder) -> &'static str {
    match order {
        BlockOrder::HeadsFirst => "HeadsFirst",
        BlockOrder::TokensFirst => "TokensFirst",
    }
}

pub(super) fn dtype_name(dtype: KvDtype) -> &'static str {
    match dtype {
        KvDtype::F32 => "f32",
        KvDtype::Bf16 => "bf16",
        KvDtype::F16 => "f16",
        KvDtype::Int8 => "int8",
    }
}
