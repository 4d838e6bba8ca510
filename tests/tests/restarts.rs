//! What routers know of caches after restarts under load, over real processes.

#![allow(
    clippy::disallowed_methods,
    clippy::print_stderr,
    clippy::unwrap_used,
    missing_docs,
    reason = "tests: a failed step panics, and real time is what they measure"
)]

use std::collections::{BTreeMap, HashSet};
use std::time::{Duration, Instant};

use proto::inference::v1::explain_request::Subject;
use proto::inference::v1::generate_request::Prompt;
use proto::inference::v1::inference_client::InferenceClient;
use proto::inference::v1::{ExplainRequest, GenerateRequest, PlacementCandidate, TokenIds};
use proto::worker::v1::kv_frame::Body;
use proto::worker::v1::worker_client::WorkerClient;
use proto::worker::v1::{DescribeRequest, WatchKvRequest};
use tests::cluster::{Cluster, Plan, Router, START};
use tests::metrics::Metrics;
use tests::{client, seed, wait};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

/// Time between two signs of life of a worker.
const HEARTBEAT: Duration = Duration::from_secs(1);
const N_PROMPT: usize = 160;

fn plan() -> Plan {
    let worker = toml::toml! {
        engine = "sim"
        sim_profile = "cpu"
        context_length = 512
        n_blocks = 200
    };
    let router = toml::toml! {
        workers = { promise_ms = 1_000 }
    };
    Plan { n_routers: 2, n_workers: 2, worker, router, ..Plan::default() }
}

/// The prompts of a load: what is asked now differs from what was asked before.
fn prompts(era: u64, n: u64) -> Vec<Vec<u32>> {
    let prompt = |index| {
        let mut random = seed::Random::new((era << 32) | index);
        (0..N_PROMPT).map(|_| 3 + u32::try_from(random.below(250)).unwrap()).collect()
    };
    (0..n).map(prompt).collect()
}

/// Clients that stream completions without pause, until they are dropped; errors are theirs to bear.
struct Load(Vec<JoinHandle<()>>);

impl Drop for Load {
    fn drop(&mut self) {
        self.0.iter().for_each(JoinHandle::abort);
    }
}

fn load(routers: &[&Router], prompts: &[Vec<u32>], seed: u64) -> Load {
    let one = |index: usize| {
        let (router, prompts) = (routers[index % routers.len()].http.clone(), prompts.to_vec());
        let mut random = seed::Random::new(seed ^ index as u64);
        tokio::spawn(async move {
            loop {
                let prompt = &prompts[usize::try_from(random.below(prompts.len() as u64)).unwrap()];
                let n_output = 5 + u32::try_from(random.below(60)).unwrap();
                if client::stream(&router, &client::completion("tiny", prompt, n_output)).await.is_err() {
                    sleep(Duration::from_millis(20)).await;
                }
            }
        })
    };
    Load((0..8).map(one).collect())
}

/// What a router knows about a prompt, by engine.
async fn candidates(router: &str, prompt: &[u32]) -> Vec<PlacementCandidate> {
    let mut client = InferenceClient::connect(format!("http://{router}")).await.unwrap();
    let prompt = Some(Prompt::Tokens(TokenIds { ids: prompt.to_vec() }));
    let subject = Some(Subject::Prompt(GenerateRequest { prompt, ..GenerateRequest::default() }));
    match client.explain(ExplainRequest { subject }).await {
        Ok(told) => told.into_inner().decisions.remove(0).candidates,
        // No worker is ready.
        Err(_) => Vec::new(),
    }
}

/// Asks every prompt once.
async fn ask_all(router: &Router, prompts: &[Vec<u32>]) {
    for prompt in prompts {
        let answer = client::stream(&router.http, &client::completion("tiny", prompt, 2)).await.unwrap();
        assert!(answer.done, "{answer:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_restarts_under_load_is_credited_with_nothing_old() {
    let mut random = seed::from_environment();
    let mut cluster = Cluster::start(plan()).await;
    let (old, new) = (prompts(1, 12), prompts(2, 12));
    ask_all(&cluster.routers[0], &old).await;
    let routers: Vec<String> = cluster.routers.iter().map(|router| router.grpc.clone()).collect();
    // Whoever holds most of the first prompt is to die.
    let holder = candidates(&routers[0], &old[0]).await.remove(0);
    assert!(holder.cached_tokens > 0, "{holder:?}");
    let busy = load(&[&cluster.routers[0], &cluster.routers[1]], &new, random.draw());
    sleep(Duration::from_millis(500 + random.below(1_000))).await;
    let index = cluster.workers.iter().position(|worker| holder.engine.contains(&worker.id)).unwrap();
    let mut before = cluster.workers.remove(index);
    before.process.kill();
    let killed = Instant::now();
    let watch = |router: String, old: Vec<Vec<u32>>, id: String, dead: String| {
        tokio::spawn(async move {
            // How long the dead life was credited, and when the new one was there.
            let (mut credited, mut is_back) = (Duration::ZERO, false);
            while !is_back || killed.elapsed() < 3 * HEARTBEAT {
                assert!(killed.elapsed() < START, "{id} does not come back to {router}");
                for prompt in &old {
                    for one in candidates(&router, prompt).await.iter().filter(|one| one.engine.contains(&id)) {
                        if one.engine == dead {
                            credited = killed.elapsed();
                        } else {
                            assert_eq!(one.cached_tokens, 0, "the new life is credited with blocks of the old one");
                            is_back = true;
                        }
                    }
                }
                sleep(Duration::from_millis(5)).await;
            }
            credited
        })
    };
    let watching: Vec<_> = routers
        .iter()
        .map(|router| watch(router.clone(), old.clone(), before.id.clone(), holder.engine.clone()))
        .collect();
    let after = cluster.start_worker_at(&before.id, &before.address);
    assert_eq!(after.address, before.address);
    cluster.workers.push(after);
    for watching in watching {
        let credited = watching.await.unwrap();
        eprintln!("the dead life was credited for {credited:?}");
        assert!(credited < HEARTBEAT, "{credited:?}");
    }
    drop(busy);
    cluster.wait_for_rest(START).await;
}

/// Hashes of the blocks that a worker has cached, as it tells whoever asks.
async fn truth(worker: &str) -> HashSet<Vec<u8>> {
    let mut client = WorkerClient::connect(format!("http://{worker}")).await.unwrap();
    let identity = client.describe(DescribeRequest {}).await.unwrap().into_inner().identity;
    let mut frames = client.watch_kv(WatchKvRequest { identity }).await.unwrap().into_inner();
    let mut blocks = HashSet::new();
    loop {
        match timeout(START, frames.message()).await.unwrap().unwrap().unwrap().body.unwrap() {
            Body::Snapshot(snapshot) => {
                blocks.extend(snapshot.blocks.into_iter().map(|block| block.hash));
                if snapshot.last {
                    return blocks;
                }
            }
            other => panic!("a snapshot comes first: {other:?}"),
        }
    }
}

/// Blocks in a router's directory, and how often it had to ask for a snapshot again.
async fn directory(router: &Router) -> (f64, f64) {
    let metrics = Metrics::fetch(&router.http).await.unwrap();
    (metrics.sum("tessera_prefix_directory_blocks", &[]), metrics.sum("tessera_kv_events_resyncs_total", &[]))
}

/// Cached tokens of each prompt, by engine.
async fn credits(router: &Router, prompts: &[Vec<u32>]) -> Vec<BTreeMap<String, (u64, u64)>> {
    let mut all = Vec::new();
    for prompt in prompts {
        let candidates = candidates(&router.grpc, prompt).await.into_iter();
        all.push(candidates.map(|one| (one.engine, (one.cached_tokens, one.promised_tokens))).collect());
    }
    all
}

#[tokio::test(flavor = "multi_thread")]
async fn a_router_that_restarts_under_load_comes_to_know_what_the_workers_hold() {
    let mut random = seed::from_environment();
    let mut cluster = Cluster::start(plan()).await;
    let prompts = prompts(3, 60);
    let busy = load(&[&cluster.routers[0], &cluster.routers[1]], &prompts, random.draw());
    sleep(Duration::from_millis(1_000 + random.below(1_000))).await;
    cluster.routers.remove(1).process.kill();
    let restarted = cluster.start_router("router-1");
    cluster.routers.push(restarted);
    cluster.wait_for_workers(2).await;
    let more = load(&[&cluster.routers[1]], &prompts, random.draw());
    let (_, n_resyncs) = directory(&cluster.routers[1]).await;
    sleep(2 * HEARTBEAT).await;
    assert_eq!(directory(&cluster.routers[1]).await.1, n_resyncs, "under load it agrees with every heartbeat's digest");
    drop((busy, more));
    cluster.wait_for_rest(START).await;

    let mut n_truth = 0;
    for worker in &cluster.workers {
        n_truth += truth(&worker.address).await.len();
    }
    assert!(n_truth > 200, "{n_truth} blocks are few to compare");
    for router in &cluster.routers {
        wait::until("a directory holds as many blocks as the workers", START, async || {
            let (n_known, _) = directory(router).await;
            if n_known == n_truth as f64 { Ok(()) } else { Err(format!("{n_known} of {n_truth}")) }
        })
        .await;
    }
    let before = directory(&cluster.routers[1]).await;
    // Promises end meanwhile, and digests of all blocks are compared.
    wait::until("no credit is a promise any more", START, async || {
        let all = credits(&cluster.routers[1], &prompts).await;
        let promised = all.iter().flat_map(BTreeMap::values).filter(|(_, promised)| *promised > 0).count();
        if promised == 0 { Ok(()) } else { Err(promised) }
    })
    .await;
    sleep(2 * HEARTBEAT).await;
    assert_eq!(directory(&cluster.routers[1]).await, before, "blocks and resyncs");
    let [stayed, restarted] = [&cluster.routers[0], &cluster.routers[1]];
    let (stayed, restarted) = (credits(stayed, &prompts).await, credits(restarted, &prompts).await);
    assert_eq!(stayed, restarted);
    let n_cached: u64 = restarted.iter().flat_map(BTreeMap::values).map(|(cached, _)| cached).sum();
    eprintln!("{n_truth} blocks, {n_cached} prompt tokens of {} prompts are known to be cached", prompts.len());
    assert!(n_cached > 0);
}
