//! Prompts computed on one worker and continued on another, while either is killed at any point, over real processes.

#![allow(
    clippy::disallowed_methods,
    clippy::print_stderr,
    clippy::unwrap_used,
    missing_docs,
    reason = "tests: a failed step panics, and real time is what they measure"
)]

use std::ops::Range;
use std::time::Duration;

use serde_json::{Value, json};
use tests::answer::Answer;
use tests::client;
use tests::cluster::{Cluster, Plan};
use tests::load;
use tests::metrics::Metrics;
use tests::{seed, wait};
use tokio::task::JoinHandle;
use toml::Table;

const START: Duration = Duration::from_secs(60);
const N_PROMPT: usize = 240;
const N_TOKENS: u32 = 40;
/// What a prompt's blocks take on their way: four layers of 64 bytes each.
const PROMPT_BYTES: f64 = (N_PROMPT / 16 * 4 * 64) as f64;

/// When a worker is killed, in the life of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Point {
    /// It is gone, and the router does not know yet.
    BeforeAccept,
    /// The prompt is being computed.
    InCompute,
    /// Some blocks are there, while others are being computed.
    PartlySent,
    /// All is sent; whoever gets it stands still.
    NotAcknowledged,
    /// The first token is out.
    AfterHandOver,
}

const POINTS: [Point; 5] =
    [Point::BeforeAccept, Point::InCompute, Point::PartlySent, Point::NotAcknowledged, Point::AfterHandOver];

fn role(role: &str) -> Table {
    let mut transfer = Table::new();
    transfer.insert("ways".to_owned(), vec!["tcp"].into());
    let mut table = Table::new();
    table.insert("role".to_owned(), role.into());
    table.insert("transfer".to_owned(), transfer.into());
    table
}

/// Workers 0 and 1 decode, the others compute prompts.
fn plan() -> (Plan, tempfile::TempDir) {
    let each_worker = ["decode", "decode", "prefill", "prefill"].map(role).to_vec();
    let mut plan = Plan { n_workers: each_worker.len(), each_worker, ..Plan::default() };
    let folder = plan.simulate(&load::slow_prefill(400));
    (plan, folder)
}

fn request(random: &mut seed::Random) -> Value {
    let prompt: Vec<u64> = (0..N_PROMPT).map(|_| 3 + random.below(250)).collect();
    let mut body = client::completion("tiny", &[], N_TOKENS);
    body["prompt"] = json!(prompt);
    body
}

/// Asks and reads; `began` is told at the first token.
fn ask(cluster: &Cluster, body: &Value, began: impl FnOnce() + Send + 'static) -> JoinHandle<Answer> {
    let (router, body) = (cluster.routers[0].http.clone(), body.clone());
    tokio::spawn(async move { Answer::ask(&client::http(), &router, &body, began).await.unwrap() })
}

async fn fetches(cluster: &Cluster, result: &str) -> f64 {
    let mut n = 0.0;
    for worker in &cluster.workers {
        if let Ok(metrics) = Metrics::fetch(&worker.address).await {
            n += metrics.sum("tessera_kv_transfer_fetches_total", &[&format!("result=\"{result}\"")]);
        }
    }
    n
}

/// Requests on each worker, waiting or running.
async fn loads(cluster: &Cluster) -> Vec<f64> {
    let mut loads = Vec::new();
    for worker in &cluster.workers {
        let metrics = Metrics::fetch(&worker.address).await;
        loads.push(metrics.map_or(-1.0, |metrics| metrics.sum("tessera_engine_requests", &[])));
    }
    loads
}

/// The worker of some that has got a request since.
async fn newly_busy(cluster: &Cluster, before: &[f64], workers: Range<usize>) -> usize {
    let mut found = None;
    wait::until("a worker has the request", Duration::from_secs(5), async || {
        let now = loads(cluster).await;
        found = workers.clone().find(|&index| now[index] > before[index]);
        found.map(|_| ()).ok_or((before.to_vec(), now))
    })
    .await;
    found.unwrap()
}

/// Bytes that a worker has sent to others.
async fn sent(cluster: &Cluster, worker: usize) -> f64 {
    let metrics = Metrics::fetch(&cluster.workers[worker].address).await;
    metrics.map_or(0.0, |metrics| metrics.sum("tessera_kv_transfer_moved_bytes_total", &["direction=\"sent\""]))
}

#[tokio::test(flavor = "multi_thread")]
async fn prompts_are_computed_apart_and_nothing_shows() {
    let (plan, _folder) = plan();
    let cluster = Cluster::start(plan).await;
    let mut random = seed::from_environment();
    let background = load::keep_decoding(&cluster, &mut random).await;
    let requests: Vec<Value> = (0..6).map(|_| request(&mut random)).collect();
    let mut split = Vec::new();
    for body in &requests {
        split.push(ask(&cluster, body, || ()).await.unwrap());
    }
    assert!(fetches(&cluster, "ok").await >= 3.0, "prompts are computed on prefill workers");
    background.iter().for_each(JoinHandle::abort);
    for (body, split) in requests.iter().zip(split) {
        let mut alone = body.clone();
        alone["cache_salt"] = "another".into();
        let alone = ask(&cluster, &alone, || ()).await.unwrap();
        assert!(alone.said().is_some());
        assert_eq!(split.said(), alone.said());
    }
    cluster.wait_for_rest(START).await;
}

/// Whose death is watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Victim {
    Prefill,
    Decode,
}

const DECODE: Range<usize> = 0..2;
const PREFILL: Range<usize> = 2..4;

/// Longest wait for a token when a worker is killed, beside what it takes undisturbed; a loaded machine is granted more.
fn late_max() -> Duration {
    Duration::from_secs(if seed::is_full() { 2 } else { 10 })
}

/// Sends a request and kills a worker at a point of its life; yields the worker and the answer.
async fn kill_at(cluster: &mut Cluster, body: &Value, point: Point, victim: Victim) -> (usize, Answer) {
    let before = loads(cluster).await;
    let sent_before = [sent(cluster, 2).await, sent(cluster, 3).await];
    let own = if victim == Victim::Prefill { PREFILL } else { DECODE };
    if point == Point::BeforeAccept {
        own.clone().for_each(|index| cluster.workers[index].process.signal("STOP"));
    }
    let (began, has_begun) = tokio::sync::oneshot::channel();
    let begin = || {
        // Not every point waits for it.
        let _ = began.send(());
    };
    let reading = ask(cluster, body, begin);
    let index = match point {
        Point::BeforeAccept => {
            tokio::time::sleep(Duration::from_millis(200)).await;
            own.clone().skip(1).for_each(|index| cluster.workers[index].process.signal("CONT"));
            own.start
        }
        _ => newly_busy(cluster, &before, own.clone()).await,
    };
    let computes = async |cluster: &Cluster| newly_busy(cluster, &before, PREFILL).await;
    match point {
        Point::BeforeAccept => {}
        Point::InCompute => {
            computes(cluster).await;
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        Point::PartlySent => {
            let prefill = computes(cluster).await;
            wait::until("some is sent", START, async || match sent(cluster, prefill).await {
                n if n > sent_before[prefill - PREFILL.start] => Ok(()),
                n => Err(n),
            })
            .await;
        }
        Point::NotAcknowledged => {
            let prefill = computes(cluster).await;
            DECODE.for_each(|index| cluster.workers[index].process.signal("STOP"));
            wait::until("all is sent", START, async || {
                let n = sent(cluster, prefill).await - sent_before[prefill - PREFILL.start];
                if n >= PROMPT_BYTES { Ok(()) } else { Err(n) }
            })
            .await;
        }
        Point::AfterHandOver => has_begun.await.unwrap(),
    }
    cluster.workers[index].process.kill();
    if point == Point::NotAcknowledged {
        DECODE.filter(|&other| other != index).for_each(|index| cluster.workers[index].process.signal("CONT"));
    }
    (index, reading.await.unwrap())
}

async fn kill_everywhere(victim: Victim) {
    let mut random = seed::from_environment();
    // A run of CI takes two of them, others each time.
    let first = random.below(POINTS.len() as u64) as usize;
    let points = POINTS.iter().cycle().skip(first).take(if seed::is_full() { POINTS.len() } else { 2 });
    for &point in points {
        let (plan, _folder) = plan();
        let tables = plan.each_worker.clone();
        let mut cluster = Cluster::start(plan).await;
        let n_times = if seed::is_full() { 20 } else { 1 };
        let mut longest = Duration::ZERO;
        for time in 0..n_times {
            let background = load::keep_decoding(&cluster, &mut random).await;
            let body = request(&mut random);
            let (killed, answer) = kill_at(&mut cluster, &body, point, victim).await;
            assert!(answer.said().is_some(), "{victim:?} {point:?} {time}: {:?}", answer.error);
            longest = longest.max(answer.longest_gap);
            let id = cluster.workers[killed].id.clone();
            cluster.workers.remove(killed);
            for stream in background {
                assert!(stream.await.unwrap().said().is_some(), "{victim:?} {point:?}: streams beside it go on");
            }
            cluster.wait_for_rest(START).await;
            let worker = cluster.start_worker_with(&id, &tables[killed]);
            cluster.workers.insert(killed, worker);
            cluster.wait_for_workers(4).await;
            let mut alone = body.clone();
            alone["cache_salt"] = format!("{time}").into();
            let alone = ask(&cluster, &alone, || ()).await.unwrap();
            assert_eq!(answer.said(), alone.said(), "{victim:?} {point:?} {time}");
            let late = answer.longest_gap.saturating_sub(alone.longest_gap);
            assert!(late <= late_max(), "{victim:?} {point:?} {time}: {late:?} late");
        }
        eprintln!("{victim:?} killed {point:?} {n_times} times: longest wait {longest:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_computes_a_prompt_may_die_at_any_point() {
    kill_everywhere(Victim::Prefill).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_goes_on_with_a_prompt_may_die_at_any_point() {
    kill_everywhere(Victim::Decode).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefill_worker_that_stands_still_is_given_up() {
    let (plan, _folder) = plan();
    let cluster = Cluster::start(plan).await;
    let mut random = seed::from_environment();
    let background = load::keep_decoding(&cluster, &mut random).await;
    let body = request(&mut random);
    let before = loads(&cluster).await;
    let reading = ask(&cluster, &body, || ());
    let prefill = newly_busy(&cluster, &before, PREFILL).await;
    cluster.workers[prefill].process.signal("STOP");
    let answer = reading.await.unwrap();
    cluster.workers[prefill].process.signal("CONT");
    assert!(answer.said().is_some(), "{:?}", answer.error);
    // Two seconds of silence, and the prompt is computed again beside those that decode.
    assert!(answer.longest_gap < Duration::from_secs(5) + late_max(), "{:?}", answer.longest_gap);
    background.iter().for_each(JoinHandle::abort);
    cluster.wait_for_rest(START).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_way_is_taken_once() {
    let mut slow = role("prefill");
    let transfer = slow.get_mut("transfer").and_then(|transfer| transfer.as_table_mut()).unwrap();
    // A prompt takes two seconds on its way, and half a second to compute beside those that decode.
    transfer.insert("bytes_per_s_max".to_owned(), 2_000.into());
    let mut plan = Plan { n_workers: 2, each_worker: vec![role("decode"), slow], ..Plan::default() };
    let _folder = plan.simulate(&load::slow_prefill(400));
    let cluster = Cluster::start(plan).await;
    let mut random = seed::from_environment();
    let background = load::keep_decoding(&cluster, &mut random).await;
    let answer = ask(&cluster, &request(&mut random), || ()).await.unwrap();
    assert!(answer.said().is_some(), "{:?}", answer.error);
    let n_fetches = fetches(&cluster, "ok").await;
    assert!(n_fetches >= 1.0, "nobody knows yet that it is slow");
    // The worker reports, and the router hears of it.
    tokio::time::sleep(Duration::from_secs(1)).await;
    for _ in 0..3 {
        let answer = ask(&cluster, &request(&mut random), || ()).await.unwrap();
        assert!(answer.said().is_some(), "{:?}", answer.error);
    }
    assert_eq!(fetches(&cluster, "ok").await, n_fetches);
    background.iter().for_each(JoinHandle::abort);
    cluster.wait_for_rest(START).await;
}
