//! Kernels for AVX-512 F, BW, DQ and VL: sixteen lanes.

use std::arch::x86_64::*;

use crate::cpu::Isa;
use crate::cpu::lanes::{Lanes, Quads};
use crate::cpu::table::{Table, vector_table};

/// The table of this instruction set; its functions run only where [`Isa::Avx512`] is available.
pub(crate) const TABLE: Table = vector_table!(Isa::Avx512, __m512, "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c");

impl Lanes for __m512 {
    const N: usize = 16;
    const ROWS: usize = 8;

    #[inline(always)]
    unsafe fn prefetch(from: *const u8) {
        // SAFETY: as the trait demands; a prefetch of any address is allowed.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(from.cast()) }
    }
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
    unsafe fn sub(self, other: Self) -> Self {
        // SAFETY: as the trait demands.
        unsafe { _mm512_sub_ps(self, other) }
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
    unsafe fn largest(self) -> f32 {
        // SAFETY: as the trait demands.
        unsafe { _mm512_reduce_max_ps(self) }
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
    unsafe fn bytes(codes: __m512i) -> [Self; 4] {
        // SAFETY: as the trait demands.
        unsafe {
            let low = _mm512_set1_epi32(255);
            [
                _mm512_cvtepi32_ps(_mm512_and_si512(codes, low)),
                _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32::<8>(codes), low)),
                _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32::<16>(codes), low)),
                _mm512_cvtepi32_ps(_mm512_srli_epi32::<24>(codes)),
            ]
        }
    }
    #[inline(always)]
    unsafe fn store_bytes(self, to: *mut i8) -> i32 {
        // SAFETY: as the trait demands.
        unsafe {
            let ints = _mm512_cvtps_epi32(self);
            _mm_storeu_si128(to.cast(), _mm512_cvtepi32_epi8(ints));
            _mm512_reduce_add_epi32(ints)
        }
    }
    #[inline(always)]
    unsafe fn store_pairs(even: Self, odd: Self, to: *mut u16) {
        // SAFETY: as the trait demands.
        unsafe {
            let low = _mm512_srli_epi32::<16>(rounded_high(even));
            let high = _mm512_and_si512(rounded_high(odd), _mm512_set1_epi32(0xffff_0000_u32.cast_signed()));
            _mm512_storeu_si512(to.cast(), _mm512_or_si512(low, high));
        }
    }
    #[inline(always)]
    unsafe fn store_pairs_bf16(even: Self, odd: Self, to: *mut u16) {
        // SAFETY: as the trait demands, and AVX512-BF16 is enabled.
        unsafe {
            _mm512_storeu_si512(to.cast(), pairs(even, odd));
        }
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

/// The bits of a number rounded to bf16, ties to even, in the high half of each lane; stays not-a-number.
///
/// # Safety
/// As for [`Lanes`].
#[inline(always)]
pub(crate) unsafe fn rounded_high(value: __m512) -> __m512i {
    // SAFETY: as the trait demands.
    unsafe {
        let bits = _mm512_castps_si512(value);
        let tie = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(tie, _mm512_set1_epi32(0x7fff)));
        let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(value, value);
        _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x40_0000))
    }
}

/// Sixteen pairs of bf16, rounded to nearest, ties to even; numbers below 2^-126 become 0.
///
/// # Safety
/// As for [`Lanes`], and AVX512-BF16 is enabled.
#[inline(always)]
pub(crate) unsafe fn pairs(even: __m512, odd: __m512) -> __m512i {
    // SAFETY: as the caller promises; both types are 64 bytes of plain bits.
    unsafe {
        let halves: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(odd, even));
        _mm512_permutexvar_epi16(_mm512_loadu_si512(PAIRS.as_ptr().cast()), halves)
    }
}

/// Order that brings element `i` of the lower half beside element `i` of the upper one.
static PAIRS: [u16; 32] = {
    let mut order = [0; 32];
    let mut i = 0;
    while i < 32 {
        order[i] = (i / 2 + i % 2 * 16) as u16;
        i += 1;
    }
    order
};
