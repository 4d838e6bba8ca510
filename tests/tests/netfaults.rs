//! The network between real processes fails: errors stay bounded and typed, nothing hangs, and all is well afterwards.
//!
//! Each process has a network namespace of its own, and a switch between them loses IP packets (`tests::switch`): all
//! in a partition, which nobody is told of, and 30 of a hundred on a lossy network.
//!
//! The deadlines that must hold, by default: a worker is silent for `router.workers.kv_silence_ms_max` (3 s), whoever
//! computes a prompt for another for `worker.transfer.silence_ms` (2 s), or does not agree to within
//! `worker.transfer.pairing_timeout_ms` (1 s).

#![allow(
    clippy::disallowed_methods,
    clippy::print_stderr,
    clippy::unwrap_used,
    missing_docs,
    reason = "tests: a failed step panics, and real time is what they measure"
)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::json;
use tests::client;
use tests::cluster::{Cluster, Plan, Router, START, SWIFT};
use tests::load::{self, Expected, Load};
use tests::metrics::Metrics;
use tests::switch::{CUT, Link, Switch};
use tests::{seed, wait};
use tokio::time::sleep;
use toml::Table;

/// Time between two requests: 20 streams a second.
const EVERY: Duration = Duration::from_millis(50);
const KV_SILENCE: Duration = Duration::from_secs(3);
const TRANSFER_SILENCE: Duration = Duration::from_secs(2);
const LEASE: Duration = Duration::from_secs(2);
/// Longest wait before a router tries to connect again, and for that to succeed or not.
const RECONNECT: Duration = Duration::from_secs(4);
const LOSSY: Link = Link::Lossy(30);

const ETCD: &str = "etcd";
const SCHEDULER: &str = "scheduler";
const ROUTERS: [&str; 2] = ["router-0", "router-1"];
const WORKERS: [&str; 2] = ["worker-0", "worker-1"];
const ALL: [&str; 6] = [ETCD, SCHEDULER, ROUTERS[0], ROUTERS[1], WORKERS[0], WORKERS[1]];

/// How long a fault lasts: longer than every silence that is borne.
fn fault() -> Duration {
    Duration::from_secs(if seed::is_full() { 30 } else { 5 })
}

/// What a loaded machine is granted beside a deadline.
fn grace() -> Duration {
    Duration::from_secs(if seed::is_full() { 2 } else { 8 })
}

/// A cluster whose processes are the switch's hosts.
struct Setting {
    cluster: Cluster,
    switch: Arc<Switch>,
    _folder: tempfile::TempDir,
}

/// Starts two routers and two workers; none where namespaces are not permitted.
async fn start(profile: &str, each_worker: Vec<Table>) -> Option<Setting> {
    let switch = Switch::start(&ALL)?;
    let mut plan =
        Plan { n_routers: 2, n_workers: 2, each_worker, switch: Some(Arc::clone(&switch)), ..Plan::default() };
    let folder = plan.simulate(profile);
    plan.worker.extend(toml::toml! {
        transfer = { ways = ["tcp"] }
    });
    Some(Setting { cluster: Cluster::start(plan).await, switch, _folder: folder })
}

/// The same under load, with streams on both workers.
async fn start_under_load() -> Option<(Setting, Expected, Load)> {
    let setting = start(SWIFT, Vec::new()).await?;
    let expected = load::undisturbed(&setting.cluster).await;
    let load = Load::running_on(&setting.cluster, &expected, EVERY).await;
    Some((setting, expected, load))
}

/// Waits until each of `routers` would place on `n` workers.
async fn wait_for_ready(what: &str, routers: &[Router], n: f64, deadline: Duration) {
    let began = Instant::now();
    wait::until(what, deadline + grace(), async || {
        for router in routers {
            let seen = router.n_ready().await.map_err(|error| format!("{error:#}"))?;
            if seen != n {
                return Err(format!("{seen} of {n}"));
            }
        }
        Ok(())
    })
    .await;
    eprintln!("{what} after {:?}", began.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_cut_off_from_routers_fails_no_request() {
    let Some((Setting { cluster, switch, .. }, expected, load)) = start_under_load().await else { return };
    let cut_off = &WORKERS[..1];

    // Shorter than anybody takes for the end.
    switch.set(CUT, &ROUTERS, cut_off);
    sleep(Duration::from_secs(1)).await;
    switch.set(Link::Clear, &ROUTERS, cut_off);
    wait_for_ready("both workers are used after a second", &cluster.routers, 2.0, RECONNECT).await;

    let began = Instant::now();
    switch.set(CUT, &ROUTERS[..1], cut_off);
    wait_for_ready("it is given up by one router", &cluster.routers[..1], 1.0, KV_SILENCE).await;
    assert_eq!(cluster.routers[1].n_ready().await.unwrap(), 2.0, "the other router goes on with it");
    switch.set(CUT, &ROUTERS, cut_off);
    wait_for_ready("it is given up by both", &cluster.routers, 1.0, KV_SILENCE).await;
    sleep(fault().saturating_sub(began.elapsed())).await;
    switch.set(Link::Clear, &ROUTERS, cut_off);
    wait_for_ready("it is used again", &cluster.routers, 2.0, RECONNECT).await;

    let outcome = load.end().await;
    outcome.assert_well("a worker is cut off from routers");
    assert!(outcome.longest_gap < KV_SILENCE + grace(), "{:?}", outcome.longest_gap);
    load::assert_recovered(&cluster, &expected).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_only_hears_or_is_only_heard_fails_no_request() {
    let Some((Setting { cluster, switch, .. }, expected, load)) = start_under_load().await else { return };
    let half = &WORKERS[..1];
    for (what, from, to) in [("it only hears", half, &ROUTERS[..]), ("it is only heard", &ROUTERS[..], half)] {
        switch.set_one_way(CUT, from, to);
        wait_for_ready(&format!("{what} and is given up"), &cluster.routers, 1.0, KV_SILENCE).await;
        switch.set(Link::Clear, from, to);
        wait_for_ready("it is used again", &cluster.routers, 2.0, RECONNECT).await;
    }
    let outcome = load.end().await;
    outcome.assert_well("a worker is cut off one way");
    assert!(outcome.longest_gap < KV_SILENCE + grace(), "{:?}", outcome.longest_gap);
    load::assert_recovered(&cluster, &expected).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_that_etcd_takes_for_dead_serve_on() {
    let Some((Setting { cluster, switch, .. }, expected, load)) = start_under_load().await else { return };
    switch.set(CUT, &[ETCD], &WORKERS);
    // Their leases run out in a store that everybody else reaches.
    wait_for_members("only the routers are registered", &cluster, 2).await;
    let end = Instant::now() + fault();
    while Instant::now() < end {
        for router in &cluster.routers {
            assert_eq!(router.n_ready().await.unwrap(), 2.0);
        }
        sleep(Duration::from_millis(100)).await;
    }
    switch.set(Link::Clear, &[ETCD], &WORKERS);
    wait_for_members("all are registered again", &cluster, 4).await;
    let outcome = load.end().await;
    outcome.assert_well("workers are cut off from etcd");
    assert!(outcome.longest_gap < grace(), "{:?}", outcome.longest_gap);
    load::assert_recovered(&cluster, &expected).await;
}

/// Waits until `n` members are registered, two leases at most.
async fn wait_for_members(what: &str, cluster: &Cluster, n: usize) {
    let began = Instant::now();
    wait::until(what, LEASE * 2 + grace(), async || {
        let seen = cluster.etcd.n_members().await.map_err(|error| format!("{error:#}"))?;
        if seen == n { Ok(()) } else { Err(format!("{seen} of {n} members")) }
    })
    .await;
    eprintln!("{what} after {:?}", began.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn routers_cut_off_from_the_scheduler_serve_on() {
    let Some((Setting { cluster, switch, .. }, expected, load)) = start_under_load().await else { return };
    switch.set(CUT, &ROUTERS, &[SCHEDULER]);
    sleep(fault()).await;
    switch.set(Link::Clear, &ROUTERS, &[SCHEDULER]);
    let before = n_views(&cluster.routers).await;
    let began = Instant::now();
    wait::until("both hear of views again", START, async || {
        let now = n_views(&cluster.routers).await;
        if now.iter().zip(&before).all(|(now, before)| now > before) { Ok(()) } else { Err(format!("{now:?}")) }
    })
    .await;
    eprintln!("views after {:?}", began.elapsed());
    let outcome = load.end().await;
    outcome.assert_well("routers are cut off from the scheduler");
    assert!(outcome.longest_gap < grace(), "{:?}", outcome.longest_gap);
    load::assert_recovered(&cluster, &expected).await;
}

async fn n_views(routers: &[Router]) -> Vec<f64> {
    let views = routers.iter().map(async |router| {
        let metrics = Metrics::fetch(&router.http).await.unwrap();
        metrics.sum("tessera_route_views_total", &[])
    });
    futures::future::join_all(views).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lossy_network_breaks_no_stream() {
    let Some((Setting { cluster, switch, .. }, expected, load)) = start_under_load().await else { return };
    switch.set(LOSSY, &ALL, &ALL);
    sleep(fault()).await;
    switch.set(Link::Clear, &ALL, &ALL);
    let outcome = load.end().await;
    outcome.assert_unbroken("30 % loss");
    eprintln!("{} packets were lost", switch.n_lost());
    assert!(switch.n_lost() as usize > outcome.n_asked, "the network was lossy");
    assert!(outcome.cut.is_empty(), "{:?}", outcome.cut);
    // Silence after silence, until no attempt is left.
    assert!(outcome.longest_gap < 3 * KV_SILENCE + grace(), "{:?}", outcome.longest_gap);
    // Every worker may be lost at once.
    assert!(outcome.refused.keys().all(|code| ["no_worker", "worker_lost"].contains(&code.as_str())), "{outcome:?}");
    assert!(outcome.n_refused() * 2 <= outcome.n_asked, "{outcome:?}");
    load::assert_recovered(&cluster, &expected).await;
}

/// Prompts that the decode worker ordered, whatever became of them.
async fn fetches(cluster: &Cluster) -> f64 {
    let metrics = Metrics::fetch(&cluster.workers[0].address).await.unwrap();
    metrics.sum("tessera_kv_transfer_fetches_total", &[])
}

/// What a long request takes on a decode worker that is busy.
const COMPUTED_ALONE: Duration = Duration::from_secs(5);

#[tokio::test(flavor = "multi_thread")]
async fn prompts_whose_transfer_is_cut_off_are_computed_where_they_decode() {
    let role = |role: &str| Table::from_iter([("role".to_owned(), role.into())]);
    let started = start(&load::slow_prefill(800), vec![role("decode"), role("prefill")]).await;
    let Some(Setting { cluster, switch, .. }) = started else { return };
    let mut random = seed::from_environment();
    let mut body = client::completion("tiny", &[], 40);
    let routers = [cluster.routers[0].http.clone()];
    let mut asked = Vec::new();
    for link in [Link::Clear, CUT, Link::Slow(Duration::from_millis(500)), LOSSY] {
        let background = load::keep_decoding(&cluster, &mut random).await;
        switch.set(link, &WORKERS[..1], &WORKERS[1..]);
        let before = fetches(&cluster).await;
        // Not each is worth sending elsewhere.
        for _ in 0..6 {
            let prompt: Vec<u64> = (0..240).map(|_| 3 + random.below(250)).collect();
            body["prompt"] = json!(prompt);
            let began = Instant::now();
            let answer = load::ask(&routers, 0, &body).await.unwrap();
            eprintln!("{link:?}: answered after {:?}", began.elapsed());
            assert!(answer.said().is_some(), "{link:?}: {:?}", answer.error);
            assert!(began.elapsed() < TRANSFER_SILENCE + COMPUTED_ALONE + grace(), "{link:?}");
            asked.push((link, body.clone(), answer));
            if fetches(&cluster).await > before {
                break;
            }
        }
        assert!(fetches(&cluster).await > before, "{link:?}: none was to be computed elsewhere");
        switch.set(Link::Clear, &WORKERS[..1], &WORKERS[1..]);
        for stream in background {
            assert!(stream.await.unwrap().said().is_some(), "{link:?}: streams beside it go on");
        }
        cluster.wait_for_rest(START).await;
    }
    for (link, mut body, answer) in asked {
        body["cache_salt"] = "another".into();
        let alone = load::ask(&routers, 0, &body).await.unwrap();
        assert_eq!(answer.said(), alone.said(), "{link:?}");
    }
}
