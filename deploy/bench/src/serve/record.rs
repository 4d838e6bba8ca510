//! What was seen of one request.

use std::time::{Duration, Instant};

use serde::Serialize;
use thiserror::Error;

use super::sse::{LineTooLong, Usage};

/// Why a request has no answer.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Failure {
    /// No connection could be made.
    #[error("cannot connect: {0}")]
    Connect(String),
    /// The answer's status is not a success.
    #[error("status {status}: {body}")]
    Status {
        /// The status.
        status: u16,
        /// What the server says.
        body: String,
    },
    /// The stream ended with an error, or the gRPC call did.
    #[error("the server gave up: {0}")]
    Stream(String),
    /// The connection ended before the stream.
    #[error("the connection ended early: {0}")]
    Disconnected(String),
    /// The answer is not a stream that we understand.
    #[error("the answer makes no sense: {0}")]
    Malformed(String),
    /// The deadline passed.
    #[error("no complete answer within {0:?}")]
    Timeout(Duration),
    /// We were told to stop; not the server's fault, and not counted as an error.
    #[error("interrupted")]
    Interrupted,
}

impl Failure {
    /// The kind that it is counted under.
    #[must_use]
    pub fn kind(&self) -> String {
        let kind = match self {
            Self::Status { status, .. } => return format!("status_{status}"),
            Self::Connect(_) => "connect",
            Self::Stream(_) => "stream",
            Self::Disconnected(_) => "disconnected",
            Self::Malformed(_) => "malformed",
            Self::Timeout(_) => "timeout",
            Self::Interrupted => "interrupted",
        };
        kind.to_owned()
    }
}

impl From<LineTooLong> for Failure {
    fn from(error: LineTooLong) -> Self {
        Self::Malformed(error.to_string())
    }
}

/// When the parts of an answer came.
#[derive(Clone, Debug)]
pub(crate) struct Timeline {
    start: Instant,
    first: Option<Instant>,
    last: Option<Instant>,
    gaps_ms: Vec<f32>,
    end: Option<Instant>,
    usage: Option<Usage>,
}

impl Timeline {
    /// An answer asked for at `start`, of about `n_parts`.
    pub(crate) fn new(start: Instant, n_parts: usize) -> Self {
        let gaps_ms = Vec::with_capacity(n_parts.min(1 << 16));
        Self { start, first: None, last: None, gaps_ms, end: None, usage: None }
    }

    /// A part with tokens came.
    pub(crate) fn part(&mut self, now: Instant) {
        if let Some(last) = self.last {
            self.gaps_ms.push(ms(now.saturating_duration_since(last)) as f32);
        }
        self.first.get_or_insert(now);
        self.last = Some(now);
    }

    /// The server told its token counts.
    pub(crate) fn usage(&mut self, usage: Usage) {
        self.usage = Some(usage);
    }

    /// The answer is complete.
    pub(crate) fn end(&mut self, now: Instant) {
        self.end.get_or_insert(now);
    }

    /// Begins anew, with the same start: the request is sent again.
    pub(crate) fn restart(&mut self) {
        *self = Self::new(self.start, self.gaps_ms.capacity());
    }

    pub(crate) fn is_ended(&self) -> bool {
        self.end.is_some()
    }

    pub(crate) fn has_parts(&self) -> bool {
        self.first.is_some()
    }
}

/// One request as it was measured.
#[derive(Clone, Debug, Serialize)]
pub struct Record {
    /// Start, in seconds after the point's beginning.
    pub start_s: f64,
    /// End or failure, in seconds after the point's beginning.
    pub end_s: f64,
    /// Time to the first part with tokens.
    pub ttft_ms: Option<f64>,
    /// Time per output token after the first; none with fewer than two tokens.
    pub tpot_ms: Option<f64>,
    /// Time to the end.
    pub e2e_ms: f64,
    /// Times between parts with tokens.
    #[serde(skip)]
    pub gaps_ms: Vec<f32>,
    /// Prompt tokens, by the server's count if it tells one.
    pub input_tokens: u64,
    /// Generated tokens, by the server's count if it tells one.
    pub output_tokens: u64,
    /// Whether fewer tokens came than were asked for.
    pub is_short: bool,
    /// Why there is no answer.
    #[serde(skip)]
    pub failure: Option<Failure>,
}

impl Record {
    /// Sums a request up; `began` is the point's beginning and `now` when the request was over.
    pub(crate) fn new(
        timeline: Timeline,
        (input_len, output_len): (u32, u32),
        failure: Option<Failure>,
        began: Instant,
        now: Instant,
    ) -> Self {
        let Timeline { start, first, last, gaps_ms, end, usage } = timeline;
        let n_parts = gaps_ms.len() as u64 + u64::from(first.is_some());
        let counted = usage.map(|usage| usage.completion_tokens).filter(|&n| n > 0);
        let output_tokens = counted.unwrap_or(n_parts);
        let input_tokens = usage.map(|usage| usage.prompt_tokens).filter(|&n| n > 0).unwrap_or(input_len.into());
        let tpot_ms = match (first, last) {
            (Some(first), Some(last)) if output_tokens > 1 && last > first => {
                Some(ms(last - first) / (output_tokens - 1) as f64)
            }
            _ => None,
        };
        let end = end.unwrap_or(now);
        Self {
            start_s: start.saturating_duration_since(began).as_secs_f64(),
            end_s: end.saturating_duration_since(began).as_secs_f64(),
            ttft_ms: first.map(|first| ms(first.saturating_duration_since(start))),
            tpot_ms,
            e2e_ms: ms(end.saturating_duration_since(start)),
            // There may be very many failures, and nobody looks at their gaps.
            gaps_ms: if failure.is_none() { gaps_ms } else { Vec::new() },
            input_tokens,
            output_tokens,
            is_short: failure.is_none() && output_tokens < output_len.into(),
            failure,
        }
    }
}

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_taken_from_parts_and_counts_from_the_server() {
        let began = daemon::clock::now();
        let at = |ms: u64| began + Duration::from_millis(ms);
        let mut timeline = Timeline::new(at(100), 4);
        [150, 160, 180].into_iter().for_each(|ms| timeline.part(at(ms)));
        timeline.usage(Usage { prompt_tokens: 9, completion_tokens: 4 });
        timeline.end(at(200));
        let record = Record::new(timeline.clone(), (8, 4), None, began, at(999));
        assert_eq!((record.ttft_ms, record.tpot_ms, record.e2e_ms), (Some(50.0), Some(10.0), 100.0));
        assert_eq!((record.input_tokens, record.output_tokens, record.is_short), (9, 4, false));
        assert_eq!(record.gaps_ms, [10.0, 20.0]);
        timeline.restart();
        let failed = Record::new(timeline, (8, 4), Some(Failure::Interrupted), began, at(300));
        assert_eq!((failed.ttft_ms, failed.output_tokens, failed.input_tokens, failed.e2e_ms), (None, 0, 8, 200.0));
    }
}
