//! Keeps what is sent below a number of bytes a second.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A link that operators share with others, or that a test makes slow.
#[derive(Debug)]
pub(super) struct Throttle {
    /// None is as fast as it goes.
    bytes_per_s: Option<u64>,
    /// When all bytes let through so far would have passed the link.
    free_at: Mutex<Option<Instant>>,
}

impl Throttle {
    pub(super) fn new(bytes_per_s: Option<u64>) -> Self {
        Self { bytes_per_s: bytes_per_s.filter(|&rate| rate > 0), free_at: Mutex::new(None) }
    }

    /// When `n_bytes` that come to the link at `now` have passed it, after all that came before them; none is at once.
    pub(super) fn passed_at(&self, n_bytes: u64, now: Instant) -> Option<Instant> {
        let takes = Duration::from_secs_f64(n_bytes as f64 / self.bytes_per_s? as f64);
        let mut free_at = self.free_at.lock().unwrap_or_else(PoisonError::into_inner);
        let passed_at = free_at.map_or(now, |free| free.max(now)) + takes;
        *free_at = Some(passed_at);
        Some(passed_at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_pass_one_after_the_other_and_an_idle_link_saves_nothing_up() {
        let start = daemon::clock::now();
        let at = |ms| start + Duration::from_millis(ms);
        let throttle = Throttle::new(Some(1_000));
        assert_eq!(throttle.passed_at(10, at(0)), Some(at(10)));
        assert_eq!(throttle.passed_at(10, at(5)), Some(at(20)));
        assert_eq!(throttle.passed_at(10, at(500)), Some(at(510)));
        assert_eq!(Throttle::new(None).passed_at(1 << 40, start), None);
    }
}
