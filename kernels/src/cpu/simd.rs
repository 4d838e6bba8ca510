//! Kernels written over [`Lanes`]; each instruction set's file makes functions of them.
//! Hot path: no allocation, no lock, no log.
//!
//! Every result has one order of operations for an instruction set: matrix elements accumulate over `in` ascending,
//! attention rows take tiles ascending, whatever other rows are in the call.

use crate::cpu::lanes::Lanes;
use crate::cpu::table::{Accumulators, MatmulTile, PANEL};
use crate::op::attention::{CacheData, Scratch, TILE, Unit};
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

/// Attention of one unit: see [`crate::op::attention`] for the algorithm.
///
/// # Safety
/// The target features of `V` are enabled in the caller.
#[inline(always)]
pub(crate) unsafe fn attend<V: Lanes>(unit: &Unit<'_>, scratch: &mut Scratch<'_>) {
    scratch.begin(unit);
    let span = unit.span();
    for tile in span.start / TILE..span.end.div_ceil(TILE) {
        let loaded = span.start.max(tile * TILE)..span.end.min((tile + 1) * TILE);
        for position in loaded {
            let (j, dims) = (position % TILE, unit.dims);
            // SAFETY: features are the caller's promise.
            unsafe {
                widen::<V>(
                    &unit.cache.keys,
                    unit.key_start(position),
                    &mut scratch.keys[j * dims.key_stride()..][..dims.key_dim],
                );
                let value = &mut scratch.values[j * dims.value_stride()..][..dims.value_dim];
                widen::<V>(&unit.cache.values, unit.value_start(position), value);
            }
        }
        for row in 0..unit.n_rows() {
            let visible = unit.visible_in_tile(row, tile);
            if !visible.is_empty() {
                // SAFETY: features are the caller's promise.
                unsafe { row_tile::<V>(unit, scratch, row, visible) };
            }
        }
    }
    scratch.finish(unit);
}

/// Copies cache elements to f32.
#[inline(always)]
unsafe fn widen<V: Lanes>(data: &CacheData<'_>, start: usize, target: &mut [f32]) {
    let n = target.len();
    let whole = n / V::N * V::N;
    match data {
        CacheData::F32(values) => target.copy_from_slice(&values[start..start + n]),
        CacheData::Bf16(values) => {
            let values = &values[start..start + n];
            for i in (0..whole).step_by(V::N) {
                // SAFETY: `i + N <= n`, the length of both slices.
                unsafe { V::load_bf16(values.as_ptr().add(i)).store(target.as_mut_ptr().add(i)) };
            }
            (whole..n).for_each(|i| target[i] = half::bf16::from_bits(values[i]).to_f32());
        }
        CacheData::F16(values) => {
            let values = &values[start..start + n];
            for i in (0..whole).step_by(V::N) {
                // SAFETY: `i + N <= n`, the length of both slices.
                unsafe { V::load_f16(values.as_ptr().add(i)).store(target.as_mut_ptr().add(i)) };
            }
            (whole..n).for_each(|i| target[i] = half::f16::from_bits(values[i]).to_f32());
        }
    }
}

/// One query row against one tile of positions, `visible` of which it sees.
#[inline(always)]
unsafe fn row_tile<V: Lanes>(unit: &Unit<'_>, scratch: &mut Scratch<'_>, row: usize, visible: std::ops::Range<usize>) {
    let (stride, value_stride) = (unit.dims.key_stride(), unit.dims.value_stride());
    let query = &scratch.query[row * stride..][..stride];
    // SAFETY: features are the caller's promise.
    let mut weights = unsafe { scores::<V>(query, &scratch.keys[..TILE * stride]) };
    unit.adjust(&mut weights, &visible);
    let alpha;
    // SAFETY: features are the caller's promise; `weights` holds TILE = 16 floats, a multiple of N.
    unsafe {
        let mut largest = scratch.largest[row];
        for j in (0..TILE).step_by(V::N) {
            largest = largest.max(V::load(weights.as_ptr().add(j)).largest());
        }
        let minus_largest = V::splat(-largest);
        alpha = first_lane(V::splat(scratch.largest[row]).add(minus_largest).exp());
        let mut sums = V::splat(0.0);
        for j in (0..TILE).step_by(V::N) {
            let p = V::load(weights.as_ptr().add(j)).add(minus_largest).exp();
            p.store(weights.as_mut_ptr().add(j));
            sums = sums.add(p);
        }
        scratch.largest[row] = largest;
        scratch.sum[row] = scratch.sum[row] * alpha + sums.sum();
    }
    let acc = &mut scratch.acc[row * value_stride..][..value_stride];
    let mut d = 0;
    while d < value_stride {
        // SAFETY: features are the caller's promise; strides are multiples of 16, so that N or 4 N columns fit.
        unsafe {
            if value_stride - d >= 4 * V::N {
                accumulate::<V, 4>(&weights, &scratch.values[d..], value_stride, visible.clone(), alpha, &mut acc[d..]);
                d += 4 * V::N;
            } else {
                accumulate::<V, 1>(&weights, &scratch.values[d..], value_stride, visible.clone(), alpha, &mut acc[d..]);
                d += V::N;
            }
        }
    }
}

/// Dot products of a query with the tile's sixteen keys.
#[inline(always)]
unsafe fn scores<V: Lanes>(query: &[f32], keys: &[f32]) -> [f32; TILE] {
    let stride = query.len();
    assert!(keys.len() == TILE * stride && stride.is_multiple_of(16), "a whole tile of padded keys");
    let mut scores = [0.0f32; TILE];
    for j in (0..TILE).step_by(4) {
        // SAFETY: features are the caller's promise; `d + N <= stride` and `j + 3 < TILE`, extents asserted above.
        unsafe {
            let mut sums = [V::splat(0.0); 4];
            for d in (0..stride).step_by(V::N) {
                let q = V::load(query.as_ptr().add(d));
                for (i, sum) in sums.iter_mut().enumerate() {
                    *sum = q.fma(V::load(keys.as_ptr().add((j + i) * stride + d)), *sum);
                }
            }
            for (i, sum) in sums.into_iter().enumerate() {
                scores[j + i] = sum.sum();
            }
        }
    }
    scores
}

/// `acc = acc * alpha + sum over visible j of weights[j] * values[j]`, `C` vectors of columns at once.
#[inline(always)]
unsafe fn accumulate<V: Lanes, const C: usize>(
    weights: &[f32; TILE],
    values: &[f32],
    stride: usize,
    visible: std::ops::Range<usize>,
    alpha: f32,
    acc: &mut [f32],
) {
    assert!(visible.end <= TILE && values.len() >= (TILE - 1) * stride + C * V::N && acc.len() >= C * V::N, "a tile");
    // SAFETY: features are the caller's promise, extents are asserted above.
    unsafe {
        let mut sums = [V::splat(0.0); C];
        for (c, sum) in sums.iter_mut().enumerate() {
            *sum = V::load(acc.as_ptr().add(c * V::N)).mul(V::splat(alpha));
        }
        for j in visible {
            let p = V::splat(weights[j]);
            for (c, sum) in sums.iter_mut().enumerate() {
                *sum = p.fma(V::load(values.as_ptr().add(j * stride + c * V::N)), *sum);
            }
        }
        for (c, sum) in sums.into_iter().enumerate() {
            sum.store(acc.as_mut_ptr().add(c * V::N));
        }
    }
}

#[inline(always)]
unsafe fn first_lane<V: Lanes>(v: V) -> f32 {
    let mut lanes = [0.0f32; 16];
    // SAFETY: the array holds N <= 16 floats; features are the caller's promise.
    unsafe { v.store(lanes.as_mut_ptr()) };
    lanes[0]
}
