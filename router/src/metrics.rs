//! What a router counts.

use std::time::Duration;

use contract::error::RequestError;
use daemon::telemetry::metrics::{Counter, Gauge, Histogram, Scope, scope};
use daemon::telemetry::names;

use crate::generate::Operation;
use crate::route::Reason;

/// The metrics of one router.
#[derive(Debug)]
pub(crate) struct Metrics {
    scope: Scope,
    model: String,
    /// Decisions by reason, then those about requests that were placed before.
    placed: [Counter; Reason::ALL.len() + 1],
    pub(crate) running: Gauge,
    /// Requests that wait to be placed.
    pub(crate) queued: Gauge,
    pub(crate) engines_ready: Gauge,
    pub(crate) engines_stale: Gauge,
    /// Views that count, and views that do not.
    views: [Counter; 2],
    pub(crate) directory_blocks: Gauge,
    pub(crate) ledger_placements: Gauge,
    pub(crate) ledger_routers: Gauge,
    pub(crate) directory_bytes: Gauge,
    pub(crate) promises_missed: Counter,
    pub(crate) mismatches: Counter,
    migrations_across: Counter,
    prediction_error: Histogram,
    input: Counter,
    cached: Counter,
    output: Counter,
    first_token: [Histogram; 2],
    per_token: [Histogram; 2],
    duration: [Histogram; 2],
}

/// Counts one thing for as long as it lives.
#[derive(Debug)]
pub(crate) struct Counted(Gauge);

impl Metrics {
    pub(crate) fn new(router: &str, model: &str, policy: &'static str) -> Self {
        let scope = scope("router", router);
        let of = |metric, values: fn(&'static str, &str) -> Vec<String>| {
            [Operation::Completion, Operation::Chat].map(|operation| {
                let values = values(operation.name(), model);
                scope.histogram(metric, &values.iter().map(String::as_str).collect::<Vec<_>>())
            })
        };
        let two = |operation: &'static str, model: &str| vec![operation.to_owned(), model.to_owned()];
        let three = |operation: &'static str, model: &str| vec![operation.to_owned(), model.to_owned(), String::new()];
        Self {
            running: scope.gauge(&names::ROUTER_REQUESTS, &["running"]),
            queued: scope.gauge(&names::ROUTER_REQUESTS, &["queued"]),
            engines_ready: scope.gauge(&names::ROUTE_ENGINES, &["ready"]),
            engines_stale: scope.gauge(&names::ROUTE_ENGINES, &["stale"]),
            views: ["taken", "passed_over"].map(|state| scope.counter(&names::ROUTE_VIEWS, &[state])),
            directory_blocks: scope.gauge(&names::DIRECTORY_BLOCKS, &[]),
            ledger_placements: scope.gauge(&names::LEDGER_PLACEMENTS, &[]),
            ledger_routers: scope.gauge(&names::LEDGER_ROUTERS, &[]),
            directory_bytes: scope.gauge(&names::DIRECTORY_MEMORY, &[]),
            promises_missed: scope.counter(&names::DIRECTORY_PROMISES_MISSED, &[]),
            mismatches: scope.counter(&names::IDENTITY_MISMATCHES, &[]),
            migrations_across: scope.counter(&names::ROUTER_MIGRATIONS_ACROSS, &[]),
            prediction_error: scope.histogram(&names::ROUTE_PREDICTION_ERROR, &[]),
            input: scope.counter(&names::USAGE_TOKENS, &[model, "input"]),
            cached: scope.counter(&names::USAGE_TOKENS, &[model, "cached"]),
            output: scope.counter(&names::USAGE_TOKENS, &[model, "output"]),
            first_token: of(&names::TIME_TO_FIRST_TOKEN, two),
            per_token: of(&names::TIME_PER_OUTPUT_TOKEN, two),
            duration: of(&names::REQUEST_DURATION, three),
            placed: std::array::from_fn(|index| {
                let reason = Reason::ALL.get(index).map_or("replaced", |reason| reason.name());
                scope.counter(&names::ROUTE_DECISIONS, &[policy, reason])
            }),
            scope,
            model: model.to_owned(),
        }
    }

    /// Counts a request as running until the result is dropped.
    pub(crate) fn run(&self) -> Counted {
        self.running.inc();
        Counted(self.running.clone())
    }

    /// Counts a decision; one for a request that was placed before counts apart, whatever its reason.
    pub(crate) fn placed(&self, reason: Reason, is_again: bool) {
        let (again, first) = self.placed.split_last().expect("there is one more than reasons");
        let counter = if is_again { again } else { &first[reason as usize] };
        counter.inc();
    }

    /// Counts a choice that goes on elsewhere after `why`, at a worker whose numerics are the same or not.
    pub(crate) fn migrated(&self, why: &RequestError, is_across: bool) {
        self.scope.counter(&names::ROUTER_MIGRATIONS, &[why.code()]).inc();
        self.migrations_across.inc_by(u64::from(is_across));
    }

    /// Notes how far a predicted time to first token was off.
    pub(crate) fn predicted(&self, actual_ms: f64, predicted_ms: f64) {
        self.prediction_error.observe((actual_ms - predicted_ms).abs() / 1e3);
    }

    pub(crate) fn refused(&self, error: &RequestError) {
        self.scope.counter(&names::ADMISSION_REJECTIONS, &[error.code()]).inc();
    }

    /// The counter of tokens charged to tenants of one label.
    pub(crate) fn tenant_tokens(&self, label: &str) -> Counter {
        self.scope.counter(&names::TENANT_TOKENS, &[label])
    }

    /// Counts a view of a scheduler's, which is followed or not.
    pub(crate) fn view(&self, is_taken: bool) {
        self.views[usize::from(!is_taken)].inc();
    }

    pub(crate) fn resync(&self, reason: &'static str) {
        self.scope.counter(&names::KV_EVENT_RESYNCS, &[reason]).inc();
    }

    pub(crate) fn first_token(&self, operation: Operation, after: Duration) {
        self.first_token[operation as usize].observe(after.as_secs_f64());
    }

    /// Counts a request that ended well.
    pub(crate) fn finished(&self, operation: Operation, times: Times, tokens: Tokens) {
        self.duration[operation as usize].observe(times.whole.as_secs_f64());
        if let Some(first) = times.first_token.filter(|_| tokens.output_longest > 1) {
            let each = times.whole.saturating_sub(first).as_secs_f64() / f64::from(tokens.output_longest - 1);
            self.per_token[operation as usize].observe(each);
        }
        self.count(tokens);
    }

    /// Counts a request that ended badly.
    pub(crate) fn failed(&self, operation: Operation, whole: Duration, error: &'static str, tokens: Tokens) {
        let labels = [operation.name(), &self.model, error];
        self.scope.histogram(&names::REQUEST_DURATION, &labels).observe(whole.as_secs_f64());
        self.count(tokens);
    }

    fn count(&self, tokens: Tokens) {
        self.input.inc_by(tokens.input);
        self.cached.inc_by(tokens.cached);
        self.output.inc_by(tokens.output);
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// How long a request took.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    pub(crate) whole: Duration,
    pub(crate) first_token: Option<Duration>,
}

/// What a request was charged for.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tokens {
    pub(crate) input: u64,
    pub(crate) cached: u64,
    pub(crate) output: u64,
    /// Of the longest choice.
    pub(crate) output_longest: u32,
}
