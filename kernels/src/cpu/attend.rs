//! Attention kernels of the vector instruction sets; see [`crate::op::attention`] for the algorithm.
//! Hot path: no allocation, no lock, no log.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{__m256, __m512};

use crate::cpu::Isa;
use crate::cpu::lanes::Lanes;
use crate::op::attention::{self, CacheData, Scratch, TILE, Unit};

/// Attention of one instruction set; unsafe because it runs only where [`Isa::check`] passes.
pub(crate) type Attend = unsafe fn(&Unit<'_>, &mut Scratch<'_>);

/// The kernel of an instruction set.
pub(crate) fn kernel(isa: Isa) -> Attend {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => attend_avx512,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => attend_avx2,
        _ => attention::reference,
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn attend_avx512(unit: &Unit<'_>, scratch: &mut Scratch<'_>) {
    // SAFETY: the features are enabled here.
    unsafe { attend::<__m512>(unit, scratch) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn attend_avx2(unit: &Unit<'_>, scratch: &mut Scratch<'_>) {
    // SAFETY: the features are enabled here.
    unsafe { attend::<__m256>(unit, scratch) }
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
