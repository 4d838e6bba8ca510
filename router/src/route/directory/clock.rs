//! Time in milliseconds, as callers tell it.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Counts from the first present it is told.
#[derive(Debug, Default)]
pub(super) struct Clock {
    first: OnceLock<Instant>,
    latest_ms: AtomicU64,
}

impl Clock {
    /// Takes notice of the present.
    pub(super) fn see(&self, now: Instant) -> u64 {
        self.first.get_or_init(|| now);
        let now_ms = self.ms(now);
        self.latest_ms.fetch_max(now_ms, Ordering::Relaxed);
        now_ms
    }

    /// Another time in this clock's milliseconds, rounded down; 0 as long as it was told no present.
    pub(super) fn ms(&self, time: Instant) -> u64 {
        self.first.get().map_or(0, |&first| time.saturating_duration_since(first).as_millis() as u64)
    }

    /// The latest present it was told.
    pub(super) fn latest_ms(&self) -> u64 {
        self.latest_ms.load(Ordering::Relaxed)
    }
}
