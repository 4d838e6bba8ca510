//! A real cluster: etcd, one scheduler, two routers, three workers; one worker is killed under load.

#![allow(
    clippy::disallowed_methods,
    clippy::print_stderr,
    clippy::unwrap_used,
    missing_docs,
    reason = "tests: a failed step panics, and real time is what they measure"
)]

use std::time::Duration;

use futures::future::join_all;
use serde_json::json;
use tests::client::{self, Streamed};
use tests::cluster::{Cluster, Plan, Router};
use tests::{seed, wait};
use tokio::task::JoinHandle;

const N_STREAMS: usize = 200;

fn plan() -> Plan {
    Plan { n_routers: 2, n_workers: 3, ..Plan::default() }
}

#[tokio::test(flavor = "multi_thread")]
async fn killing_a_worker_changes_no_stream_and_leaks_no_block() {
    let mut random = seed::from_environment();
    let mut cluster = Cluster::start(plan()).await;
    let prompt = |_| (0..40).map(|_| 3 + u32::try_from(random.below(250)).unwrap()).collect();
    let prompts: Vec<Vec<u32>> = (0..N_STREAMS).map(prompt).collect();
    let streams = open(&cluster, &prompts);
    wait::until("all workers generate", Duration::from_secs(60), async || {
        for worker in &cluster.workers {
            let metrics = tests::metrics::Metrics::fetch(&worker.address).await.map_err(|error| error.to_string())?;
            let running = metrics.sum("tessera_engine_requests", &["state=\"running\""]);
            if running < 5.0 {
                return Err(format!("{} runs {running}", worker.id));
            }
        }
        Ok(())
    })
    .await;
    cluster.workers.remove(0).process.kill();
    let disturbed = ended(streams).await;
    let mut n_migrations = 0.0;
    for router in &cluster.routers {
        let metrics = tests::metrics::Metrics::fetch(&router.http).await.unwrap();
        n_migrations += metrics.sum("tessera_router_migrations_total", &["reason=\"worker_lost\""]);
    }
    assert!(n_migrations > 0.0, "the killed worker held streams");
    let undisturbed = ended(open(&cluster, &prompts)).await;
    for (disturbed, undisturbed) in disturbed.iter().zip(&undisturbed) {
        assert_eq!(
            (disturbed.tokens.len(), disturbed.finish_reason.as_deref()),
            (300, Some("length")),
            "{disturbed:?}"
        );
        assert!(disturbed.done && disturbed.tokens == undisturbed.tokens && disturbed.text == undisturbed.text);
    }
    cluster.wait_for_rest(Duration::from_secs(20)).await;
}

type Reading = JoinHandle<anyhow::Result<Streamed>>;

/// Streams completions, over both routers.
fn open(cluster: &Cluster, prompts: &[Vec<u32>]) -> Vec<Reading> {
    let routers = cluster.routers.iter().cycle();
    let open = |(prompt, router): (&Vec<u32>, &Router)| {
        let (address, body) = (router.http.clone(), client::completion("tiny", prompt, 300));
        tokio::spawn(async move { client::stream(&address, &body).await })
    };
    prompts.iter().zip(routers).map(open).collect()
}

async fn ended(streams: Vec<Reading>) -> Vec<Streamed> {
    join_all(streams).await.into_iter().map(|stream| stream.unwrap().unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_worker_leaves_within_its_lease_and_a_new_one_gets_traffic() {
    let mut cluster = Cluster::start(Plan { n_workers: 2, ..Plan::default() }).await;
    cluster.workers.remove(0).process.kill();
    cluster.wait_for_workers(1).await;
    let newcomer = cluster.start_worker("worker-new");
    cluster.workers.push(newcomer);
    cluster.wait_for_workers(2).await;
    wait::until("the new worker is used", Duration::from_secs(20), async || {
        let body = json!({"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 2, "cache_salt": "x"});
        let (status, answer) = cluster.post("/v1/completions", &body).await;
        assert_eq!(status, 200, "{answer}");
        let metrics =
            tests::metrics::Metrics::fetch(&cluster.workers[1].address).await.map_err(|error| error.to_string())?;
        let steps = metrics.sum("tessera_engine_step_duration_seconds_count", &[]);
        if steps > 0.0 { Ok(()) } else { Err("no step yet".to_owned()) }
    })
    .await;
}
