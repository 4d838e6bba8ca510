//! All workers and all routers are restarted one by one under load: no request fails and no token changes.

#![allow(
    clippy::disallowed_methods,
    clippy::print_stderr,
    clippy::unwrap_used,
    missing_docs,
    reason = "tests: a failed step panics, and real time is what they measure"
)]

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::json;
use tests::answer::Answer;
use tests::client::{self, EventStream};
use tests::cluster::{Cluster, Plan, START, SWIFT};
use tests::load::{self, Load, ask};
use tests::{place, seed};

/// Time between two requests: 50 streams a second.
const EVERY: Duration = Duration::from_millis(20);
/// The same where tokens are computed: 3 streams a second.
const EVERY_COMPUTED: Duration = Duration::from_millis(333);
const SMOLLM2: &str = "smollm2";

/// Restarts a worker while it runs a request: of those that do, the one that has run longest.
///
/// Requests that a cached prompt sends all to one worker leave the other idle; it has them as soon as that one leaves.
async fn restart_worker(cluster: &mut Cluster, round: usize) -> String {
    let mut before = cluster.take_busy(1.0).await;
    match round % 3 {
        0 => before.process.terminate(),
        1 => drop(cluster.drain(&before.id, &["--now"])),
        _ => drop(cluster.drain(&before.id, &["--grace", "300ms"])),
    }
    assert!(before.process.ended(START).success(), "{}", before.process.errors());
    let after = cluster.start_worker_at(&before.id, &before.address);
    cluster.workers.push(after);
    cluster.wait_for_workers(2).await;
    before.id
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

/// Restarts all workers and all routers one by one, round after round.
async fn restart_all(cluster: &mut Cluster, n_rounds: usize) {
    let mut restarted = BTreeSet::new();
    for round in 0..n_rounds {
        for index in 0..2 {
            restarted.insert(restart_worker(cluster, round * 2 + index).await);
        }
        for _ in 0..2 {
            restart_router(cluster).await;
        }
    }
    assert_eq!(restarted.len(), 2, "only {restarted:?}");
}

async fn start(worker_more: toml::Table) -> (Cluster, tempfile::TempDir) {
    let mut plan = Plan { n_routers: 2, n_workers: 2, ..Plan::default() };
    let folder = plan.simulate(SWIFT);
    plan.worker.extend(worker_more);
    (Cluster::start(plan).await, folder)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rolling_restart_fails_no_request_and_changes_no_token() {
    let (mut cluster, _folder) = start(toml::Table::new()).await;
    let expected = load::undisturbed(&cluster).await;
    let load = Load::on(&cluster, &expected, EVERY);
    restart_all(&mut cluster, if seed::is_full() { 30 } else { 4 }).await;
    load.end().await.assert_well("a rolling restart");
    cluster.wait_for_rest(START).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rolling_restart_changes_no_token_that_is_computed() {
    let packed = tempfile::tempdir().unwrap();
    let mut worker = toml::toml! {
        threads = 1
        kv_cache_mb = 64
    };
    // A loaded machine computes slowly.
    let router = toml::toml! {
        server = { grace_ms = 60000 }
    };
    // What the first start packs, all others read.
    worker.insert("packed_cache".to_owned(), packed.path().display().to_string().into());
    let plan = Plan {
        model: place::smollm2(),
        model_name: SMOLLM2.to_owned(),
        n_routers: 2,
        n_workers: 2,
        worker,
        router,
        ..Plan::default()
    };
    let mut cluster = Cluster::start(plan).await;
    let expected = load::undisturbed_of(&cluster, (0..24).map(|index| load::request_to(SMOLLM2, index))).await;
    let load = Load::on(&cluster, &expected, EVERY_COMPUTED);
    restart_all(&mut cluster, if seed::is_full() { 12 } else { 2 }).await;
    load.end().await.assert_well("a rolling restart of SmolLM2");
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
        let mut leaving = cluster.take_busy(4.0).await;
        if way == "signal" {
            leaving.process.terminate();
        } else {
            let draining = cluster.drain(&leaving.id, &[]);
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
async fn the_life_that_lives_is_sent_away_though_a_dead_one_is_known_whose_address_is_anothers_now() {
    let mut plan = Plan { n_workers: 1, ttl_ms: 60_000, ..Plan::default() };
    let _folder = plan.simulate(SWIFT);
    let mut cluster = Cluster::start(plan).await;
    let mut dead = cluster.workers.remove(0);
    dead.process.kill();
    let other = cluster.start_worker_at("other", &dead.address);
    let mut after = cluster.start_worker(&dead.id);
    cluster.workers.push(other);
    // One of them is the new life.
    cluster.wait_for_workers(2).await;
    let draining = cluster.drain(&dead.id, &["--now"]);
    assert!(draining.errors().contains(&format!("passes over a life of {} at {}", dead.id, dead.address)));
    assert!(after.process.ended(START).success(), "{}", after.process.errors());
    cluster.wait_for_workers(1).await;
    let routers = [cluster.routers[0].http.clone()];
    assert!(ask(&routers, 0, &load::request(1)).await.unwrap().said().is_some(), "the other worker serves on");
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
