//! The load ledger over real processes: how soon routers see each other's placements, and when they forget a dead one.

#![allow(
    clippy::disallowed_methods,
    clippy::print_stderr,
    clippy::unwrap_used,
    missing_docs,
    reason = "tests: a failed step panics, and real time is what they measure"
)]

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use proto::cluster::v1::scheduler_client::SchedulerClient;
use proto::cluster::v1::{LedgerBatch, LedgerEvent, LedgerEventKind, PlacedWork};
use proto::worker::v1::EngineId;
use tests::client;
use tests::cluster::{Cluster, Plan};
use tests::metrics::Metrics;
use tests::process::Process;
use tests::wait;
use tokio::sync::mpsc;
use tonic::Streaming;
use tonic::transport::Endpoint;

const PER_SECOND: u32 = 2_000;
const N_PLACEMENTS: u32 = 4_000;
/// The grace, and what a loaded machine adds.
const PATIENCE: Duration = Duration::from_secs(20);

/// Shares the ledger as `router`: events go in, batches of others come out.
async fn share(address: &str, router: u64) -> (mpsc::Sender<LedgerEvent>, Streaming<LedgerBatch>) {
    let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap().tcp_nodelay(true);
    let (sender, events) = mpsc::channel::<LedgerEvent>(8_192);
    let told = futures::stream::unfold((events, None), move |(mut events, sequence)| async move {
        let Some(sequence) = sequence else {
            return Some((LedgerBatch { router, snapshot: true, ..LedgerBatch::default() }, (events, Some(0))));
        };
        let mut batch = vec![events.recv().await?];
        while let Ok(event) = events.try_recv() {
            batch.push(event);
        }
        let sequence: u64 = sequence + batch.len() as u64;
        Some((LedgerBatch { router, sequence, events: batch, ..LedgerBatch::default() }, (events, Some(sequence))))
    });
    let mut client = SchedulerClient::new(endpoint.connect().await.unwrap());
    (sender, client.share_ledger(told).await.unwrap().into_inner())
}

fn events(number: u64) -> [LedgerEvent; 3] {
    let engine = EngineId { worker: "worker-0".to_owned(), incarnation: 7, data_rank: 0 };
    let tenant = "tenant-0".to_owned();
    let work = PlacedWork { engine: Some(engine), tokens_new: 100, tokens_prompt: 200, prefill_us: 300, tenant };
    let event = |kind: LedgerEventKind, work| LedgerEvent { kind: kind.into(), number, work };
    [
        event(LedgerEventKind::Placed, Some(work)),
        event(LedgerEventKind::FirstToken, None),
        event(LedgerEventKind::Finished, None),
    ]
}

/// Each side is a thread with a runtime of its own, as a process would have.
#[test]
fn placements_of_one_router_are_in_anothers_view_within_milliseconds() {
    let scheduler = Process::tessera("scheduler", &["scheduler", "--set", "scheduler.listen=127.0.0.1:0"], None);
    let address = scheduler.address("grpc");
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let times: Arc<Mutex<Vec<Instant>>> = Arc::default();
    let (reading, sending) =
        (runtime(), tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap());
    let (_keeps, mut seen) = reading.block_on(share(&address, 2));
    let (sender, _batches) = sending.block_on(share(&address, 1));
    let placed_at = Arc::clone(&times);
    let placing = std::thread::spawn(move || {
        let began = Instant::now();
        for number in 0..N_PLACEMENTS {
            let due = began + Duration::from_secs(1) / PER_SECOND * number;
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            placed_at.lock().unwrap().push(Instant::now());
            events(u64::from(number)).into_iter().for_each(|event| sender.blocking_send(event).unwrap());
        }
        sender
    });
    let mut delays = Vec::new();
    reading.block_on(async {
        while delays.len() < N_PLACEMENTS as usize {
            let batch = seen.message().await.unwrap().unwrap();
            let now = Instant::now();
            let placed = batch.events.iter().filter(|event| event.kind == i32::from(LedgerEventKind::Placed));
            let times = times.lock().unwrap();
            delays.extend(placed.map(|event| now - times[usize::try_from(event.number).unwrap()]));
        }
    });
    drop(placing.join().unwrap());
    delays.sort_unstable();
    let at = |per_mille: usize| delays[(delays.len() - 1) * per_mille / 1_000];
    eprintln!("placement to other view at {PER_SECOND}/s: p50 {:?}, p99 {:?}, worst {:?}", at(500), at(990), at(1_000));
    assert!(at(990) < Duration::from_secs(1), "{:?}", at(990));
}

#[tokio::test(flavor = "multi_thread")]
async fn routers_see_each_other_and_forget_one_that_is_killed_with_all_it_placed() {
    let mut cluster = Cluster::start(Plan { n_routers: 2, ..Plan::default() }).await;
    let gauge =
        async |address: &str, name: &str| Metrics::fetch(address).await.map_or(-1.0, |metrics| metrics.sum(name, &[]));
    for address in [&cluster.routers[0].http, &cluster.routers[1].http, &cluster.scheduler.address("grpc")] {
        wait::until("both routers share", PATIENCE, async || match gauge(address, "tessera_ledger_routers").await {
            2.0 => Ok(()),
            n => Err(format!("{address} sees {n}")),
        })
        .await;
    }
    let streams = (0..40).map(|_| {
        let address = cluster.routers[0].http.clone();
        tokio::spawn(async move { client::stream(&address, &client::completion("tiny", &[5, 6, 7], 400)).await })
    });
    let streams: Vec<_> = streams.collect();
    let other = cluster.routers[1].http.clone();
    wait::until("the other router sees placements", PATIENCE, async || {
        if gauge(&other, "tessera_ledger_placements").await > 5.0 { Ok(()) } else { Err("none") }
    })
    .await;
    cluster.routers[0].process.kill();
    wait::until("the other router forgets it", PATIENCE, async || {
        let left = (gauge(&other, "tessera_ledger_placements").await, gauge(&other, "tessera_ledger_routers").await);
        if left == (0.0, 1.0) { Ok(()) } else { Err(format!("{left:?}")) }
    })
    .await;
    for stream in streams {
        // Cut off, or refused: the router is dead.
        let _ = stream.await.unwrap();
    }
}
