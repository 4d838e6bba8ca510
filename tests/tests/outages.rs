//! etcd and schedulers go away and come back under load: no request notices, and membership is right again soon.

#![allow(
    clippy::disallowed_methods,
    clippy::print_stderr,
    clippy::unwrap_used,
    missing_docs,
    reason = "tests: a failed step panics, and real time is what they measure"
)]

use std::time::{Duration, Instant};

use tests::cluster::{Cluster, Plan, SWIFT};
use tests::load::{self, Load};
use tests::metrics::Metrics;
use tests::{seed, wait};
use tokio::time::sleep;

/// Time between two requests: 25 streams a second.
const EVERY: Duration = Duration::from_millis(40);
/// The lease of every member, the shortest that etcd keeps.
const LEASE: Duration = Duration::from_secs(2);

/// How long etcd is away: longer than a lease, and in full longer than any connection's patience.
fn outage() -> Duration {
    if seed::is_full() { Duration::from_secs(60) } else { LEASE * 5 / 2 }
}

/// Longest time until something is right again; a loaded machine is granted more.
fn within(leases: u32) -> Duration {
    LEASE * leases * if seed::is_full() { 1 } else { 3 }
}

async fn start(n_schedulers: usize) -> (Cluster, tempfile::TempDir) {
    let ttl_ms = i64::try_from(LEASE.as_millis()).unwrap();
    let mut plan = Plan { n_routers: 2, n_workers: 2, n_schedulers, ttl_ms, ..Plan::default() };
    let folder = plan.simulate(SWIFT);
    (Cluster::start(plan).await, folder)
}

fn assert_all_run(cluster: &mut Cluster) {
    for process in cluster.processes() {
        assert!(process.is_running(), "{} has ended:\n{}", process.name, process.errors());
    }
}

/// Of one router: workers that it would place on.
async fn n_ready(router: &str) -> f64 {
    Metrics::fetch(router).await.unwrap().sum("tessera_route_engines", &["state=\"ready\""])
}

/// Watches every router until the end of `during`: neither loses a worker for a moment.
async fn assert_no_worker_is_lost(cluster: &Cluster, during: Duration) {
    let end = Instant::now() + during;
    while Instant::now() < end {
        for router in &cluster.routers {
            assert_eq!(n_ready(&router.http).await, cluster.workers.len() as f64, "{}", router.process.name);
        }
        sleep(Duration::from_millis(100)).await;
    }
}

/// Waits until every member is registered, knows it, and is joined by a newcomer that leaves again.
async fn membership_is_right(cluster: &mut Cluster, what: &str) {
    let began = Instant::now();
    let members: Vec<String> = cluster.routers.iter().map(|router| router.http.clone()).collect();
    let members: Vec<String> = members.into_iter().chain(cluster.workers.iter().map(|w| w.address.clone())).collect();
    wait::until("all members are registered", within(2), async || {
        let n = cluster.etcd.n_members().await.map_err(|error| format!("{error:#}"))?;
        if n != members.len() {
            return Err(format!("{n} of {}", members.len()));
        }
        for member in &members {
            let metrics = Metrics::fetch(member).await.map_err(|error| format!("{error:#}"))?;
            if metrics.sum("tessera_membership_leases", &["state=\"held\""]) != 1.0 {
                return Err(format!("{member} does not know that it is registered"));
            }
        }
        Ok(())
    })
    .await;
    eprintln!("{what}: registered again after {:?}", began.elapsed());
    // Whoever counts as lost for a moment only would be so about now.
    assert_no_worker_is_lost(cluster, LEASE / 2).await;
    // A watch that does not hear does not hear of a newcomer either.
    let n_workers = cluster.workers.len();
    let mut newcomer = cluster.start_worker("worker-new");
    let began = Instant::now();
    wait::until("the routers see a newcomer", within(2), async || {
        for router in &cluster.routers {
            let n = n_ready(&router.http).await;
            if n != (n_workers + 1) as f64 {
                return Err(format!("{n} workers"));
            }
        }
        Ok(())
    })
    .await;
    eprintln!("{what}: a newcomer is seen after {:?}", began.elapsed());
    newcomer.process.terminate();
    assert!(newcomer.process.ended(Duration::from_secs(60)).success(), "{}", newcomer.process.errors());
    cluster.wait_for_workers(n_workers).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outage_of_etcd_fails_no_request_and_removes_nobody() {
    let (mut cluster, _folder) = start(1).await;
    let expected = load::undisturbed(&cluster).await;
    for way in ["hangs and wakes", "is killed and restarted empty", "is killed and restarted", "is compacted"] {
        let load = Load::on(&cluster, &expected, EVERY);
        match way {
            "hangs and wakes" => {
                cluster.etcd.process.signal("STOP");
                assert_no_worker_is_lost(&cluster, outage()).await;
                cluster.etcd.process.signal("CONT");
            }
            "is compacted" => cluster.etcd.compact().await.unwrap(),
            _ => {
                cluster.etcd.process.kill();
                assert_no_worker_is_lost(&cluster, outage()).await;
                cluster.etcd.restart(way == "is killed and restarted").await;
            }
        }
        membership_is_right(&mut cluster, way).await;
        load.end().await.assert_well(&format!("etcd {way}"));
        assert_all_run(&mut cluster);
    }
    cluster.wait_for_rest(Duration::from_secs(20)).await;
}

/// Views that each router has taken.
async fn views(cluster: &Cluster) -> Vec<f64> {
    let mut taken = Vec::new();
    for router in &cluster.routers {
        let metrics = Metrics::fetch(&router.http).await.unwrap();
        taken.push(metrics.sum("tessera_route_views_total", &["state=\"taken\""]));
    }
    taken
}

/// Waits until every router takes views again.
async fn views_go_on(cluster: &Cluster, what: &str) {
    let (began, before) = (Instant::now(), views(cluster).await);
    wait::until(what, within(1), async || {
        let now = views(cluster).await;
        // One may have been under way.
        if now.iter().zip(&before).all(|(now, before)| *now >= before + 2.0) {
            Ok(())
        } else {
            Err((before.clone(), now))
        }
    })
    .await;
    eprintln!("{what}: after {:?}", began.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn schedulers_are_killed_and_another_one_leads_within_a_lease() {
    let (mut cluster, _folder) = start(2).await;
    let expected = load::undisturbed(&cluster).await;
    let load = Load::on(&cluster, &expected, EVERY);
    views_go_on(&cluster, "both schedulers run").await;

    // Who started last leads.
    let address = cluster.more_schedulers[0].address("grpc");
    cluster.more_schedulers[0].kill();
    views_go_on(&cluster, "the leader is killed, the other one takes over").await;
    cluster.more_schedulers[0] = cluster.start_scheduler_at(&address);
    views_go_on(&cluster, "a new one has started").await;

    let first = cluster.scheduler.address("grpc");
    cluster.scheduler.kill();
    views_go_on(&cluster, "the one that does not lead is killed").await;
    cluster.more_schedulers[0].signal("STOP");
    assert_no_worker_is_lost(&cluster, LEASE * 2).await;
    cluster.scheduler = cluster.start_scheduler_at(&first);
    views_go_on(&cluster, "the only one hangs, and a new one starts").await;
    cluster.more_schedulers[0].signal("CONT");
    views_go_on(&cluster, "the one that hung is back").await;

    load.end().await.assert_well("schedulers are killed");
    assert_all_run(&mut cluster);
    cluster.wait_for_rest(Duration::from_secs(20)).await;
}
