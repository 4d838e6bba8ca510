//! A token bucket: a rate with a burst.

use std::time::Instant;

/// Lets through, in any window of `t` seconds, at most `burst + t · rate`, or the largest single request in place of the
/// burst if that is more: a request larger than the burst may go when the bucket is full, and what follows pays for it.
#[derive(Clone, Debug)]
pub(super) struct Bucket {
    rate_per_s: f64,
    burst: f64,
    level: f64,
    at: Instant,
}

/// What sums of floats are off by at most.
const ROUNDING: f64 = 1e-9;

impl Bucket {
    /// Makes a full bucket.
    pub(super) fn new(rate_per_s: f64, burst: f64, now: Instant) -> Self {
        Self { rate_per_s, burst, level: burst, at: now }
    }

    /// Takes `n` out.
    ///
    /// # Errors
    /// Milliseconds until it could be, at least 1; nothing was taken.
    pub(super) fn take(&mut self, now: Instant, n: f64) -> Result<(), u64> {
        self.refill(now);
        let missing = n.min(self.burst) - self.level;
        if missing > ROUNDING {
            // A cast of a float saturates.
            return Err((((missing - ROUNDING) / self.rate_per_s * 1e3).ceil() as u64).max(1));
        }
        self.level -= n;
        Ok(())
    }

    /// Gives `n` back, or takes more whatever the level when it is negative.
    pub(super) fn adjust(&mut self, now: Instant, n: f64) {
        self.refill(now);
        self.level = (self.level + n).min(self.burst);
    }

    /// Changes rate and burst; what is in the bucket stays, up to the new burst.
    pub(super) fn set(&mut self, now: Instant, rate_per_s: f64, burst: f64) {
        self.refill(now);
        (self.rate_per_s, self.burst) = (rate_per_s, burst);
        self.level = self.level.min(burst);
    }

    fn refill(&mut self, now: Instant) {
        let passed_s = now.saturating_duration_since(self.at).as_secs_f64();
        self.level = (self.level + passed_s * self.rate_per_s).min(self.burst);
        self.at = self.at.max(now);
    }
}
