//! Means and percentiles of what was measured.

use serde::Serialize;

/// How a quantity is distributed; all 0 when there is none of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Distribution {
    /// Values.
    #[serde(skip)]
    pub n: usize,
    /// Arithmetic mean.
    pub mean: f64,
    /// Median.
    pub p50: f64,
    /// 90 % are no larger.
    pub p90: f64,
    /// 99 % are no larger.
    pub p99: f64,
}

impl Distribution {
    /// Whether there are no values, so that the rest says nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.n == 0
    }

    /// Summarises values, which are sorted in place.
    #[must_use]
    pub fn of(values: &mut [f64]) -> Self {
        values.sort_unstable_by(f64::total_cmp);
        let Some(last) = values.len().checked_sub(1) else { return Self::default() };
        // The smallest value that as many are not above (nearest rank).
        let at = |fraction: f64| values[((fraction * values.len() as f64).ceil() as usize).clamp(1, last + 1) - 1];
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        Self { n: values.len(), mean, p50: at(0.5), p90: at(0.9), p99: at(0.99) }
    }

    /// The mean of each over several runs.
    #[must_use]
    pub fn mean_of(all: &[Self]) -> Self {
        let mean = |of: fn(&Self) -> f64| all.iter().map(of).sum::<f64>() / all.len().max(1) as f64;
        Self {
            n: all.iter().map(|d| d.n).sum(),
            mean: mean(|d| d.mean),
            p50: mean(|d| d.p50),
            p90: mean(|d| d.p90),
            p99: mean(|d| d.p99),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_that_occurred() {
        let mut values: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        let found = Distribution::of(&mut values);
        assert_eq!((found.mean, found.p50, found.p90, found.p99), (50.5, 50.0, 90.0, 99.0));
        assert_eq!(Distribution::of(&mut [3.0]).p50, 3.0);
        assert_eq!(Distribution::of(&mut []), Distribution::default());
    }
}
