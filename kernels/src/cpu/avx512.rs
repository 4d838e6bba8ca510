//! Kernels for AVX-512 F, BW, DQ and VL: sixteen lanes.

use std::arch::x86_64::*;

use crate::cpu::dot::{self, Dot};
use crate::cpu::grouped::{self, Factor, GroupedDot};
use crate::cpu::lanes::{Lanes, Quads};
use crate::cpu::table::Table;
use crate::cpu::{Isa, simd, simd_grouped};
use crate::op::{elementwise, norm, rope};
use crate::ops::{Activation, RopeStyle};

/// The table of this instruction set; its functions run only where [`Isa::Avx512`] is available.
pub(crate) static TABLE: Table = Table {
    isa: Isa::Avx512,
    dot_bf16,
    dot_f32,
    dot_int8,
    dot_grouped,
    quantize_groups,
    round,
    quantize,
    widen,
    sum_squares,
    normalize,
    add,
    rotate,
    gated_activation,
};

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn dot_bf16(dot: &mut Dot<'_, u16, u16, f32>) {
    // SAFETY: the features are enabled here.
    unsafe { simd::dot_bf16::<__m512>(dot) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(crate) unsafe fn dot_f32(dot: &mut Dot<'_, f32, f32, f32>) {
    // SAFETY: the features are enabled here.
    unsafe { simd::dot_f32::<__m512>(dot) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn dot_int8(dot: &mut Dot<'_, u8, i8, i32>) {
    dot::int8(dot);
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn dot_grouped(dot: &mut GroupedDot<'_>) {
    // SAFETY: the features are enabled here.
    unsafe { simd_grouped::dot::<__m512>(dot) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(crate) unsafe fn quantize_groups(x: &[f32], codes: &mut [i8], factors: &mut [Factor]) {
    grouped::quantize(x, codes, factors);
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn round(x: &[f32], out: &mut [u16]) {
    dot::round(x, out);
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(crate) unsafe fn quantize(x: &[f32], out: &mut [u8]) -> f32 {
    dot::quantize(x, out)
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(crate) unsafe fn widen(from: &[u16], to: &mut [f32]) {
    // SAFETY: the features are enabled here.
    unsafe { simd::widen::<__m512>(from, to) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(crate) unsafe fn sum_squares(x: &[f32]) -> f32 {
    // SAFETY: the features are enabled here.
    unsafe { simd::sum_squares::<__m512>(x) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(crate) unsafe fn gated_activation(activation: Activation, gate: &[f32], up: &[f32], out: &mut [f32]) {
    // SAFETY: the features are enabled here.
    unsafe { simd::gated_activation::<__m512>(activation, gate, up, out) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(crate) unsafe fn normalize(x: &[f32], factor: f32, weight: &[f32], out: &mut [f32]) {
    norm::normalize(x, factor, weight, out);
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(crate) unsafe fn add(x: &mut [f32], y: &[f32]) {
    elementwise::add_to(x, y);
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(crate) unsafe fn rotate(style: RopeStyle, head: &mut [f32], cos: &[f32], sin: &[f32]) {
    rope::rotate(style, head, cos, sin);
}

impl Lanes for __m512 {
    const N: usize = 16;
    const ROWS: usize = 8;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: as the trait demands.
        unsafe { _mm512_set1_ps(value) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: as the trait demands.
        unsafe { _mm512_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        // SAFETY: as the trait demands.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
    }
    #[inline(always)]
    unsafe fn load_pairs(from: *const u16) -> (Self, Self) {
        // SAFETY: as the trait demands.
        unsafe {
            let bits = _mm512_loadu_si512(from.cast());
            let odd = _mm512_and_si512(bits, _mm512_set1_epi32(0xffff_0000_u32.cast_signed()));
            (_mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits)), _mm512_castsi512_ps(odd))
        }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: as the trait demands.
        unsafe { _mm512_storeu_ps(to, self) }
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: as the trait demands.
        unsafe { _mm512_add_ps(self, other) }
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        // SAFETY: as the trait demands.
        unsafe { _mm512_mul_ps(self, other) }
    }
    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        // SAFETY: as the trait demands.
        unsafe { _mm512_div_ps(self, other) }
    }
    #[inline(always)]
    unsafe fn fma(self, factor: Self, addend: Self) -> Self {
        // SAFETY: as the trait demands.
        unsafe { _mm512_fmadd_ps(self, factor, addend) }
    }
    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        // SAFETY: as the trait demands.
        unsafe { _mm512_max_ps(self, other) }
    }
    #[inline(always)]
    unsafe fn min(self, other: Self) -> Self {
        // SAFETY: as the trait demands.
        unsafe { _mm512_min_ps(self, other) }
    }
    #[inline(always)]
    unsafe fn round(self) -> Self {
        // SAFETY: as the trait demands.
        unsafe { _mm512_roundscale_ps::<0>(self) }
    }
    #[inline(always)]
    unsafe fn scale_by_power(self, power: Self) -> Self {
        // SAFETY: as the trait demands.
        unsafe { _mm512_scalef_ps(self, power) }
    }
    #[inline(always)]
    unsafe fn zero_where_below(self, x: Self, bound: Self) -> Self {
        // SAFETY: as the trait demands.
        unsafe { _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, bound), self) }
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        // SAFETY: as the trait demands.
        unsafe {
            let halves = _mm256_add_ps(_mm512_castps512_ps256(self), _mm512_extractf32x8_ps::<1>(self));
            halves.sum()
        }
    }
}

impl Quads for __m512 {
    type Codes = __m512i;
    type Ints = __m512i;

    #[inline(always)]
    unsafe fn codes(from: *const u8) -> __m512i {
        // SAFETY: as the trait demands.
        unsafe { _mm512_loadu_si512(from.cast()) }
    }
    #[inline(always)]
    unsafe fn low(codes: __m512i) -> __m512i {
        // SAFETY: as the trait demands.
        unsafe { _mm512_and_si512(codes, _mm512_set1_epi8(15)) }
    }
    #[inline(always)]
    unsafe fn high(codes: __m512i) -> __m512i {
        // SAFETY: as the trait demands.
        unsafe { _mm512_and_si512(_mm512_srli_epi16::<4>(codes), _mm512_set1_epi8(15)) }
    }
    #[inline(always)]
    unsafe fn with_bits(codes: __m512i, bits: *const u8, worth: u8) -> __m512i {
        // SAFETY: as the trait demands.
        unsafe {
            let mask = bits.cast::<u64>().read_unaligned();
            _mm512_mask_add_epi8(codes, mask, codes, _mm512_set1_epi8(worth.cast_signed()))
        }
    }
    #[inline(always)]
    unsafe fn ints(value: i32) -> __m512i {
        // SAFETY: as the trait demands.
        unsafe { _mm512_set1_epi32(value) }
    }
    #[inline(always)]
    unsafe fn dot(sums: __m512i, codes: __m512i, x: i32) -> __m512i {
        // Pairs of products are summed in 16 bits with saturation, which those of a nibble cannot reach: two nibbles.
        // SAFETY: as the trait demands.
        unsafe {
            let x = _mm512_set1_epi32(x);
            let low = _mm512_maddubs_epi16(Self::low(codes), x);
            let high = _mm512_maddubs_epi16(Self::high(codes), x);
            let low = _mm512_madd_epi16(low, _mm512_set1_epi16(1));
            let high = _mm512_madd_epi16(high, _mm512_set1_epi16(16));
            _mm512_add_epi32(sums, _mm512_add_epi32(low, high))
        }
    }
    #[inline(always)]
    unsafe fn dot_vnni(sums: __m512i, codes: __m512i, x: i32) -> __m512i {
        // SAFETY: as the trait demands, and VNNI is enabled.
        unsafe { _mm512_dpbusd_epi32(sums, codes, _mm512_set1_epi32(x)) }
    }
    #[inline(always)]
    unsafe fn float(ints: __m512i) -> Self {
        // SAFETY: as the trait demands.
        unsafe { _mm512_cvtepi32_ps(ints) }
    }
    #[inline(always)]
    unsafe fn load_u8(from: *const u8) -> Self {
        // SAFETY: as the trait demands.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast()))) }
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> Self {
        // SAFETY: as the trait demands.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast()))) }
    }
}
