//! Early rejection: what cannot be served in time is told so at once, and when to come back.

use contract::error::RequestError;
use thiserror::Error;

/// Longest time that a client is told to stay away, ten minutes.
const RETRY_AFTER_MS_MAX: u64 = 600_000;

/// What a request that comes now has before it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outlook {
    /// Tokens that will be placed before it.
    pub tokens_ahead: u64,
    /// Tokens per millisecond that all workers together take; not above 0 is unknown, and nothing is refused.
    pub tokens_per_ms: f64,
    /// Least predicted time to first token over the workers, in milliseconds, once it is placed.
    pub first_token_ms: f64,
}

/// No worker can have the first token in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("the first token is expected after {expected_ms} ms, more than the {allowed_ms} ms there are")]
pub struct Late {
    /// Predicted time to first token.
    pub expected_ms: u64,
    /// The goal, or what the deadline leaves.
    pub allowed_ms: u64,
    /// When what is ahead will have shrunk enough, if nothing else comes.
    pub retry_after_ms: u64,
}

impl Outlook {
    /// Judges a request with `left_ms` to its deadline, if it has one.
    ///
    /// A prompt that takes longer than the goal by itself may wait for as long as the goal.
    ///
    /// # Errors
    /// When the first token is expected after the goal or after the deadline.
    pub fn judge(&self, goal_ms: u64, left_ms: Option<u64>) -> Result<(), Late> {
        let (goal_ms, own_ms) = (goal_ms as f64, self.first_token_ms.max(0.0));
        let queue_ms = self.tokens_ahead as f64 / self.tokens_per_ms;
        let expected_ms = queue_ms + own_ms;
        let goal_ms = if own_ms > goal_ms { goal_ms + own_ms } else { goal_ms };
        let allowed_ms = left_ms.map_or(goal_ms, |left_ms| goal_ms.min(left_ms as f64));
        let is_known = self.tokens_per_ms > 0.0 && expected_ms.is_finite();
        if !is_known || expected_ms <= allowed_ms {
            return Ok(());
        }
        // Waiting shortens the queue and nothing else. Casts of floats saturate.
        let retry_after_ms = (expected_ms - allowed_ms).min(queue_ms).ceil() as u64;
        Err(Late {
            expected_ms: expected_ms.ceil() as u64,
            allowed_ms: allowed_ms as u64,
            retry_after_ms: retry_after_ms.clamp(1, RETRY_AFTER_MS_MAX),
        })
    }
}

impl From<Late> for RequestError {
    fn from(late: Late) -> Self {
        Self::Overloaded { reason: late.to_string(), retry_after_ms: late.retry_after_ms }
    }
}
