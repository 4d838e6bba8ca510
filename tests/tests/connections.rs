//! Connections between real processes are slow, or break again and again: no request fails.
//!
//! A proxy that workers advertise instead of themselves stands before each (`tests::proxy`).

#![allow(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    missing_docs,
    reason = "tests: a failed step panics, and real time is what they measure"
)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use tests::cluster::{Cluster, Plan, SWIFT};
use tests::load::{self, Expected, Load};
use tests::proxy::{Behind, Proxy};
use tests::seed;
use tokio::time::sleep;

/// Time between two requests: 20 streams a second.
const EVERY: Duration = Duration::from_millis(50);
/// How long every byte takes over a slow connection.
const SLOW: Duration = Duration::from_millis(500);

/// How long it lasts: longer than every silence that is borne.
fn fault() -> Duration {
    Duration::from_secs(if seed::is_full() { 30 } else { 5 })
}

/// Two routers and two workers behind proxies, also on the workers' way to etcd.
struct Setting {
    cluster: Cluster,
    workers: Vec<Behind>,
    etcd: Arc<Proxy>,
    expected: Expected,
    _folder: tempfile::TempDir,
}

async fn start() -> Setting {
    let workers = vec![Behind::start().await, Behind::start().await];
    let etcd = Arc::new(Proxy::start().await);
    let each_worker = workers.iter().map(|worker| worker.table.clone()).collect();
    let etcd_proxy = Some(Arc::clone(&etcd));
    let mut plan = Plan { n_routers: 2, n_workers: 2, each_worker, etcd_proxy, ..Plan::default() };
    let folder = plan.simulate(SWIFT);
    let cluster = Cluster::start(plan).await;
    let expected = load::undisturbed(&cluster).await;
    Setting { cluster, workers, etcd, expected, _folder: folder }
}

#[tokio::test(flavor = "multi_thread")]
async fn half_a_second_on_every_way_fails_no_request() {
    let Setting { cluster, workers, etcd, expected, .. } = &start().await;
    let load = Load::running_on(cluster, expected, EVERY).await;
    let delay = |delay| workers.iter().map(|worker| &worker.service).chain([&**etcd]).for_each(|way| way.delay(delay));
    delay(SLOW);
    sleep(fault()).await;
    for router in &cluster.routers {
        assert_eq!(router.n_ready().await.unwrap(), 2.0, "who is slow is not lost");
    }
    delay(Duration::ZERO);
    load.end().await.assert_well("half a second of delay");
    load::assert_recovered(cluster, expected).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_that_break_again_and_again_fail_no_request() {
    let Setting { cluster, workers, expected, .. } = &start().await;
    let load = Load::running_on(cluster, expected, EVERY).await;
    let end = Instant::now() + fault();
    while Instant::now() < end {
        for worker in workers {
            worker.service.cut();
            sleep(Duration::from_millis(500)).await;
            cluster.wait_for_workers(2).await;
        }
    }
    load.end().await.assert_well("connections break");
    load::assert_recovered(cluster, expected).await;
}
