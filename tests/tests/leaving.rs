//! Workers that leave hand on what they have cached, over real processes: nothing of it is computed again.

#![allow(clippy::disallowed_methods, clippy::unwrap_used, missing_docs, reason = "tests: a failed step panics")]

use serde_json::Value;
use tests::answer::Answer;
use tests::client::{self, EventStream};
use tests::cluster::{Cluster, Plan, START, Worker};
use tests::metrics::Metrics;
use tests::{load, place, wait};
use tokio::task::JoinHandle;

const N_PROMPT: u64 = 240;
/// What the prompt's full blocks but that of the last token take: four simulated layers of 64 bytes each.
const PROMPT_BYTES: f64 = ((N_PROMPT - 1) / 16 * 4 * 64) as f64;

/// Workers to whom this prompt is long: it takes more than half a second.
fn simulated() -> (Plan, tempfile::TempDir) {
    let mut plan = Plan { n_workers: 2, ..Plan::default() };
    let folder = plan.simulate(&load::slow_prefill(400));
    (plan, folder)
}

fn request(model: &str, n_tokens: u32) -> Value {
    let mut body = client::completion(model, &[], n_tokens);
    body["prompt"] = (0..N_PROMPT).map(|i| 3 + i * 7 % 250).collect();
    body
}

/// Asks and reads; `began` is told at the first token.
fn ask(cluster: &Cluster, body: &Value, began: impl FnOnce() + Send + 'static) -> JoinHandle<Answer> {
    let (router, body) = (cluster.routers[0].http.clone(), body.clone());
    tokio::spawn(async move { Answer::ask(&Cluster::new_client(), &router, &body, began).await.unwrap() })
}

/// What a request is answered where nothing is cached.
async fn alone(cluster: &Cluster, body: &Value) -> Answer {
    let mut body = body.clone();
    body["cache_salt"] = "another".into();
    let answer = ask(cluster, &body, || ()).await.unwrap();
    assert!(answer.said().is_some(), "{answer:?}");
    answer
}

/// Blocks that a worker has got from others, in bytes, and prompt tokens that it computed.
async fn moved_and_computed(worker: &Worker) -> (f64, f64) {
    let metrics = Metrics::fetch(&worker.address).await.unwrap();
    let moved = metrics.sum("tessera_kv_transfer_moved_bytes_total", &["direction=\"received\""]);
    (moved, metrics.sum("tessera_engine_batch_tokens_sum", &["phase=\"prefill\""]))
}

#[tokio::test(flavor = "multi_thread")]
async fn what_only_a_leaving_worker_has_cached_moves_and_is_not_computed_again() {
    let (plan, _folder) = simulated();
    let mut cluster = Cluster::start(plan).await;
    let body = request("tiny", 5);
    let expected = alone(&cluster, &body).await;
    // It keeps the worker from leaving.
    let (client, router) = (Cluster::new_client(), cluster.routers[0].http.clone());
    let mut running = EventStream::open(&client, &router, "/v1/completions", &request("tiny", 250)).await.unwrap();
    running.next().await.unwrap().expect("a first token");
    let mut leaving = cluster.take_busy(1.0).await;
    let (moved, computed) = moved_and_computed(&cluster.workers[0]).await;
    let mut draining = cluster.begin_drain(&leaving.id, &["--grace", "60s"]);
    wait::until("it moves before anybody asks", START, async || {
        let now = moved_and_computed(&cluster.workers[0]).await.0 - moved;
        if now >= PROMPT_BYTES { Ok(()) } else { Err(now) }
    })
    .await;
    let answer = ask(&cluster, &body, || ()).await.unwrap();
    assert_eq!(answer.said(), expected.said(), "{:?}", answer.error);
    let (moved_then, computed_then) = moved_and_computed(&cluster.workers[0]).await;
    assert_eq!(moved_then - moved, PROMPT_BYTES, "once");
    assert!(computed_then - computed < N_PROMPT as f64 / 4.0, "{} tokens are computed", computed_then - computed);
    drop((running, client));
    assert!(draining.ended(START).success(), "{}", draining.errors());
    assert!(leaving.process.ended(START).success(), "{}", leaving.process.errors());
    cluster.wait_for_rest(START).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn where_only_a_worker_that_computes_prompts_is_left_requests_go_on_there_and_stay() {
    let (plan, _folder) = simulated();
    let role = |role: &str| toml::Table::from_iter([("role".to_owned(), role.into())]);
    let mut cluster = Cluster::start(Plan { each_worker: vec![role("prefill"), role("decode")], ..plan }).await;
    let body = request("tiny", 200);
    let expected = alone(&cluster, &body).await;
    let (began, has_begun) = tokio::sync::oneshot::channel();
    // Nobody waits for it when the test has failed.
    let reading = ask(&cluster, &body, || began.send(()).unwrap_or_default());
    has_begun.await.unwrap();
    let mut leaving = cluster.workers.remove(1);
    drop(cluster.drain(&leaving.id, &["--now"]));
    let answer = reading.await.unwrap();
    assert_eq!(answer.said(), expected.said(), "{:?}", answer.error);
    let metrics = Metrics::fetch(&cluster.routers[0].http).await.unwrap();
    assert_eq!(metrics.sum("tessera_router_migrations_total", &[]), 1.0, "it does not leave where nobody else is");
    assert!(leaving.process.ended(START).success(), "{}", leaving.process.errors());
    cluster.wait_for_rest(START).await;
}

async fn hand_over(plan: Plan) {
    let body = request(&plan.model_name, 200);
    let mut cluster = Cluster::start(plan).await;
    let expected = alone(&cluster, &body).await;
    let (began, has_begun) = tokio::sync::oneshot::channel();
    // Nobody waits for it when the test has failed.
    let reading = ask(&cluster, &body, || began.send(()).unwrap_or_default());
    has_begun.await.unwrap();
    let mut leaving = cluster.take_busy(1.0).await;
    let (moved, computed) = moved_and_computed(&cluster.workers[0]).await;
    drop(cluster.drain(&leaving.id, &["--now"]));
    let answer = reading.await.unwrap();
    assert_eq!(answer.said(), expected.said(), "{:?}", answer.error);
    let (moved_then, computed_then) = moved_and_computed(&cluster.workers[0]).await;
    assert!(moved_then > moved, "what it has computed comes along");
    assert!(computed_then - computed < N_PROMPT as f64 / 4.0, "{} tokens are computed", computed_then - computed);
    assert!(leaving.process.ended(START).success(), "{}", leaving.process.errors());
    cluster.wait_for_rest(START).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_is_handed_over_goes_on_with_its_keys_and_values() {
    let (plan, _folder) = simulated();
    hand_over(plan).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_computed_request_that_is_handed_over_goes_on_with_its_keys_and_values() {
    let packed = tempfile::tempdir().unwrap();
    let mut worker = toml::toml! {
        threads = 1
        kv_cache_mb = 64
    };
    // What the first start packs, the other reads.
    worker.insert("packed_cache".to_owned(), packed.path().display().to_string().into());
    let (model, model_name) = (place::smollm2(), "smollm2".to_owned());
    hand_over(Plan { model, model_name, n_workers: 2, worker, ..Plan::default() }).await;
}
