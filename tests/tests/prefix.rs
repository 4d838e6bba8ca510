//! The second of two requests with the same long prefix goes to the same worker and computes only the rest.

#![allow(
    clippy::disallowed_methods,
    clippy::print_stderr,
    clippy::unwrap_used,
    missing_docs,
    reason = "tests: a failed step panics, and real time is what they measure"
)]

use std::time::Duration;

use serde_json::json;
use tests::cluster::{Cluster, Plan};
use tests::metrics::Metrics;
use tests::place;

const N_SHARED: u32 = 1000;
const BLOCK: u64 = 16;

async fn hit_tokens(address: &str) -> f64 {
    Metrics::fetch(address).await.unwrap().sum("tessera_kv_cache_prefix_tokens_total", &["result=\"hit\""])
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shared_prefix_is_computed_once() {
    let plan = Plan { model: place::smollm2(), model_name: "smollm2".to_owned(), n_workers: 3, ..Plan::default() };
    let cluster = Cluster::start(plan).await;
    let shared: Vec<u32> = (0..N_SHARED).map(|i| 1000 + i * 7 % 20_000).collect();
    let ask = |last: u32| {
        let mut prompt = shared.clone();
        prompt.extend([last, last + 1, last + 2]);
        json!({"model": "smollm2", "prompt": prompt, "max_tokens": 2, "temperature": 0})
    };
    let (status, first) = cluster.post("/v1/completions", &ask(100)).await;
    assert_eq!((status, &first["usage"]["prompt_tokens_details"]["cached_tokens"]), (200, &json!(0)), "{first}");
    cluster.wait_for_rest(Duration::from_secs(20)).await;
    let (status, second) = cluster.post("/v1/completions", &ask(200)).await;
    let expected = u64::from(N_SHARED) / BLOCK * BLOCK;
    assert_eq!(
        (status, &second["usage"]["prompt_tokens_details"]["cached_tokens"]),
        (200, &json!(expected)),
        "{second}"
    );
    let mut hits = Vec::new();
    for worker in &cluster.workers {
        hits.push(hit_tokens(&worker.address).await);
    }
    hits.sort_by(f64::total_cmp);
    assert_eq!(hits, [0.0, 0.0, expected as f64], "one worker, and only it, had the prefix");
}
