//! A product's activations, rounded to the formats of its weights, in the order that kernels load them.

use std::ops::Range;

use crate::cpu::dot::{Order, TILE_ROWS};
use crate::cpu::grouped::Factor;
use crate::cpu::panels::{GROUP, GROUP_INT8};

/// A call's activations; grown to the largest call and kept.
#[derive(Default)]
pub(crate) struct Activations {
    /// By [`Places::bf16`], padded to whole groups with 0.
    pub(crate) bf16: Vec<u16>,
    /// By [`Places::int8`], padded to whole groups with 128, which is the value 0.
    pub(crate) int8: Vec<u8>,
    /// Scale of each int8 row.
    pub(crate) scales: Vec<f32>,
    /// `[rows, groups, 32]`, for quantised weights.
    pub(crate) groups: Vec<i8>,
    /// `[rows, groups]`.
    pub(crate) factors: Vec<Factor>,
}

/// Where the elements of rows lie.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Places {
    order: Order,
    group: usize,
    /// Elements from one row, or one tile of rows, to the next.
    pub(crate) stride: usize,
}

impl Places {
    /// Rows of bf16. In [`Order::Rows`], rows that were whole half pages apart would share a few lines of the first-level
    /// cache, so they get one more line.
    pub(crate) fn bf16(order: Order, depth: usize) -> Self {
        let padded = depth.next_multiple_of(GROUP);
        let gap = if order == Order::Rows && padded.is_multiple_of(1024) { GROUP } else { 0 };
        Self::new(order, GROUP, padded + gap)
    }

    /// Rows of 8 bits.
    pub(crate) fn int8(order: Order, depth: usize) -> Self {
        Self::new(order, GROUP_INT8, depth.next_multiple_of(GROUP_INT8))
    }

    fn new(order: Order, group: usize, row: usize) -> Self {
        let stride = if order == Order::Tiles { TILE_ROWS * row } else { row };
        Self { order, group, stride }
    }

    /// Elements of so many rows.
    pub(crate) fn len(self, rows: usize) -> usize {
        rows.div_ceil(self.rows_together()) * self.stride
    }

    /// Rows whose elements lie among each other.
    pub(crate) fn rows_together(self) -> usize {
        if self.order == Order::Tiles { TILE_ROWS } else { 1 }
    }

    /// Elements from one group of a row to the next.
    pub(crate) fn step(self) -> usize {
        self.rows_together() * self.group
    }

    /// First element of a group of inputs of a row.
    pub(crate) fn group(self, row: usize, group: usize) -> usize {
        let together = self.rows_together();
        row / together * self.stride + self.within(row % together) + group * self.step()
    }

    /// First element of a row of those that lie together.
    pub(crate) fn within(self, row: usize) -> usize {
        row * self.group
    }

    /// Where the first of the rows (a multiple of sixteen) and inputs (whole groups) lies.
    pub(crate) fn first(self, rows: &Range<usize>, inputs: &Range<usize>) -> usize {
        rows.start / self.rows_together() * self.stride + inputs.start * self.rows_together()
    }

    /// Fills the last group of a row of `depth` inputs, whose elements begin the slice.
    pub(crate) fn pad<T: Copy>(self, row: &mut [T], depth: usize, value: T) {
        let (whole, rest) = (depth / self.group * self.step(), depth % self.group);
        if rest > 0 {
            row[whole + rest..whole + self.group].fill(value);
        }
    }
}
