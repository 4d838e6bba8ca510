//! What it costs to move blocks from and to this worker, by what it saw of late.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use daemon::clock;

/// After so long without a transfer what was seen counts half, so that a way that was slow is tried again.
const HALF_LIFE: Duration = Duration::from_secs(30);
/// What was seen before counts half after as many bytes, or after as long a time.
const WINDOW: (u64, Duration) = (64 << 20, Duration::from_secs(2));

/// Time that blocks take on their way, without what they wait for to be computed.
#[derive(Debug, Default)]
pub(crate) struct MoveCost {
    token_bytes: usize,
    seen: Mutex<Seen>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    n_bytes: f64,
    seconds: f64,
    at: Option<Instant>,
}

impl MoveCost {
    /// Nothing is known yet of tokens that have so many bytes.
    pub(super) fn new(token_bytes: usize) -> Self {
        Self { token_bytes, seen: Mutex::default() }
    }

    /// So many bytes took so long. One short lock.
    pub(super) fn note(&self, n_bytes: u64, took: Duration) {
        self.note_at(n_bytes, took, clock::now());
    }

    fn note_at(&self, n_bytes: u64, took: Duration, now: Instant) {
        let mut seen = self.lock();
        let (bytes_max, time_max) = (WINDOW.0 as f64, WINDOW.1.as_secs_f64());
        let is_much = seen.n_bytes > bytes_max || seen.seconds > time_max;
        let kept = seen.part_left(now) * if is_much { 0.5 } else { 1.0 };
        seen.n_bytes = kept * seen.n_bytes + n_bytes as f64;
        // Who stands still says nothing of the way.
        seen.seconds = kept * seen.seconds + took.as_secs_f64().min(time_max);
        seen.at = Some(now);
    }

    /// Milliseconds that a token takes; 0 where nothing is known.
    pub(crate) fn ms_per_token(&self) -> f64 {
        self.ms_per_token_at(clock::now())
    }

    fn ms_per_token_at(&self, now: Instant) -> f64 {
        let seen = *self.lock();
        1e3 * self.token_bytes as f64 * seen.seconds / seen.n_bytes.max(1.0) * seen.part_left(now)
    }

    fn lock(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Seen {
    /// What is left of it at `now`.
    fn part_left(&self, now: Instant) -> f64 {
        let age = self.at.map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        0.5_f64.powf(age.as_secs_f64() / HALF_LIFE.as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_way_that_becomes_slow_is_noticed_at_once_and_one_that_becomes_fast_soon() {
        let cost = MoveCost::new(1 << 20);
        assert!(cost.ms_per_token().abs() < f64::EPSILON, "nothing is known");
        for _ in 0..100 {
            cost.note(1 << 20, Duration::from_micros(500));
        }
        let fast = cost.ms_per_token();
        assert!((fast - 0.5).abs() < 0.01, "{fast} ms");
        cost.note(10_000, Duration::from_secs(3));
        let slow = cost.ms_per_token();
        assert!(slow > 20.0, "{slow} ms");
        for _ in 0..1_000 {
            cost.note(1 << 20, Duration::from_micros(500));
        }
        let fast = cost.ms_per_token();
        assert!(fast < 1.0, "{fast} ms");
    }

    #[test]
    fn a_way_that_was_slow_is_tried_again_and_counts_for_what_it_is_then() {
        let (cost, began) = (MoveCost::new(1 << 20), clock::now());
        cost.note_at(512 << 10, Duration::from_secs(60), began);
        let ms_at = |s| cost.ms_per_token_at(began + Duration::from_secs(s));
        assert!((ms_at(0) - 4_000.0).abs() < 1.0, "who stood still is slow for a moment: {}", ms_at(0));
        assert!((ms_at(30) - 2_000.0).abs() < 1.0 && ms_at(300) < 4.0);
        for _ in 0..64 {
            cost.note_at(1 << 20, Duration::from_micros(500), began + Duration::from_secs(300));
        }
        assert!(ms_at(300) < 1.0, "{}", ms_at(300));
    }
}
