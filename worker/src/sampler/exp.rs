//! Exponential and logarithm from additions and multiplications alone, so that every platform rounds alike.

/// Below this the result is 0; the true value is under 2⁻¹²⁵.
const LOWEST: f32 = -87.0;

/// `e^x` for `x <= 0`, relative error below 3e-7; 0 below [`LOWEST`] and for what is not a number.
///
/// Cody and Waite's reduction by multiples of ln 2, then the polynomial of Cephes' `expf`.
pub(super) fn exp(x: f32) -> f32 {
    /// Adding and taking away 1.5 · 2²³ rounds to the nearest integer.
    const ROUND: f32 = 12_582_912.0;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let inside = x >= LOWEST;
    let x = if inside { x } else { 0.0 };
    let n = (x * std::f32::consts::LOG2_E + ROUND) - ROUND;
    let r = x - n * LN2_HIGH - n * LN2_LOW;
    let p = 1.987_569_1e-4;
    let p = p * r + 1.398_199_9e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 1.666_666_5e-1;
    let p = p * r + 0.5;
    let value = p * (r * r) + r + 1.0;
    let power = f32::from_bits(((n as i32 + 127) as u32) << 23);
    if inside { value * power } else { 0.0 }
}

/// Natural logarithm of a positive normal number, error below 1e-14 of the result's size plus one.
///
/// The exponent times ln 2, plus `2 atanh((m - 1) / (m + 1))` of the mantissa as a series.
pub(super) fn ln(x: f64) -> f64 {
    if !(x.is_finite() && x >= f64::MIN_POSITIVE) {
        return if x == 0.0 { f64::NEG_INFINITY } else { f64::NAN };
    }
    let bits = x.to_bits();
    let mut exponent = ((bits >> 52) & 0x7ff) as i64 - 1023;
    let mut mantissa = f64::from_bits((bits & ((1 << 52) - 1)) | (1023 << 52));
    if mantissa > std::f64::consts::SQRT_2 {
        mantissa *= 0.5;
        exponent += 1;
    }
    let t = (mantissa - 1.0) / (mantissa + 1.0);
    let square = t * t;
    let mut term = t;
    let mut sum = 0.0;
    for k in 0..14 {
        sum += term / f64::from(2 * k + 1);
        term *= square;
    }
    exponent as f64 * std::f64::consts::LN_2 + 2.0 * sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_near_the_true_value_and_monotone_enough() {
        let mut x = 0.0_f32;
        while x > LOWEST {
            let (ours, truth) = (f64::from(exp(x)), f64::from(x).exp());
            assert!((ours / truth - 1.0).abs() < 3e-7, "{x}: {ours} {truth}");
            x -= 0.013_7;
        }
        assert_eq!((exp(0.0), exp(-100.0), exp(f32::NEG_INFINITY), exp(f32::NAN)), (1.0, 0.0, 0.0, 0.0));
    }

    #[test]
    fn ln_is_near_the_true_value() {
        for x in [1e-300, 0.1, 0.5, 1.0, 1.0 + 1e-12, 1.5, 2.0, 10.0, 49152.0, 1e300] {
            assert!((ln(x) - f64::ln(x)).abs() < 1e-14 * (1.0 + f64::ln(x).abs()), "{x}: {} {}", ln(x), f64::ln(x));
        }
        assert_eq!(ln(0.0), f64::NEG_INFINITY);
        assert!(ln(f64::NAN).is_nan() && ln(f64::INFINITY).is_nan());
    }
}
