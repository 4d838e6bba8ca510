//! Streams go on when their worker is killed or hangs: complete, unchanged and soon, over real processes.

#![allow(
    clippy::disallowed_methods,
    clippy::print_stderr,
    clippy::unwrap_used,
    missing_docs,
    reason = "tests: a failed step panics, and real time is what they measure"
)]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use tests::answer::Answer;
use tests::client::{self, EventStream};
use tests::cluster::{Cluster, Plan, SWIFT};
use tests::metrics::Metrics;
use tests::{place, seed, wait};
use tokio::task::JoinHandle;
use toml::Table;

const START: Duration = Duration::from_secs(60);
const N_TOKENS: u32 = 120;

/// Longest wait for a next token when a worker is killed; a loaded machine is granted more.
fn gap_max() -> Duration {
    Duration::from_secs(if seed::is_full() { 2 } else { 10 })
}

/// A worker that takes about 15 ms for a token.
fn simulated() -> Plan {
    let worker = toml::toml! {
        engine = "sim"
        sim_profile = "cpu"
        context_length = 512
        n_blocks = 800
    };
    Plan { n_workers: 2, worker, ..Plan::default() }
}

/// The tiny model, computed.
fn computed() -> Plan {
    Plan { n_workers: 2, model: place::tiny("llama"), ..Plan::default() }
}

/// Requests of every kind that carries state from token to token.
fn requests(n: usize) -> Vec<Value> {
    let request = |index: usize| {
        let mut random = seed::Random::new(index as u64);
        let prompt: Vec<u64> = (0..20 + random.below(60)).map(|_| 3 + random.below(250)).collect();
        let mut body = client::completion("tiny", &[], N_TOKENS);
        body["prompt"] = json!(prompt);
        let more = match index % 5 {
            0 => json!({}),
            1 => json!({"temperature": 0.8, "seed": index, "frequency_penalty": 0.7, "presence_penalty": 0.3}),
            2 => json!({"temperature": 1.1, "seed": index, "n": 2, "logprobs": 3, "repetition_penalty": 1.2}),
            3 => json!({"min_tokens": 90, "stop_token_ids": (0..8).map(|_| 3 + random.below(250)).collect::<Vec<_>>()}),
            _ => json!({"temperature": 0.7, "top_p": 0.9, "seed": index, "stop": ["t77 t"], "min_tokens": 50}),
        };
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    (0..n).map(request).collect()
}

/// Streams that are being read, and how many of them have begun.
struct Streams {
    reading: Vec<JoinHandle<Answer>>,
    n_begun: Arc<AtomicUsize>,
}

impl Streams {
    fn open(cluster: &Cluster, requests: &[Value]) -> Self {
        let n_begun = Arc::new(AtomicUsize::new(0));
        let read = |body: &Value| {
            let (address, body, n_begun) = (cluster.routers[0].http.clone(), body.clone(), Arc::clone(&n_begun));
            tokio::spawn(async move {
                let events = EventStream::open(&client::http(), &address, "/v1/completions", &body).await.unwrap();
                let begun = || {
                    n_begun.fetch_add(1, Ordering::Relaxed);
                };
                Answer::read(events, begun).await.unwrap()
            })
        };
        Self { reading: requests.iter().map(read).collect(), n_begun }
    }

    async fn all_begun(&self) {
        wait::until("every stream has begun", START, async || {
            let n = self.n_begun.load(Ordering::Relaxed);
            if n == self.reading.len() { Ok(()) } else { Err(n) }
        })
        .await;
    }

    async fn answers(self) -> Vec<Answer> {
        let answers = futures::future::join_all(self.reading).await;
        answers.into_iter().map(Result::unwrap).collect()
    }
}

/// What the requests are answered where nothing fails.
async fn undisturbed(cluster: &Cluster, requests: &[Value]) -> Vec<Answer> {
    let answers = Streams::open(cluster, requests).answers().await;
    assert!(answers.iter().all(|answer| answer.said().is_some()), "{answers:?}");
    assert_eq!(migrations(cluster).await, 0.0);
    answers
}

fn assert_equal(answers: &[Answer], expected: &[Answer]) {
    for (index, (answer, expected)) in answers.iter().zip(expected).enumerate() {
        assert_eq!(answer.said(), expected.said(), "request {index}: {:?}", answer.error);
    }
    let longest = answers.iter().map(|answer| answer.longest_gap).max().unwrap();
    eprintln!("{} streams, longest wait {longest:?}", answers.len());
}

async fn migrations(cluster: &Cluster) -> f64 {
    Metrics::fetch(&cluster.routers[0].http).await.unwrap().sum("tessera_router_migrations_total", &[])
}

async fn kill_in_mid_stream(plan: Plan) {
    let mut cluster = Cluster::start(plan).await;
    let requests = requests(40);
    let expected = undisturbed(&cluster, &requests).await;
    let streams = Streams::open(&cluster, &requests);
    streams.all_begun().await;
    cluster.workers.remove(0).process.kill();
    let answers = streams.answers().await;
    assert_equal(&answers, &expected);
    assert!(answers.iter().all(|answer| answer.longest_gap < gap_max()));
    assert!(migrations(&cluster).await > 0.0, "the worker was killed too late");
    cluster.wait_for_rest(START).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_simulated_worker_is_killed_and_every_stream_goes_on_unchanged() {
    kill_in_mid_stream(simulated()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_is_killed_and_every_stream_goes_on_unchanged() {
    kill_in_mid_stream(computed()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_only_worker_is_killed_and_its_streams_wait_for_the_next() {
    let mut cluster = Cluster::start(Plan { n_workers: 1, ..simulated() }).await;
    let requests = requests(10);
    let expected = undisturbed(&cluster, &requests).await;
    let streams = Streams::open(&cluster, &requests);
    streams.all_begun().await;
    let mut before = cluster.workers.remove(0);
    before.process.kill();
    let after = cluster.start_worker_at(&before.id, &before.address);
    cluster.workers.push(after);
    assert_equal(&streams.answers().await, &expected);
    cluster.wait_for_rest(START).await;
}

/// Hangs the engine of a worker that otherwise lives, before or while it runs `requests`, and lets it go on again.
async fn hang_the_engine(with_scheduler: bool) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("hang");
    let mut plan = Plan { n_workers: 2, ..Plan::default() };
    let _profiles = plan.simulate(SWIFT);
    plan.worker.extend(toml::toml! {
        stall_ms_min = 2000
        stall_ms_max = 2000
    });
    let profile = folder.path().join("profile.toml");
    let hangs = format!("hangs_while = {:?}\n", file.display().to_string());
    std::fs::write(&profile, hangs + SWIFT).unwrap();
    plan.each_worker = vec![Table::from_iter([("sim_profile".to_owned(), profile.display().to_string().into())])];
    let mut cluster = Cluster::start(plan).await;
    let requests = requests(40);
    let expected = undisturbed(&cluster, &requests).await;
    if !with_scheduler {
        cluster.scheduler.kill();
    }
    let streams = Streams::open(&cluster, &requests);
    streams.all_begun().await;
    std::fs::write(&file, "").unwrap();
    let answers = tokio::time::timeout(START, streams.answers()).await.expect("they end while the engine hangs");
    assert_equal(&answers, &expected);
    assert!(answers.iter().all(|answer| answer.longest_gap < gap_max() + Duration::from_secs(3)));
    assert!(migrations(&cluster).await > 0.0, "the engine hung too late");
    let again = Streams::open(&cluster, &requests).answers().await;
    assert_equal(&again, &expected);
    let worker = cluster.workers[0].address.clone();
    let count =
        async |address: &str, name: &str, labels: &[&str]| Metrics::fetch(address).await.unwrap().sum(name, labels);
    assert!(count(&worker, "tessera_engine_stalls_total", &[]).await >= 1.0);
    let scheduler = cluster.scheduler.address("grpc");
    if with_scheduler {
        assert_eq!(count(&scheduler, "tessera_cluster_engines", &["state=\"stalled\""]).await, 1.0);
    }
    std::fs::remove_file(&file).unwrap();
    cluster.wait_for_rest(START).await;
    wait::until("it is used again", START, async || {
        let steps = count(&worker, "tessera_engine_step_duration_seconds_count", &[]).await;
        assert_equal(&Streams::open(&cluster, &requests).answers().await, &expected);
        let more = count(&worker, "tessera_engine_step_duration_seconds_count", &[]).await - steps;
        // What waited when it hung is a step or two.
        if more > 20.0 { Ok(()) } else { Err(more) }
    })
    .await;
    if with_scheduler {
        assert_eq!(count(&scheduler, "tessera_cluster_engines", &["state=\"stalled\""]).await, 0.0);
    }
    cluster.wait_for_rest(START).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_hangs_in_a_worker_that_lives_and_its_streams_go_on_until_it_steps_again() {
    hang_the_engine(true).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_hangs_where_there_is_no_scheduler_and_its_streams_go_on() {
    hang_the_engine(false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_hangs_and_its_streams_go_on_while_its_late_tokens_reach_nobody() {
    let cluster = Cluster::start(simulated()).await;
    let requests = requests(20);
    let expected = undisturbed(&cluster, &requests).await;
    let streams = Streams::open(&cluster, &requests);
    streams.all_begun().await;
    cluster.workers[0].process.signal("STOP");
    wait::until(
        "its streams go on elsewhere",
        START,
        async || {
            if migrations(&cluster).await > 0.0 { Ok(()) } else { Err(()) }
        },
    )
    .await;
    cluster.workers[0].process.signal("CONT");
    assert_equal(&streams.answers().await, &expected);
    cluster.wait_for_rest(START).await;
}
