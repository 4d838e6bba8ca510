//! The one place where the process reads a clock.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Reads the monotonic clock.
#[must_use]
#[expect(clippy::disallowed_methods, reason = "this is the module that the ban points to")]
pub fn now() -> Instant {
    Instant::now()
}

/// Reads the wall clock, in milliseconds since the Unix epoch; a clock set before 1970 reads as 0.
#[must_use]
#[expect(clippy::disallowed_methods, reason = "this is the module that the ban points to")]
pub fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    #[test]
    fn wall_clock_is_after_2020_and_monotonic_clock_does_not_go_back() {
        assert!(super::unix_ms() > 1_577_836_800_000);
        let first = super::now();
        assert!(super::now() >= first);
    }
}
