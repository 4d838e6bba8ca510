//! Clients that ask at an even pace, know every router, and know what each answer must be.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};

use crate::answer::{Answer, Said};
use crate::client;
use crate::cluster::{Cluster, START};
use crate::metrics::Metrics;
use crate::{seed, wait};

/// How many requests differ.
const N_PROMPTS: u64 = 40;
/// A request that takes so long hangs.
const HANGS: Duration = Duration::from_secs(120);
/// Tokens of an answer on average.
pub const N_TOKENS_MEAN: f64 = 39.5;

/// Request `index` to the tiny model.
pub fn request(index: u64) -> Value {
    request_to("tiny", index)
}

/// Request `index` to a model: a short prompt for 10 to 69 tokens, every other one sampled.
pub fn request_to(model: &str, index: u64) -> Value {
    let mut random = seed::Random::new(index);
    let prompt: Vec<u64> = (0..20 + random.below(60)).map(|_| 3 + random.below(250)).collect();
    let n_tokens = 10 + u32::try_from(random.below(60)).unwrap();
    let mut body = client::completion(model, &[], n_tokens);
    body["prompt"] = json!(prompt);
    if index.is_multiple_of(2) {
        body["temperature"] = json!(0.8);
        body["seed"] = json!(index);
    }
    body
}

/// Streams a completion over the first router, from `first` on, that lets it connect; the wait for its head counts.
pub async fn ask(routers: &[String], first: usize, body: &Value) -> anyhow::Result<Answer> {
    let asked = Instant::now();
    let client = Cluster::new_client();
    for router in routers.iter().cycle().skip(first) {
        match Answer::ask(&client, router, body, || ()).await {
            Err(error) if is_refused(&error) && asked.elapsed() < START => sleep(Duration::from_millis(5)).await,
            answered => return answered,
        }
    }
    unreachable!("there are routers")
}

/// The timing of simulated workers to whom a prompt is long, beside requests of [`keep_decoding`].
pub fn slow_prefill(n_blocks: u32) -> String {
    format!(
        "block_size = 16
n_blocks = {n_blocks}
max_running = 32
prefill_budget = 20
context_length = 512
[timing]
prefill_tokens_per_s = 400
decode_base_ms = 10
"
    )
}

/// Requests of 480 tokens that decode all the while, begun; decode workers are busy with them, so that prompts are
/// computed elsewhere.
///
/// Each prompt is a step of workers as of [`slow_prefill`]: what fewer tokens cost, one that has just started cannot know.
pub async fn keep_decoding(cluster: &Cluster, random: &mut seed::Random) -> Vec<JoinHandle<Answer>> {
    let mut streams = Vec::new();
    for _ in 0..16 {
        let mut body = client::completion("tiny", &[], 480);
        body["prompt"] = (0..20).map(|_| 3 + random.below(250)).collect();
        let (client, router) = (Cluster::new_client(), cluster.routers[0].http.clone());
        let (began, has_begun) = tokio::sync::oneshot::channel();
        streams.push(tokio::spawn(async move {
            // Nobody waits for it when the test has failed.
            let begin = || began.send(()).unwrap_or_default();
            Answer::ask(&client, &router, &body, begin).await.unwrap()
        }));
        has_begun.await.unwrap();
    }
    streams
}

fn is_refused(error: &anyhow::Error) -> bool {
    error.downcast_ref::<reqwest::Error>().is_some_and(reqwest::Error::is_connect)
}

/// Requests and what each is answered where nothing fails.
pub type Expected = Arc<Vec<(Value, Said)>>;

/// What each [`request`] is answered where nothing fails.
pub async fn undisturbed(cluster: &Cluster) -> Expected {
    undisturbed_of(cluster, (0..N_PROMPTS).map(request)).await
}

/// What requests of one's own are answered where nothing fails.
pub async fn undisturbed_of(cluster: &Cluster, requests: impl Iterator<Item = Value>) -> Expected {
    let routers = [cluster.routers[0].http.clone()];
    let asked = requests.map(async |body| {
        let answer = ask(&routers, 0, &body).await.unwrap();
        let said = answer.said().unwrap_or_else(|| panic!("{answer:?}")).clone();
        (body, said)
    });
    Arc::new(futures::future::join_all(asked).await)
}

/// Waits until every router uses all workers again, asks everything anew until each worker has computed, and checks the
/// answers and that no block is held.
pub async fn assert_recovered(cluster: &Cluster, expected: &Expected) {
    let began = Instant::now();
    cluster.wait_for_workers(cluster.workers.len()).await;
    let before = n_steps(cluster).await;
    wait::until("every worker computes again", START, async || {
        let requests = expected.iter().map(|(body, _)| body.clone());
        assert!(undisturbed_of(cluster, requests).await == *expected, "other tokens after recovery");
        let now = n_steps(cluster).await;
        if now.iter().zip(&before).all(|(now, before)| now > before) { Ok(()) } else { Err(format!("{now:?}")) }
    })
    .await;
    cluster.wait_for_rest(START).await;
    eprintln!("all is well after {:?}", began.elapsed());
}

/// Steps that each worker has run.
async fn n_steps(cluster: &Cluster) -> Vec<f64> {
    let steps = cluster.workers.iter().map(async |worker| {
        let metrics = Metrics::fetch(&worker.address).await.unwrap();
        metrics.sum("tessera_engine_step_duration_seconds_count", &[])
    });
    futures::future::join_all(steps).await
}

/// Requests at an even pace until it is stopped; each is compared with what it is answered undisturbed.
pub struct Load {
    stop: Arc<AtomicBool>,
    asking: JoinHandle<Outcome>,
}

/// How a load ended.
#[derive(Debug, Default)]
pub struct Outcome {
    pub n_asked: usize,
    /// Requests that ended with an error of the API, by its code.
    pub refused: BTreeMap<String, usize>,
    /// What clients say whose connection to a router broke before the answer's end.
    pub cut: Vec<String>,
    /// What every request says of itself that ended in another way, or with other tokens.
    pub broken: Vec<String>,
    /// Longest wait of a client between two events, an error among them.
    pub longest_gap: Duration,
}

/// Why a request did not end well.
enum Failure {
    /// The API's error, by its code.
    Refused(String),
    /// The router's connection broke.
    Cut(String),
    Broken(String),
}

impl Load {
    /// Asks `routers` in turn, a request `every` so often, until it is told to end.
    pub fn start(routers: Vec<String>, expected: Expected, every: Duration) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let asking = tokio::spawn(async move {
            let mut ticks = interval(every);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
            let mut outcome = Outcome::default();
            let mut running = tokio::task::JoinSet::new();
            while !stopped.load(Ordering::Relaxed) {
                ticks.tick().await;
                let index = outcome.n_asked;
                outcome.n_asked += 1;
                let (routers, expected) = (routers.clone(), Arc::clone(&expected));
                running.spawn(async move { one(&routers, index, &expected).await });
                while let Some(ended) = running.try_join_next() {
                    outcome.take(ended.unwrap());
                }
            }
            while let Some(ended) = running.join_next().await {
                outcome.take(ended.unwrap());
            }
            outcome
        });
        Self { stop, asking }
    }

    /// Over all routers of a cluster.
    pub fn on(cluster: &Cluster, expected: &Expected, every: Duration) -> Self {
        let routers = cluster.routers.iter().map(|router| router.http.clone()).collect();
        Self::start(routers, Arc::clone(expected), every)
    }

    /// The same with streams that run on every worker.
    pub async fn running_on(cluster: &Cluster, expected: &Expected, every: Duration) -> Self {
        let load = Self::on(cluster, expected, every);
        wait::until("every worker runs requests", START, async || {
            for worker in &cluster.workers {
                if worker.n_running().await.map_err(|error| format!("{error:#}"))? == 0.0 {
                    return Err(format!("{} runs none", worker.id));
                }
            }
            Ok(())
        })
        .await;
        load
    }

    /// Stops asking, and waits for what runs.
    pub async fn end(self) -> Outcome {
        self.stop.store(true, Ordering::Relaxed);
        self.asking.await.unwrap()
    }
}

/// Asks one, and tells its longest wait and what is wrong with it.
async fn one(routers: &[String], index: usize, expected: &[(Value, Said)]) -> (Duration, Result<(), Failure>) {
    let (body, expected) = &expected[index % expected.len()];
    let broken = |what: String| Err(Failure::Broken(format!("request {index}: {what}")));
    let asked = Instant::now();
    let answer = match timeout(HANGS, ask(routers, index % routers.len(), body)).await {
        Err(_) => return (HANGS, broken(format!("no end within {HANGS:?}"))),
        Ok(Err(error)) if error.downcast_ref::<reqwest::Error>().is_some() => {
            return (Duration::ZERO, Err(Failure::Cut(format!("request {index}: {error:#}"))));
        }
        Ok(Err(error)) => {
            let refused = code_of(&error).map(|code| Err(Failure::Refused(code)));
            return (asked.elapsed(), refused.unwrap_or_else(|| broken(format!("{error:#}"))));
        }
        Ok(Ok(answer)) => answer,
    };
    let ended = match (answer.said(), &answer.error) {
        (Some(said), _) if said == expected => Ok(()),
        (Some(said), _) => broken(format!("{said:?} instead of {expected:?}")),
        (None, Some(error)) if error["code"].is_string() => {
            Err(Failure::Refused(error["code"].as_str().unwrap().to_owned()))
        }
        (None, error) => broken(format!("it ended with {error:?}")),
    };
    (answer.longest_gap, ended)
}

/// The code of an answer that is an error of the API.
fn code_of(error: &anyhow::Error) -> Option<String> {
    let text = error.to_string();
    let (_, body) = text.strip_prefix("status ")?.split_once(": ")?;
    let body: Value = serde_json::from_str(body).ok()?;
    body["error"]["code"].as_str().map(str::to_owned)
}

impl Outcome {
    fn take(&mut self, (gap, ended): (Duration, Result<(), Failure>)) {
        self.longest_gap = self.longest_gap.max(gap);
        match ended {
            Ok(()) => {}
            Err(Failure::Refused(code)) => *self.refused.entry(code).or_default() += 1,
            Err(Failure::Cut(how)) => self.cut.push(how),
            Err(Failure::Broken(how)) => self.broken.push(how),
        }
    }

    /// How many ended with an error of the API.
    pub fn n_refused(&self) -> usize {
        self.refused.values().sum()
    }

    /// Prints what there was, and panics unless every request ended well, with an error of the API, or with its router.
    pub fn assert_unbroken(&self, what: &str) {
        let Self { n_asked, refused, cut, broken, longest_gap } = self;
        eprintln!("{what}: {n_asked} streams, refused {refused:?}, {} cut, longest wait {longest_gap:?}", cut.len());
        assert!(broken.is_empty(), "{what}: {} of {n_asked} are broken, the first: {}", broken.len(), broken[0]);
    }

    /// Prints what there was, and panics when a request did not end well.
    pub fn assert_well(&self, what: &str) {
        self.assert_unbroken(what);
        let Self { n_asked, refused, cut, .. } = self;
        assert!(refused.is_empty(), "{what}: of {n_asked} requests failed {refused:?}");
        assert!(cut.is_empty(), "{what}: of {n_asked} requests {} were cut, the first: {}", cut.len(), cut[0]);
    }
}
