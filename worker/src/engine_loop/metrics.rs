//! The engine's metrics, kept as handles so that a step takes no lock and formats nothing.

use std::time::Duration;

use contract::cost::StepLoad;
use contract::error::RequestError;
use contract::occupancy::Occupancy;
use daemon::telemetry::metrics::{Counter, Gauge, Histogram, Scope, scope};
use daemon::telemetry::names;
use engine::Counters;

/// Handles and what they were last told.
pub(super) struct Metrics {
    scope: Scope,
    waiting: Gauge,
    running: Gauge,
    /// total, allocated, cached, free
    blocks: [Gauge; 4],
    step_duration: Histogram,
    step_overhead: Histogram,
    prefill_tokens: Histogram,
    decode_tokens: Histogram,
    preemptions: Counter,
    prefix_hits: Counter,
    prefix_misses: Counter,
    counted: Counters,
}

impl Metrics {
    pub(super) fn new(worker: &str) -> Self {
        let scope = scope("worker", worker);
        let blocks = ["total", "allocated", "cached", "free"];
        Self {
            waiting: scope.gauge(&names::ENGINE_REQUESTS, &["waiting"]),
            running: scope.gauge(&names::ENGINE_REQUESTS, &["running"]),
            blocks: blocks.map(|state| scope.gauge(&names::KV_CACHE_BLOCKS, &[state])),
            step_duration: scope.histogram(&names::ENGINE_STEP_DURATION, &[]),
            step_overhead: scope.histogram(&names::ENGINE_STEP_OVERHEAD, &[]),
            prefill_tokens: scope.histogram(&names::ENGINE_BATCH_TOKENS, &["prefill"]),
            decode_tokens: scope.histogram(&names::ENGINE_BATCH_TOKENS, &["decode"]),
            preemptions: scope.counter(&names::ENGINE_PREEMPTIONS, &[]),
            prefix_hits: scope.counter(&names::KV_CACHE_PREFIX_TOKENS, &["hit"]),
            prefix_misses: scope.counter(&names::KV_CACHE_PREFIX_TOKENS, &["miss"]),
            counted: Counters::default(),
            scope,
        }
    }

    /// Counts a request that ended badly.
    pub(super) fn aborted(&self, error: &RequestError) {
        self.scope.counter(&names::ENGINE_ABORTS, &[error.code()]).inc();
    }

    /// Counts a step, the time it took and the time lost around its kernels.
    pub(super) fn stepped(&self, load: &StepLoad, took: Duration, overhead: Duration) {
        self.step_duration.observe(took.as_secs_f64());
        self.step_overhead.observe(overhead.as_secs_f64());
        let tokens = [(&self.prefill_tokens, load.prefill_tokens), (&self.decode_tokens, load.decode_sequences)];
        for (histogram, n_tokens) in tokens {
            if n_tokens > 0 {
                histogram.observe(n_tokens as f64);
            }
        }
    }

    /// Shows the engine's state and what was counted since the last call.
    pub(super) fn observe(&mut self, occupancy: &Occupancy, counters: Counters) {
        self.waiting.set(occupancy.requests_waiting.into());
        self.running.set(occupancy.requests_running.into());
        let blocks = occupancy.blocks;
        let values = [blocks.total, blocks.allocated, blocks.cached, blocks.free];
        for (gauge, value) in self.blocks.iter().zip(values) {
            gauge.set(value.into());
        }
        self.preemptions.inc_by(counters.preemptions - self.counted.preemptions);
        self.prefix_hits.inc_by(counters.prefix_hit_tokens - self.counted.prefix_hit_tokens);
        self.prefix_misses.inc_by(counters.prefix_miss_tokens - self.counted.prefix_miss_tokens);
        self.counted = counters;
    }
}
