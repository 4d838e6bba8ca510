//! Tenants over real processes: four routers share simulated workers fairly, and quotas follow demand from one to another.

#![allow(
    clippy::disallowed_methods,
    clippy::print_stderr,
    clippy::unwrap_used,
    missing_docs,
    reason = "tests: a failed step panics, and real time is what they measure"
)]

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tests::cluster::{Cluster, Plan, START};
use tests::metrics::Metrics;
use tests::{client, seed, wait};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use toml::Table;

/// Prompt tokens of a worker in a second, and in the longest step.
const TOKENS_PER_S: u32 = 8_000;
const STEP_TOKENS: u32 = 512;
const N_LONG: u32 = 400;
const N_SHORT: u32 = 40;
const N_ROUTERS: usize = 4;

fn plan(folder: &tempfile::TempDir, profile: &str, tenants: Table) -> Plan {
    let path = folder.path().join("profile.toml");
    std::fs::write(&path, profile).unwrap();
    let mut worker = toml::toml! { engine = "sim" };
    worker.insert("sim_profile".to_owned(), path.display().to_string().into());
    let mut admission = toml::toml! { tenant_header = "x-tenant" };
    admission.insert("tenants".to_owned(), tenants.into());
    let mut router = Table::new();
    router.insert("admission".to_owned(), admission.into());
    Plan { n_routers: N_ROUTERS, n_workers: 2, worker, router, ..Plan::default() }
}

/// What a tenant's clients have done.
#[derive(Default)]
struct Tally {
    n_answered: AtomicU64,
    tokens: AtomicU64,
    n_running: AtomicI64,
}

/// Clients of one tenant that ask one router without pause, until they are dropped.
struct Clients(Vec<JoinHandle<()>>);

impl Drop for Clients {
    fn drop(&mut self) {
        self.0.iter().for_each(JoinHandle::abort);
    }
}

#[derive(Clone)]
struct Load {
    tenant: &'static str,
    n_prompt: u32,
    n_output: u32,
    /// After an answer, and after a refusal.
    pause: Duration,
}

fn prompt(n_tokens: u32) -> Vec<u32> {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    // Prompts share nothing, so that all of each is computed.
    let mut random = seed::Random::new(NEXT.fetch_add(1, Ordering::Relaxed));
    (0..n_tokens).map(|_| 3 + u32::try_from(random.below(250)).unwrap()).collect()
}

fn clients(n: usize, router: &str, load: &Load, tally: &Arc<Tally>) -> Clients {
    let one = |_| {
        let (router, load, tally) = (router.to_owned(), load.clone(), Arc::clone(tally));
        tokio::spawn(async move {
            loop {
                if ask(&router, &load, &tally).await {
                    tally.n_answered.fetch_add(1, Ordering::Relaxed);
                    tally.tokens.fetch_add(u64::from(load.n_prompt), Ordering::Relaxed);
                }
                sleep(load.pause).await;
            }
        })
    };
    Clients((0..n).map(one).collect())
}

/// Asks once and reads the answer to its end; whether it was let in.
async fn ask(router: &str, load: &Load, tally: &Tally) -> bool {
    let body = client::completion("tiny", &prompt(load.n_prompt), load.n_output);
    let request = client::http().post(format!("http://{router}/v1/completions")).json(&body);
    let Ok(answer) = request.header("x-tenant", load.tenant).send().await else { return false };
    if answer.status() != 200 {
        assert_eq!(answer.status(), 429, "refused");
        return false;
    }
    struct Running<'a>(&'a Tally);
    impl Drop for Running<'_> {
        fn drop(&mut self) {
            self.0.n_running.fetch_sub(1, Ordering::Relaxed);
        }
    }
    tally.n_running.fetch_add(1, Ordering::Relaxed);
    let _running = Running(tally);
    answer.bytes().await.is_ok()
}

async fn wait_for_ledger(cluster: &Cluster) {
    for router in &cluster.routers {
        wait::until("routers share the ledger", START, async || {
            let metrics = Metrics::fetch(&router.http).await.map_err(|error| error.to_string())?;
            let n = metrics.sum("tessera_ledger_routers", &[]);
            if n == N_ROUTERS as f64 { Ok(()) } else { Err(format!("{} sees {n}", router.http)) }
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn four_routers_give_tenants_equal_tokens_and_an_idle_one_its_turn() {
    let folder = tempfile::tempdir().unwrap();
    let profile = format!(
        "block_size = 16\nn_blocks = 4096\nmax_running = 256\nprefill_budget = {STEP_TOKENS}\ncontext_length = 512\n\
        [timing]\nprefill_tokens_per_s = {TOKENS_PER_S}\n"
    );
    let tenants = toml::toml! {
        long = {}
        short = {}
        idle = {}
    };
    let cluster = Cluster::start(plan(&folder, &profile, tenants)).await;
    wait_for_ledger(&cluster).await;
    let load = |tenant, n_prompt| Load { tenant, n_prompt, n_output: 1, pause: Duration::ZERO };
    let (long, short) = (Arc::new(Tally::default()), Arc::new(Tally::default()));
    let span = Duration::from_secs(if seed::is_full() { 30 } else { 6 });
    // First all come to every router, then those with long prompts come to one only.
    for n_long_routers in [N_ROUTERS, 1] {
        let all = cluster.routers.iter();
        let of_short: Vec<_> =
            all.clone().map(|router| clients(20, &router.http, &load("short", N_SHORT), &short)).collect();
        let n_each = 16 / n_long_routers;
        let all = all.take(n_long_routers);
        let of_long: Vec<_> = all.map(|router| clients(n_each, &router.http, &load("long", N_LONG), &long)).collect();
        sleep(Duration::from_secs(1)).await;
        let before = [&long, &short].map(|tally| tally.tokens.load(Ordering::Relaxed));
        let (began, mut waits) = (Instant::now(), Vec::new());
        while began.elapsed() < span {
            let idle = Load { tenant: "idle", ..load("idle", N_SHORT) };
            let asked = Instant::now();
            let router = &cluster.routers[waits.len() % N_ROUTERS].http;
            assert!(timeout(START, ask(router, &idle, &Tally::default())).await.unwrap());
            waits.push(asked.elapsed());
            sleep(Duration::from_millis(300)).await;
        }
        let after = [&long, &short].map(|tally| tally.tokens.load(Ordering::Relaxed));
        let [long, short] = [after[0] - before[0], after[1] - before[1]].map(|tokens| tokens as f64);
        waits.sort_unstable();
        let (median, longest) = (waits[waits.len() / 2], waits[waits.len() - 1]);
        eprintln!(
            "long prompts at {n_long_routers} of {N_ROUTERS} routers: {long} and {short} tokens, {:.3}; \
            an idle tenant waits {median:?}, at most {longest:?}",
            long / short
        );
        assert!((long / short - 1.0).abs() < 0.05, "{long} and {short} tokens");
        drop((of_long, of_short));
    }
}

/// Requests per second that a quota lets through at a router that is asked for `n_per_s`, over `span`.
async fn rate(cluster: &Cluster, router: usize, load: &Load, span: Duration) -> f64 {
    let tally = Arc::new(Tally::default());
    let clients = clients(N_CLIENTS, &cluster.routers[router].http, load, &tally);
    sleep(Duration::from_secs(2)).await;
    let (before, began) = (tally.n_answered.load(Ordering::Relaxed), Instant::now());
    sleep(span).await;
    let n = tally.n_answered.load(Ordering::Relaxed) - before;
    let rate = n as f64 / began.elapsed().as_secs_f64();
    drop(clients);
    rate
}

const N_CLIENTS: usize = 8;

#[tokio::test(flavor = "multi_thread")]
async fn quotas_follow_demand_within_two_seconds_and_are_equal_parts_without_a_scheduler() {
    let folder = tempfile::tempdir().unwrap();
    let profile = "block_size = 16\nn_blocks = 4096\nmax_running = 256\nprefill_budget = 512\ncontext_length = 512\n\
        [timing]\ndecode_base_ms = 10\n";
    // 40 requests a second; and 8 at once.
    let tenants = toml::toml! {
        hurried = { requests_per_minute = 2400, burst_s = 1 }
        patient = { n_concurrent_max = 8 }
    };
    let mut cluster = Cluster::start(plan(&folder, profile, tenants)).await;
    wait_for_ledger(&cluster).await;
    // Four times what is allowed, most of it refused.
    let hurried = Load { tenant: "hurried", n_prompt: 3, n_output: 1, pause: Duration::from_millis(50) };
    let span = Duration::from_secs(if seed::is_full() { 20 } else { 3 });
    for router in [0, 2] {
        let rate = rate(&cluster, router, &hurried, span).await;
        eprintln!("40 a second are allowed, router {router} alone is asked: {rate:.1}");
        assert!((36.0..=44.0).contains(&rate), "{rate}");
    }

    // Each runs for half a second.
    let patient = Load { tenant: "patient", n_prompt: 3, n_output: 50, pause: Duration::from_millis(20) };
    for router in [1, 3] {
        let tally = Arc::new(Tally::default());
        let clients = clients(16, &cluster.routers[router].http, &patient, &tally);
        sleep(Duration::from_secs(2)).await;
        let mut n_running = Vec::new();
        for _ in 0..20 {
            n_running.push(tally.n_running.load(Ordering::Relaxed));
            sleep(Duration::from_millis(50)).await;
        }
        let mean = n_running.iter().sum::<i64>() as f64 / n_running.len() as f64;
        eprintln!("8 at once are allowed, router {router} alone is asked: {mean:.1}, {n_running:?}");
        assert!(n_running.iter().all(|&n| n <= 8) && mean > 6.5, "{n_running:?}");
        drop(clients);
    }

    cluster.scheduler.kill();
    // The grace of the ledger's streams.
    sleep(Duration::from_millis(2_500)).await;
    let rate = rate(&cluster, 1, &hurried, span).await;
    eprintln!("without a scheduler, one of {N_ROUTERS} routers: {rate:.1} of 40 a second");
    assert!((9.0..=11.0).contains(&rate), "{rate}");
}
