//! Means and percentiles of what was measured.

use serde::Serialize;

/// How a quantity is distributed; no number, and so null in JSON, when nothing was measured.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Distribution {
    /// Values measured.
    pub n: usize,
    /// Arithmetic mean.
    pub mean: f64,
    /// Median.
    pub p50: f64,
    /// 90 % are no larger.
    pub p90: f64,
    /// 99 % are no larger.
    pub p99: f64,
    /// Smallest.
    pub min: f64,
    /// Largest.
    pub max: f64,
}

impl Distribution {
    const NOTHING: Self =
        Self { n: 0, mean: f64::NAN, p50: f64::NAN, p90: f64::NAN, p99: f64::NAN, min: f64::NAN, max: f64::NAN };

    /// Summarises values, which are sorted in place; those that are not finite are left out.
    #[must_use]
    pub fn of(values: &mut Vec<f64>) -> Self {
        values.retain(|value| value.is_finite());
        values.sort_unstable_by(f64::total_cmp);
        let (Some(&min), Some(&max)) = (values.first(), values.last()) else { return Self::NOTHING };
        Self {
            n: values.len(),
            mean: values.iter().sum::<f64>() / values.len() as f64,
            p50: percentile(values, 0.5),
            p90: percentile(values, 0.9),
            p99: percentile(values, 0.99),
            min,
            max,
        }
    }
}

/// Median, smallest and largest of a few repetitions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Spread {
    /// Median.
    pub median: f64,
    /// Smallest.
    pub min: f64,
    /// Largest.
    pub max: f64,
}

impl Spread {
    /// Summarises repetitions; no number when there are none.
    #[must_use]
    pub fn of(mut values: Vec<f64>) -> Self {
        let Distribution { p50, min, max, .. } = Distribution::of(&mut values);
        Self { median: p50, min, max }
    }
}

/// The value at `fraction` (0..=1) of ascending values, interpolated linearly between ranks; 0 when there are none.
#[must_use]
pub fn percentile(sorted: &[f64], fraction: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else { return 0.0 };
    let place = fraction.clamp(0.0, 1.0) * last as f64;
    let below = place.floor() as usize;
    let above = (below + 1).min(last);
    sorted[below] + (sorted[above] - sorted[below]) * (place - below as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_interpolate_between_ranks() {
        let sorted = [1.0, 2.0, 3.0, 4.0];
        assert_eq!([0.0, 0.5, 1.0].map(|p| percentile(&sorted, p)), [1.0, 2.5, 4.0]);
        assert!((percentile(&sorted, 0.9) - 3.7).abs() < 1e-12);
        assert_eq!((percentile(&[], 0.5), percentile(&[5.0], 0.99)), (0.0, 5.0));
    }

    #[test]
    fn a_distribution_sorts_and_leaves_out_what_is_no_number() {
        let found = Distribution::of(&mut vec![3.0, f64::NAN, 1.0, 2.0]);
        assert_eq!((found.n, found.mean, found.p50, found.min, found.max), (3, 2.0, 2.0, 1.0, 3.0));
        assert!(found.p50 <= found.p90 && found.p90 <= found.p99 && found.p99 <= found.max);
        let nothing = serde_json::to_value(Distribution::of(&mut Vec::new())).unwrap();
        assert!(nothing["n"] == 0 && nothing["p50"].is_null() && nothing["max"].is_null(), "{nothing}");
    }
}
