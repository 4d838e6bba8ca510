//! Every metric of every role: name, unit, meaning, labels.
//!
//! Names follow OpenTelemetry: dots, lowercase, UCUM units, `gen_ai.*` where the semantic conventions have one.
//! Prometheus spells them with underscores, the unit as suffix, and `_total` for counters.
//! Label values are bounded sets: states and reasons, tenants that the configuration names, never ids or prompts.

/// What a metric measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Only grows.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Distribution over the metric's buckets.
    Histogram,
}

/// The unit of a metric's values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// A number of things, `{thing}` in UCUM; no suffix.
    Count,
    /// Seconds.
    Seconds,
    /// Bytes.
    Bytes,
}

/// One metric.
#[derive(Debug)]
pub struct Metric {
    /// Name in OpenTelemetry's spelling.
    pub name: &'static str,
    /// What it measures.
    pub kind: Kind,
    /// Unit of its values.
    pub unit: Unit,
    /// One sentence for people, without a full stop.
    pub help: &'static str,
    /// Label names in OpenTelemetry's spelling, in the order in which values are given.
    pub labels: &'static [&'static str],
    /// Upper bounds of a histogram's buckets; empty for the others.
    pub buckets: &'static [f64],
}

impl Metric {
    /// Spells the name as Prometheus does, without the `_total` that its text format adds to counters.
    #[must_use]
    pub fn prometheus_name(&self) -> String {
        let name = self.name.replace('.', "_");
        match self.unit {
            Unit::Count => name,
            Unit::Seconds => name + "_seconds",
            Unit::Bytes => name + "_bytes",
        }
    }
}

/// Attribute keys of spans, where the semantic conventions have one.
pub mod attribute {
    /// `chat`, `text_completion` or `embeddings`.
    pub const OPERATION: &str = "gen_ai.operation.name";
    /// Always [`PROVIDER_TESSERA`].
    pub const PROVIDER: &str = "gen_ai.provider.name";
    /// This system, as a provider.
    pub const PROVIDER_TESSERA: &str = "tessera";
    /// The model asked for.
    pub const REQUEST_MODEL: &str = "gen_ai.request.model";
    /// Tokens of the prompt.
    pub const INPUT_TOKENS: &str = "gen_ai.usage.input_tokens";
    /// Tokens generated.
    pub const OUTPUT_TOKENS: &str = "gen_ai.usage.output_tokens";
    /// Tokens of the prompt that came from the prefix cache.
    pub const CACHED_TOKENS: &str = "gen_ai.usage.cache_read.input_tokens";
    /// Why generation ended.
    pub const FINISH_REASONS: &str = "gen_ai.response.finish_reasons";
    /// The engine that a request was placed on.
    pub const ROUTE_ENGINE: &str = "tessera.route.engine";
    /// Why it was placed there.
    pub const ROUTE_REASON: &str = "tessera.route.reason";
    /// Tokens of the prompt that the router took for cached there.
    pub const ROUTE_CACHED_TOKENS: &str = "tessera.route.cached_tokens";
    /// Predicted milliseconds from placement to first token.
    pub const ROUTE_PREDICTED_MS: &str = "tessera.route.predicted_ms";
    /// What went wrong.
    pub const ERROR_TYPE: &str = "error.type";
}

/// Declares the metrics and the list of them all.
macro_rules! metrics {
    ($($(#[doc = $doc:literal])+ $const:ident = $kind:ident, $unit:ident, $name:literal, [$($label:literal),*], $help:literal $(, $buckets:expr)?;)*) => {
        $($(#[doc = $doc])+ pub static $const: Metric = Metric {
            name: $name,
            kind: Kind::$kind,
            unit: Unit::$unit,
            help: $help,
            labels: &[$($label),*],
            buckets: metrics!(@buckets $($buckets)?),
        };)*
        /// All metrics, in the order of this file.
        pub static ALL: &[&Metric] = &[$(&$const),*];
    };
    (@buckets) => { &[] };
    (@buckets $buckets:expr) => { $buckets };
}

/// Buckets for durations of single steps and calls, from 100 µs to 10 s.
const STEP_BUCKETS: &[f64] =
    &[0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];
/// Buckets for counts of tokens, powers of two.
const TOKEN_BUCKETS: &[f64] =
    &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0];

metrics! {
    /// Whole requests at the router; buckets of the semantic conventions.
    REQUEST_DURATION = Histogram, Seconds, "gen_ai.server.request.duration",
        ["gen_ai.operation.name", "gen_ai.request.model", "error.type"],
        "Time from receiving a request to its last token, by how it ended (empty error type: well)",
        &[0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92];
    /// Queue and prefill as the client feels it; buckets of the semantic conventions.
    TIME_TO_FIRST_TOKEN = Histogram, Seconds, "gen_ai.server.time_to_first_token",
        ["gen_ai.operation.name", "gen_ai.request.model"],
        "Time from receiving a request to its first token",
        &[0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0];
    /// Decode speed as the client feels it; buckets of the semantic conventions.
    TIME_PER_OUTPUT_TOKEN = Histogram, Seconds, "gen_ai.server.time_per_output_token",
        ["gen_ai.operation.name", "gen_ai.request.model"],
        "Time per token after the first, averaged over one request",
        &[0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5];
    /// Tokens that went in and out at the router; `kind` is input, cached or output.
    USAGE_TOKENS = Counter, Count, "tessera.usage.tokens", ["gen_ai.request.model", "kind"],
        "Tokens of requests: input, of these cached, and output";
    /// Requests at the router; `state` is queued or running.
    ROUTER_REQUESTS = Gauge, Count, "tessera.router.requests", ["state"],
        "Requests that the router holds, by state";
    /// Answers that went on at another worker; `reason` is the error's code that the worker before ended with.
    ROUTER_MIGRATIONS = Counter, Count, "tessera.router.migrations", ["reason"],
        "Choices that went on at another worker with the tokens they had, by what became of the one before";
    /// Of these, to a worker that need not compute the same tokens.
    ROUTER_MIGRATIONS_ACROSS = Counter, Count, "tessera.router.migrations_across_numerics", [],
        "Choices that went on at a worker whose weights, formats or instruction set differ, for want of an equal one";
    /// Placement decisions.
    ROUTE_DECISIONS = Counter, Count, "tessera.route.decisions", ["policy", "reason"],
        "Placement decisions, by policy and reason";
    /// How far predictions are off: the policy places by them.
    ROUTE_PREDICTION_ERROR = Histogram, Seconds, "tessera.route.prediction.error", [],
        "Difference between the predicted and the actual time from placement to first token", STEP_BUCKETS;
    /// Engines that the router knows; `state` is ready, stale or gone.
    ROUTE_ENGINES = Gauge, Count, "tessera.route.engines", ["state"],
        "Engines that the router knows, by state";
    /// Views of the cluster that schedulers told; `state` is taken or passed_over.
    ROUTE_VIEWS = Counter, Count, "tessera.route.views", ["state"],
        "Views of the cluster, by whether they count: of several schedulers the one that started last is followed";
    /// Workers that do not agree with the router about the model; each try counts.
    IDENTITY_MISMATCHES = Counter, Count, "tessera.route.identity_mismatches", [],
        "Handshakes with workers refused because model, tokenizer, block size or key differ";
    /// Requests refused before placement.
    ADMISSION_REJECTIONS = Counter, Count, "tessera.admission.rejections", ["reason"],
        "Requests refused before placement, by reason";
    /// Tokens that tenants are charged; `tenant` is a name of the configuration, or other.
    TENANT_TOKENS = Counter, Count, "tessera.admission.tokens", ["tenant"],
        "Uncached input tokens and output tokens, by tenant of the configuration";
    /// Blocks that the router's prefix directory knows.
    DIRECTORY_BLOCKS = Gauge, Count, "tessera.prefix_directory.blocks", [],
        "Block locations in the prefix directory";
    /// Memory of the router's prefix directory.
    DIRECTORY_MEMORY = Gauge, Bytes, "tessera.prefix_directory.memory", [],
        "Memory of the prefix directory";
    /// Blocks of prompts just placed that their engine did not store soon.
    DIRECTORY_PROMISES_MISSED = Counter, Count, "tessera.prefix_directory.promises_missed", [],
        "Blocks that an engine was credited with because their prompt was placed there, and did not store in time";
    /// Snapshots asked for because events were missed.
    KV_EVENT_RESYNCS = Counter, Count, "tessera.kv_events.resyncs", ["reason"],
        "Snapshots of a worker's cached blocks asked for, by reason";
    /// Requests in an engine; `state` is waiting or running.
    ENGINE_REQUESTS = Gauge, Count, "tessera.engine.requests", ["state"],
        "Requests in the engine, by state";
    /// One engine step.
    ENGINE_STEP_DURATION = Histogram, Seconds, "tessera.engine.step.duration", [],
        "Time of one engine step", STEP_BUCKETS;
    /// What a step costs beside its computation: planning that was not overlapped, hand-over, filling of inputs.
    ENGINE_STEP_OVERHEAD = Histogram, Seconds, "tessera.engine.step.overhead", [],
        "Time of one engine step in which neither the model nor the sampler computed, though there was work",
        &[0.000_005, 0.000_01, 0.000_02, 0.000_03, 0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.01, 0.1, 1.0];
    /// Tokens in one step; `phase` is prefill or decode.
    ENGINE_BATCH_TOKENS = Histogram, Count, "tessera.engine.batch.tokens", ["phase"],
        "Tokens computed in one engine step, by phase", TOKEN_BUCKETS;
    /// Sequences whose blocks were taken back.
    ENGINE_PREEMPTIONS = Counter, Count, "tessera.engine.preemptions", [],
        "Sequences preempted for want of blocks";
    /// Times that the engine stood still.
    ENGINE_STALLS = Counter, Count, "tessera.engine.stalls", [],
        "Times that a step, or the engine's answer to an event, took longer than it can";
    /// Requests that ended without finishing; `reason` is one of a closed set.
    ENGINE_ABORTS = Counter, Count, "tessera.engine.aborts", ["reason"],
        "Requests aborted in the engine, by reason";
    /// Weights on the device.
    MODEL_WEIGHTS = Gauge, Bytes, "tessera.model.weights", [],
        "Memory of the model's weights";
    /// The KV pool when all of it is in use.
    KV_CACHE_POOL = Gauge, Bytes, "tessera.kv_cache.pool", [],
        "Memory of the KV cache's pool, which is taken as blocks are used";
    /// Blocks of the pool; `state` is total, allocated, cached or free.
    KV_CACHE_BLOCKS = Gauge, Count, "tessera.kv_cache.blocks", ["state"],
        "Blocks of the KV cache, by state";
    /// Prompt tokens looked up in the prefix cache; `result` is hit or miss.
    KV_CACHE_PREFIX_TOKENS = Counter, Count, "tessera.kv_cache.prefix.tokens", ["result"],
        "Prompt tokens found in the prefix cache or not";
    /// Keys and values that moved between workers; `direction` is sent or received, `way` is tcp, pull or ring. What is
    /// pulled counts as sent when it is announced.
    KV_TRANSFER_BYTES = Counter, Bytes, "tessera.kv_transfer.moved", ["direction", "way"],
        "Keys and values moved between workers, by direction and way";
    /// Orders of a decode worker as they ended; `result` is ok or why not.
    KV_TRANSFER_FETCHES = Counter, Count, "tessera.kv_transfer.fetches", ["result"],
        "Prompts ordered from prefill workers, by how the transfer ended";
    /// Frames of blocks that nobody waited for.
    KV_TRANSFER_FRAMES_DROPPED = Counter, Count, "tessera.kv_transfer.frames.dropped", ["reason"],
        "Received frames of blocks that were not wanted, by reason";
    /// Leases kept; `state` is held or lost.
    MEMBERSHIP_LEASES = Gauge, Count, "tessera.membership.leases", ["state"],
        "Membership leases of this process, by state";
    /// Members that the scheduler sees.
    CLUSTER_MEMBERS = Gauge, Count, "tessera.cluster.members", ["kind"],
        "Members of the cluster, by kind";
    /// Engines of registered workers; `state` is reporting, silent, draining, stalled or refused.
    CLUSTER_ENGINES = Gauge, Count, "tessera.cluster.engines", ["state"],
        "Engines that the scheduler sees, by state";
    /// Workers kept out of the view; `reason` is identity or registration.
    CLUSTER_REFUSALS = Counter, Count, "tessera.cluster.refusals", ["reason"],
        "Workers that the scheduler refused, by reason";
    /// Occupancy reports that changed nothing; `reason` is unknown, incarnation, refused, order or blocks.
    OCCUPANCY_IGNORED = Counter, Count, "tessera.occupancy.ignored", ["reason"],
        "Occupancy reports that the scheduler ignored, by reason";
    /// Placements in the load ledger: at the scheduler those of all routers, at a router those of the others.
    LEDGER_PLACEMENTS = Gauge, Count, "tessera.ledger.placements", [],
        "Placements that have not ended, as routers tell each other over the scheduler";
    /// Routers that share the load ledger, this one among them.
    LEDGER_ROUTERS = Gauge, Count, "tessera.ledger.routers", [],
        "Routers that share the load ledger";
    /// Open connections.
    SERVER_CONNECTIONS = Gauge, Count, "tessera.server.connections", [],
        "Open connections of this listener";
    /// Calls and requests that run, streams included.
    SERVER_REQUESTS = Gauge, Count, "tessera.server.requests", [],
        "Requests in flight at this listener, streams included";
    /// What the server refused; `reason` is connections or requests.
    SERVER_REFUSALS = Counter, Count, "tessera.server.refusals", ["reason"],
        "Connections and requests refused because a bound was reached";
    /// Requests whose handler panicked.
    SERVER_PANICS = Counter, Count, "tessera.server.panics", [],
        "Requests whose handler panicked";
    /// Async tasks alive.
    RUNTIME_TASKS = Gauge, Count, "tessera.runtime.tasks", [],
        "Async tasks alive in the process";
    /// Open file descriptors.
    PROCESS_FILE_DESCRIPTORS = Gauge, Count, "process.unix.file_descriptor.count", [],
        "Open file descriptors of the process";
    /// Resident memory.
    PROCESS_MEMORY = Gauge, Bytes, "process.memory.usage", [],
        "Resident memory of the process";
    /// Time since start.
    PROCESS_UPTIME = Gauge, Seconds, "process.uptime", [],
        "Time since the process started";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_the_grammar_and_are_unique() {
        let mut seen = std::collections::BTreeSet::new();
        let word = |text: &str| {
            text.split('.').all(|part| {
                !part.is_empty() && part.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
            })
        };
        for metric in ALL {
            assert!(word(metric.name) && metric.labels.iter().all(|label| word(label)), "{}", metric.name);
            assert!(seen.insert(metric.prometheus_name()), "{} twice", metric.name);
            assert!(!metric.name.ends_with("total"), "{}", metric.name);
            assert!(!metric.help.is_empty() && !metric.help.ends_with('.'), "{}", metric.name);
            assert_eq!(metric.kind == Kind::Histogram, !metric.buckets.is_empty(), "{}", metric.name);
            assert!(metric.buckets.is_sorted(), "{}", metric.name);
        }
    }

    #[test]
    fn prometheus_spelling_appends_the_unit() {
        assert_eq!(TIME_TO_FIRST_TOKEN.prometheus_name(), "gen_ai_server_time_to_first_token_seconds");
        assert_eq!(KV_CACHE_BLOCKS.prometheus_name(), "tessera_kv_cache_blocks");
        assert_eq!(PROCESS_MEMORY.prometheus_name(), "process_memory_usage_bytes");
    }
}
