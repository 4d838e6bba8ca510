//! Kernels for AVX2 with FMA and F16C: eight lanes.

use std::arch::x86_64::*;

use crate::cpu::Isa;
use crate::cpu::lanes::{Lanes, Quads};
use crate::cpu::table::{Table, vector_table};

/// The table of this instruction set; its functions run only where [`Isa::Avx2`] is available.
pub(crate) const TABLE: Table = vector_table!(Isa::Avx2, __m256, "avx2,fma,f16c");

impl Lanes for __m256 {
    const N: usize = 8;
    const ROWS: usize = 4;

    #[inline(always)]
    unsafe fn prefetch(from: *const u8) {
        // SAFETY: as the trait demands; a prefetch of any address is allowed.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(from.cast()) }
    }
    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: as the trait demands.
        unsafe { _mm256_set1_ps(value) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: as the trait demands.
        unsafe { _mm256_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        // SAFETY: as the trait demands.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) }
    }
    #[inline(always)]
    unsafe fn load_pairs(from: *const u16) -> (Self, Self) {
        // SAFETY: as the trait demands.
        unsafe {
            let bits = _mm256_loadu_si256(from.cast());
            let odd = _mm256_and_si256(bits, _mm256_set1_epi32(0xffff_0000_u32.cast_signed()));
            (_mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits)), _mm256_castsi256_ps(odd))
        }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: as the trait demands.
        unsafe { _mm256_storeu_ps(to, self) }
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: as the trait demands.
        unsafe { _mm256_add_ps(self, other) }
    }
    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        // SAFETY: as the trait demands.
        unsafe { _mm256_sub_ps(self, other) }
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        // SAFETY: as the trait demands.
        unsafe { _mm256_mul_ps(self, other) }
    }
    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        // SAFETY: as the trait demands.
        unsafe { _mm256_div_ps(self, other) }
    }
    #[inline(always)]
    unsafe fn fma(self, factor: Self, addend: Self) -> Self {
        // SAFETY: as the trait demands.
        unsafe { _mm256_fmadd_ps(self, factor, addend) }
    }
    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        // SAFETY: as the trait demands.
        unsafe { _mm256_max_ps(self, other) }
    }
    #[inline(always)]
    unsafe fn min(self, other: Self) -> Self {
        // SAFETY: as the trait demands.
        unsafe { _mm256_min_ps(self, other) }
    }
    #[inline(always)]
    unsafe fn round(self) -> Self {
        // SAFETY: as the trait demands.
        unsafe { _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self) }
    }
    #[inline(always)]
    unsafe fn scale_by_power(self, power: Self) -> Self {
        // SAFETY: as the trait demands.
        unsafe {
            let biased = _mm256_add_epi32(_mm256_cvtps_epi32(power), _mm256_set1_epi32(127));
            _mm256_mul_ps(self, _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased)))
        }
    }
    #[inline(always)]
    unsafe fn zero_where_below(self, x: Self, bound: Self) -> Self {
        // SAFETY: as the trait demands.
        unsafe { _mm256_and_ps(_mm256_cmp_ps::<_CMP_NLT_UQ>(x, bound), self) }
    }
    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        // SAFETY: as the trait demands.
        unsafe {
            let quarters = _mm_max_ps(_mm256_castps256_ps128(self), _mm256_extractf128_ps::<1>(self));
            let pairs = _mm_max_ps(quarters, _mm_movehl_ps(quarters, quarters));
            _mm_cvtss_f32(_mm_max_ss(pairs, _mm_movehdup_ps(pairs)))
        }
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        // SAFETY: as the trait demands.
        unsafe {
            let quarters = _mm_add_ps(_mm256_castps256_ps128(self), _mm256_extractf128_ps::<1>(self));
            let pairs = _mm_add_ps(quarters, _mm_movehl_ps(quarters, quarters));
            _mm_cvtss_f32(_mm_add_ss(pairs, _mm_movehdup_ps(pairs)))
        }
    }
}

impl Quads for __m256 {
    type Codes = __m256i;
    type Ints = __m256i;

    #[inline(always)]
    unsafe fn codes(from: *const u8) -> __m256i {
        // SAFETY: as the trait demands.
        unsafe { _mm256_loadu_si256(from.cast()) }
    }
    #[inline(always)]
    unsafe fn low(codes: __m256i) -> __m256i {
        // SAFETY: as the trait demands.
        unsafe { _mm256_and_si256(codes, _mm256_set1_epi8(15)) }
    }
    #[inline(always)]
    unsafe fn high(codes: __m256i) -> __m256i {
        // SAFETY: as the trait demands.
        unsafe { _mm256_and_si256(_mm256_srli_epi16::<4>(codes), _mm256_set1_epi8(15)) }
    }
    #[inline(always)]
    unsafe fn with_bits(codes: __m256i, bits: *const u8, worth: u8) -> __m256i {
        // SAFETY: as the trait demands.
        unsafe {
            let bits = _mm256_set1_epi32(bits.cast::<i32>().read_unaligned());
            // Byte `i` looks at bit `i % 8` of byte `i / 8`.
            let spread = _mm256_setr_epi64x(0, 0x0101_0101_0101_0101, 0x0202_0202_0202_0202, 0x0303_0303_0303_0303);
            let single = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64.cast_signed());
            let own = _mm256_and_si256(_mm256_shuffle_epi8(bits, spread), single);
            let set = _mm256_cmpeq_epi8(own, single);
            _mm256_add_epi8(codes, _mm256_and_si256(set, _mm256_set1_epi8(worth.cast_signed())))
        }
    }
    #[inline(always)]
    unsafe fn ints(value: i32) -> __m256i {
        // SAFETY: as the trait demands.
        unsafe { _mm256_set1_epi32(value) }
    }
    #[inline(always)]
    unsafe fn dot(sums: __m256i, codes: __m256i, x: i32) -> __m256i {
        // Pairs of products are summed in 16 bits with saturation, which those of a nibble cannot reach: two nibbles.
        // SAFETY: as the trait demands.
        unsafe {
            let x = _mm256_set1_epi32(x);
            let low = _mm256_maddubs_epi16(Self::low(codes), x);
            let high = _mm256_maddubs_epi16(Self::high(codes), x);
            let low = _mm256_madd_epi16(low, _mm256_set1_epi16(1));
            let high = _mm256_madd_epi16(high, _mm256_set1_epi16(16));
            _mm256_add_epi32(sums, _mm256_add_epi32(low, high))
        }
    }
    #[inline(always)]
    unsafe fn float(ints: __m256i) -> Self {
        // SAFETY: as the trait demands.
        unsafe { _mm256_cvtepi32_ps(ints) }
    }
    #[inline(always)]
    unsafe fn bytes(codes: __m256i) -> [Self; 4] {
        // SAFETY: as the trait demands.
        unsafe {
            let low = _mm256_set1_epi32(255);
            [
                _mm256_cvtepi32_ps(_mm256_and_si256(codes, low)),
                _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32::<8>(codes), low)),
                _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32::<16>(codes), low)),
                _mm256_cvtepi32_ps(_mm256_srli_epi32::<24>(codes)),
            ]
        }
    }
    #[inline(always)]
    unsafe fn store_bytes(self, to: *mut i8) -> i32 {
        // SAFETY: as the trait demands.
        unsafe {
            let ints = _mm256_cvtps_epi32(self);
            let words = _mm_packs_epi32(_mm256_castsi256_si128(ints), _mm256_extracti128_si256::<1>(ints));
            _mm_storel_epi64(to.cast(), _mm_packs_epi16(words, words));
            let pairs = _mm_madd_epi16(words, _mm_set1_epi16(1));
            let two = _mm_add_epi32(pairs, _mm_unpackhi_epi64(pairs, pairs));
            _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32::<1>(two)))
        }
    }
    #[inline(always)]
    unsafe fn store_pairs(even: Self, odd: Self, to: *mut u16) {
        // SAFETY: as the trait demands.
        unsafe {
            let low = _mm256_srli_epi32::<16>(rounded_high(even));
            let high = _mm256_and_si256(rounded_high(odd), _mm256_set1_epi32(0xffff_0000_u32.cast_signed()));
            _mm256_storeu_si256(to.cast(), _mm256_or_si256(low, high));
        }
    }
    #[inline(always)]
    unsafe fn load_u8(from: *const u8) -> Self {
        // SAFETY: as the trait demands.
        unsafe { _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(from.cast()))) }
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> Self {
        // SAFETY: as the trait demands.
        unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from.cast()))) }
    }
}

/// The bits of a number rounded to bf16, ties to even, in the high half of each lane; stays not-a-number.
///
/// # Safety
/// As for [`Lanes`].
#[inline(always)]
pub(crate) unsafe fn rounded_high(value: __m256) -> __m256i {
    // SAFETY: as the trait demands.
    unsafe {
        let bits = _mm256_castps_si256(value);
        let tie = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(tie, _mm256_set1_epi32(0x7fff)));
        let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x40_0000));
        let is_nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(value, value));
        _mm256_blendv_epi8(rounded, quiet, is_nan)
    }
}
