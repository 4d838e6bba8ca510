//! A unit of attention's work, and the memory that a thread does it in.

use std::ops::Range;

use crate::op::attention::cache::{Region, TILE};
use crate::op::attention::softmax::Softmax;
use crate::op::attention::{PARTITION, STRIPE, UNIT_ROWS};

/// Sizes that all units of a call share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Dims {
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) key_dim: usize,
    pub(crate) value_dim: usize,
    /// Query heads of a unit; divides the heads of a kv head.
    pub(crate) unit_heads: usize,
}

impl Dims {
    pub(crate) fn new(heads: usize, kv_heads: usize, key_dim: usize, value_dim: usize) -> Self {
        let group = heads / kv_heads;
        // Whole groups share loads of keys and values.
        let unit_heads = (1..=group.min(UNIT_ROWS)).rev().find(|&n| group.is_multiple_of(n)).unwrap_or(1);
        Self { heads, kv_heads, key_dim, value_dim, unit_heads }
    }

    /// Query tokens of a unit.
    pub(crate) fn unit_queries(&self) -> usize {
        UNIT_ROWS / self.unit_heads
    }

    /// Elements of a key in scratch: padded with zeros to whole vectors.
    pub(crate) fn key_stride(&self) -> usize {
        self.key_dim.next_multiple_of(TILE)
    }

    /// Elements of a value in scratch.
    pub(crate) fn value_stride(&self) -> usize {
        self.value_dim.next_multiple_of(TILE)
    }

    /// Numbers that the state of one partition takes.
    pub(crate) fn partial_len(&self, n_queries: usize) -> usize {
        Softmax::len(n_queries * self.unit_heads, self.value_stride())
    }

    /// Cache lines of a thread's scratch.
    pub(crate) fn scratch_lines(&self) -> usize {
        let (key, value) = (self.key_stride(), self.value_stride());
        let rows = UNIT_ROWS * (key + STRIPE + TILE) + 2 * Softmax::len(UNIT_ROWS, value);
        (rows + STRIPE * (key + value)).div_ceil(TILE)
    }
}

/// Work of one thread: some query tokens of one sequence, some heads that share a kv head.
pub(crate) struct Unit<'a> {
    pub(crate) dims: Dims,
    pub(crate) keys: Region<'a>,
    pub(crate) values: Region<'a>,
    /// `[tokens, heads, key_dim]`, of all sequences.
    pub(super) query: &'a [f32],
    /// The sequence's blocks.
    pub(super) blocks: &'a [u32],
    /// First query row in `query`.
    pub(super) first_row: usize,
    pub(super) n_queries: usize,
    /// Absolute position of the first query.
    pub(super) position: usize,
    pub(super) heads: Range<usize>,
    pub(crate) scale: f32,
    pub(super) window: usize,
    pub(crate) soft_cap: Option<f32>,
    /// What the thread computes after this, from which position on: it is asked for while the last stripe is used.
    pub(super) following: Option<(&'a Self, usize)>,
}

impl Unit<'_> {
    /// (query, head) pairs: row `r` is query `r / heads`, head `r % heads` of this unit.
    pub(crate) fn n_rows(&self) -> usize {
        self.n_queries * self.heads.len()
    }

    /// The position after its last query.
    pub(crate) fn end(&self) -> usize {
        self.position + self.n_queries
    }

    /// Whose positions are read after this one's `position`, and which: sixteen, from a multiple of sixteen on.
    #[inline(always)]
    pub(crate) fn later(&self, position: usize) -> Option<(&Self, usize)> {
        if position < self.end() {
            return Some((self, position));
        }
        let (unit, start) = self.following?;
        let position = start / STRIPE * STRIPE + position.checked_sub(self.end().next_multiple_of(STRIPE))?;
        (position < unit.end()).then_some((unit, position))
    }

    /// Numbers that one partition's state takes.
    pub(crate) fn partial_len(&self) -> usize {
        self.dims.partial_len(self.n_queries)
    }

    /// A state for its rows in `partial_len` numbers of memory.
    pub(crate) fn state<'m>(&self, memory: &'m mut [f32]) -> Softmax<'m> {
        Softmax::new(memory, self.n_rows(), self.dims.value_stride())
    }

    /// Query token and head of a row, as the call counts them.
    pub(crate) fn token_and_head(&self, row: usize) -> (usize, usize) {
        let heads = self.heads.len();
        (self.first_row + row / heads, self.heads.start + row % heads)
    }

    /// A row's query.
    #[inline(always)]
    pub(crate) fn query(&self, row: usize) -> &[f32] {
        let (token, head) = self.token_and_head(row);
        &self.query[(token * self.dims.heads + head) * self.dims.key_dim..][..self.dims.key_dim]
    }

    /// Positions of a partition that any row sees.
    #[inline(always)]
    pub(crate) fn span(&self, partition: usize) -> Range<usize> {
        let (first, end) = (partition * PARTITION, (partition + 1) * PARTITION);
        self.visible(0).start.max(first)..self.end().min(end)
    }

    /// Positions that a row sees.
    #[inline(always)]
    pub(crate) fn visible(&self, row: usize) -> Range<usize> {
        let end = self.position + row / self.heads.len() + 1;
        end.saturating_sub(self.window)..end
    }

    /// Rows that see any of these positions.
    #[inline(always)]
    pub(crate) fn rows_that_see(&self, positions: &Range<usize>) -> Range<usize> {
        let first = positions.start.saturating_sub(self.position);
        let end = positions.end.saturating_add(self.window).saturating_sub(self.position.saturating_add(1));
        first.min(self.n_queries) * self.heads.len()..end.min(self.n_queries) * self.heads.len()
    }

    /// Where a position lies in a region: first element of its run, offset in the block.
    #[inline(always)]
    pub(crate) fn place(&self, region: &Region<'_>, position: usize) -> (usize, usize) {
        let block_size = region.layout.block_size;
        let kv_head = self.heads.start * self.dims.kv_heads / self.dims.heads;
        let block = self.blocks[position / block_size] as usize;
        (region.layout.run(block, kv_head), position % block_size)
    }

    /// From dot products to scores in powers of two, or to the argument of the cap's tangent.
    #[inline(always)]
    pub(crate) fn score_factor(&self) -> f32 {
        self.soft_cap.map_or(self.scale * std::f32::consts::LOG2_E, |cap| self.scale / cap)
    }
}

/// A cache line of scratch.
#[derive(Clone, Copy, Default)]
#[repr(align(64))]
pub(crate) struct Line(#[expect(dead_code, reason = "read and written through `flat`")] [f32; TILE]);

/// A thread's memory for one unit; strides are those of [`Dims`].
pub(crate) struct Scratch<'a> {
    pub(crate) work: Work<'a>,
    /// The partition at hand.
    pub(crate) state: Softmax<'a>,
    /// All partitions so far.
    pub(crate) total: Softmax<'a>,
}

/// What kernels keep between their steps, in formats of their own.
pub(crate) struct Work<'a> {
    /// `[rows, key_stride]`
    pub(crate) query: &'a mut [f32],
    /// `[rows, STRIPE]`: scores, then weights.
    pub(crate) weights: &'a mut [f32],
    /// `[rows, TILE]`: sums of weights, by position modulo 16.
    pub(crate) sums: &'a mut [f32],
    /// `[STRIPE / TILE, key_stride, TILE]`
    pub(crate) keys: &'a mut [f32],
    /// `[STRIPE / TILE, value_stride, TILE]`
    pub(crate) values: &'a mut [f32],
    /// `[rows]`: what the stripe at hand scales earlier ones with.
    pub(crate) alpha: [f32; UNIT_ROWS],
    /// Factors of the scores of a stripe.
    pub(crate) key_factors: [f32; STRIPE],
    /// Factors of the weights of a stripe.
    pub(crate) value_factors: [f32; STRIPE],
}

impl<'a> Scratch<'a> {
    /// Takes `unit.dims.scratch_lines()` lines, with whatever is in them.
    pub(crate) fn new(memory: &'a mut [Line], unit: &Unit<'_>) -> Self {
        let (key, value) = (unit.dims.key_stride(), unit.dims.value_stride());
        let (query, rest) = flat(memory).split_at_mut(UNIT_ROWS * key);
        let (weights, rest) = rest.split_at_mut(UNIT_ROWS * STRIPE);
        let (sums, rest) = rest.split_at_mut(UNIT_ROWS * TILE);
        let (keys, rest) = rest.split_at_mut(STRIPE * key);
        let (values, rest) = rest.split_at_mut(STRIPE * value);
        let (state, total) = rest.split_at_mut(unit.partial_len());
        let work = Work {
            query,
            weights,
            sums,
            keys,
            values,
            alpha: [0.0; UNIT_ROWS],
            key_factors: [1.0; STRIPE],
            value_factors: [1.0; STRIPE],
        };
        Self { work, state: unit.state(state), total: unit.state(total) }
    }
}

/// The floats of some lines.
pub(crate) fn flat(lines: &mut [Line]) -> &mut [f32] {
    // SAFETY: a line is sixteen floats without padding, as long as its alignment.
    unsafe { std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast(), size_of_val(lines) / size_of::<f32>()) }
}

/// The arithmetic of one instruction set.
pub(crate) trait Kernel {
    /// Brings the queries into the form that `partition` wants them in.
    ///
    /// # Safety
    /// This CPU has the instruction set, and the caller enables it.
    unsafe fn begin(unit: &Unit<'_>, work: &mut Work<'_>);

    /// Computes the softmax over positions of one partition, from a fresh start.
    ///
    /// # Safety
    /// As for `begin`.
    unsafe fn partition(unit: &Unit<'_>, positions: Range<usize>, work: &mut Work<'_>, state: &mut Softmax<'_>);
}

/// [`Attend`](super::Attend) by a kernel.
///
/// # Safety
/// As for [`Kernel::begin`].
#[inline(always)]
pub(crate) unsafe fn walk<K: Kernel>(
    unit: &Unit<'_>,
    partitions: Range<usize>,
    partials: Option<&mut [f32]>,
    scratch: &mut Scratch<'_>,
) {
    // SAFETY: the caller's obligation is the same.
    unsafe { K::begin(unit, &mut scratch.work) };
    if let Some(partials) = partials {
        for (partition, memory) in partitions.zip(partials.chunks_exact_mut(unit.partial_len())) {
            let mut state = unit.state(memory);
            // SAFETY: the caller's obligation is the same.
            unsafe { K::partition(unit, unit.span(partition), &mut scratch.work, &mut state) };
        }
        return;
    }
    scratch.total.clear();
    for partition in partitions {
        // SAFETY: the caller's obligation is the same.
        unsafe { K::partition(unit, unit.span(partition), &mut scratch.work, &mut scratch.state) };
        scratch.total.merge(&scratch.state);
    }
}
