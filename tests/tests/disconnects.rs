//! Clients that go away at random moments leave nothing behind: no block, no task, no file descriptor.

#![allow(
    clippy::disallowed_methods,
    clippy::print_stderr,
    clippy::unwrap_used,
    missing_docs,
    reason = "tests: a failed step panics, and real time is what they measure"
)]

use std::time::Duration;

use futures::stream::{self, StreamExt as _};
use tests::client::{self, EventStream};
use tests::cluster::{Cluster, Plan};
use tests::metrics::Metrics;
use tests::{seed, wait};

/// More than run at once, so that some are queued when their client leaves.
const CONCURRENCY: usize = 32;

#[derive(Debug, PartialEq)]
struct Held {
    tasks: f64,
    descriptors: Vec<usize>,
}

async fn held(cluster: &Cluster) -> Held {
    let mut tasks = 0.0;
    for address in [&cluster.routers[0].http, &cluster.workers[0].address] {
        tasks += Metrics::fetch(address).await.unwrap().sum("tessera_runtime_tasks", &[]);
    }
    let descriptors = [&cluster.routers[0].process, &cluster.workers[0].process];
    Held { tasks, descriptors: descriptors.map(|process| process.n_descriptors()).to_vec() }
}

/// Starts a request and leaves it: at once, after its headers, or after some tokens.
async fn leave(address: String, prompt: Vec<u32>, moment: u64) {
    let request = client::completion("tiny", &prompt, 400);
    let client = Cluster::new_client();
    let reading = async {
        let Ok(mut events) = EventStream::open(&client, &address, "/v1/completions", &request).await else { return };
        for _ in 0..moment % 20 {
            if !matches!(events.next().await, Ok(Some(_))) {
                return;
            }
        }
    };
    // A third leave within some milliseconds, wherever their request is by then.
    let patience =
        if moment.is_multiple_of(3) { Duration::from_micros(moment % 20_000) } else { Duration::from_secs(30) };
    let _ = tokio::time::timeout(patience, reading).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn random_disconnects_leave_nothing_behind() {
    let n_disconnects = if seed::is_full() { 2000 } else { 300 };
    let mut random = seed::from_environment();
    let mut plan = Plan::default();
    plan.worker.insert("max_running".to_owned(), 8.into());
    plan.worker.insert("token_budget".to_owned(), 64.into());
    let cluster = Cluster::start(plan).await;
    let address = cluster.routers[0].http.clone();
    // Warm up: connections that stay open between the processes are part of the baseline.
    for _ in 0..4 {
        leave(address.clone(), vec![5; 20], 8).await;
    }
    cluster.wait_for_rest(Duration::from_secs(20)).await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    let before = held(&cluster).await;
    let moments = (0..n_disconnects).map(|_| {
        let length = 1 + random.below(100);
        let prompt = (0..length).map(|_| 3 + u32::try_from(random.below(250)).unwrap()).collect();
        (prompt, random.draw() % 1_000_000)
    });
    let moments: Vec<(Vec<u32>, u64)> = moments.collect();
    let leaving = moments.into_iter().map(|(prompt, moment)| leave(address.clone(), prompt, moment));
    stream::iter(leaving).buffer_unordered(CONCURRENCY).collect::<Vec<()>>().await;
    cluster.wait_for_rest(Duration::from_secs(30)).await;
    wait::until("tasks and descriptors are as before", Duration::from_secs(30), async || {
        let now = held(&cluster).await;
        if now == before { Ok(()) } else { Err(format!("{now:?} instead of {before:?}")) }
    })
    .await;
}
