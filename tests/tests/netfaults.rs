//! The network between real processes fails: errors stay bounded and typed, nothing hangs, and all is well afterwards.
//!
//! Every fault is made by a proxy between two processes (`tests::proxy`), which workers advertise instead of themselves.
//! Gone, it accepts connections and passes nothing on, as a partition looks to those who had a connection; lossy, it
//! delays a packet as TCP's retransmissions would.
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
use tests::cluster::{Cluster, Plan, START, SWIFT};
use tests::load::{self, Load};
use tests::metrics::Metrics;
use tests::proxy::{Behind, Network, Proxy};
use tests::{seed, wait};
use tokio::time::sleep;

/// Time between two requests: 20 streams a second.
const EVERY: Duration = Duration::from_millis(50);
const KV_SILENCE: Duration = Duration::from_secs(3);
const TRANSFER_SILENCE: Duration = Duration::from_secs(2);
const LEASE: Duration = Duration::from_secs(2);

/// How long a fault lasts: longer than every silence that is borne.
fn fault() -> Duration {
    if seed::is_full() { Duration::from_secs(30) } else { Duration::from_secs(5) }
}

/// What a loaded machine is granted beside a deadline.
fn grace() -> Duration {
    Duration::from_secs(if seed::is_full() { 2 } else { 8 })
}

/// Two routers and two workers behind proxies.
struct Setting {
    cluster: Cluster,
    workers: Vec<Behind>,
    etcd: Arc<Proxy>,
    _folder: tempfile::TempDir,
}

async fn start() -> Setting {
    let workers = vec![Behind::start().await, Behind::start().await];
    let etcd = Arc::new(Proxy::start().await);
    let each_worker = workers.iter().map(|worker| worker.table.clone()).collect();
    let ttl_ms = i64::try_from(LEASE.as_millis()).unwrap();
    let etcd_proxy = Some(Arc::clone(&etcd));
    let mut plan = Plan { n_routers: 2, n_workers: 2, each_worker, etcd_proxy, ttl_ms, ..Plan::default() };
    let folder = plan.simulate(SWIFT);
    Setting { cluster: Cluster::start(plan).await, workers, etcd, _folder: folder }
}

/// The same with streams that run on both workers.
async fn start_under_load() -> (Setting, Load) {
    let setting = start().await;
    let expected = load::undisturbed(&setting.cluster).await;
    let load = Load::on(&setting.cluster, &expected, EVERY);
    wait::until("both workers run requests", START, async || {
        for worker in &setting.cluster.workers {
            let metrics = Metrics::fetch(&worker.address).await.map_err(|error| format!("{error:#}"))?;
            if metrics.sum("tessera_engine_requests", &["state=\"running\""]) == 0.0 {
                return Err(format!("{} runs none", worker.id));
            }
        }
        Ok(())
    })
    .await;
    (setting, load)
}

impl Setting {
    fn set(&self, network: Network) {
        self.workers.iter().for_each(|worker| worker.service.set(network));
    }

    /// Waits until both workers are used by both routers, and nothing is left of what was.
    async fn has_recovered(&self) {
        let began = Instant::now();
        self.cluster.wait_for_workers(2).await;
        let before = self.steps().await;
        wait::until("both workers compute again", START, async || {
            for prompt in 0..8 {
                let said = load::ask(&[self.cluster.routers[0].http.clone()], 0, &load::request(prompt)).await;
                let said = said.map_err(|error| format!("{error:#}"))?;
                said.said().ok_or_else(|| format!("{:?}", said.error))?;
            }
            let now = self.steps().await;
            if now.iter().zip(&before).all(|(now, before)| now > before) { Ok(()) } else { Err(format!("{now:?}")) }
        })
        .await;
        self.cluster.wait_for_rest(START).await;
        eprintln!("recovered after {:?}", began.elapsed());
    }

    async fn steps(&self) -> Vec<f64> {
        let mut steps = Vec::new();
        for worker in &self.cluster.workers {
            let metrics = Metrics::fetch(&worker.address).await.unwrap();
            steps.push(metrics.sum("tessera_engine_step_duration_seconds_count", &[]));
        }
        steps
    }
}

async fn n_ready(router: &str) -> f64 {
    Metrics::fetch(router).await.unwrap().sum("tessera_route_engines", &["state=\"ready\""])
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_no_router_reaches_fails_no_request() {
    let (setting, load) = start_under_load().await;
    setting.workers[0].service.set(Network::Gone);
    let began = Instant::now();
    wait::until("it is given up", KV_SILENCE + grace(), async || {
        for router in &setting.cluster.routers {
            let n = n_ready(&router.http).await;
            if n != 1.0 {
                return Err(n);
            }
        }
        Ok(())
    })
    .await;
    sleep(fault().saturating_sub(began.elapsed())).await;
    setting.workers[0].service.set(Network::Clear);
    setting.cluster.wait_for_workers(2).await;
    let outcome = load.end().await;
    outcome.assert_well("a worker is cut off from routers");
    assert!(outcome.longest_gap < KV_SILENCE + grace(), "{:?}", outcome.longest_gap);
    setting.has_recovered().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_that_etcd_takes_for_dead_serve_on() {
    let (setting, load) = start_under_load().await;
    setting.etcd.set(Network::Gone);
    // Their leases run out in a store that everybody else reaches.
    wait::until("only the routers are registered", LEASE * 2 + grace(), async || {
        let n = setting.cluster.etcd.n_members().await.map_err(|error| format!("{error:#}"))?;
        if n == 2 { Ok(()) } else { Err(format!("{n} members")) }
    })
    .await;
    let end = Instant::now() + fault() / 2;
    while Instant::now() < end {
        for router in &setting.cluster.routers {
            assert_eq!(n_ready(&router.http).await, 2.0);
        }
        sleep(Duration::from_millis(100)).await;
    }
    setting.etcd.set(Network::Clear);
    let back = Instant::now();
    wait::until("all are registered", LEASE * 2 + grace(), async || {
        let n = setting.cluster.etcd.n_members().await.map_err(|error| format!("{error:#}"))?;
        if n == 4 { Ok(()) } else { Err(format!("{n} members")) }
    })
    .await;
    eprintln!("registered again after {:?}", back.elapsed());
    load.end().await.assert_well("workers are cut off from etcd");
    setting.has_recovered().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn half_a_second_on_every_way_fails_no_request() {
    let (setting, load) = start_under_load().await;
    setting.set(Network::Slow(Duration::from_millis(500)));
    setting.etcd.set(Network::Slow(Duration::from_millis(500)));
    sleep(fault()).await;
    for router in &setting.cluster.routers {
        assert_eq!(n_ready(&router.http).await, 2.0, "who is slow is not lost");
    }
    setting.set(Network::Clear);
    setting.etcd.set(Network::Clear);
    load.end().await.assert_well("half a second of delay");
    setting.has_recovered().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lossy_network_breaks_no_stream() {
    let (setting, load) = start_under_load().await;
    setting.set(Network::Lossy(30));
    sleep(fault()).await;
    setting.set(Network::Clear);
    let outcome = load.end().await;
    outcome.assert_unbroken("30 % loss");
    // Silence after silence, until no attempt is left.
    assert!(outcome.longest_gap < 3 * KV_SILENCE + grace(), "{:?}", outcome.longest_gap);
    // Every worker may be lost at once.
    assert!(outcome.refused.keys().all(|code| ["no_worker", "worker_lost"].contains(&code.as_str())), "{outcome:?}");
    assert!(outcome.n_refused() * 2 <= outcome.n_asked, "{outcome:?}");
    setting.has_recovered().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_that_break_again_and_again_fail_no_request() {
    let (setting, load) = start_under_load().await;
    let end = Instant::now() + fault();
    while Instant::now() < end {
        for worker in &setting.workers {
            worker.service.cut();
            sleep(Duration::from_millis(500)).await;
            setting.cluster.wait_for_workers(2).await;
        }
    }
    load.end().await.assert_well("connections break");
    setting.has_recovered().await;
}

/// Prompts that the decode worker ordered, whatever became of them.
async fn fetches(cluster: &Cluster) -> f64 {
    let metrics = Metrics::fetch(&cluster.workers[0].address).await.unwrap();
    metrics.sum("tessera_kv_transfer_fetches_total", &[])
}

/// What a long request takes on a decode worker that is busy.
const COMPUTED_ALONE: Duration = Duration::from_secs(5);

/// A worker to whom a prompt is long, beside others that decode.
const SLOW_PREFILL: &str = "
block_size = 16
n_blocks = 800
max_running = 32
prefill_budget = 20
context_length = 512
[timing]
prefill_tokens_per_s = 400
decode_base_ms = 10
";

#[tokio::test(flavor = "multi_thread")]
async fn prompts_whose_transfer_is_cut_off_are_computed_where_they_decode() {
    let mut workers = [Behind::start().await, Behind::start().await];
    for (worker, role) in workers.iter_mut().zip(["decode", "prefill"]) {
        worker.table.insert("role".to_owned(), role.into());
    }
    let each_worker = workers.iter().map(|worker| worker.table.clone()).collect();
    let mut plan = Plan { n_workers: 2, each_worker, ..Plan::default() };
    let _folder = plan.simulate(SLOW_PREFILL);
    let cluster = Cluster::start(plan).await;
    let mut random = seed::from_environment();
    let mut body = client::completion("tiny", &[], 40);
    let routers = [cluster.routers[0].http.clone()];
    let mut asked = Vec::new();
    for network in [Network::Clear, Network::Gone, Network::Slow(Duration::from_millis(500)), Network::Lossy(30)] {
        let background = load::keep_decoding(&cluster).await;
        workers[1].transfer.set(network);
        let before = fetches(&cluster).await;
        // Not each is worth sending elsewhere.
        for _ in 0..6 {
            let prompt: Vec<u64> = (0..240).map(|_| 3 + random.below(250)).collect();
            body["prompt"] = json!(prompt);
            let began = Instant::now();
            let answer = load::ask(&routers, 0, &body).await.unwrap();
            eprintln!("{network:?}: answered after {:?}", began.elapsed());
            assert!(answer.said().is_some(), "{network:?}: {:?}", answer.error);
            assert!(began.elapsed() < TRANSFER_SILENCE + COMPUTED_ALONE + grace(), "{network:?}");
            asked.push((network, body.clone(), answer));
            if fetches(&cluster).await > before {
                break;
            }
        }
        assert!(fetches(&cluster).await > before, "{network:?}: none was to be computed elsewhere");
        workers[1].transfer.set(Network::Clear);
        for stream in background {
            assert!(stream.await.unwrap().said().is_some(), "{network:?}: streams beside it go on");
        }
        cluster.wait_for_rest(START).await;
    }
    for (network, mut body, answer) in asked {
        body["cache_salt"] = "another".into();
        let alone = load::ask(&routers, 0, &body).await.unwrap();
        assert_eq!(answer.said(), alone.said(), "{network:?}");
    }
}
