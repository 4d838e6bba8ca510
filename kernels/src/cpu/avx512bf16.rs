//! Kernels for AVX-512 with BF16 and VNNI: products of pairs and quads in one instruction.
//! Hot path: no allocation, no lock, no log.

use std::arch::x86_64::*;

use crate::cpu::dot::Dot;
use crate::cpu::grouped::{DirectDot, GroupedDot, QUADS, Unpack};
use crate::cpu::lanes::Lanes as _;
use crate::cpu::panels::{GROUP, GROUP_INT8, PANEL, STRIP};
use crate::cpu::simd_grouped::with_format;
use crate::cpu::table::Table;
use crate::cpu::{Isa, avx512, simd_grouped, simd_unpack};

/// The table of this instruction set; its functions run only where [`Isa::Avx512Bf16`] is available.
pub(crate) const TABLE: Table = Table {
    isa: Isa::Avx512Bf16,
    dot_bf16,
    dot_int8,
    dot_grouped,
    unpack,
    dot_direct: Some(dot_direct),
    round,
    ..avx512::TABLE
};

/// Most rows of a block: two registers of sums each, beside two of weights and one of activations.
const ROWS: usize = 12;

/// Calls a block of as many rows as are left until all are done.
macro_rules! by_rows {
    ($dot:expr, $block:ident) => {{
        let mut row = 0;
        while row < $dot.rows {
            let n = ($dot.rows - row).min(ROWS);
            match n {
                1 => $block::<1>($dot, row),
                2 => $block::<2>($dot, row),
                3 => $block::<3>($dot, row),
                4 => $block::<4>($dot, row),
                5 => $block::<5>($dot, row),
                6 => $block::<6>($dot, row),
                7 => $block::<7>($dot, row),
                8 => $block::<8>($dot, row),
                9 => $block::<9>($dot, row),
                10 => $block::<10>($dot, row),
                11 => $block::<11>($dot, row),
                _ => $block::<12>($dot, row),
            }
            row += n;
        }
    }};
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,avx2,fma,f16c")]
unsafe fn dot_bf16(dot: &mut Dot<'_, u16, u16, f32>) {
    dot.begin(GROUP);
    // SAFETY: the features are enabled here; `check` asserted the extents that the blocks read and write.
    unsafe { by_rows!(dot, bf16_block) };
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,avx2,fma,f16c")]
unsafe fn dot_int8(dot: &mut Dot<'_, u8, i8, i32>) {
    dot.begin(GROUP_INT8);
    // SAFETY: the features are enabled here; `check` asserted the extents that the blocks read and write.
    unsafe { by_rows!(dot, int8_block) };
}

/// `R` rows times a stretch of a panel, in registers over the whole depth.
///
/// A single row waits for memory, so it reads one strip of a group after the other, in order; more rows share each
/// activation between both strips and ask for lines ahead. (In lockstep, strips 1 KB apart read at a third of the bandwidth
/// on Zen 4 where nobody asks.)
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,avx2,fma,f16c")]
unsafe fn bf16_block<const R: usize>(dot: &mut Dot<'_, u16, u16, f32>, row: usize) {
    // SAFETY: `Dot::check` asserted that `R` rows from `row` of `depth` inputs, whole groups of the panel, and sums of
    // these rows exist; a prefetch may name any address.
    unsafe {
        let x = dot.x.as_ptr().add(row * dot.stride);
        let sums = dot.sums.as_mut_ptr().add(row * PANEL);
        let (mut low, mut high) = ([_mm512_setzero_ps(); R], [_mm512_setzero_ps(); R]);
        for r in 0..R {
            low[r] = _mm512_loadu_ps(sums.add(r * PANEL));
            high[r] = _mm512_loadu_ps(sums.add(r * PANEL + STRIP));
        }
        let mut part = dot.panel.as_ptr();
        for group in 0..dot.depth / GROUP {
            let x = x.add(group * GROUP);
            if R == 1 {
                for (strip, sums) in [&mut low, &mut high].into_iter().enumerate() {
                    for pair in 0..GROUP / 2 {
                        let line = part.add(strip * GROUP * STRIP + pair * 2 * STRIP);
                        __m512::prefetch_in_order(line.cast());
                        let w = bf16_of(_mm512_loadu_si512(line.cast()));
                        for (r, sum) in sums.iter_mut().enumerate() {
                            let bits = x.add(r * dot.stride + 2 * pair).cast::<i32>().read_unaligned();
                            *sum = _mm512_dpbf16_ps(*sum, bf16_of(_mm512_set1_epi32(bits)), w);
                        }
                    }
                }
            } else {
                for pair in 0..GROUP / 2 {
                    let line = part.add(pair * 2 * STRIP);
                    let w_low = bf16_of(_mm512_loadu_si512(line.cast()));
                    let w_high = bf16_of(_mm512_loadu_si512(line.add(GROUP * STRIP).cast()));
                    __m512::prefetch_ahead(part.cast(), pair);
                    for r in 0..R {
                        let bits = x.add(r * dot.stride + 2 * pair).cast::<i32>().read_unaligned();
                        let x = bf16_of(_mm512_set1_epi32(bits));
                        low[r] = _mm512_dpbf16_ps(low[r], x, w_low);
                        high[r] = _mm512_dpbf16_ps(high[r], x, w_high);
                    }
                }
            }
            part = part.add(GROUP * PANEL);
        }
        for r in 0..R {
            _mm512_storeu_ps(sums.add(r * PANEL), low[r]);
            _mm512_storeu_ps(sums.add(r * PANEL + STRIP), high[r]);
        }
    }
}

/// As [`bf16_block`], for quads of 8 bits.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,avx2,fma,f16c")]
unsafe fn int8_block<const R: usize>(dot: &mut Dot<'_, u8, i8, i32>, row: usize) {
    // SAFETY: as in `bf16_block`.
    unsafe {
        let x = dot.x.as_ptr().add(row * dot.stride);
        let sums = dot.sums.as_mut_ptr().add(row * PANEL);
        let (mut low, mut high) = ([_mm512_setzero_si512(); R], [_mm512_setzero_si512(); R]);
        for r in 0..R {
            low[r] = _mm512_loadu_si512(sums.add(r * PANEL).cast());
            high[r] = _mm512_loadu_si512(sums.add(r * PANEL + STRIP).cast());
        }
        let mut part = dot.panel.as_ptr();
        for group in 0..dot.depth / GROUP_INT8 {
            let x = x.add(group * GROUP_INT8);
            if R == 1 {
                for (strip, sums) in [&mut low, &mut high].into_iter().enumerate() {
                    for quad in 0..GROUP_INT8 / 4 {
                        let line = part.add(strip * GROUP_INT8 * STRIP + quad * 4 * STRIP);
                        __m512::prefetch_in_order(line.cast());
                        let w = _mm512_loadu_si512(line.cast());
                        for (r, sum) in sums.iter_mut().enumerate() {
                            let x = x.add(r * dot.stride + 4 * quad).cast::<i32>().read_unaligned();
                            *sum = _mm512_dpbusd_epi32(*sum, _mm512_set1_epi32(x), w);
                        }
                    }
                }
            } else {
                for quad in 0..GROUP_INT8 / 4 {
                    let line = part.add(quad * 4 * STRIP);
                    let w_low = _mm512_loadu_si512(line.cast());
                    let w_high = _mm512_loadu_si512(line.add(GROUP_INT8 * STRIP).cast());
                    __m512::prefetch_ahead(part.cast(), quad);
                    for r in 0..R {
                        let x = x.add(r * dot.stride + 4 * quad).cast::<i32>().read_unaligned();
                        let x = _mm512_set1_epi32(x);
                        low[r] = _mm512_dpbusd_epi32(low[r], x, w_low);
                        high[r] = _mm512_dpbusd_epi32(high[r], x, w_high);
                    }
                }
            }
            part = part.add(GROUP_INT8 * PANEL);
        }
        for r in 0..R {
            _mm512_storeu_si512(sums.add(r * PANEL).cast(), low[r]);
            _mm512_storeu_si512(sums.add(r * PANEL + STRIP).cast(), high[r]);
        }
    }
}

/// Sixteen pairs of bf16 from their bits.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn bf16_of(bits: __m512i) -> __m512bh {
    // SAFETY: both are 64 bytes of plain bits.
    unsafe { std::mem::transmute(bits) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,avx2,fma,f16c")]
unsafe fn round(x: &[f32], out: &mut [u16], step: usize) {
    let n_groups = x.len() / GROUP;
    assert!(step >= GROUP && out.len() >= n_groups.saturating_sub(1) * step + GROUP.min(x.len()), "groups");
    for group in 0..n_groups {
        // SAFETY: the row has this group, and so has `out` by the assertion.
        unsafe {
            let (from, to) = (x.as_ptr().add(group * GROUP), out.as_mut_ptr().add(group * step));
            let halves = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(from.add(STRIP)), _mm512_loadu_ps(from));
            _mm512_storeu_si512(to.cast(), std::mem::transmute::<__m512bh, __m512i>(halves));
        }
    }
    if n_groups * GROUP < x.len() {
        crate::cpu::dot::round(&x[n_groups * GROUP..], &mut out[n_groups * step..], step);
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,avx2,fma,f16c")]
unsafe fn dot_grouped(dot: &mut GroupedDot<'_>) {
    // SAFETY: the features are enabled here.
    unsafe { simd_grouped::dot::<__m512, true>(dot) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,avx2,fma,f16c")]
unsafe fn unpack(work: &mut Unpack<'_>) {
    // SAFETY: the features are enabled here.
    unsafe { simd_unpack::to_bf16::<__m512, true>(work) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,avx2,fma,f16c")]
unsafe fn dot_direct(dot: &mut DirectDot<'_>) {
    dot.check();
    // SAFETY: the features are enabled here; the constants are those of the grouping.
    unsafe { with_format!(dot.grouping, direct_rows(dot)) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,avx2,fma,f16c")]
unsafe fn direct_rows<const PLANES: usize, const KIND: u8>(dot: &mut DirectDot<'_>) {
    // SAFETY: the features are enabled here; constants and extents are the caller's promise.
    unsafe {
        match dot.rows {
            1 => direct_block::<PLANES, KIND, 1>(dot),
            2 => direct_block::<PLANES, KIND, 2>(dot),
            3 => direct_block::<PLANES, KIND, 3>(dot),
            _ => direct_block::<PLANES, KIND, 4>(dot),
        }
    }
}

/// `R` rows times a panel, whose weights become bf16 in registers; sums as in [`bf16_block`].
#[expect(clippy::needless_range_loop, reason = "registers are arrays over rows and columns alike")]
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,avx2,fma,f16c")]
unsafe fn direct_block<const PLANES: usize, const KIND: u8, const R: usize>(dot: &mut DirectDot<'_>) {
    // SAFETY: the features are enabled here; `DirectDot::check` asserted that the panel has these groups, and that `R`
    // rows of activations and sums exist.
    unsafe {
        let stride = dot.stride;
        let (panel, at) = (dot.panel.as_ptr(), dot.sums.as_mut_ptr());
        let zero = _mm512_set1_ps(dot.grouping.scale.zero() as f32);
        let mut sums = [[_mm512_setzero_ps(); R]; 2];
        for r in 0..R {
            sums[0][r] = _mm512_loadu_ps(at.add(r * PANEL));
            sums[1][r] = _mm512_loadu_ps(at.add(r * PANEL + STRIP));
        }
        for group in 0..dot.groups {
            if R > 1 {
                dot.grouping.prefetch::<__m512>(dot.panel, dot.groups + group..dot.groups + group + 1);
            }
            let x = dot.x.as_ptr().add(group * GROUP);
            for (strip, sums) in sums.iter_mut().enumerate() {
                let places = dot.grouping.places(group, strip);
                let (header, super_block) = (panel.add(places.header), panel.add(places.super_block));
                let scales = simd_grouped::scales::<__m512, KIND>(header, super_block, 0);
                for pair in 0..QUADS / 2 {
                    let codes = panel.add(places.codes);
                    let values = simd_unpack::values::<__m512, PLANES, KIND>(codes, 0, pair, &scales, zero);
                    for (i, two) in values.as_flattened().chunks_exact(2).enumerate() {
                        let w = bf16_of(avx512::pairs(two[0], two[1]));
                        for (r, sum) in sums.iter_mut().enumerate() {
                            let bits = x.add(r * stride + 8 * pair + 2 * i).cast::<i32>().read_unaligned();
                            *sum = _mm512_dpbf16_ps(*sum, bf16_of(_mm512_set1_epi32(bits)), w);
                        }
                    }
                }
            }
        }
        for r in 0..R {
            _mm512_storeu_ps(at.add(r * PANEL), sums[0][r]);
            _mm512_storeu_ps(at.add(r * PANEL + STRIP), sums[1][r]);
        }
    }
}
