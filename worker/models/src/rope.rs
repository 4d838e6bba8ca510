//! Rotary position embedding: frequencies under the scalings that published models use.

use std::f64::consts::PI;

use crate::config::CONTEXT_MAX;

/// Rotary embedding of one kind of layer.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    /// Base of the geometric series of wavelengths.
    pub theta: f64,
    /// Elements of a head that are rotated, from the first on.
    pub rotary_dim: usize,
    /// How frequencies were changed for longer contexts.
    pub scaling: RopeScaling,
}

/// Change of the frequencies for contexts longer than those of the first training.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// None.
    None,
    /// All positions divided by `factor`.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Llama 3.1: long wavelengths divided, short ones kept, those between interpolated.
    Llama3 {
        /// The divisor.
        factor: f64,
        /// Wavelengths above `original_context / low_frequency_factor` are divided.
        low_frequency_factor: f64,
        /// Wavelengths below `original_context / high_frequency_factor` are kept.
        high_frequency_factor: f64,
        /// Context of the first training.
        original_context: f64,
    },
    /// YaRN (Peng et al. 2023): a ramp over dimensions, and a factor on the scores.
    Yarn {
        /// The divisor.
        factor: f64,
        /// Context of the first training.
        original_context: f64,
        /// Rotations over that context above which a dimension is kept.
        beta_fast: f64,
        /// Rotations below which it is divided.
        beta_slow: f64,
        /// Whether the ramp's ends are rounded to whole dimensions.
        truncate: bool,
        /// Factor on cosines and sines.
        attention_factor: f64,
    },
}

impl RopeConfig {
    /// No scaling.
    pub fn plain(theta: f64, rotary_dim: usize) -> Self {
        Self { theta, rotary_dim, scaling: RopeScaling::None }
    }

    /// Angle per position of each pair of elements.
    pub fn frequencies(&self) -> Vec<f32> {
        let dim = self.rotary_dim as f64;
        let plain = |pair: usize| self.theta.powf(-2.0 * pair as f64 / dim);
        let frequency: Box<dyn Fn(usize) -> f64> = match self.scaling {
            RopeScaling::None => Box::new(plain),
            RopeScaling::Linear { factor } => Box::new(move |pair| plain(pair) / factor),
            RopeScaling::Llama3 { factor, low_frequency_factor, high_frequency_factor, original_context } => {
                Box::new(move |pair| {
                    let base = plain(pair);
                    let rotations = original_context * base / (2.0 * PI);
                    let span = high_frequency_factor - low_frequency_factor;
                    let kept = ((rotations - low_frequency_factor) / span).clamp(0.0, 1.0);
                    (1.0 - kept) * base / factor + kept * base
                })
            }
            RopeScaling::Yarn { factor, original_context, beta_fast, beta_slow, truncate, .. } => {
                let dimension =
                    |rotations: f64| dim * (original_context / (rotations * 2.0 * PI)).ln() / (2.0 * self.theta.ln());
                let (mut low, mut high) = (dimension(beta_fast), dimension(beta_slow));
                if truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                (low, high) = (low.max(0.0), high.min(dim - 1.0));
                if low == high {
                    high += 0.001;
                }
                Box::new(move |pair| {
                    let divided = ((pair as f64 - low) / (high - low)).clamp(0.0, 1.0);
                    plain(pair) * (divided / factor + (1.0 - divided))
                })
            }
        };
        (0..self.rotary_dim / 2).map(|pair| frequency(pair) as f32).collect()
    }

    /// Factor on cosines and sines.
    pub fn amplitude(&self) -> f32 {
        match self.scaling {
            RopeScaling::Yarn { attention_factor, .. } => attention_factor as f32,
            _ => 1.0,
        }
    }

    pub(crate) fn check(&self) -> Result<(), (&'static str, String, String)> {
        let above = |key, value: f64, bound: f64| {
            if value.is_finite() && value > bound {
                return Ok(());
            }
            Err((key, value.to_string(), format!("a number above {bound}")))
        };
        above("rope theta", self.theta, 1.0)?;
        self.check_scaling(above)?;
        // Numbers that are right each by itself can still give what no position can be turned by.
        above("rope amplitude", self.amplitude().into(), 0.0)?;
        check_frequencies(&self.frequencies())
            .map_err(|(pair, frequency)| ("rope frequency", format!("{frequency} of pair {pair}"), FREQUENCY.into()))
    }

    fn check_scaling<E>(&self, above: impl Fn(&'static str, f64, f64) -> Result<(), E>) -> Result<(), E> {
        match self.scaling {
            RopeScaling::None => Ok(()),
            RopeScaling::Linear { factor } => above("rope scaling factor", factor, 0.0),
            RopeScaling::Llama3 { factor, low_frequency_factor, high_frequency_factor, original_context } => {
                above("rope scaling factor", factor, 0.0)?;
                above("rope scaling low_freq_factor", low_frequency_factor, 0.0)?;
                above("rope scaling high_freq_factor", high_frequency_factor, low_frequency_factor)?;
                above("rope scaling original_max_position_embeddings", original_context, 0.0)
            }
            RopeScaling::Yarn { factor, original_context, beta_fast, beta_slow, attention_factor, .. } => {
                above("rope scaling factor", factor, 0.0)?;
                above("rope scaling original_max_position_embeddings", original_context, 0.0)?;
                above("rope scaling beta_slow", beta_slow, 0.0)?;
                above("rope scaling beta_fast", beta_fast, beta_slow)?;
                above("rope scaling attention_factor", attention_factor, 0.0)
            }
        }
    }
}

/// What [`check_frequencies`] asks for.
pub(crate) const FREQUENCY: &str = "at least 0, and finite at the last position of any context";

/// Checks that every position of any context has a finite angle.
///
/// # Errors
/// The first frequency that is wrong, after its index.
pub(crate) fn check_frequencies(frequencies: &[f32]) -> Result<(), (usize, f32)> {
    let right = |frequency: f32| frequency >= 0.0 && (frequency * CONTEXT_MAX as f32).is_finite();
    match frequencies.iter().copied().enumerate().find(|&(_, frequency)| !right(frequency)) {
        Some(wrong) => Err(wrong),
        None => Ok(()),
    }
}

/// YaRN's factor on the scores, as published: `0.1 scale ln(factor) + 1`.
pub(crate) fn yarn_attention_factor(factor: f64, scale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * scale * factor.ln() + 1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assert_near(actual: &[f32], expected: &[f32]) {
        assert_eq!(actual.len(), expected.len());
        for (a, e) in actual.iter().zip(expected) {
            assert!((a - e).abs() <= 1e-5 * e.abs(), "{actual:?} against {expected:?}");
        }
    }

    #[test]
    fn plain_and_linear_are_geometric_series() {
        let mut rope = RopeConfig::plain(10000.0, 8);
        assert_near(&rope.frequencies(), &[1.0, 0.1, 0.01, 0.001]);
        rope.scaling = RopeScaling::Linear { factor: 4.0 };
        assert_near(&rope.frequencies(), &[0.25, 0.025, 0.0025, 0.00025]);
    }

    #[test]
    fn only_frequencies_and_amplitudes_that_turn_every_position_are_accepted() {
        let check = |scaling| RopeConfig { theta: 10000.0, rotary_dim: 8, scaling }.check().map_err(|error| error.0);
        let linear = |factor| RopeScaling::Linear { factor };
        assert_eq!(check(linear(4.0)), Ok(()));
        assert_eq!(check(linear(0.25)), Ok(()));
        assert_eq!(check(linear(1e300)), Ok(()), "frequencies of 0 turn nothing");
        for factor in [1e-300, 1e-38, 1e-32] {
            assert_eq!(check(linear(factor)), Err("rope frequency"), "{factor}");
        }
        let llama3 = |factor, high_frequency_factor| RopeScaling::Llama3 {
            factor,
            low_frequency_factor: 1.0,
            high_frequency_factor,
            original_context: 8.0,
        };
        assert_eq!(check(llama3(8.0, 4.0)), Ok(()));
        assert_eq!(check(llama3(1e-300, 4.0)), Err("rope frequency"));
        let yarn = |factor, attention_factor| RopeScaling::Yarn {
            factor,
            original_context: 4.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            truncate: true,
            attention_factor,
        };
        assert_eq!(check(yarn(4.0, 1.1)), Ok(()));
        assert_eq!(check(yarn(1e-300, 1.1)), Err("rope frequency"));
        for attention_factor in [1e300, 1e-300] {
            assert_eq!(check(yarn(4.0, attention_factor)), Err("rope amplitude"));
        }
    }

    #[test]
    fn the_first_frequency_that_turns_nothing_is_named() {
        assert_eq!(check_frequencies(&[1.0, 0.0, 1e30]), Ok(()));
        for wrong in [-0.5, f32::INFINITY, 1e32] {
            assert_eq!(check_frequencies(&[1.0, wrong, 0.1]), Err((1, wrong)));
        }
        assert!(matches!(check_frequencies(&[f32::NAN]), Err((0, _))));
    }

    #[test]
    fn llama3_keeps_short_wavelengths_and_divides_long_ones() {
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_frequency_factor: 1.0,
            high_frequency_factor: 4.0,
            original_context: 128.0,
        };
        let rope = RopeConfig { theta: 10000.0, rotary_dim: 8, scaling };
        let rotations = 128.0 * 0.1 / (2.0 * PI);
        let kept = (rotations - 1.0) / 3.0;
        let middle = (0.1 * (kept + (1.0 - kept) / 8.0)) as f32;
        assert_near(&rope.frequencies(), &[1.0, middle, 0.01 / 8.0, 0.001 / 8.0]);
    }

    #[test]
    fn yarn_ramps_between_kept_and_divided_dimensions() {
        let scaling = RopeScaling::Yarn {
            factor: 4.0,
            original_context: 4096.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            truncate: true,
            attention_factor: yarn_attention_factor(4.0, 1.0),
        };
        let rope = RopeConfig { theta: 10000.0, rotary_dim: 64, scaling };
        let (scaled, plain) = (rope.frequencies(), RopeConfig::plain(10000.0, 64).frequencies());
        // ln(4096 / 64 pi) * 64 / (2 ln 10000) = 10.47, ln(4096 / 2 pi) * 64 / (2 ln 10000) = 22.51.
        assert_near(&scaled[..=10], &plain[..=10]);
        assert_near(&scaled[23..], &plain[23..].iter().map(|f| f / 4.0).collect::<Vec<_>>());
        assert!(scaled[16] < plain[16] && scaled[16] > plain[16] / 4.0);
        assert!((rope.amplitude() - 1.138_629_4).abs() < 1e-6);
    }
}
