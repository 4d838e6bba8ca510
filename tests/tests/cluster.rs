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
use tests::cluster::{Cluster, Plan};
use tests::{seed, wait};

const N_STREAMS: usize = 200;

fn plan() -> Plan {
    Plan { n_routers: 2, n_workers: 3, ..Plan::default() }
}

#[tokio::test(flavor = "multi_thread")]
async fn killing_a_worker_ends_only_its_own_streams_and_leaks_no_block() {
    let mut random = seed::from_environment();
    let mut cluster = Cluster::start(plan()).await;
    let streams = (0..N_STREAMS).map(|index| {
        let prompt: Vec<u32> = (0..40).map(|_| 3 + u32::try_from(random.below(250)).unwrap()).collect();
        let address = cluster.routers[index % 2].http.clone();
        tokio::spawn(async move { client::stream(&address, &client::completion("tiny", &prompt, 300)).await })
    });
    let streams: Vec<_> = streams.collect();
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
    let ended: Vec<Streamed> = join_all(streams).await.into_iter().map(|stream| stream.unwrap().unwrap()).collect();
    let (lost, whole): (Vec<_>, Vec<_>) = ended.iter().partition(|stream| stream.error.is_some());
    assert!(!lost.is_empty(), "the killed worker held streams");
    for stream in lost {
        let error = stream.error.as_ref().unwrap();
        assert_eq!(error["code"], "worker_lost", "{error}");
        assert!(error["message"].as_str().unwrap().contains("worker-0"), "{error}");
        assert!(stream.finish_reason.is_none(), "a lost stream does not claim to have finished");
    }
    for stream in &whole {
        assert_eq!((stream.tokens.len(), stream.finish_reason.as_deref()), (300, Some("length")));
        assert!(stream.done);
    }
    assert!(whole.len() >= N_STREAMS / 3, "{} of {N_STREAMS} completed", whole.len());
    cluster.wait_for_rest(Duration::from_secs(20)).await;
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
