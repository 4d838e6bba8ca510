//! The router's table of the configuration document.

use std::path::PathBuf;
use std::time::Duration;

use contract::hash::HashKey;
use daemon::address::{check_advertise, check_listen, check_peers};
use daemon::announce::Announce;
use daemon::client::ChannelOptions;
use daemon::config::at_least_one;
use daemon::server::ServerConfig;
use membership::MembershipConfig;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};

use crate::admission::AdmissionSettings;
use crate::error::Error;
use crate::resume::Budget;
use crate::route::directory::PrefixDirectory;
use crate::route::placer::PlacerSettings;
use crate::route::{RoutePolicy, policy};

/// Everything a router is told.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Config {
    /// Its lasting name.
    pub id: String,
    /// Where gRPC listens.
    pub grpc: String,
    /// Where the OpenAI HTTP API listens.
    pub http: String,
    /// The address other members reach gRPC at; empty takes the one that is listened on.
    pub advertise: String,
    /// Model files: the tokenizer and chat template are read, weights are not.
    pub model: PathBuf,
    /// Name that clients ask for; empty takes the one the files suggest.
    pub model_name: String,
    /// Tokens in a KV block; absent takes the first worker's.
    #[serde(deserialize_with = "some_tokens")]
    pub block_size: Option<u32>,
    /// Secret of the cluster's prefix hashes, 64 hexadecimal digits.
    pub hash_key: String,
    /// How requests are placed, by the name of a policy.
    pub policy: String,
    /// Where members are found.
    pub membership: MembershipConfig,
    /// Schedulers, as HOST:PORT; any of them serves the view.
    pub scheduler_addresses: Vec<String>,
    /// What a request may be.
    pub limits: Limits,
    /// Who may ask for how much.
    pub admission: AdmissionSettings,
    /// How workers are placed on and watched.
    pub workers: WorkerSettings,
    /// Lets web pages of any origin call the HTTP API.
    pub cors: bool,
    /// Bounds of both listeners.
    pub server: ServerConfig,
    /// Who is told the addresses.
    #[serde(skip)]
    pub announce: Announce,
}

/// Bounds on requests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Limits {
    /// Requests that run at once; beyond it they are refused with a time to come back.
    #[serde(deserialize_with = "at_least_one")]
    pub n_in_flight_max: usize,
    /// Time after which a refused client may come back.
    pub retry_after_ms: u64,
    /// Largest body of a request.
    #[serde(deserialize_with = "at_least_one")]
    pub body_bytes_max: usize,
    /// Choices of one request, over all its prompts.
    #[serde(deserialize_with = "at_least_one")]
    pub n_choices_max: u32,
    /// Stop strings of one request.
    pub n_stops_max: usize,
    /// Longest stop string.
    pub stop_bytes_max: usize,
    /// Longest time for a request.
    #[serde(deserialize_with = "at_least_one")]
    pub request_timeout_ms: u64,
    /// Long texts that are tokenized at once.
    #[serde(deserialize_with = "at_least_one")]
    pub n_tokenizing_max: usize,
    /// Memory for the tokens of parts of long texts, so that what prompts share is tokenized once; 0 remembers nothing.
    pub tokenized_bytes_max: usize,
}

/// How workers are reached.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct WorkerSettings {
    /// Connections to workers and schedulers.
    pub channel: ChannelOptions,
    /// Placements of one choice at most before its first token.
    #[serde(deserialize_with = "at_least_one")]
    pub n_attempts_max: u32,
    /// Times that one choice goes on at another worker after its first token; 0 lets it end with its worker.
    pub n_migrations_max: u32,
    /// Longest wait of a request for a worker that is ready, where there is none.
    pub worker_wait_ms_max: u64,
    /// Longest wait for a worker to describe itself or to begin a watch.
    #[serde(deserialize_with = "at_least_one")]
    pub handshake_timeout_ms: u64,
    /// A watch that is silent for this long is made anew, and until then its worker gets nothing: three of its heartbeats.
    #[serde(deserialize_with = "silence_ms")]
    pub kv_silence_ms_max: u64,
    /// A scheduler that tells no view for this long is not followed until it does: three of its heartbeats.
    #[serde(deserialize_with = "silence_ms")]
    pub view_silence_ms_max: u64,
    /// Shortest wait before a lost watch is made anew.
    pub backoff_ms_min: u64,
    /// Longest such wait.
    pub backoff_ms_max: u64,
    /// Bound of the prefix directory, at least 64 KiB.
    #[serde(deserialize_with = "directory_bytes")]
    pub directory_bytes_max: usize,
    /// For so long blocks of a prompt just placed are taken for cached.
    pub promise_ms: u64,
    /// Longest time between two tokens that placement grants running requests, in milliseconds; 0 sets no goal.
    pub decode_ms_goal: u64,
    /// Predicted prefill work of an engine, in milliseconds over all routers, from which on requests wait here instead.
    #[serde(deserialize_with = "at_least_one")]
    pub dispatch_ahead_ms: u64,
    /// Tokens of a choice that wait for their client; one that is further behind is aborted.
    #[serde(deserialize_with = "at_least_one")]
    pub reader_tokens_max: u32,
    /// For so long room at a worker that is new is left to each that waits at another router and comes first; longer than
    /// it takes to hear of a placement, much shorter than `dispatch_ahead_ms`. 0 leaves none.
    pub give_way_ms: u64,
    /// Time for which placements of other routers still count when the scheduler that told them is lost.
    pub ledger_grace_ms: u64,
}

/// Reads a bound that leaves the prefix directory room for blocks.
fn directory_bytes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<usize, D::Error> {
    let bytes = usize::deserialize(deserializer)?;
    let least = PrefixDirectory::BYTES_MAX_LEAST;
    if bytes < least {
        Err(D::Error::custom(format!("directory_bytes_max is {bytes}; give at least {least}")))
    } else {
        Ok(bytes)
    }
}

/// Reads the tokens of a block, where they are given.
fn some_tokens<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u32>, D::Error> {
    at_least_one(deserializer).map(Some)
}

/// Least that is taken for silence, in milliseconds: a busy machine answers later than others.
const SILENCE_MS_LEAST: u64 = 100;

/// Reads how long a silence is borne.
fn silence_ms<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    let ms = u64::deserialize(deserializer)?;
    if ms < SILENCE_MS_LEAST {
        Err(D::Error::custom(format!("a silence of {ms} ms is too short; give at least {SILENCE_MS_LEAST}")))
    } else {
        Ok(ms)
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            id: "router-0".to_owned(),
            grpc: "127.0.0.1:50051".to_owned(),
            http: "127.0.0.1:8080".to_owned(),
            advertise: String::new(),
            model: PathBuf::new(),
            model_name: String::new(),
            block_size: None,
            hash_key: String::new(),
            policy: policy::DEFAULT.to_owned(),
            membership: MembershipConfig::default(),
            scheduler_addresses: Vec::new(),
            limits: Limits::default(),
            admission: AdmissionSettings::default(),
            workers: WorkerSettings::default(),
            cors: false,
            server: ServerConfig::default(),
            announce: Announce::default(),
        }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            n_in_flight_max: 4_096,
            retry_after_ms: 1_000,
            body_bytes_max: 8 << 20,
            n_choices_max: 128,
            n_stops_max: 16,
            stop_bytes_max: 1_024,
            request_timeout_ms: 3_600_000,
            n_tokenizing_max: 8,
            tokenized_bytes_max: 64 << 20,
        }
    }
}

impl Default for WorkerSettings {
    fn default() -> Self {
        Self {
            channel: ChannelOptions::default(),
            n_attempts_max: 3,
            n_migrations_max: 16,
            worker_wait_ms_max: 10_000,
            handshake_timeout_ms: 5_000,
            kv_silence_ms_max: 3_000,
            view_silence_ms_max: 3_000,
            backoff_ms_min: 50,
            backoff_ms_max: 2_000,
            directory_bytes_max: 256 << 20,
            promise_ms: 10_000,
            decode_ms_goal: 0,
            dispatch_ahead_ms: 200,
            reader_tokens_max: 16_384,
            give_way_ms: 15,
            ledger_grace_ms: 2_000,
        }
    }
}

impl WorkerSettings {
    /// A connection to a worker, which also calls that outlive the watch notice to be silent, within the same time.
    pub(crate) fn channel_to_worker(&self) -> ChannelOptions {
        let interval_ms = self.channel.keepalive_interval_ms.min(self.kv_silence_ms_max.div_ceil(3));
        let timeout_ms = self.channel.keepalive_timeout_ms.min(self.kv_silence_ms_max - self.kv_silence_ms_max / 3);
        ChannelOptions { keepalive_interval_ms: interval_ms, keepalive_timeout_ms: timeout_ms, ..self.channel.clone() }
    }

    /// How often one choice may be placed.
    pub(crate) fn budget(&self) -> Budget {
        Budget { n_attempts_max: self.n_attempts_max, n_migrations_max: self.n_migrations_max }
    }

    pub(crate) fn ledger_grace(&self) -> Duration {
        Duration::from_millis(self.ledger_grace_ms)
    }

    /// How requests are placed.
    pub(crate) fn placer(&self) -> PlacerSettings {
        let decode_ms_goal = if self.decode_ms_goal == 0 { f64::INFINITY } else { self.decode_ms_goal as f64 };
        PlacerSettings {
            promise: Duration::from_millis(self.promise_ms),
            decode_ms_goal,
            dispatch_ahead_ms: self.dispatch_ahead_ms as f64,
            give_way: Duration::from_millis(self.give_way_ms),
            directory_bytes_max: self.directory_bytes_max,
        }
    }
}

impl Config {
    /// Reads the hash key.
    ///
    /// # Errors
    /// When it is not 64 hexadecimal digits.
    pub fn key(&self) -> Result<HashKey, Error> {
        self.hash_key.parse().map_err(Error::HashKey)
    }

    /// The policy that is named.
    pub(crate) fn policy(&self) -> Result<&'static dyn RoutePolicy, Error> {
        policy::by_name(&self.policy).ok_or_else(|| Error::Policy {
            name: self.policy.clone(),
            known: policy::POLICIES.map(|policy| policy.name()).join(", "),
        })
    }

    /// Checks what can be judged before anything is opened.
    ///
    /// # Errors
    /// The first value that cannot work.
    pub fn check(&self) -> Result<(), Error> {
        membership::check_id(&self.id)?;
        check_listen("router.grpc", &self.grpc)?;
        check_listen("router.http", &self.http)?;
        check_advertise("router.advertise", &self.advertise)?;
        check_peers("router.scheduler_addresses", &self.scheduler_addresses)?;
        self.membership.check()?;
        let WorkerSettings { backoff_ms_min: least, backoff_ms_max: most, .. } = self.workers;
        if least > most {
            return Err(Error::Backoff { least, most });
        }
        self.policy()?;
        self.key().map(drop)
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use daemon::config::Document;

    use super::*;

    #[test]
    fn a_bound_that_lets_nothing_through_is_refused_by_its_name() {
        let bounds = [
            "limits.n_in_flight_max",
            "limits.body_bytes_max",
            "limits.n_choices_max",
            "limits.request_timeout_ms",
            "limits.n_tokenizing_max",
            "admission.first_token_goal_ms",
            "admission.wait_ms_max",
            "admission.order.patience_ms",
            "admission.queue.n_requests_max",
            "admission.queue.tokens_max",
            "admission.queue.n_requests_per_tenant_max",
            "admission.queue.tokens_per_tenant_max",
            "admission.queue.n_scan_max",
            "admission.queue.n_scan_per_tenant_max",
            "admission.default.weight",
            "admission.default.requests_per_minute",
            "admission.default.tokens_per_minute",
            "admission.default.n_concurrent_max",
            "admission.default.burst_s",
            "workers.n_attempts_max",
            "workers.handshake_timeout_ms",
            "workers.dispatch_ahead_ms",
            "block_size",
        ];
        for path in bounds {
            let read = |value: u32| {
                let document = Document::parse(&format!("router.{path} = {value}"), "test").unwrap();
                document.section::<Config>("router").map(drop)
            };
            read(1).unwrap();
            let error = read(0).unwrap_err();
            let key = path.rsplit_once('.').map_or(path, |(_, key)| key);
            assert!(error.source().unwrap().to_string().contains(key), "{path}: {error:?}");
        }
        let small = Document::parse("router.workers.directory_bytes_max = 65535", "test").unwrap();
        let error = small.section::<Config>("router").unwrap_err();
        assert!(error.source().unwrap().to_string().contains("directory_bytes_max is 65535; give at least 65536"));
        for path in ["kv_silence_ms_max", "view_silence_ms_max"] {
            let short = Document::parse(&format!("router.workers.{path} = 99"), "test").unwrap();
            let error = short.section::<Config>("router").unwrap_err();
            assert!(error.source().unwrap().to_string().contains("give at least 100"), "{error:?}");
        }
        let none = Document::parse("router.limits.n_stops_max = 0", "test").unwrap();
        assert!(none.section::<Config>("router").is_ok(), "no stop strings is a choice");
    }

    #[test]
    fn values_that_cannot_work_are_named_before_anything_is_opened() {
        let good = || Config { hash_key: "0a".repeat(32), ..Config::default() };
        good().check().unwrap();
        let waits = WorkerSettings { backoff_ms_min: 3_000, ..WorkerSettings::default() };
        let wrong = [
            (Config { hash_key: "zz".to_owned(), ..good() }, "router.hash_key has 2 characters"),
            (Config { id: " a".to_owned(), ..good() }, "\" a\""),
            (Config { grpc: "nowhere".to_owned(), ..good() }, "router.grpc \"nowhere\""),
            (Config { http: "a b:1".to_owned(), ..good() }, "router.http"),
            (Config { advertise: "0.0.0.0:1".to_owned(), ..good() }, "router.advertise"),
            (Config { scheduler_addresses: vec!["x".to_owned()], ..good() }, "router.scheduler_addresses \"x\""),
            (Config { policy: "luck".to_owned(), ..good() }, "router.policy \"luck\""),
            (Config { workers: waits, ..good() }, "backoff_ms_min is 3000"),
        ];
        for (config, what) in wrong {
            let error = config.check().unwrap_err();
            let text = format!("{error} {}", error.source().map(ToString::to_string).unwrap_or_default());
            assert!(text.contains(what), "{text}");
        }
    }
}
