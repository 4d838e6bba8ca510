//! How long to wait before trying again: doubling, bounded, jittered.

use std::time::Duration;

/// First wait.
const FIRST: Duration = Duration::from_millis(50);

/// Waits of one series of failures.
#[derive(Clone, Debug)]
pub(crate) struct Backoff {
    max: Duration,
    n_failures: u32,
}

impl Backoff {
    /// Starts a series whose waits never exceed `max`.
    pub(crate) fn new(max: Duration) -> Self {
        Self { max, n_failures: 0 }
    }

    /// Counts a failure and gives the wait after it: between half and all of the doubled bound, by `random`.
    pub(crate) fn fail(&mut self, random: u64) -> Duration {
        let bound = FIRST.saturating_mul(1 << self.n_failures.min(16)).min(self.max);
        self.n_failures = self.n_failures.saturating_add(1);
        let half = bound / 2;
        let nanos = u64::try_from(half.as_nanos()).unwrap_or(u64::MAX).saturating_add(1);
        half + Duration::from_nanos(random % nanos)
    }

    /// Whether the last failure is worth a line in the log: the first, then ever more seldom.
    pub(crate) fn is_worth_a_line(&self) -> bool {
        self.n_failures.is_power_of_two()
    }

    /// Ends the series.
    pub(crate) fn succeed(&mut self) {
        self.n_failures = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_stay_within_their_bound_and_start_again_after_success() {
        let mut backoff = Backoff::new(Duration::from_secs(2));
        let mut bound = FIRST;
        for random in [0, u64::MAX, 7, 1 << 40, 3, 5, 11, 13] {
            let wait = backoff.fail(random);
            assert!(bound / 2 <= wait && wait <= bound, "{wait:?} of {bound:?}");
            bound = (bound * 2).min(Duration::from_secs(2));
        }
        backoff.succeed();
        assert!(backoff.fail(u64::MAX) <= FIRST);
    }

    #[test]
    fn log_lines_get_seldom() {
        let mut backoff = Backoff::new(Duration::from_secs(2));
        let lines = (0..1_000).filter(|_| {
            backoff.fail(0);
            backoff.is_worth_a_line()
        });
        assert_eq!(lines.count(), 10);
    }
}
