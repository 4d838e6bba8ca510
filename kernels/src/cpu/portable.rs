//! Kernels over arrays of eight floats, for targets without a file of their own: the compiler makes vectors of them.
//!
//! Multiplies and adds are rounded apart, since a fused one is a function call where the target lacks it.

use crate::cpu::lanes::{Lanes, Quads};
use crate::cpu::table::{Table, vector_table};
use crate::cpu::{Isa, dot, scalar};

/// Runs on every machine.
pub(crate) const TABLE: Table = Table { widen: scalar::widen, ..vector_table!(Isa::Portable, Array) };

/// Eight floats.
#[derive(Clone, Copy)]
pub(crate) struct Array([f32; 8]);

impl Array {
    #[inline(always)]
    fn map2(self, other: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        Self(std::array::from_fn(|i| f(self.0[i], other.0[i])))
    }
}

impl Lanes for Array {
    const N: usize = 8;
    const ROWS: usize = 2;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        Self([value; 8])
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: as the trait demands.
        Self(unsafe { from.cast::<[f32; 8]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        // SAFETY: as the trait demands.
        let bits = unsafe { from.cast::<[u16; 8]>().read_unaligned() };
        Self(bits.map(|bits| half::f16::from_bits(bits).to_f32()))
    }
    #[inline(always)]
    unsafe fn load_pairs(from: *const u16) -> (Self, Self) {
        // SAFETY: as the trait demands.
        let bits = unsafe { from.cast::<[u32; 8]>().read_unaligned() };
        let bits = bits.map(u32::from_le);
        (Self(bits.map(|bits| f32::from_bits(bits << 16))), Self(bits.map(|bits| f32::from_bits(bits & !0xffff))))
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: as the trait demands.
        unsafe { to.cast::<[f32; 8]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        self.map2(other, |a, b| a + b)
    }
    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        self.map2(other, |a, b| a - b)
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        self.map2(other, |a, b| a * b)
    }
    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        self.map2(other, |a, b| a / b)
    }
    #[inline(always)]
    unsafe fn fma(self, factor: Self, addend: Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i] * factor.0[i] + addend.0[i]))
    }
    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        self.map2(other, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    unsafe fn min(self, other: Self) -> Self {
        self.map2(other, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    unsafe fn round(self) -> Self {
        Self(self.0.map(dot::nearest))
    }
    #[inline(always)]
    unsafe fn scale_by_power(self, power: Self) -> Self {
        self.map2(power, |value, power| value * f32::from_bits(((power as i32 + 127) as u32) << 23))
    }
    #[inline(always)]
    unsafe fn zero_where_below(self, x: Self, bound: Self) -> Self {
        Self(std::array::from_fn(|i| if x.0[i] < bound.0[i] { 0.0 } else { self.0[i] }))
    }
    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        self.0.into_iter().fold(f32::NEG_INFINITY, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        let fours: [f32; 4] = std::array::from_fn(|i| self.0[i] + self.0[i + 4]);
        (fours[0] + fours[2]) + (fours[1] + fours[3])
    }
}

impl Quads for Array {
    type Codes = [u8; 32];
    type Ints = [i32; 8];

    #[inline(always)]
    unsafe fn codes(from: *const u8) -> [u8; 32] {
        // SAFETY: as the trait demands.
        unsafe { from.cast::<[u8; 32]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn low(codes: [u8; 32]) -> [u8; 32] {
        codes.map(|code| code & 15)
    }
    #[inline(always)]
    unsafe fn high(codes: [u8; 32]) -> [u8; 32] {
        codes.map(|code| code >> 4)
    }
    #[inline(always)]
    unsafe fn with_bits(codes: [u8; 32], bits: *const u8, worth: u8) -> [u8; 32] {
        // SAFETY: as the trait demands.
        let bits = unsafe { bits.cast::<[u8; 4]>().read_unaligned() };
        let mut codes = codes;
        for (codes, bits) in codes.chunks_exact_mut(8).zip(bits) {
            for (i, code) in codes.iter_mut().enumerate() {
                *code += (bits >> i & 1) * worth;
            }
        }
        codes
    }
    #[inline(always)]
    unsafe fn ints(value: i32) -> [i32; 8] {
        [value; 8]
    }
    #[inline(always)]
    unsafe fn dot(sums: [i32; 8], codes: [u8; 32], x: i32) -> [i32; 8] {
        let x = x.to_le_bytes();
        let mut sums = sums;
        for (sum, codes) in sums.iter_mut().zip(codes.chunks_exact(4)) {
            for (&code, &x) in codes.iter().zip(&x) {
                *sum += i32::from(code) * i32::from(x.cast_signed());
            }
        }
        sums
    }
    #[inline(always)]
    unsafe fn float(ints: [i32; 8]) -> Self {
        Self(ints.map(|int| int as f32))
    }
    #[inline(always)]
    unsafe fn bytes(codes: [u8; 32]) -> [Self; 4] {
        std::array::from_fn(|byte| Self(std::array::from_fn(|lane| f32::from(codes[4 * lane + byte]))))
    }
    #[inline(always)]
    unsafe fn store_bytes(self, to: *mut i8) -> i32 {
        let bytes = self.0.map(|value| dot::nearest_byte(value).cast_signed());
        // SAFETY: as the trait demands.
        unsafe { to.cast::<[i8; 8]>().write_unaligned(bytes) };
        bytes.into_iter().map(i32::from).sum()
    }
    #[inline(always)]
    unsafe fn store_pairs(even: Self, odd: Self, to: *mut u16) {
        let pairs: [[u16; 2]; 8] = std::array::from_fn(|i| [dot::to_bf16(even.0[i]), dot::to_bf16(odd.0[i])]);
        // SAFETY: as the trait demands.
        unsafe { to.cast::<[[u16; 2]; 8]>().write_unaligned(pairs) }
    }
    #[inline(always)]
    unsafe fn load_u8(from: *const u8) -> Self {
        // SAFETY: as the trait demands.
        Self(unsafe { from.cast::<[u8; 8]>().read_unaligned() }.map(f32::from))
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> Self {
        // SAFETY: as the trait demands.
        Self(unsafe { from.cast::<[i8; 8]>().read_unaligned() }.map(f32::from))
    }
}
