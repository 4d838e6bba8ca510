//! Kernels for AVX-512 with BF16 and VNNI: products of pairs and quads in one instruction.
//! Hot path: no allocation, no lock, no log.

use std::arch::x86_64::*;

use crate::cpu::dot::{Dot, Expand};
use crate::cpu::grouped::{ELEMENTS, ScaleKind};
use crate::cpu::panels::{GROUP, GROUP_INT8, PANEL, STRIP};
use crate::cpu::table::Table;
use crate::cpu::{Isa, avx512};

/// The table of this instruction set; its functions run only where [`Isa::Avx512Bf16`] is available.
pub(crate) static TABLE: Table = Table {
    isa: Isa::Avx512Bf16,
    dot_bf16,
    dot_f32: avx512::dot_f32,
    dot_int8,
    expand,
    round,
    quantize: avx512::quantize,
    widen: avx512::widen,
    sum_squares: avx512::sum_squares,
    gated_activation: avx512::gated_activation,
};

/// Most rows of a block: two registers of sums each, beside two of weights and one of activations.
const ROWS: usize = 12;
/// Bytes by which a panel is fetched ahead of its use when few rows leave time to wait for memory.
const AHEAD: usize = 4096;

/// Calls a block of as many rows as are left until all are done; few rows fetch the panel ahead.
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
    dot.check(GROUP);
    // SAFETY: the features are enabled here; `check` asserted the extents that the blocks read and write.
    unsafe { by_rows!(dot, bf16_block) };
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,avx2,fma,f16c")]
unsafe fn dot_int8(dot: &mut Dot<'_, u8, i8, i32>) {
    dot.check(GROUP_INT8);
    // SAFETY: the features are enabled here; `check` asserted the extents that the blocks read and write.
    unsafe { by_rows!(dot, int8_block) };
}

/// `R` rows times a stretch of a panel, in registers over the whole depth.
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
            for pair in 0..GROUP / 2 {
                let line = part.add(pair * 2 * STRIP);
                if R <= 4 {
                    _mm_prefetch::<_MM_HINT_T0>(line.cast::<i8>().wrapping_add(AHEAD));
                    _mm_prefetch::<_MM_HINT_T0>(line.cast::<i8>().wrapping_add(AHEAD + GROUP * STRIP * 2));
                }
                let w_low = bf16_of(_mm512_loadu_si512(line.cast()));
                let w_high = bf16_of(_mm512_loadu_si512(line.add(GROUP * STRIP).cast()));
                for r in 0..R {
                    let bits = x.add(r * dot.stride + 2 * pair).cast::<i32>().read_unaligned();
                    let x = bf16_of(_mm512_set1_epi32(bits));
                    low[r] = _mm512_dpbf16_ps(low[r], x, w_low);
                    high[r] = _mm512_dpbf16_ps(high[r], x, w_high);
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
            for quad in 0..GROUP_INT8 / 4 {
                let line = part.add(quad * 4 * STRIP);
                if R <= 4 {
                    _mm_prefetch::<_MM_HINT_T0>(line.wrapping_add(AHEAD));
                    _mm_prefetch::<_MM_HINT_T0>(line.wrapping_add(AHEAD + GROUP_INT8 * STRIP));
                }
                let w_low = _mm512_loadu_si512(line.cast());
                let w_high = _mm512_loadu_si512(line.add(GROUP_INT8 * STRIP).cast());
                for r in 0..R {
                    let x = _mm512_set1_epi32(x.add(r * dot.stride + 4 * quad).cast::<i32>().read_unaligned());
                    low[r] = _mm512_dpbusd_epi32(low[r], x, w_low);
                    high[r] = _mm512_dpbusd_epi32(high[r], x, w_high);
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
pub(crate) unsafe fn round(x: &[f32], out: &mut [u16]) {
    assert!(x.len() == out.len(), "equal lengths");
    let whole = x.len() / STRIP * STRIP;
    for i in (0..whole).step_by(STRIP) {
        // SAFETY: `i + 16` elements are in both slices.
        unsafe {
            let bits: __m256i = std::mem::transmute(_mm512_cvtneps_pbh(_mm512_loadu_ps(x.as_ptr().add(i))));
            _mm256_storeu_si256(out.as_mut_ptr().add(i).cast(), bits);
        }
    }
    crate::cpu::dot::round(&x[whole..], &mut out[whole..]);
}

/// Expands quantised groups: a nibble is looked up as f32, scaled, and rounded with its neighbours.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,avx2,fma,f16c")]
pub(crate) unsafe fn expand(expand: &mut Expand<'_>) {
    let grouping = expand.grouping;
    for (index, out) in expand.out.chunks_exact_mut(ELEMENTS).enumerate() {
        let (header, super_block) = grouping.places(expand.first_group + index / 2, index % 2);
        let codes = header + grouping.header_bytes();
        let group = &expand.panel[header..codes + grouping.code_bytes()];
        let (header, codes) = group.split_at(grouping.header_bytes());
        let super_block = &expand.panel[super_block..super_block + grouping.super_bytes()];
        // SAFETY: the features are enabled here; the slices are as long as the grouping says, `out` as asserted by
        // its chunks.
        unsafe {
            match grouping.planes {
                None => expand_bytes(&scales(grouping.scale, header, super_block), codes, out),
                Some(0) => expand_nibbles::<0>(&scales(grouping.scale, header, super_block), codes, out),
                Some(1) => expand_nibbles::<1>(&scales(grouping.scale, header, super_block), codes, out),
                Some(_) => expand_nibbles::<2>(&scales(grouping.scale, header, super_block), codes, out),
            }
        }
    }
}

/// Scales and minima of columns 0..8 and 8..16, each twice, for both halves of a group.
struct Factors {
    scale: [[__m512; 2]; 2],
    minimum: [[__m512; 2]; 2],
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,avx2,fma,f16c")]
unsafe fn scales(kind: ScaleKind, header: &[u8], super_block: &[u8]) -> Factors {
    // SAFETY: header and super-block are as long as the kind says.
    unsafe {
        let half = |bytes: &[u8], at: usize| _mm512_cvtph_ps(_mm256_loadu_si256(bytes.as_ptr().add(at).cast()));
        let byte = |at: usize| {
            let codes = _mm_loadu_si128(header.as_ptr().add(at).cast());
            _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(codes))
        };
        let signed = |at: usize| {
            let codes = _mm_loadu_si128(header.as_ptr().add(at).cast());
            _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes))
        };
        let (scale, minimum) = match kind {
            ScaleKind::Centred { zero } => {
                let d = half(header, 0);
                ([d; 2], [_mm512_mul_ps(d, _mm512_set1_ps(-f32::from(zero))); 2])
            }
            ScaleKind::Minimum => ([half(header, 0); 2], [half(header, 2 * STRIP); 2]),
            ScaleKind::SuperMinimum => {
                let scale = _mm512_mul_ps(half(super_block, 0), byte(0));
                let minimum = _mm512_mul_ps(half(super_block, 2 * STRIP), byte(STRIP));
                ([scale; 2], [_mm512_sub_ps(_mm512_setzero_ps(), minimum); 2])
            }
            ScaleKind::SuperHalves => {
                let d = half(super_block, 0);
                let scale = [_mm512_mul_ps(d, signed(0)), _mm512_mul_ps(d, signed(STRIP))];
                (scale, scale.map(|scale| _mm512_mul_ps(scale, _mm512_set1_ps(-32.0))))
            }
        };
        let first = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
        let second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
        let twice = |v: __m512| [_mm512_permutexvar_ps(first, v), _mm512_permutexvar_ps(second, v)];
        Factors { scale: scale.map(twice), minimum: minimum.map(twice) }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,avx2,fma,f16c")]
unsafe fn expand_bytes(factors: &Factors, codes: &[u8], out: &mut [u16]) {
    // SAFETY: 512 codes and 512 results.
    unsafe {
        for pair in 0..GROUP / 2 {
            let [first, second] = [0, STRIP].map(|at| {
                let codes = _mm_loadu_si128(codes.as_ptr().add(pair * 2 * STRIP + at).cast());
                _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(codes))
            });
            put(factors, pair, [first, second], out);
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,avx2,fma,f16c")]
unsafe fn expand_nibbles<const PLANES: usize>(factors: &Factors, codes: &[u8], out: &mut [u16]) {
    // SAFETY: 256 bytes of nibbles and 64 bytes for each plane, 512 results.
    unsafe {
        let values = _mm512_set_ps(15., 14., 13., 12., 11., 10., 9., 8., 7., 6., 5., 4., 3., 2., 1., 0.);
        let mask = |pair: usize, plane: usize, at: usize| {
            let bits = codes.as_ptr().add(ELEMENTS / 2 + plane * ELEMENTS / 8 + 4 * pair + at / 8);
            bits.cast::<u16>().read_unaligned()
        };
        for line in 0..GROUP / 4 {
            let nibbles = [0, STRIP].map(|at| {
                let codes = _mm_loadu_si128(codes.as_ptr().add(line * 2 * STRIP + at).cast());
                _mm512_cvtepu8_epi32(codes)
            });
            let looked_up = [
                nibbles.map(|codes| _mm512_permutexvar_ps(codes, values)),
                nibbles.map(|codes| _mm512_permutexvar_ps(_mm512_srli_epi32::<4>(codes), values)),
            ];
            for (odd, [mut first, mut second]) in looked_up.into_iter().enumerate() {
                let pair = 2 * line + odd;
                for plane in 0..PLANES {
                    let worth = _mm512_set1_ps((16 << plane) as f32);
                    first = _mm512_mask_add_ps(first, mask(pair, plane, 0), first, worth);
                    second = _mm512_mask_add_ps(second, mask(pair, plane, STRIP), second, worth);
                }
                put(factors, pair, [first, second], out);
            }
        }
    }
}

/// Scales the codes of a pair of inputs, and stores them as bf16.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,avx2,fma,f16c")]
unsafe fn put(factors: &Factors, pair: usize, [first, second]: [__m512; 2], out: &mut [u16]) {
    let half = pair / (GROUP / 4);
    let first = _mm512_fmadd_ps(first, factors.scale[half][0], factors.minimum[half][0]);
    let second = _mm512_fmadd_ps(second, factors.scale[half][1], factors.minimum[half][1]);
    // SAFETY: `out` holds 16 pairs of 32; the types are 64 bytes of plain bits.
    unsafe {
        let bits: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(second, first));
        _mm512_storeu_si512(out.as_mut_ptr().add(pair * 2 * STRIP).cast(), bits);
    }
}
