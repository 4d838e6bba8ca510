//! What matrix kernels compute: rows of activations times a stretch of one panel, added to sums.
//!
//! Each instruction set has one order of operations for an element, whatever the number of rows: inputs ascending,
//! one pair (bf16) after the other. The plain forms here judge all others.

use crate::cpu::panels::{GROUP, GROUP_INT8, PANEL, STRIP};

/// `sums[r][c] += x[r] . panel[c]` over `depth` inputs, from 0 on if `is_first`.
pub(crate) struct Dot<'a, X, W, S> {
    /// In [`Order::Rows`], row `r` starts at `r * stride`; in [`Order::Tiles`], the tiles of sixteen rows do.
    pub(crate) x: &'a [X],
    pub(crate) stride: usize,
    pub(crate) rows: usize,
    /// Whole groups of inputs.
    pub(crate) depth: usize,
    /// A stretch of a panel, see [`crate::cpu::panels`].
    pub(crate) panel: &'a [W],
    /// `[rows, 32]`.
    pub(crate) sums: &'a mut [S],
    /// Whether sums begin here, whatever their memory holds.
    pub(crate) is_first: bool,
    /// For kernels that ask memory for the next panel, which lies behind this one: which turn it is of how many with this
    /// panel; `None` where it comes from a cache.
    pub(crate) turn: Option<(usize, usize)>,
}

/// How rounded activations lie in memory, by what kernels load of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Row after row.
    Rows,
    /// Sixteen rows together, of each a line of 64 bytes (a group of inputs): tiles of 1 KB, groups ascending.
    Tiles,
}

/// Rows of a tile.
pub(crate) const TILE_ROWS: usize = 16;

impl<X, W, S: Copy + Default> Dot<'_, X, W, S> {
    /// Checks what kernels of [`Order::Rows`] rely on, and clears sums that begin here.
    #[inline(always)]
    pub(crate) fn begin(&mut self, group: usize) {
        assert!(self.rows > 0 && self.depth.is_multiple_of(group) && self.depth <= self.stride, "whole groups");
        assert!(self.x.len() >= (self.rows - 1) * self.stride + self.depth, "rows of activations");
        self.check_panel();
        if self.is_first {
            self.sums[..self.rows * PANEL].fill(S::default());
        }
    }

    /// Checks what kernels of [`Order::Tiles`] rely on; they clear sums themselves.
    #[inline(always)]
    pub(crate) fn check_tiles(&self, group: usize) {
        let n = TILE_ROWS * self.depth;
        assert!(self.rows > 0 && self.depth > 0, "something to multiply");
        assert!(self.depth.is_multiple_of(group) && n <= self.stride, "whole groups");
        assert!(self.x.len() >= (self.rows - 1) / TILE_ROWS * self.stride + n, "tiles of activations");
        self.check_panel();
    }

    #[inline(always)]
    fn check_panel(&self) {
        assert!(self.panel.len() >= self.depth * PANEL && self.sums.len() >= self.rows * PANEL, "panel and sums");
    }
}

/// Nearest bf16, ties to even; stays not-a-number.
#[inline(always)]
pub(crate) fn to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = (bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16;
    if value.is_nan() { (bits >> 16) as u16 | 0x40 } else { rounded }
}

/// 1.5 * 2^23: a sum with it is rounded to an integer, ties to even, which lies in its low bits.
const MAGIC: f32 = 12_582_912.0;

/// Nearest integer, ties to even; exact below 2^22.
#[inline(always)]
pub(crate) fn nearest(value: f32) -> f32 {
    (value + MAGIC) - MAGIC
}

/// The low byte of the nearest integer, ties to even, in two's complement; whatever for what is not a number.
#[inline(always)]
pub(crate) fn nearest_byte(value: f32) -> u8 {
    (value + MAGIC).to_bits() as u8
}

/// Value of a bf16.
#[inline(always)]
pub(crate) fn to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// The plain form for bf16.
#[inline(always)]
pub(crate) fn bf16(dot: &mut Dot<'_, u16, u16, f32>) {
    dot.begin(GROUP);
    for row in 0..dot.rows {
        let x = &dot.x[row * dot.stride..][..dot.depth];
        for strip in 0..2 {
            let mut sums: [f32; STRIP] = std::array::from_fn(|c| dot.sums[row * PANEL + strip * STRIP + c]);
            for (group, x) in x.chunks_exact(GROUP).enumerate() {
                let part = &dot.panel[(group * 2 + strip) * GROUP * STRIP..][..GROUP * STRIP];
                for (x, line) in x.chunks_exact(2).zip(part.chunks_exact(2 * STRIP)) {
                    let (even, odd) = (to_f32(x[0]), to_f32(x[1]));
                    for (sum, w) in sums.iter_mut().zip(line.chunks_exact(2)) {
                        *sum += even * to_f32(w[0]);
                        *sum += odd * to_f32(w[1]);
                    }
                }
            }
            dot.sums[row * PANEL + strip * STRIP..][..STRIP].copy_from_slice(&sums);
        }
    }
}

/// The plain form for f32.
#[inline(always)]
pub(crate) fn f32(dot: &mut Dot<'_, f32, f32, f32>) {
    dot.begin(1);
    for row in 0..dot.rows {
        let x = &dot.x[row * dot.stride..][..dot.depth];
        let mut sums: [f32; PANEL] = std::array::from_fn(|c| dot.sums[row * PANEL + c]);
        for (x, line) in x.iter().zip(dot.panel.chunks_exact(PANEL)) {
            sums.iter_mut().zip(line).for_each(|(sum, w)| *sum += x * w);
        }
        dot.sums[row * PANEL..][..PANEL].copy_from_slice(&sums);
    }
}

/// The plain form for unsigned activations and signed weights of 8 bits; exact.
#[inline(always)]
pub(crate) fn int8(dot: &mut Dot<'_, u8, i8, i32>) {
    dot.begin(GROUP_INT8);
    for row in 0..dot.rows {
        let x = &dot.x[row * dot.stride..][..dot.depth];
        for strip in 0..2 {
            let mut sums: [i32; STRIP] = std::array::from_fn(|c| dot.sums[row * PANEL + strip * STRIP + c]);
            for (group, x) in x.chunks_exact(GROUP_INT8).enumerate() {
                let part = &dot.panel[(group * 2 + strip) * GROUP_INT8 * STRIP..][..GROUP_INT8 * STRIP];
                for (x, line) in x.chunks_exact(4).zip(part.chunks_exact(4 * STRIP)) {
                    let x: [i32; 4] = std::array::from_fn(|i| i32::from(x[i]));
                    for (sum, w) in sums.iter_mut().zip(line.chunks_exact(4)) {
                        let w: [i32; 4] = std::array::from_fn(|i| i32::from(w[i]));
                        *sum += (x[0] * w[0] + x[1] * w[1]) + (x[2] * w[2] + x[3] * w[3]);
                    }
                }
            }
            dot.sums[row * PANEL + strip * STRIP..][..STRIP].copy_from_slice(&sums);
        }
    }
}

/// The plain rounding of a row to bf16; group `g` begins at `g * step`.
#[inline(always)]
pub(crate) fn round(x: &[f32], out: &mut [u16], step: usize) {
    for (x, out) in x.chunks(GROUP).zip(out.chunks_mut(step)) {
        out.iter_mut().zip(x).for_each(|(out, &x)| *out = to_bf16(x));
    }
}

/// The plain rounding of a row to 8 bits: `x = scale * (out - 128)`; returns the scale. Group `g` begins at `g * step`.
///
/// What is not a number becomes 0 with a scale that is none, so that it shows in the result.
#[inline(always)]
pub(crate) fn quantize(x: &[f32], out: &mut [u8], step: usize) -> f32 {
    let largest = x.iter().fold(0.0f32, |largest, x| if x.abs() > largest { x.abs() } else { largest });
    let inverse = if largest > 0.0 && largest.is_finite() { 127.0 / largest } else { 0.0 };
    let mut poison = 0.0f32;
    for (x, out) in x.chunks(GROUP_INT8).zip(out.chunks_mut(step)) {
        for (out, &x) in out.iter_mut().zip(x) {
            poison += x * 0.0;
            *out = nearest_byte(x * inverse) ^ 0x80;
        }
    }
    largest / 127.0 + poison
}
