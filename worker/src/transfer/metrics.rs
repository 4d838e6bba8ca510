//! What transfers count, kept as handles.

use daemon::telemetry::metrics::{Counter, Scope, scope};
use daemon::telemetry::names;

use super::Way;
use super::receive::Unwanted;

/// Counters of one worker.
#[derive(Debug)]
pub(super) struct Metrics {
    scope: Scope,
    /// By [`Way`].
    sent: [Counter; 3],
    received: [Counter; 3],
    /// By [`Unwanted`].
    dropped: [Counter; 3],
}

impl Metrics {
    pub(super) fn new(worker: &str) -> Self {
        let scope = scope("worker", worker);
        let ways = ["tcp", "pull", "ring"];
        Self {
            sent: ways.map(|way| scope.counter(&names::KV_TRANSFER_BYTES, &["sent", way])),
            received: ways.map(|way| scope.counter(&names::KV_TRANSFER_BYTES, &["received", way])),
            dropped: ["stale", "not_reserved", "out_of_order"]
                .map(|reason| scope.counter(&names::KV_TRANSFER_FRAMES_DROPPED, &[reason])),
            scope,
        }
    }

    pub(super) fn sent(&self, way: Way, n_bytes: u64) {
        self.sent[way as usize].inc_by(n_bytes);
    }

    pub(super) fn received(&self, way: Way, n_bytes: u64) {
        self.received[way as usize].inc_by(n_bytes);
    }

    pub(super) fn dropped(&self, reason: Unwanted) {
        self.dropped[reason as usize].inc();
    }

    /// Frames dropped so far.
    #[cfg(test)]
    pub(super) fn n_dropped(&self, reason: Unwanted) -> u64 {
        self.dropped[reason as usize].get()
    }

    pub(super) fn fetched(&self, result: &'static str) {
        self.scope.counter(&names::KV_TRANSFER_FETCHES, &[result]).inc();
    }
}
