//! Kernels written over [`Lanes`]; each instruction set's file makes functions of them.
//! Hot path: no allocation, no lock, no log.
//!
//! Every result has one order of operations for an instruction set: matrix elements accumulate over inputs ascending,
//! whatever other rows are in the call.

use crate::cpu::dot::Dot;
use crate::cpu::lanes::Lanes;
use crate::cpu::panels::{GROUP, PANEL, STRIP};
use crate::ops::Activation;

/// Calls a `block` of as many rows as are left, at most `V::ROWS`, until all are done.
macro_rules! by_rows {
    ($rows:expr, $most:expr, $block:ident::<$v:ty>($($argument:expr),*)) => {{
        let mut row = 0;
        while row < $rows {
            let n = ($rows - row).min($most);
            match n {
                1 => $block::<$v, 1>($($argument,)* row),
                2 => $block::<$v, 2>($($argument,)* row),
                3 => $block::<$v, 3>($($argument,)* row),
                4 => $block::<$v, 4>($($argument,)* row),
                5 => $block::<$v, 5>($($argument,)* row),
                6 => $block::<$v, 6>($($argument,)* row),
                7 => $block::<$v, 7>($($argument,)* row),
                _ => $block::<$v, 8>($($argument,)* row),
            }
            row += n;
        }
    }};
}

/// bf16 products by shifts and fused multiply-adds; see [`crate::cpu::dot`].
///
/// # Safety
/// The target features of `V` are enabled in the caller.
#[inline(always)]
pub(crate) unsafe fn dot_bf16<V: Lanes>(dot: &mut Dot<'_, u16, u16, f32>) {
    dot.begin(GROUP);
    for half in (0..PANEL).step_by(2 * V::N) {
        // SAFETY: features are the caller's promise; `check` asserted the extents that the blocks read and write.
        unsafe { by_rows!(dot.rows, V::ROWS, bf16_block::<V>(dot, half)) };
    }
}

/// `R` rows times two vectors of columns, from `column` on.
#[inline(always)]
unsafe fn bf16_block<V: Lanes, const R: usize>(dot: &mut Dot<'_, u16, u16, f32>, column: usize, row: usize) {
    // A strip's vectors lie side by side, strips in different parts of a group.
    let place = |column: usize| column / STRIP * GROUP * STRIP + column % STRIP * 2;
    let (low_at, high_at) = (place(column), place(column + V::N));
    // SAFETY: features are the caller's promise; `Dot::check` asserted that `R` rows from `row` of `depth` inputs,
    // whole groups of the panel, and sums of these rows exist.
    unsafe {
        let x = dot.x.as_ptr().add(row * dot.stride);
        let sums = dot.sums.as_mut_ptr().add(row * PANEL + column);
        let (mut low, mut high) = ([V::splat(0.0); R], [V::splat(0.0); R]);
        for r in 0..R {
            (low[r], high[r]) = (V::load(sums.add(r * PANEL)), V::load(sums.add(r * PANEL + V::N)));
        }
        for group in 0..dot.depth / GROUP {
            let part = dot.panel.as_ptr().add(group * GROUP * PANEL);
            for pair in 0..GROUP / 2 {
                V::prefetch_ahead(part.cast(), pair);
                let line = part.add(pair * 2 * STRIP);
                let (low_even, low_odd) = V::load_pairs(line.add(low_at));
                let (high_even, high_odd) = V::load_pairs(line.add(high_at));
                for r in 0..R {
                    let bits = x.add(r * dot.stride + group * GROUP + 2 * pair).cast::<u32>().read_unaligned();
                    let (even, odd) = (V::splat(f32::from_bits(bits << 16)), V::splat(f32::from_bits(bits & !0xffff)));
                    low[r] = odd.fma(low_odd, even.fma(low_even, low[r]));
                    high[r] = odd.fma(high_odd, even.fma(high_even, high[r]));
                }
            }
        }
        for r in 0..R {
            low[r].store(sums.add(r * PANEL));
            high[r].store(sums.add(r * PANEL + V::N));
        }
    }
}

/// f32 products; see [`crate::cpu::dot`].
///
/// # Safety
/// The target features of `V` are enabled in the caller.
#[inline(always)]
pub(crate) unsafe fn dot_f32<V: Lanes>(dot: &mut Dot<'_, f32, f32, f32>) {
    dot.begin(1);
    for column in (0..PANEL).step_by(2 * V::N) {
        // SAFETY: features are the caller's promise; `check` asserted the extents that the blocks read and write.
        unsafe { by_rows!(dot.rows, V::ROWS, f32_block::<V>(dot, column)) };
    }
}

/// `R` rows times two vectors of columns, in registers over the whole depth.
#[inline(always)]
unsafe fn f32_block<V: Lanes, const R: usize>(dot: &mut Dot<'_, f32, f32, f32>, column: usize, row: usize) {
    // SAFETY: features are the caller's promise; `Dot::check` asserted that `R` rows from `row` of `depth` inputs,
    // `depth` lines of the panel, and sums of these rows exist.
    unsafe {
        let x = dot.x.as_ptr().add(row * dot.stride);
        let sums = dot.sums.as_mut_ptr().add(row * PANEL + column);
        let (mut low, mut high) = ([V::splat(0.0); R], [V::splat(0.0); R]);
        for r in 0..R {
            (low[r], high[r]) = (V::load(sums.add(r * PANEL)), V::load(sums.add(r * PANEL + V::N)));
        }
        for k in 0..dot.depth {
            let line = dot.panel.as_ptr().add(k * PANEL + column);
            let (w_low, w_high) = (V::load(line), V::load(line.add(V::N)));
            for r in 0..R {
                let x = V::splat(*x.add(r * dot.stride + k));
                low[r] = x.fma(w_low, low[r]);
                high[r] = x.fma(w_high, high[r]);
            }
        }
        for r in 0..R {
            low[r].store(sums.add(r * PANEL));
            high[r].store(sums.add(r * PANEL + V::N));
        }
    }
}

/// Sum of squares; lanes at fixed places of the row.
///
/// # Safety
/// The target features of `V` are enabled in the caller.
#[inline(always)]
pub(crate) unsafe fn sum_squares<V: Lanes>(x: &[f32]) -> f32 {
    // SAFETY: features are the caller's promise; each chunk holds N floats.
    unsafe {
        let mut sums = V::splat(0.0);
        let chunks = x.chunks_exact(V::N);
        let rest = chunks.remainder();
        for chunk in chunks {
            let v = V::load(chunk.as_ptr());
            sums = v.fma(v, sums);
        }
        rest.iter().fold(sums.sum(), |sum, v| sum + v * v)
    }
}

/// See [`crate::op::activation`].
///
/// # Safety
/// The target features of `V` are enabled in the caller.
#[inline(always)]
pub(crate) unsafe fn gated_activation<V: Lanes>(activation: Activation, gate: &[f32], up: &[f32], out: &mut [f32]) {
    assert!(gate.len() == up.len() && gate.len() == out.len(), "equal lengths");
    for start in (0..gate.len()).step_by(V::N) {
        let n = V::N.min(gate.len() - start);
        // SAFETY: features are the caller's promise; whole vectors lie in the slices, short ones in arrays of 16.
        unsafe {
            if n == V::N {
                let y = activate(activation, V::load(gate[start..].as_ptr())).mul(V::load(up[start..].as_ptr()));
                y.store(out[start..].as_mut_ptr());
            } else {
                let (mut g, mut u) = ([0.0f32; 16], [0.0f32; 16]);
                g[..n].copy_from_slice(&gate[start..]);
                u[..n].copy_from_slice(&up[start..]);
                activate(activation, V::load(g.as_ptr())).mul(V::load(u.as_ptr())).store(g.as_mut_ptr());
                out[start..].copy_from_slice(&g[..n]);
            }
        }
    }
}

/// `x * sigmoid(s x)`: silu as it is, gelu by `1 + tanh(u) = 2 sigmoid(2 u)`.
#[inline(always)]
unsafe fn activate<V: Lanes>(activation: Activation, x: V) -> V {
    // SAFETY: features are the caller's promise.
    unsafe {
        let minus_u = match activation {
            Activation::Silu => x.mul(V::splat(-1.0)),
            Activation::GeluTanh => {
                let cubic = x.mul(x).fma(V::splat(0.044_715), V::splat(1.0));
                x.mul(V::splat(-2.0 * 0.797_884_6)).mul(cubic)
            }
        };
        x.div(minus_u.exp().add(V::splat(1.0)))
    }
}

/// Widens f16.
///
/// # Safety
/// The target features of `V` are enabled in the caller.
#[inline(always)]
pub(crate) unsafe fn widen<V: Lanes>(from: &[u16], to: &mut [f32]) {
    assert!(from.len() == to.len() && to.len().is_multiple_of(V::N), "whole vectors");
    for i in (0..to.len()).step_by(V::N) {
        // SAFETY: features are the caller's promise; a whole vector from `i` on lies in both slices.
        unsafe { V::load_f16(from.as_ptr().add(i)).store(to.as_mut_ptr().add(i)) };
    }
}
