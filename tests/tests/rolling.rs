//! All workers and all routers are restarted one by one under load: no request fails and no token changes.

#![allow(
    clippy::disallowed_methods,
    clippy::print_stderr,
    clippy::unwrap_used,
    missing_docs,
    reason = "tests: a failed step panics, and real time is what they measure"
)]

use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use tests::answer::{Answer, Said};
use tests::client::{self, EventStream};
use tests::cluster::{Cluster, Plan, START};
use tests::process::Process;
use tests::{place, seed, wait};
use tokio::task::JoinHandle;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep};

/// Time between two requests: 50 streams a second.
const EVERY: Duration = Duration::from_millis(20);
const N_PROMPTS: u64 = 40;

/// A worker that decodes in 5 ms and a little more for each request beside.
const PROFILE: &str = "
block_size = 16
n_blocks = 4000
max_running = 256
prefill_budget = 512
context_length = 512
[timing]
prefill_tokens_per_s = 20000
decode_base_ms = 5
decode_per_sequence_ms = 0.1
";

fn request(index: u64) -> Value {
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

/// Streams a completion over the first router that lets it connect.
async fn ask(routers: &[String], first: usize, body: &Value) -> anyhow::Result<Answer> {
    let end = Instant::now() + START;
    let client = Cluster::new_client();
    for router in routers.iter().cycle().skip(first) {
        match EventStream::open(&client, router, "/v1/completions", body).await {
            Ok(events) => return Answer::read(events, || ()).await,
            Err(error) if is_refused(&error) && Instant::now() < end => sleep(Duration::from_millis(5)).await,
            Err(error) => return Err(error),
        }
    }
    unreachable!("there are routers")
}

fn is_refused(error: &anyhow::Error) -> bool {
    error.downcast_ref::<reqwest::Error>().is_some_and(reqwest::Error::is_connect)
}

/// Requests at an even pace until it is stopped; each is compared with what it is answered undisturbed.
struct Load {
    stop: Arc<AtomicBool>,
    asking: JoinHandle<Vec<JoinHandle<Result<Duration, String>>>>,
}

impl Load {
    fn start(routers: Vec<String>, expected: Arc<Vec<Said>>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let asking = tokio::spawn(async move {
            let mut ticks = interval(EVERY);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
            let mut asked = Vec::new();
            while !stopped.load(Ordering::Relaxed) {
                ticks.tick().await;
                let index = asked.len();
                let (routers, expected) = (routers.clone(), Arc::clone(&expected));
                asked.push(tokio::spawn(async move {
                    let prompt = index % expected.len();
                    let answer = ask(&routers, index % routers.len(), &request(prompt as u64)).await;
                    let answer = answer.map_err(|error| format!("request {index}: {error:#}"))?;
                    match answer.said() {
                        Some(said) if *said == expected[prompt] => Ok(answer.longest_gap),
                        Some(said) => Err(format!("request {index}: {said:?} instead of {:?}", expected[prompt])),
                        None => Err(format!("request {index} ended with {:?}", answer.error)),
                    }
                }));
            }
            asked
        });
        Self { stop, asking }
    }

    /// Stops asking and tells what failed, how many were asked, and the longest wait between two tokens.
    async fn end(self) -> (Vec<String>, usize, Duration) {
        self.stop.store(true, Ordering::Relaxed);
        let asked = self.asking.await.unwrap();
        let n_asked = asked.len();
        let ended = futures::future::join_all(asked).await.into_iter().map(Result::unwrap);
        let (well, badly): (Vec<_>, Vec<_>) = ended.partition(Result::is_ok);
        let longest = well.into_iter().map(Result::unwrap).max().unwrap_or_default();
        (badly.into_iter().map(Result::unwrap_err).collect(), n_asked, longest)
    }
}

/// Sends a worker away by the command, and waits for it to say that it is done.
fn drain(cluster: &Cluster, worker: &str, more: &[&str]) -> Process {
    let mut command = Command::new(place::tessera());
    command.args(["drain", worker, "--scheduler", &cluster.scheduler.address("grpc")]).args(more);
    let mut draining = Process::start("drain", command);
    assert!(draining.ended(START).success(), "{}", draining.errors());
    draining
}

async fn restart_worker(cluster: &mut Cluster, round: usize) {
    let mut before = cluster.workers.remove(0);
    match round % 3 {
        0 => before.process.terminate(),
        1 => drop(drain(cluster, &before.id, &["--now"])),
        _ => drop(drain(cluster, &before.id, &["--grace", "300ms"])),
    }
    assert!(before.process.ended(START).success(), "{}", before.process.errors());
    let after = cluster.start_worker_at(&before.id, &before.address);
    cluster.workers.push(after);
    cluster.wait_for_workers(2).await;
}

async fn restart_router(cluster: &mut Cluster) {
    let mut before = cluster.routers.remove(0);
    before.process.terminate();
    assert!(before.process.ended(START).success(), "{}", before.process.errors());
    let id = before.process.name.clone();
    let after = cluster.start_router_at(&id, &before.http, &before.grpc);
    cluster.routers.push(after);
    cluster.wait_for_workers(2).await;
}

async fn start(worker_more: toml::Table) -> (Cluster, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let profile = folder.path().join("profile.toml");
    std::fs::write(&profile, PROFILE).unwrap();
    let mut worker = toml::toml! {
        engine = "sim"
    };
    worker.insert("sim_profile".to_owned(), profile.display().to_string().into());
    worker.extend(worker_more);
    (Cluster::start(Plan { n_routers: 2, n_workers: 2, worker, ..Plan::default() }).await, folder)
}

async fn undisturbed(cluster: &Cluster) -> Vec<Said> {
    let routers = [cluster.routers[0].http.clone()];
    let asked = (0..N_PROMPTS).map(async |index| ask(&routers, 0, &request(index)).await.unwrap());
    let answers = futures::future::join_all(asked).await;
    answers.iter().map(|answer| answer.said().unwrap_or_else(|| panic!("{answer:?}")).clone()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rolling_restart_fails_no_request_and_changes_no_token() {
    let (mut cluster, _folder) = start(toml::Table::new()).await;
    let expected = Arc::new(undisturbed(&cluster).await);
    let routers = cluster.routers.iter().map(|router| router.http.clone()).collect();
    let load = Load::start(routers, expected);
    let n_rounds = if seed::is_full() { 30 } else { 4 };
    for round in 0..n_rounds {
        for index in 0..2 {
            restart_worker(&mut cluster, round * 2 + index).await;
        }
        for _ in 0..2 {
            restart_router(&mut cluster).await;
        }
    }
    let (failed, n_asked, longest) = load.end().await;
    eprintln!("{n_asked} streams, {} failed, longest wait {longest:?}", failed.len());
    assert!(failed.is_empty(), "{} of {n_asked}, the first: {}", failed.len(), failed[0]);
    cluster.wait_for_rest(START).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_runs_at_the_end_of_a_workers_grace_goes_on_elsewhere() {
    let more = toml::toml! {
        server = { grace_ms = 600 }
    };
    let (mut cluster, _folder) = start(more).await;
    let mut body = client::completion("tiny", &[5, 6, 7], 400);
    body["n"] = json!(4);
    let routers = [cluster.routers[0].http.clone()];
    let expected = ask(&routers, 0, &body).await.unwrap();
    for way in ["signal", "command"] {
        let (routers, body) = (routers.clone(), body.clone());
        let asked = tokio::spawn(async move { ask(&routers, 0, &body).await.unwrap() });
        let index = wait::until("a worker runs it", START, async || {
            for (index, worker) in cluster.workers.iter().enumerate() {
                let metrics = tests::metrics::Metrics::fetch(&worker.address).await.unwrap();
                if metrics.sum("tessera_engine_requests", &["state=\"running\""]) >= 4.0 {
                    return Ok(index);
                }
            }
            Err("nobody")
        })
        .await;
        let mut leaving = cluster.workers.remove(index);
        if way == "signal" {
            leaving.process.terminate();
        } else {
            let draining = drain(&cluster, &leaving.id, &[]);
            assert!(draining.errors().contains("4 requests left\n0 requests left\n"), "{}", draining.errors());
        }
        let answer = asked.await.unwrap();
        assert_eq!(answer.said(), expected.said(), "{way}: {:?}", answer.error);
        assert!(leaving.process.ended(START).success(), "{}", leaving.process.errors());
        let after = cluster.start_worker_at(&leaving.id, &leaving.address);
        cluster.workers.push(after);
        cluster.wait_for_workers(2).await;
    }
    cluster.wait_for_rest(START).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_router_that_is_told_to_stop_cuts_no_stream() {
    let (mut cluster, _folder) = start(toml::Table::new()).await;
    let body = client::completion("tiny", &[5, 6, 7], 400);
    let routers: Vec<String> = cluster.routers.iter().map(|router| router.http.clone()).collect();
    let expected = ask(&routers, 0, &body).await.unwrap();
    let events = EventStream::open(&Cluster::new_client(), &routers[0], "/v1/completions", &body).await.unwrap();
    let mut stopping = cluster.routers.remove(0);
    stopping.process.terminate();
    let answer = Answer::read(events, || ()).await.unwrap();
    assert_eq!(answer.said(), expected.said(), "{:?}", answer.error);
    assert!(stopping.process.ended(START).success(), "{}", stopping.process.errors());
    // Meanwhile the other one serves.
    assert_eq!(ask(&routers, 0, &body).await.unwrap().said(), expected.said());
    cluster.wait_for_rest(START).await;
}
