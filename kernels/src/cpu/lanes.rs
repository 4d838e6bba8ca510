//! A vector register of f32 lanes, so that a kernel is written once for several widths.

/// Bytes between what is read and what [`Lanes::prefetch_ahead`] asks for.
const AHEAD: usize = 8 << 10;
/// The same of [`Lanes::prefetch_in_order`].
const AHEAD_IN_ORDER: usize = 4 << 10;
/// Bytes of a cache line.
pub(crate) const LINE: usize = 64;

/// A vector of [`Lanes::N`] floats.
///
/// # Safety
/// All methods must be inlined into a function whose target features the implementation names.
pub(crate) trait Lanes: Copy {
    /// Number of lanes; divides 16.
    const N: usize;
    /// Rows of the matrix micro-kernel, as many as the register file holds beside two weight vectors.
    const ROWS: usize;

    /// Asks the second-level cache for a line; any address may be named. (Requests to the first level wait for its few
    /// miss buffers.)
    #[inline(always)]
    unsafe fn prefetch(_from: *const u8) {}
    /// Asks for what lies ahead of a group at `part`, two lines in each step, in the order of memory while both strips are
    /// read side by side: hardware does not prefetch these in time, and reads them at a third of the bandwidth (Zen 4).
    #[inline(always)]
    unsafe fn prefetch_ahead(part: *const u8, step: usize) {
        let ahead = part.wrapping_add(AHEAD + step * 2 * LINE);
        // SAFETY: as for the trait.
        unsafe {
            Self::prefetch(ahead);
            Self::prefetch(ahead.wrapping_add(LINE));
        }
    }
    /// Asks for a line ahead of one that is read in the order of memory: hardware does so too, but not far enough (a tenth of
    /// the bandwidth, Zen 4).
    #[inline(always)]
    unsafe fn prefetch_in_order(line: *const u8) {
        // SAFETY: as for the trait.
        unsafe { Self::prefetch(line.wrapping_add(AHEAD_IN_ORDER)) }
    }
    unsafe fn splat(value: f32) -> Self;
    unsafe fn load(from: *const f32) -> Self;
    unsafe fn load_f16(from: *const u16) -> Self;
    /// Loads N pairs of bf16: the even elements, the odd ones.
    unsafe fn load_pairs(from: *const u16) -> (Self, Self);
    unsafe fn store(self, to: *mut f32);
    unsafe fn add(self, other: Self) -> Self;
    unsafe fn sub(self, other: Self) -> Self;
    unsafe fn mul(self, other: Self) -> Self;
    unsafe fn div(self, other: Self) -> Self;
    /// `self * factor + addend`, rounded once.
    unsafe fn fma(self, factor: Self, addend: Self) -> Self;
    /// The larger; `other` where either is NaN.
    unsafe fn max(self, other: Self) -> Self;
    /// The smaller; `other` where either is NaN.
    unsafe fn min(self, other: Self) -> Self;
    /// Nearest integers, ties to even.
    unsafe fn round(self) -> Self;
    /// `self * 2^power` for integral powers from -126 to 127.
    unsafe fn scale_by_power(self, power: Self) -> Self;
    /// `self`, but 0 where `x < bound`.
    unsafe fn zero_where_below(self, x: Self, bound: Self) -> Self;
    /// The largest lane; no lane is not-a-number.
    unsafe fn largest(self) -> f32;
    /// Sum of the lanes as a tree of halves.
    unsafe fn sum(self) -> f32;

    /// `e^self`, within 2 ulp; 0 below -87.3 and for negative infinity.
    ///
    /// Range reduction and polynomial of the Cephes library's `expf`.
    #[inline(always)]
    unsafe fn exp(self) -> Self {
        const LOW: f32 = -87.3;
        // SAFETY: target features as for the trait.
        unsafe {
            // The bound first, so that NaN stays NaN.
            let x = Self::splat(88.3).min(Self::splat(LOW).max(self));
            let n = x.mul(Self::splat(std::f32::consts::LOG2_E)).round();
            let r = n.fma(Self::splat(-0.693_359_4), x);
            let r = n.fma(Self::splat(2.121_944_4e-4), r);
            let mut p = Self::splat(1.987_569_1e-4);
            for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
                p = p.fma(r, Self::splat(c));
            }
            let y = p.fma(r.mul(r), r).add(Self::splat(1.0));
            y.scale_by_power(n).zero_where_below(self, Self::splat(LOW))
        }
    }
}

/// Codes of quantised weights, four bytes to a lane, and 32-bit sums of their products.
///
/// # Safety
/// As for [`Lanes`].
pub(crate) trait Quads: Lanes {
    /// `4 N` bytes.
    type Codes: Copy;
    /// N sums.
    type Ints: Copy;

    unsafe fn codes(from: *const u8) -> Self::Codes;
    /// The low nibble of each byte.
    unsafe fn low(codes: Self::Codes) -> Self::Codes;
    /// The high nibble of each byte.
    unsafe fn high(codes: Self::Codes) -> Self::Codes;
    /// Adds `worth` to codes whose bit is set; the bits are `N / 2` bytes.
    unsafe fn with_bits(codes: Self::Codes, bits: *const u8, worth: u8) -> Self::Codes;
    unsafe fn ints(value: i32) -> Self::Ints;
    /// Adds to each sum the products of its four unsigned codes with four signed bytes, exactly.
    unsafe fn dot(sums: Self::Ints, codes: Self::Codes, x: i32) -> Self::Ints;
    /// As [`dot`](Self::dot), where VNNI is enabled too.
    #[inline(always)]
    unsafe fn dot_vnni(sums: Self::Ints, codes: Self::Codes, x: i32) -> Self::Ints {
        // SAFETY: as for the trait.
        unsafe { Self::dot(sums, codes, x) }
    }
    unsafe fn float(ints: Self::Ints) -> Self;
    /// The first to fourth bytes of all lanes as floats.
    unsafe fn bytes(codes: Self::Codes) -> [Self; 4];
    /// Rounds to the nearest integers, ties to even, which must fit 8 bits; stores them and returns their sum.
    unsafe fn store_bytes(self, to: *mut i8) -> i32;
    /// Rounds to bf16, ties to even, and stores N pairs.
    unsafe fn store_pairs(even: Self, odd: Self, to: *mut u16);
    /// As [`store_pairs`](Self::store_pairs), where AVX512-BF16 is enabled too; numbers below 2^-126 become 0.
    #[inline(always)]
    unsafe fn store_pairs_bf16(even: Self, odd: Self, to: *mut u16) {
        // SAFETY: as for the trait.
        unsafe { Self::store_pairs(even, odd, to) }
    }
    /// Loads N unsigned bytes as floats.
    unsafe fn load_u8(from: *const u8) -> Self;
    /// Loads N signed bytes as floats.
    unsafe fn load_i8(from: *const i8) -> Self;
}
