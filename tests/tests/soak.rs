//! A cluster under load while one thing after another fails: right answers, nothing leaked, memory as it was.
//!
//! In CI for a minute with a fault every 15 s; `cargo xtask full soak` for half an hour with a fault a minute.
//! `SOAK_S` sets another duration, `SEED` repeats the faults of an earlier run.
//! A request may fail for one reason only: the router that streams it was killed.

#![allow(
    clippy::disallowed_methods,
    clippy::print_stderr,
    clippy::unwrap_used,
    missing_docs,
    reason = "tests: a failed step panics, and real time is what they measure"
)]

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use tests::cluster::{Cluster, Plan, START};
use tests::load::{self, Load, N_TOKENS_MEAN};
use tests::metrics::Metrics;
use tests::process::Process;
use tests::proxy::Behind;
use tests::seed::{self, Random};
use tests::wait;
use tokio::time::sleep;

/// A worker that decodes 8 sequences in 20.8 ms.
const PROFILE: &str = "
block_size = 16
n_blocks = 400
max_running = 8
prefill_budget = 512
context_length = 512
[timing]
prefill_tokens_per_s = 20000
decode_base_ms = 20
decode_per_sequence_ms = 0.1
";
const TOKENS_PER_S: f64 = 8.0 / 0.0208;
const N_WORKERS: usize = 3;
/// Of what all workers can do.
const LOAD: f64 = 0.8;
/// How long whoever is paused stands still: longer than every silence that is borne.
const PAUSE: Duration = Duration::from_secs(5);
/// How long a byte takes over a slow network.
const SLOW: Duration = Duration::from_millis(200);
/// Soaks shorter than this say nothing about memory: caches still fill.
const MEMORY_AFTER: Duration = Duration::from_secs(300);
/// How much more memory a process may hold at the end than half-way.
const GROWTH_MAX: f64 = 0.02;

/// Streams that may run over a router when it is killed.
const N_CUT_MAX: usize = 50;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    KillWorker,
    PauseWorker,
    RestartWorker,
    KillRouter,
    PauseRouter,
    RestartRouter,
    PauseEtcd,
    KillEtcd,
    EmptyEtcd,
    KillScheduler,
    PauseScheduler,
    SlowNetwork,
}

const FAULTS: [Fault; 12] = [
    Fault::KillWorker,
    Fault::PauseWorker,
    Fault::RestartWorker,
    Fault::KillRouter,
    Fault::PauseRouter,
    Fault::RestartRouter,
    Fault::PauseEtcd,
    Fault::KillEtcd,
    Fault::EmptyEtcd,
    Fault::KillScheduler,
    Fault::PauseScheduler,
    Fault::SlowNetwork,
];

fn duration() -> Duration {
    let usual = if seed::is_full() { 1800 } else { 60 };
    Duration::from_secs(std::env::var("SOAK_S").map_or(usual, |seconds| seconds.parse().expect("SOAK_S is a number")))
}

async fn pause(process: &Process) {
    process.signal("STOP");
    sleep(PAUSE).await;
    process.signal("CONT");
}

/// Ends a process, by force or not.
fn end(process: &mut Process, by_force: bool) {
    if by_force {
        process.kill();
    } else {
        process.terminate();
        assert!(process.ended(START).success(), "{}", process.errors());
    }
}

/// Every kind of fault once in random order, then again: what each of them costs for good is known half-way.
#[derive(Default)]
struct Faults(Vec<Fault>);

impl Faults {
    fn next(&mut self, random: &mut Random) -> Fault {
        if self.0.is_empty() {
            self.0.extend(FAULTS);
        }
        self.0.swap_remove(usize::try_from(random.below(self.0.len() as u64)).unwrap())
    }
}

async fn strike(cluster: &mut Cluster, behind: &[Behind], fault: Fault, random: &mut Random) {
    let mut one_of = |n: usize| usize::try_from(random.below(n as u64)).unwrap();
    match fault {
        Fault::PauseWorker => pause(&cluster.workers[one_of(N_WORKERS)].process).await,
        Fault::KillWorker | Fault::RestartWorker => {
            let mut worker = cluster.workers.remove(one_of(N_WORKERS));
            end(&mut worker.process, fault == Fault::KillWorker);
            let of_it = behind.iter().find(|behind| behind.table["listen"].as_str() == Some(&worker.address)).unwrap();
            let again = cluster.start_worker_with(&worker.id, &of_it.table);
            cluster.workers.push(again);
        }
        Fault::PauseRouter => pause(&cluster.routers[one_of(2)].process).await,
        Fault::KillRouter | Fault::RestartRouter => {
            let mut router = cluster.routers.remove(one_of(2));
            end(&mut router.process, fault == Fault::KillRouter);
            let again = cluster.start_router_at(&router.process.name, &router.http, &router.grpc);
            cluster.routers.push(again);
        }
        Fault::PauseEtcd => pause(&cluster.etcd.process).await,
        Fault::KillEtcd | Fault::EmptyEtcd => {
            cluster.etcd.process.kill();
            sleep(PAUSE).await;
            cluster.etcd.restart(fault == Fault::KillEtcd).await;
        }
        Fault::KillScheduler => {
            let address = cluster.scheduler.address("grpc");
            cluster.scheduler.kill();
            cluster.scheduler = cluster.start_scheduler_at(&address);
        }
        Fault::PauseScheduler => pause(&cluster.scheduler).await,
        Fault::SlowNetwork => {
            let worker = &behind[one_of(N_WORKERS)];
            [&worker.service, &worker.transfer].iter().for_each(|way| way.delay(SLOW));
            sleep(PAUSE).await;
            [&worker.service, &worker.transfer].iter().for_each(|way| way.delay(Duration::ZERO));
        }
    }
    cluster.wait_for_workers(N_WORKERS).await;
}

/// Memory of every process over time, by process.
#[derive(Default)]
struct Memory(BTreeMap<(String, u32), Vec<(Duration, u64)>>);

impl Memory {
    fn sample(&mut self, cluster: &mut Cluster, at: Duration) {
        for process in cluster.processes() {
            let samples = self.0.entry((process.name.clone(), process.pid())).or_default();
            samples.push((at, process.resident_bytes()));
        }
    }

    /// Prints, for whoever lived from the first quarter to the end, medians of the last two quarters; yields the worst
    /// growth.
    fn growth(&self, whole: Duration) -> f64 {
        let median = |samples: &[(Duration, u64)], from: u32| {
            let quarter = (whole * from / 4, whole * (from + 1) / 4);
            let of_quarter = samples.iter().filter(|(at, _)| (quarter.0..quarter.1).contains(at));
            let mut bytes: Vec<u64> = of_quarter.map(|(_, bytes)| *bytes).collect();
            bytes.sort_unstable();
            bytes.get(bytes.len() / 2).copied()
        };
        let mut worst = f64::NEG_INFINITY;
        for ((name, _), samples) in &self.0 {
            let lived = samples[0].0 < whole / 4 && samples[samples.len() - 1].0 >= whole * 15 / 16;
            let (true, Some(before), Some(after)) = (lived, median(samples, 2), median(samples, 3)) else { continue };
            let growth = after as f64 / before as f64 - 1.0;
            eprintln!("memory of {name}: {} KiB, then {} KiB: {:+.2} %", before >> 10, after >> 10, growth * 100.0);
            worst = worst.max(growth);
        }
        worst
    }
}

/// Open descriptors and tasks of every process that stands still, by name.
async fn idle(cluster: &mut Cluster) -> BTreeMap<String, (usize, usize)> {
    let mut addresses = vec![cluster.scheduler.address("grpc")];
    addresses.extend(cluster.more_schedulers.iter().map(|scheduler| scheduler.address("grpc")));
    let mut tasks = Vec::new();
    for address in cluster.routers.iter().map(|router| &router.http) {
        tasks.push(n_tasks(address).await);
    }
    for address in cluster.workers.iter().map(|worker| &worker.address) {
        tasks.push(n_tasks(address).await);
    }
    // As `Cluster::processes` lists them.
    for address in addresses[1..].iter().chain(&addresses[..1]) {
        tasks.push(n_tasks(address).await);
    }
    let mut idle = BTreeMap::new();
    for (process, n_tasks) in cluster.processes().zip(tasks) {
        let most: &mut (usize, usize) = idle.entry(process.name.clone()).or_default();
        *most = (most.0.max(process.n_descriptors()), most.1.max(n_tasks));
    }
    idle
}

async fn n_tasks(address: &str) -> usize {
    Metrics::fetch(address).await.unwrap().sum("tessera_runtime_tasks", &[]) as usize
}

#[tokio::test(flavor = "multi_thread")]
async fn faults_under_load_leave_right_answers_and_nothing_behind() {
    let mut random = seed::from_environment();
    let whole = duration();
    let between = Duration::from_secs(if whole < MEMORY_AFTER { 15 } else { 60 });
    let behind = [Behind::start().await, Behind::start().await, Behind::start().await];
    let each_worker = behind.iter().map(|behind| behind.table.clone()).collect();
    let mut plan = Plan { n_routers: 2, n_workers: N_WORKERS, n_schedulers: 2, each_worker, ..Plan::default() };
    let _folder = plan.simulate(PROFILE);
    let mut cluster = Cluster::start(plan).await;
    let expected = load::undisturbed(&cluster).await;
    cluster.wait_for_rest(START).await;
    let before = idle(&mut cluster).await;

    let requests_per_s = LOAD * N_WORKERS as f64 * TOKENS_PER_S / N_TOKENS_MEAN;
    let load = Load::on(&cluster, &expected, Duration::from_secs_f64(1.0 / requests_per_s));
    let (began, mut memory) = (Instant::now(), Memory::default());
    let (mut faults, mut struck) = (Faults::default(), Vec::new());
    let mut next = between / 2;
    while began.elapsed() < whole {
        if began.elapsed() >= next {
            let fault = faults.next(&mut random);
            let at = began.elapsed();
            strike(&mut cluster, &behind, fault, &mut random).await;
            eprintln!(
                "at {:.0} s {fault:?}, all well after {:.1} s",
                at.as_secs_f64(),
                (began.elapsed() - at).as_secs_f64()
            );
            struck.push(fault);
            next += between;
        }
        memory.sample(&mut cluster, began.elapsed());
        sleep(Duration::from_secs(1)).await;
    }
    let outcome = load.end().await;
    outcome.assert_unbroken(&format!("{struck:?}"));
    assert!(outcome.refused.is_empty(), "{:?}", outcome.refused);
    let n_killed = struck.iter().filter(|fault| **fault == Fault::KillRouter).count();
    let cut = &outcome.cut;
    assert!(cut.len() <= n_killed * N_CUT_MAX, "{} streams were cut, the first: {}", cut.len(), cut[0]);

    cluster.wait_for_rest(START).await;
    let mut now = BTreeMap::new();
    wait::until("descriptors and tasks at baseline", START, async || {
        now = idle(&mut cluster).await;
        let is_more = |(name, now): (&String, &(usize, usize))| now.0 > before[name].0 || now.1 > before[name].1;
        if now.iter().any(is_more) { Err(format!("{now:?} instead of {before:?}")) } else { Ok(()) }
    })
    .await;
    eprintln!("descriptors and tasks: {now:?}, at first {before:?}");
    let growth = memory.growth(whole);
    assert!(whole < MEMORY_AFTER || growth <= GROWTH_MAX, "memory grew by {:.2} %", growth * 100.0);
}
