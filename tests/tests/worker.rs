//! What one worker costs: time to start, memory, time lost between steps; on the demo model.
//!
//! Bounds are wide, for machines that do other things too; `TESSERA_FULL=1` takes those that are promised.

#![allow(
    clippy::disallowed_methods,
    clippy::print_stderr,
    clippy::unwrap_used,
    missing_docs,
    reason = "tests: a failed step panics, and real time is what they measure"
)]

use std::time::{Duration, Instant};

use tests::cluster::{Cluster, Plan};
use tests::metrics::Metrics;
use tests::{client, place, seed, wait};

const MODEL: &str = "smollm2";
/// Streams at once.
const N_STREAMS: u32 = 32;
/// Memory beside weights and pool.
const OTHER_BYTES_MAX: f64 = 200e6;

async fn start() -> Cluster {
    let worker = toml::toml! {
        kv_cache_mb = 128
    };
    Cluster::start(Plan { model: place::smollm2(), model_name: MODEL.to_owned(), worker, ..Plan::default() }).await
}

async fn generate(http: &str, n_streams: u32, n_tokens: u32) -> Duration {
    let began = Instant::now();
    let streams = (0..n_streams).map(|index| {
        let prompt: Vec<u32> = (0..100).map(|i| 1_000 + index * 131 + i * 17).collect();
        let body = client::completion(MODEL, &prompt, n_tokens);
        async move { client::stream(http, &body).await.unwrap() }
    });
    for streamed in futures::future::join_all(streams).await {
        assert_eq!((streamed.tokens.len(), streamed.error), (n_tokens as usize, None));
    }
    began.elapsed()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_keeps_to_its_memory_and_loses_little_time_between_steps() {
    let cluster = start().await;
    let (worker, http) = (&cluster.workers[0], &cluster.routers[0].http);
    // The first is as fast as the second, for the worker has warmed itself up.
    let (first, second) = (generate(http, 1, 1).await, generate(http, 1, 1).await);
    generate(http, N_STREAMS, 32).await;
    let metrics = Metrics::fetch(&worker.address).await.unwrap();
    let bytes = |name| metrics.sum(name, &[]);
    let (memory, weights, pool) = (
        bytes("process_memory_usage_bytes"),
        bytes("tessera_model_weights_bytes"),
        bytes("tessera_kv_cache_pool_bytes"),
    );
    let sum = |name: &str| metrics.sum(&format!("tessera_engine_step_{name}"), &[]);
    let overhead = sum("overhead_seconds_sum") / sum("overhead_seconds_count");
    eprintln!("first request {first:?}, second {second:?}, {:.1} µs lost per step", overhead * 1e6);
    eprintln!("memory {:.0} MB, weights {:.0} MB, pool {:.0} MB", memory / 1e6, weights / 1e6, pool / 1e6);
    assert!(weights > 50e6 && pool > 100e6, "weights {weights}, pool {pool}");
    assert!(memory <= weights + pool + OTHER_BYTES_MAX, "{memory} bytes are resident");
    let (overhead_max, slower_max) = if seed::is_full() { (50e-6, 2) } else { (5e-3, 10) };
    assert!(overhead <= overhead_max, "{overhead} s are lost per step");
    assert!(first <= second * slower_max + Duration::from_millis(100), "first {first:?}, second {second:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_starts_fast() {
    let cluster = start().await;
    let began = Instant::now();
    let worker = cluster.start_worker("late");
    let url = format!("http://{}/readyz", worker.address);
    wait::until("readiness", Duration::from_secs(60), async || {
        let answer = client::http().get(&url).send().await.map_err(|error| error.to_string())?;
        if answer.status().is_success() { Ok(()) } else { Err(answer.status().to_string()) }
    })
    .await;
    let took = began.elapsed();
    eprintln!("ready after {took:?}");
    assert!(took <= Duration::from_secs(if seed::is_full() { 1 } else { 30 }), "ready after {took:?}");
}
