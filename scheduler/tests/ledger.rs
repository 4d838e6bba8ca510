//! The load ledger over loopback: routers tell each other through a scheduler, are lost, and come back.
#![allow(clippy::unwrap_used, clippy::print_stderr, missing_docs, reason = "a test root that prints what it measures")]

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use contract::demand::RouterDemand;
use contract::ids::{DataRank, EngineId, Incarnation};
use contract::ledger::{LedgerEvent, PlacedWork, PlacementKey};
use contract::placements::{LedgerBatch, LedgerNews, Placements};
use daemon::announce::Announce;
use daemon::clock;
use daemon::shutdown::{Shutdown, Trigger};
use daemon::task::Tasks;
use proto::cluster::v1 as wire;
use proto::cluster::v1::scheduler_client::SchedulerClient;
use scheduler::{Config, run};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tonic::{Code, Status, Streaming};

/// Far longer than anything here takes; reached only by a defect.
const DEADLINE: Duration = Duration::from_secs(30);
const GRACE: Duration = Duration::from_millis(300);

struct Running {
    address: String,
    trigger: Trigger,
    ran: JoinHandle<Result<(), scheduler::Error>>,
}

impl Running {
    async fn start(change: impl FnOnce(&mut Config)) -> Self {
        let (announce, mut announced) = Announce::channel();
        let (trigger, shutdown) = Shutdown::pair();
        let grace_ms = u64::try_from(GRACE.as_millis()).unwrap();
        let listen = "127.0.0.1:0".to_owned();
        let ledger_silence_ms_max = u64::try_from(DEADLINE.as_millis()).unwrap();
        let mut config =
            Config { listen, ledger_grace_ms: grace_ms, ledger_silence_ms_max, announce, ..Config::default() };
        change(&mut config);
        let ran = Tasks::new().spawn("scheduler", run(config, shutdown));
        let (_, address) = timeout(DEADLINE, announced.next()).await.unwrap().unwrap();
        Self { address: address.to_string(), trigger, ran }
    }

    async fn stop(self) {
        self.trigger.fire();
        timeout(DEADLINE, self.ran).await.unwrap().unwrap().unwrap();
    }
}

/// One router's side of a stream; dropping it drops its connection, as a crash would.
struct Router {
    id: u64,
    own: Placements,
    told: mpsc::Sender<LedgerBatch>,
    batches: Streaming<wire::LedgerBatch>,
    view: BTreeMap<Incarnation, Placements>,
}

impl Router {
    async fn connect(scheduler: &Running, id: u64, own: Placements) -> Self {
        let mut client = SchedulerClient::connect(format!("http://{}", scheduler.address)).await.unwrap();
        let (told, receiver) = mpsc::channel(64);
        told.send(LedgerBatch { router: Incarnation(id), news: own.snapshot() }).await.unwrap();
        let told_batches = futures::stream::unfold(receiver, |mut receiver| async {
            Some((wire::LedgerBatch::from(&receiver.recv().await?), receiver))
        });
        let batches = client.share_ledger(told_batches).await.unwrap().into_inner();
        Self { id, own, told, batches, view: BTreeMap::new() }
    }

    async fn put(&mut self, event: LedgerEvent) {
        let sequence = self.own.put(&event);
        let news = LedgerNews::Events { sequence, events: vec![event] };
        self.told.send(LedgerBatch { router: Incarnation(self.id), news }).await.unwrap();
    }

    async fn place(&mut self, number: u64) {
        self.put(placed(self.id, number)).await;
    }

    /// Reads until the view is as wanted; the batches that came.
    async fn until(&mut self, is_wanted: impl Fn(&BTreeMap<Incarnation, Placements>) -> bool) -> Vec<LedgerBatch> {
        let mut seen = Vec::new();
        while !is_wanted(&self.view) {
            let read = timeout(DEADLINE, self.batches.message()).await;
            let message = read.unwrap_or_else(|_| panic!("no such view; the last was {:?}", self.view));
            let batch = LedgerBatch::try_from(message.unwrap().unwrap()).unwrap();
            if batch.news == LedgerNews::Gone {
                self.view.remove(&batch.router);
            } else {
                self.view.entry(batch.router).or_default().take(&batch.news).unwrap();
            }
            seen.push(batch);
        }
        seen
    }

    /// Reads until another router is seen with `n` placements.
    async fn until_placed(&mut self, router: u64, n: usize) -> Vec<LedgerBatch> {
        self.until(|view| view.get(&Incarnation(router)).is_some_and(|placements| placements.len() == n)).await
    }

    /// Reads until the scheduler ends the stream.
    async fn ended(&mut self) -> Status {
        loop {
            match timeout(DEADLINE, self.batches.message()).await.unwrap() {
                Ok(message) => drop(message.expect("the scheduler says why it ends a stream")),
                Err(status) => return status,
            }
        }
    }
}

fn placed(router: u64, number: u64) -> LedgerEvent {
    let engine = EngineId { worker: "worker-0".into(), incarnation: Incarnation(7), data_rank: DataRank(0) };
    let work = PlacedWork { engine, tenant: "t".into(), tokens_new: 100, tokens_prompt: 200, prefill_us: 300 };
    LedgerEvent::Placed(key(router, number), work)
}

fn key(router: u64, number: u64) -> PlacementKey {
    PlacementKey { router: Incarnation(router), number }
}

/// Router 1 with `n` placements, of which router 2 has heard.
async fn one_seen_by_two(scheduler: &Running, n: u64) -> (Router, Router) {
    let mut one = Router::connect(scheduler, 1, Placements::default()).await;
    let mut two = Router::connect(scheduler, 2, Placements::default()).await;
    for number in 0..n {
        one.place(number).await;
    }
    two.until_placed(1, n as usize).await;
    (one, two)
}

#[tokio::test]
async fn routers_see_each_others_placements_also_those_made_before_they_came() {
    let scheduler = Running::start(|_| {}).await;
    let mut one = Router::connect(&scheduler, 1, Placements::default()).await;
    one.place(0).await;
    one.place(1).await;
    one.put(LedgerEvent::FirstToken(key(1, 0))).await;
    let mut two = Router::connect(&scheduler, 2, Placements::default()).await;
    two.until(|view| view.get(&Incarnation(1)) == Some(&one.own)).await;
    two.place(0).await;
    one.until_placed(2, 1).await;
    one.put(LedgerEvent::Finished(key(1, 1))).await;
    two.until(|view| view.get(&Incarnation(1)) == Some(&one.own)).await;
    assert_eq!(one.view.keys().collect::<Vec<_>>(), [&Incarnation(2)], "nobody is told of itself");
    scheduler.stop().await;
}

#[tokio::test]
async fn a_router_lost_without_goodbye_is_forgotten_after_the_grace() {
    let scheduler = Running::start(|_| {}).await;
    let (one, mut two) = one_seen_by_two(&scheduler, 1).await;
    let lost = clock::now();
    drop(one);
    two.until(BTreeMap::is_empty).await;
    let took = clock::now() - lost;
    assert!(took >= GRACE, "forgotten after {took:?}");
    let mut three = Router::connect(&scheduler, 3, Placements::default()).await;
    three.until(|view| view.contains_key(&Incarnation(2))).await;
    assert!(!three.view.contains_key(&Incarnation(1)), "who comes later hears nothing of it");
    scheduler.stop().await;
}

#[tokio::test]
async fn a_router_that_hangs_is_forgotten_and_one_that_gives_signs_of_life_is_not() {
    let scheduler = Running::start(|config| config.ledger_silence_ms_max = 2_000).await;
    let (mut hung, mut two) = one_seen_by_two(&scheduler, 1).await;
    let alive = two.told.clone();
    let signs = Tasks::new().spawn("signs-of-life", async move {
        let news = LedgerNews::Demand(RouterDemand::default());
        while alive.send(LedgerBatch { router: Incarnation(2), news: news.clone() }).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    });
    two.until(BTreeMap::is_empty).await;
    let status = hung.ended().await;
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
    signs.abort();
    scheduler.stop().await;
}

#[tokio::test]
async fn a_router_that_reconnects_within_the_grace_loses_nothing() {
    let scheduler = Running::start(|config| config.ledger_grace_ms = 20_000).await;
    let (one, mut two) = one_seen_by_two(&scheduler, 2).await;
    let mut own = one.own.clone();
    drop(one);
    // What happens while it is away comes with its snapshot.
    own.put(&LedgerEvent::Finished(key(1, 0)));
    own.put(&placed(1, 2));
    own.put(&placed(1, 3));
    let mut one = Router::connect(&scheduler, 1, own).await;
    let batches = two.until_placed(1, 3).await;
    assert_eq!(batches.len(), 1, "{batches:?}");
    one.place(4).await;
    two.until_placed(1, 4).await;
    one.until(|view| view.contains_key(&Incarnation(2))).await;
    scheduler.stop().await;
}

#[tokio::test]
async fn whoever_lags_or_breaks_the_protocol_is_ended_with_a_typed_status() {
    let scheduler = Running::start(|config| config.ledger_batches_max = 4).await;
    let mut early = Router::connect(&scheduler, 1, Placements::default()).await;
    early.own.put(&placed(1, 0));
    early.place(1).await;
    let status = early.ended().await;
    assert_eq!(status.code(), Code::FailedPrecondition, "{status}");
    assert!(status.message().contains("event 1 of a router was missed"), "{status}");
    let mut fast = Router::connect(&scheduler, 2, Placements::default()).await;
    let mut slow = Router::connect(&scheduler, 3, Placements::default()).await;
    slow.until(|view| view.contains_key(&Incarnation(2))).await;
    fast.place(0).await;
    // Far more than all buffers between the two hold.
    for _ in 0..200 {
        let events = vec![LedgerEvent::FirstToken(key(2, 0)); 5_000];
        let mut sequence = 0;
        events.iter().for_each(|event| sequence = fast.own.put(event));
        let news = LedgerNews::Events { sequence, events };
        fast.told.send(LedgerBatch { router: Incarnation(2), news }).await.unwrap();
    }
    let status = slow.ended().await;
    assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
    let mut again = Router::connect(&scheduler, 3, Placements::default()).await;
    again.until_placed(2, 1).await;
    scheduler.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_thousand_placements_a_second_arrive_at_once() {
    const PER_SECOND: u32 = 2_000;
    const N_PLACEMENTS: u32 = 3_000;
    let scheduler = Running::start(|_| {}).await;
    let mut two = Router::connect(&scheduler, 2, Placements::default()).await;
    let one = Router::connect(&scheduler, 1, Placements::default()).await;
    let times: Arc<Mutex<Vec<Instant>>> = Arc::default();
    // A thread keeps the pace better than a timer of a runtime does.
    let (placed_at, told) = (Arc::clone(&times), one.told.clone());
    let placing = std::thread::spawn(move || {
        let (mut own, began) = (one.own, clock::now());
        for number in 0..N_PLACEMENTS {
            let due = began + Duration::from_secs(1) / PER_SECOND * number;
            std::thread::sleep(due.saturating_duration_since(clock::now()));
            placed_at.lock().unwrap().push(clock::now());
            let key = key(1, u64::from(number));
            let events = vec![placed(1, key.number), LedgerEvent::FirstToken(key)];
            let mut sequence = 0;
            events.iter().for_each(|event| sequence = own.put(event));
            let news = LedgerNews::Events { sequence, events };
            told.blocking_send(LedgerBatch { router: Incarnation(1), news }).unwrap();
        }
        one.batches
    });
    let mut delays = Vec::new();
    while delays.len() < N_PLACEMENTS as usize {
        let n = delays.len();
        two.until(|view| view.get(&Incarnation(1)).is_some_and(|placements| placements.len() > n)).await;
        let (now, seen) = (clock::now(), two.view[&Incarnation(1)].len());
        delays.extend(times.lock().unwrap()[n..seen].iter().map(|&at| now - at));
    }
    drop(placing.join().unwrap());
    delays.sort_unstable();
    let at = |per_mille: usize| delays[(delays.len() - 1) * per_mille / 1_000];
    eprintln!("placement to other view at {PER_SECOND}/s: p50 {:?}, p99 {:?}, worst {:?}", at(500), at(990), at(1_000));
    assert!(at(990) < Duration::from_secs(1), "{:?}", at(990));
    scheduler.stop().await;
}
