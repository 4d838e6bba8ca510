//! Which of one tenant's requests goes first: the one whose virtual deadline is earliest.

use std::time::{Duration, Instant};

use daemon::config::at_least_one;
use serde::{Deserialize, Serialize};

/// Priorities go from minus this, the most urgent, to plus this; what is beyond counts as the bound.
pub const PRIORITY_MAX: i32 = 4;

/// How far one priority is ahead of the next, in patiences.
///
/// A virtual deadline is at most two patiences after arrival, so a more urgent request goes first unless the other has
/// waited for a patience longer.
const PATIENCES_PER_PRIORITY: i64 = 3;

/// The order inside one tenant.
///
/// A request's virtual deadline is its own deadline or the end of the tenant's patience, whichever is earlier, and
/// `slack` times its predicted prefill later; a priority moves it by a fixed time.
/// It never changes and those of later requests grow with the clock, so nothing waits for ever.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Order {
    /// Deadlines further away than this do not count.
    #[serde(deserialize_with = "at_least_one")]
    pub patience_ms: u32,
    /// 0 is earliest deadline, then first come; more lets short prefills overtake long ones that came up to `slack` times
    /// the difference earlier.
    pub slack: f64,
}

/// A request's place among those of its tenant: lower goes first.
pub(super) type Rank = (i64, u64);

impl Default for Order {
    fn default() -> Self {
        Self { patience_ms: 30_000, slack: 6.0 }
    }
}

impl Order {
    /// Virtual deadline in microseconds since `epoch`, from arrival, priority (lower is more urgent), deadline and predicted
    /// prefill.
    pub fn rank_us(
        &self,
        epoch: Instant,
        now: Instant,
        priority: i32,
        deadline: Option<Instant>,
        prefill_ms: f64,
    ) -> i64 {
        let patience_us = i64::from(self.patience_ms) * 1_000;
        let arrival_us = micros(epoch, now);
        let deadline_us = deadline.map_or(patience_us, |deadline| (micros(epoch, deadline) - arrival_us).max(0));
        // A cast of a float saturates, and what is no number counts as nothing.
        let slack_us = (self.slack.max(0.0) * prefill_ms.max(0.0) * 1e3) as i64;
        let priority = i64::from(priority.clamp(-PRIORITY_MAX, PRIORITY_MAX));
        arrival_us
            + deadline_us.min(patience_us)
            + slack_us.min(patience_us)
            + priority * PATIENCES_PER_PRIORITY * patience_us
    }
}

/// Signed microseconds from `epoch` to `at`, at most a century.
fn micros(epoch: Instant, at: Instant) -> i64 {
    const CENTURY_US: i64 = 100 * 366 * 86_400 * 1_000_000;
    let us = |span: Duration| i64::try_from(span.as_micros()).unwrap_or(CENTURY_US).min(CENTURY_US);
    us(at.saturating_duration_since(epoch)) - us(epoch.saturating_duration_since(at))
}
