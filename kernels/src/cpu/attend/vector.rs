//! What attention asks of a vector register beside [`Lanes`].

use crate::cpu::lanes::Lanes;

/// Below this power of two a weight is 0.
const POWER_MIN: f32 = -126.0;

/// A vector of [`Lanes::N`] floats.
///
/// # Safety
/// As for [`Lanes`].
pub(crate) trait Vector: Lanes {
    /// Nearest bf16 values, ties to even; no lane is not-a-number.
    unsafe fn round_bf16(self) -> Self;
    /// The largest lane in all lanes.
    unsafe fn spread_largest(self) -> Self;

    /// `2^self`, within 4 ulp, for numbers up to 0; 1 for 0, 0 for negative infinity; below -126, 0 or what is below 2^-126.
    ///
    /// Polynomial: `1 + r q(r)`, `q` interpolates `(2^r - 1) / r` at Chebyshev nodes of [-0.5, 0.5].
    #[inline(always)]
    unsafe fn exp2(self) -> Self {
        // SAFETY: as for the trait.
        unsafe {
            // The bound first, so that NaN stays NaN.
            let x = Self::splat(POWER_MIN).max(self);
            let n = x.round();
            let r = n.fma(Self::splat(-1.0), x);
            let mut p = Self::splat(1.338_130_2e-3);
            for c in [9.666_368e-3, 5.550_381e-2, 2.402_235e-1, 6.931_472e-1, 1.0] {
                p = p.fma(r, Self::splat(c));
            }
            p.scale_by_power(n).zero_where_below(self, Self::splat(POWER_MIN))
        }
    }

    /// Hyperbolic tangent within 2e-7, as `1 - 2 / (2^(2 x log2 e) + 1)`.
    #[inline(always)]
    unsafe fn tanh(self) -> Self {
        // SAFETY: as for the trait.
        unsafe {
            // Of the negative magnitude, where `exp2` is good; beyond 20 the result is 1 anyway.
            let minus = self.min(self.mul(Self::splat(-1.0)));
            let e = minus.mul(Self::splat(2.0 * std::f32::consts::LOG2_E)).exp2();
            let magnitude = e.mul(Self::splat(-1.0)).add(Self::splat(1.0)).div(e.add(Self::splat(1.0)));
            magnitude.with_sign_of(self)
        }
    }

    /// Its magnitude with another's sign.
    unsafe fn with_sign_of(self, other: Self) -> Self;
}
