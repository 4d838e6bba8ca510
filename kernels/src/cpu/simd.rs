//! Kernels written over [`Lanes`]; each instruction set's file makes functions of them.
//! Hot path: no allocation, no lock, no log.
//!
//! Every result has one order of operations for an instruction set: matrix elements accumulate over `in` ascending,
//! whatever other rows are in the call.

use crate::cpu::lanes::Lanes;
use crate::cpu::table::{Accumulators, MatmulTile, PANEL};
use crate::ops::Activation;

/// Elements that a panel can be made of.
pub(crate) trait WeightElement: Copy {
    /// Loads N of them as f32.
    unsafe fn load<V: Lanes>(from: *const Self) -> V;
}

impl WeightElement for u16 {
    #[inline(always)]
    unsafe fn load<V: Lanes>(from: *const Self) -> V {
        // SAFETY: the caller's obligation is the same.
        unsafe { V::load_bf16(from) }
    }
}

impl WeightElement for f32 {
    #[inline(always)]
    unsafe fn load<V: Lanes>(from: *const Self) -> V {
        // SAFETY: the caller's obligation is the same.
        unsafe { V::load(from) }
    }
}

/// Multiplies up to eight rows with a panel; see [`crate::op::matmul`].
///
/// # Safety
/// The target features of `V` are enabled in the caller.
#[inline(always)]
pub(crate) unsafe fn matmul_tile<V: Lanes, W: WeightElement>(tile: &MatmulTile<'_, W>, out: &mut Accumulators) {
    let rows = tile.rows();
    let mut row = 0;
    while row < rows {
        let n = (rows - row).min(V::ROWS);
        for column in (0..PANEL).step_by(2 * V::N) {
            // SAFETY: features are the caller's promise; `rows()` checked the extents.
            unsafe {
                match n {
                    1 => block::<V, W, 1>(tile, row, column, out),
                    2 => block::<V, W, 2>(tile, row, column, out),
                    3 => block::<V, W, 3>(tile, row, column, out),
                    4 => block::<V, W, 4>(tile, row, column, out),
                    5 => block::<V, W, 5>(tile, row, column, out),
                    6 => block::<V, W, 6>(tile, row, column, out),
                    7 => block::<V, W, 7>(tile, row, column, out),
                    _ => block::<V, W, 8>(tile, row, column, out),
                }
            }
        }
        row += n;
    }
}

/// `R` rows times two vectors of columns, in registers over the whole depth.
#[inline(always)]
unsafe fn block<V: Lanes, W: WeightElement, const R: usize>(
    tile: &MatmulTile<'_, W>,
    row: usize,
    column: usize,
    out: &mut Accumulators,
) {
    // SAFETY: `row + R` rows of `depth` elements are in `x`, and `depth` lines of PANEL elements in `panel`, as
    // `MatmulTile::rows` asserted; `column + 2 N <= PANEL`.
    unsafe {
        let x = tile.x.as_ptr().add(row * tile.depth);
        let mut weights = tile.panel.as_ptr().add(column);
        let mut low = [V::splat(0.0); R];
        let mut high = [V::splat(0.0); R];
        for k in 0..tile.depth {
            let (w_low, w_high) = (W::load::<V>(weights), W::load::<V>(weights.add(V::N)));
            for r in 0..R {
                let x = V::splat(*x.add(r * tile.depth + k));
                low[r] = x.fma(w_low, low[r]);
                high[r] = x.fma(w_high, high[r]);
            }
            weights = weights.wrapping_add(PANEL);
        }
        for r in 0..R {
            let to = out[(row + r) * PANEL + column..][..2 * V::N].as_mut_ptr();
            low[r].store(to);
            high[r].store(to.add(V::N));
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
