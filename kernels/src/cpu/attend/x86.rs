//! Attention on x86-64: vectors of eight and sixteen lanes, and products by AVX512-BF16.

use std::arch::x86_64::*;
use std::ops::Range;

use crate::cpu::attend::amx::{Amx, Tiles};
use crate::cpu::attend::online::Online;
use crate::cpu::attend::product::{F32, Product, Widened, bf16_bits};
use crate::cpu::attend::vector::Vector;
use crate::cpu::attend::{KvTable, attend};
use crate::cpu::lanes::Lanes as _;
use crate::cpu::{avx2, avx512};
use crate::op::attention::unit::{Scratch, Unit};
use crate::op::kv::{self, Write};

/// A table whose functions are compiled for some features.
macro_rules! table {
    ($(#[$doc:meta])* $name:ident, $features:literal, $single:ty, $pairs:ty) => {
        $(#[$doc])*
        pub(crate) static $name: KvTable = {
            #[target_feature(enable = $features)]
            unsafe fn attend_with_features(
                unit: &Unit<'_>,
                partitions: Range<usize>,
                partials: Option<&mut [f32]>,
                scratch: &mut Scratch<'_>,
            ) {
                // SAFETY: the features are enabled here.
                unsafe { attend::<Online<$single>, Online<$pairs>>(unit, partitions, partials, scratch) }
            }

            #[target_feature(enable = $features)]
            unsafe fn write_head(write: &Write<'_>, head: usize) {
                // SAFETY: the caller's obligation is the same.
                unsafe { kv::write_head(write, head) }
            }

            KvTable { attend: attend_with_features, write_head }
        };
    };
}

table!(
    /// AVX2 with FMA and F16C.
    AVX2, "avx2,fma,f16c", F32<__m256>, Widened<__m256>
);
table!(
    /// AVX-512 F, BW, DQ and VL.
    AVX512, "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c", F32<__m512>, Widened<__m512>
);
table!(
    /// AVX-512 with BF16.
    AVX512_BF16, "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c", F32<__m512>, Pairs
);

table!(
    /// AMX tiles, and AVX-512 for what is between them.
    AMX, "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c", F32<__m512>, Tiles<Amx>
);

impl Vector for __m512 {
    #[inline(always)]
    unsafe fn round_bf16(self) -> Self {
        // SAFETY: as the trait demands.
        unsafe {
            let upper = _mm512_set1_epi32(0xffff_0000_u32.cast_signed());
            _mm512_castsi512_ps(_mm512_and_si512(avx512::rounded_high(self), upper))
        }
    }
    #[inline(always)]
    unsafe fn spread_largest(self) -> Self {
        // SAFETY: as the trait demands.
        unsafe {
            let x = _mm512_max_ps(self, _mm512_shuffle_f32x4::<0b01_00_11_10>(self, self));
            let x = _mm512_max_ps(x, _mm512_shuffle_f32x4::<0b10_11_00_01>(x, x));
            let x = _mm512_max_ps(x, _mm512_permute_ps::<0b01_00_11_10>(x));
            _mm512_max_ps(x, _mm512_permute_ps::<0b10_11_00_01>(x))
        }
    }
    /// Two instructions take a number apart and put the result together, with nothing to bound: the fraction of an infinity is
    /// 0, and a scale below -149 gives 0. Coefficients: least greatest relative error of degree 5 on [0, 1], by Lawson's
    /// iteration; 1.4e-7 in f32.
    #[inline(always)]
    unsafe fn exp2(self) -> Self {
        // SAFETY: as the trait demands.
        unsafe {
            let r = _mm512_reduce_ps::<_MM_FROUND_TO_NEG_INF>(self);
            let mut p = Self::splat(1.867_132_5e-3);
            for c in [9.017_025e-3, 5.579_991_6e-2, 2.401_644_4e-1, 6.931_513e-1, 1.0] {
                p = p.fma(r, Self::splat(c));
            }
            _mm512_scalef_ps(p, self)
        }
    }
    #[inline(always)]
    unsafe fn with_sign_of(self, other: Self) -> Self {
        // SAFETY: as the trait demands.
        unsafe { _mm512_or_ps(self, _mm512_and_ps(other, _mm512_set1_ps(-0.0))) }
    }
}

impl Vector for __m256 {
    #[inline(always)]
    unsafe fn round_bf16(self) -> Self {
        // SAFETY: as the trait demands.
        unsafe {
            let upper = _mm256_set1_epi32(0xffff_0000_u32.cast_signed());
            _mm256_castsi256_ps(_mm256_and_si256(avx2::rounded_high(self), upper))
        }
    }
    #[inline(always)]
    unsafe fn spread_largest(self) -> Self {
        // SAFETY: as the trait demands.
        unsafe {
            let x = _mm256_max_ps(self, _mm256_permute2f128_ps::<1>(self, self));
            let x = _mm256_max_ps(x, _mm256_permute_ps::<0b01_00_11_10>(x));
            _mm256_max_ps(x, _mm256_permute_ps::<0b10_11_00_01>(x))
        }
    }
    #[inline(always)]
    unsafe fn with_sign_of(self, other: Self) -> Self {
        // SAFETY: as the trait demands.
        unsafe { _mm256_or_ps(self, _mm256_and_ps(other, _mm256_set1_ps(-0.0))) }
    }
}

/// bf16 by bf16, two products and a sum in one instruction; a row's word is a pair.
pub(crate) struct Pairs;

impl Product for Pairs {
    type V = __m512;
    type Element = u16;
    type Line = __m512bh;
    type Factor = __m512bh;

    const GROUP: usize = 2;
    const WORDS: usize = 1;
    const ROWS: usize = 6;
    const PANELS: usize = 4;

    #[inline(always)]
    unsafe fn line(from: *const u16) -> __m512bh {
        // SAFETY: as the trait demands; the types are 512 bits each.
        unsafe { std::mem::transmute::<__m512i, __m512bh>(_mm512_loadu_si512(from.cast())) }
    }
    #[inline(always)]
    unsafe fn factor(from: *const f32) -> __m512bh {
        // SAFETY: as the trait demands; the types are 512 bits each.
        unsafe { std::mem::transmute::<__m512i, __m512bh>(_mm512_set1_epi32(from.cast::<i32>().read())) }
    }
    #[inline(always)]
    unsafe fn add_product(factor: __m512bh, line: __m512bh, sum: __m512) -> __m512 {
        // SAFETY: as the trait demands.
        unsafe { _mm512_dpbf16_ps(sum, factor, line) }
    }
    #[inline(always)]
    unsafe fn pack(from: &[f32], to: &mut [f32]) {
        let (whole, rest) = from.as_chunks::<2>();
        for (to, x) in to.iter_mut().zip(whole) {
            *to = f32::from_bits(bf16_bits(x[0]) >> 16 | bf16_bits(x[1]));
        }
        to[whole.len()..].fill(0.0);
        if let [last] = rest {
            to[whole.len()] = f32::from_bits(bf16_bits(*last) >> 16);
        }
    }
    #[inline(always)]
    unsafe fn store_weights(weights: __m512, row: *mut f32, position: usize) {
        // SAFETY: as the trait demands; the types are 256 bits each.
        unsafe {
            let bits = std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(weights));
            _mm256_storeu_si256(row.cast::<u16>().add(position).cast(), bits);
        }
    }
}
