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

/// Very many times, counted by size: percentiles are off by 1 % at most, the mean is right.
#[derive(Clone, Debug, Default)]
pub(crate) struct Gaps {
    counts: Vec<u64>,
    n: u64,
    sum: f64,
}

/// Times up to this are not told apart, in seconds.
const GAP_MIN: f64 = 1e-5;
const GAP_STEP: f64 = 1.01;

impl Gaps {
    pub(crate) fn add(&mut self, seconds: f64) {
        let bucket = (seconds.max(GAP_MIN) / GAP_MIN).ln() / GAP_STEP.ln();
        let bucket = bucket.round() as usize;
        if bucket >= self.counts.len() {
            self.counts.resize(bucket + 1, 0);
        }
        self.counts[bucket] += 1;
        self.n += 1;
        self.sum += seconds;
    }

    pub(crate) fn distribution(&self) -> Distribution {
        if self.n == 0 {
            return Distribution::default();
        }
        let at = |fraction: f64| {
            let mut left = (fraction * self.n as f64).ceil() as u64;
            let reaches = |&count: &u64| {
                left = left.saturating_sub(count);
                left == 0
            };
            GAP_MIN * GAP_STEP.powi(self.counts.iter().position(reaches).unwrap_or(0) as i32)
        };
        Distribution { n: self.n as usize, mean: self.sum / self.n as f64, p50: at(0.5), p90: at(0.9), p99: at(0.99) }
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

    #[test]
    fn counted_times_have_nearly_the_same_percentiles() {
        let mut gaps = Gaps::default();
        (1..=100).map(f64::from).for_each(|seconds| gaps.add(seconds));
        let found = gaps.distribution();
        assert_eq!((found.n, found.mean), (100, 50.5));
        for (found, right) in [(found.p50, 50.0), (found.p90, 90.0), (found.p99, 99.0)] {
            assert!((found / right - 1.0).abs() < 0.01, "{found} for {right}");
        }
        assert_eq!(Gaps::default().distribution(), Distribution::default());
    }
}
