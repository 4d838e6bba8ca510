//! Clients that ask at an even pace, know every router, and know what each answer must be.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep};

use crate::answer::{Answer, Said};
use crate::client;
use crate::cluster::{Cluster, START};
use crate::seed;

/// How many requests differ.
const N_PROMPTS: u64 = 40;
/// Tokens of an answer on average.
pub const N_TOKENS_MEAN: f64 = 39.5;

/// Request `index`: a short prompt for 10 to 69 tokens, every other one sampled.
pub fn request(index: u64) -> Value {
    let mut random = seed::Random::new(index);
    let prompt: Vec<u64> = (0..20 + random.below(60)).map(|_| 3 + random.below(250)).collect();
    let n_tokens = 10 + u32::try_from(random.below(60)).unwrap();
    let mut body = client::completion("tiny", &[], n_tokens);
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

/// Requests of 480 tokens that decode all the while, begun; decode workers are busy with them, so that prompts are
/// computed elsewhere.
pub async fn keep_decoding(cluster: &Cluster) -> Vec<JoinHandle<Answer>> {
    let mut streams = Vec::new();
    for index in 0..16_u64 {
        let mut body = client::completion("tiny", &[], 480);
        body["prompt"] = json!([3 + index, 4, 5]);
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

/// What every request is answered where nothing fails.
pub async fn undisturbed(cluster: &Cluster) -> Arc<Vec<Said>> {
    let routers = [cluster.routers[0].http.clone()];
    let asked = (0..N_PROMPTS).map(async |index| ask(&routers, 0, &request(index)).await.unwrap());
    let answers = futures::future::join_all(asked).await;
    let said = answers.iter().map(|answer| answer.said().unwrap_or_else(|| panic!("{answer:?}")).clone());
    Arc::new(said.collect())
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
    /// Longest wait of a client between two events.
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
    pub fn start(routers: Vec<String>, expected: Arc<Vec<Said>>, every: Duration) -> Self {
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
    pub fn on(cluster: &Cluster, expected: &Arc<Vec<Said>>, every: Duration) -> Self {
        let routers = cluster.routers.iter().map(|router| router.http.clone()).collect();
        Self::start(routers, Arc::clone(expected), every)
    }

    /// Stops asking, and waits for what runs.
    pub async fn end(self) -> Outcome {
        self.stop.store(true, Ordering::Relaxed);
        self.asking.await.unwrap()
    }
}

/// Asks one, and tells its longest wait or what is wrong with it.
async fn one(routers: &[String], index: usize, expected: &[Said]) -> Result<Duration, Failure> {
    let prompt = index % expected.len();
    let broken = |what: String| Failure::Broken(format!("request {index}: {what}"));
    let answer = match ask(routers, index % routers.len(), &request(prompt as u64)).await {
        Ok(answer) => answer,
        Err(error) if error.downcast_ref::<reqwest::Error>().is_some() => {
            return Err(Failure::Cut(format!("request {index}: {error:#}")));
        }
        Err(error) => return Err(code_of(&error).map_or_else(|| broken(format!("{error:#}")), Failure::Refused)),
    };
    match (answer.said(), &answer.error) {
        (Some(said), _) if *said == expected[prompt] => Ok(answer.longest_gap),
        (Some(said), _) => Err(broken(format!("{said:?} instead of {:?}", expected[prompt]))),
        (None, Some(error)) if error["code"].is_string() => {
            Err(Failure::Refused(error["code"].as_str().unwrap().to_owned()))
        }
        (None, error) => Err(broken(format!("it ended with {error:?}"))),
    }
}

/// The code of an answer that is an error of the API.
fn code_of(error: &anyhow::Error) -> Option<String> {
    let text = error.to_string();
    let (_, body) = text.strip_prefix("status ")?.split_once(": ")?;
    let body: Value = serde_json::from_str(body).ok()?;
    body["error"]["code"].as_str().map(str::to_owned)
}

impl Outcome {
    fn take(&mut self, ended: Result<Duration, Failure>) {
        match ended {
            Ok(gap) => self.longest_gap = self.longest_gap.max(gap),
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
