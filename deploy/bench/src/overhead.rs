//! What a router adds: the same request through it and straight to its worker, in turn, at a fixed rate.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use contract::ids::{EngineId, RequestId};
use contract::request::{GenerateRequest, SamplingParams, StopParams};
use daemon::client::{AddressError, ChannelOptions, channel};
use daemon::clock;
use daemon::task::Tasks;
use proto::inference::v1 as inference;
use proto::inference::v1::inference_client::InferenceClient;
use proto::worker::v1 as wire;
use proto::worker::v1::worker_client::WorkerClient;
use serde::Serialize;
use thiserror::Error;
use tonic::transport::Channel;

use crate::random::Random;
use crate::statistics::Distribution;
use crate::table::{Table, number};

/// Longest time for one request.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Requests before the measured ones: connections and caches are warm then.
const N_WARM_UP: usize = 60;
/// Words of which texts are made; each is one token or two of most vocabularies.
const WORDS: [&str; 16] = [
    "river", "stone", "light", "house", "winter", "paper", "music", "garden", "bridge", "window", "market", "letter",
    "morning", "island", "silver", "forest",
];

/// What `tessera bench router` is told.
#[derive(Clone, Debug, PartialEq)]
pub struct OverheadOptions {
    /// The router's gRPC address.
    pub router: String,
    /// The gRPC address of a worker behind it.
    pub worker: String,
    /// Requests in a second, over all ways.
    pub rate: f64,
    /// Time to measure.
    pub time: Duration,
    /// Tokens of a prompt; of texts, words.
    pub prompt_tokens: usize,
    /// Makes the load repeatable.
    pub seed: u64,
}

/// Why nothing was measured.
#[derive(Debug, Error)]
pub enum OverheadError {
    /// An address that is none.
    #[error(transparent)]
    Address(#[from] AddressError),
    /// The worker does not describe itself.
    #[error("the worker at {address} does not describe itself: {}", .status.message())]
    Describe {
        /// Where.
        address: String,
        /// What it said.
        status: Box<tonic::Status>,
    },
    /// The worker described itself incompletely.
    #[error("the worker at {address} names no {what}")]
    Incomplete {
        /// Where.
        address: String,
        /// What is missing.
        what: &'static str,
    },
    /// A rate or time that asks for nothing.
    #[error("{rate} requests a second for {seconds} s are none; give more")]
    Nothing {
        /// As given.
        rate: f64,
        /// As given.
        seconds: f64,
    },
}

/// A way of a request to the worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Way {
    /// Straight to it.
    Worker,
    /// Through the router, as tokens.
    Tokens,
    /// Through the router, as text.
    Text,
}

/// What became of one request: its milliseconds, or why it failed.
type Seen = (Way, Result<f64, String>);

const WAYS: [Way; 3] = [Way::Worker, Way::Tokens, Way::Text];

/// What was seen on one way.
#[derive(Clone, Debug, Serialize)]
pub struct WayResult {
    /// Which.
    pub way: Way,
    /// Milliseconds from the call to the last frame.
    pub ms: Distribution,
    /// Requests that failed.
    pub n_failed: usize,
    /// What the last failure said.
    pub failure: Option<String>,
}

/// All that `tessera bench router` found.
#[derive(Clone, Debug, Serialize)]
pub struct OverheadReport {
    /// Always `"router"`.
    pub bench: &'static str,
    /// Requests in a second.
    pub rate: f64,
    /// Tokens of a prompt.
    pub prompt_tokens: usize,
    /// The worker first.
    pub results: Vec<WayResult>,
}

#[derive(Clone)]
struct Ends {
    router: InferenceClient<Channel>,
    worker: WorkerClient<Channel>,
    engine: EngineId,
    model: String,
    vocab_size: u32,
    prompt_tokens: usize,
}

/// Sends requests on each way in turn and measures them.
///
/// # Errors
/// When the worker cannot be asked; requests that fail are counted.
pub async fn overhead(options: &OverheadOptions) -> Result<OverheadReport, OverheadError> {
    let n_requests = (options.rate * options.time.as_secs_f64()) as usize;
    if n_requests == 0 {
        return Err(OverheadError::Nothing { rate: options.rate, seconds: options.time.as_secs_f64() });
    }
    let ends = Ends::new(options).await?;
    let mut random = Random::new(options.seed, 0);
    for index in 0..N_WARM_UP {
        // What fails now fails again below, where it is counted.
        let _ = ends.ask(WAYS[index % WAYS.len()], random.next()).await;
    }
    let seen: Arc<Mutex<Vec<Seen>>> = Arc::default();
    let tasks = Tasks::new();
    let began = clock::now();
    for index in 0..n_requests {
        let due = began + Duration::from_secs_f64(index as f64 / options.rate);
        tokio::time::sleep_until(due.into()).await;
        let (ends, seen, seed, way) = (ends.clone(), Arc::clone(&seen), random.next(), WAYS[index % WAYS.len()]);
        tasks.spawn("request", async move {
            let result = ends.ask(way, seed).await;
            seen.lock().unwrap_or_else(PoisonError::into_inner).push((way, result));
        });
    }
    // Every request has a deadline of its own.
    drop(tasks.join(TIMEOUT + Duration::from_secs(1)).await);
    let seen = std::mem::take(&mut *seen.lock().unwrap_or_else(PoisonError::into_inner));
    let results = WAYS.map(|way| WayResult::of(way, &seen)).to_vec();
    Ok(OverheadReport { bench: "router", rate: options.rate, prompt_tokens: options.prompt_tokens, results })
}

impl Ends {
    async fn new(options: &OverheadOptions) -> Result<Self, OverheadError> {
        let address = options.worker.clone();
        let open = |address: &str| channel(address, &ChannelOptions::default());
        let (router, mut worker) =
            (InferenceClient::new(open(&options.router)?), WorkerClient::new(open(&options.worker)?));
        let described = worker.describe(wire::DescribeRequest {}).await;
        let described = described
            .map_err(|status| OverheadError::Describe { address: address.clone(), status: Box::new(status) })?
            .into_inner();
        let missing = |what| OverheadError::Incomplete { address: address.clone(), what };
        let identity = described.identity.ok_or_else(|| missing("model"))?;
        let engine = described.engines.into_iter().next().ok_or_else(|| missing("engine"))?.into();
        let (model, vocab_size) = (identity.name, identity.vocab_size);
        Ok(Self { router, worker, engine, model, vocab_size, prompt_tokens: options.prompt_tokens })
    }

    /// Sends one request and reads its answer to the end; returns the milliseconds.
    async fn ask(&self, way: Way, seed: u64) -> Result<f64, String> {
        let asking = async {
            match way {
                Way::Worker => self.ask_worker(seed).await,
                Way::Tokens => {
                    let ids = self.tokens(seed);
                    self.ask_router(inference::generate_request::Prompt::Tokens(inference::TokenIds { ids })).await
                }
                Way::Text => {
                    let mut random = Random::new(seed, 1);
                    let words = (0..self.prompt_tokens).map(|_| WORDS[random.below(WORDS.len() as u32) as usize]);
                    let text = words.collect::<Vec<_>>().join(" ");
                    self.ask_router(inference::generate_request::Prompt::Text(text)).await
                }
            }
        };
        let result = tokio::time::timeout(TIMEOUT, asking).await;
        let took = result.map_err(|_| format!("no answer within {TIMEOUT:?}"))?;
        took.map(|took| took.as_secs_f64() * 1e3).map_err(|status| status.message().to_owned())
    }

    async fn ask_worker(&self, seed: u64) -> Result<Duration, tonic::Status> {
        let request = GenerateRequest {
            id: RequestId(u128::from(seed) << 64 | 1),
            attempt: 0,
            model: self.model.as_str().into(),
            prompt: self.tokens(seed),
            generated: Vec::new(),
            tenant: "default".into(),
            cache_salt: String::new(),
            adapter: String::new(),
            priority: 0,
            deadline: Some(TIMEOUT),
            sampling: SamplingParams { temperature: 0.0, ..SamplingParams::default() },
            stop: StopParams { max_tokens: 1, ..StopParams::default() },
            logprobs: None,
            prompt_logprobs: None,
            prefill_on: Vec::new(),
        };
        let request = wire::GenerateRequest::new(&request, &self.engine);
        let began = clock::now();
        let mut frames = self.worker.clone().generate(request).await?.into_inner();
        while frames.message().await?.is_some() {}
        Ok(since(began))
    }

    async fn ask_router(&self, prompt: inference::generate_request::Prompt) -> Result<Duration, tonic::Status> {
        let options = inference::Options {
            max_tokens: Some(1),
            temperature: Some(0.0),
            ignore_eos: true,
            ..inference::Options::default()
        };
        let request =
            inference::GenerateRequest { model: self.model.clone(), prompt: Some(prompt), options: Some(options) };
        let began = clock::now();
        let mut parts = self.router.clone().generate(request).await?.into_inner();
        while parts.message().await?.is_some() {}
        Ok(since(began))
    }

    fn tokens(&self, seed: u64) -> Vec<u32> {
        let mut random = Random::new(seed, 0);
        (0..self.prompt_tokens).map(|_| random.below(self.vocab_size)).collect()
    }
}

fn since(began: Instant) -> Duration {
    clock::now().saturating_duration_since(began)
}

impl WayResult {
    fn of(way: Way, seen: &[Seen]) -> Self {
        let own = || seen.iter().filter(|(other, _)| *other == way).map(|(_, result)| result);
        let mut times: Vec<f64> = own().filter_map(|result| result.as_ref().ok().copied()).collect();
        let mut failures = own().filter_map(|result| result.as_ref().err());
        let n_failed = own().count() - times.len();
        Self { way, ms: Distribution::of(&mut times), n_failed, failure: failures.next_back().cloned() }
    }
}

impl OverheadReport {
    /// The table for people.
    #[must_use]
    pub fn text(&self) -> String {
        let straight = self.results[0].ms;
        let mut table = Table::new(&["way", "requests", "failed", "p50 ms", "added", "p99 ms", "added"]);
        for WayResult { way, ms, n_failed, .. } in &self.results {
            let name = match way {
                Way::Worker => "straight to the worker",
                Way::Tokens => "router, tokens in",
                Way::Text => "router, text in",
            };
            let added = |value: f64, straight: f64| match way {
                Way::Worker => String::new(),
                Way::Tokens | Way::Text => number(value - straight),
            };
            table.row(vec![
                name.to_owned(),
                ms.n.to_string(),
                n_failed.to_string(),
                number(ms.p50),
                added(ms.p50, straight.p50),
                number(ms.p99),
                added(ms.p99, straight.p99),
            ]);
        }
        let failures = self.results.iter().filter_map(|result| result.failure.as_ref());
        let failures: String = failures.map(|failure| format!("\nfailed: {failure}")).collect();
        format!(
            "{} requests a second in turn, prompts of {} tokens, one token out\n\n{}{failures}",
            number(self.rate),
            self.prompt_tokens,
            table.render()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_router_adds_stands_beside_each_way() {
        let seen: Vec<Seen> = vec![
            (Way::Worker, Ok(1.0)),
            (Way::Tokens, Ok(1.25)),
            (Way::Text, Ok(1.5)),
            (Way::Text, Err("gone".to_owned())),
        ];
        let results = WAYS.map(|way| WayResult::of(way, &seen)).to_vec();
        let report = OverheadReport { bench: "router", rate: 200.0, prompt_tokens: 128, results };
        let text = report.text();
        assert!(text.contains("0.25") && text.contains("0.5"), "{text}");
        assert!(text.ends_with("failed: gone"), "{text}");
        assert_eq!(report.results[2].n_failed, 1);
    }

    #[tokio::test]
    async fn nothing_to_send_and_nobody_there_are_errors() {
        let address = "127.0.0.1:1".to_owned();
        let options = OverheadOptions {
            router: address.clone(),
            worker: address,
            rate: 0.0,
            time: Duration::from_secs(1),
            prompt_tokens: 1,
            seed: 0,
        };
        assert!(matches!(overhead(&options).await, Err(OverheadError::Nothing { .. })));
        let error = overhead(&OverheadOptions { rate: 1.0, ..options }).await.unwrap_err();
        assert!(matches!(error, OverheadError::Describe { .. }), "{error}");
    }
}
