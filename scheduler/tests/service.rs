//! The scheduler over loopback: members join, report, leave, and come back after its restart.
#![allow(clippy::unwrap_used, missing_docs, reason = "a test root; helpers of tests may panic")]

use std::sync::Arc;
use std::time::Duration;

use contract::cost::{CostCoefficients, StepLoad};
use contract::ids::{DataRank, EngineId, Incarnation};
use contract::model::{Fingerprint, ModelIdentity};
use contract::occupancy::{BlockCounts, Occupancy};
use contract::view::{ClusterView, Member, MemberKind};
use daemon::announce::Announce;
use daemon::clock;
use daemon::server::Listener;
use daemon::shutdown::{Shutdown, Trigger};
use daemon::task::Tasks;
use membership::{Lease, Membership, MembershipConfig, connect};
use proto::cluster::v1 as wire;
use proto::cluster::v1::scheduler_client::SchedulerClient;
use scheduler::{Config, run};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tonic::transport::Channel;

/// Far longer than anything here takes; reached only by a defect.
const DEADLINE: Duration = Duration::from_secs(30);
const TTL: Duration = Duration::from_millis(900);

struct Running {
    address: String,
    trigger: Trigger,
    ran: JoinHandle<Result<(), scheduler::Error>>,
}

impl Running {
    async fn start(listen: &str) -> Self {
        let (announce, mut announced) = Announce::channel();
        let (trigger, shutdown) = Shutdown::pair();
        let config = Config { listen: listen.to_owned(), heartbeat_ms: 200, announce, ..Config::default() };
        let ran = Tasks::new().spawn("scheduler", run(config, shutdown));
        let (_, address) = timeout(DEADLINE, announced.next()).await.unwrap().unwrap();
        Self { address: address.to_string(), trigger, ran }
    }

    async fn stop(self) -> String {
        self.trigger.fire();
        timeout(DEADLINE, self.ran).await.unwrap().unwrap().unwrap();
        self.address
    }

    fn membership(&self, tasks: &Tasks) -> Arc<dyn Membership> {
        let ttl_ms = u64::try_from(TTL.as_millis()).unwrap();
        let endpoints = vec![self.address.clone()];
        connect(&MembershipConfig { endpoints, ttl_ms, ..MembershipConfig::default() }, tasks).unwrap()
    }

    async fn client(&self) -> SchedulerClient<Channel> {
        SchedulerClient::connect(format!("http://{}", self.address)).await.unwrap()
    }

    async fn views(&self) -> Views {
        let request = wire::WatchViewRequest { router: "r0".to_owned() };
        Views(self.client().await.watch_view(request).await.unwrap().into_inner())
    }
}

struct Views(tonic::Streaming<wire::ClusterView>);

impl Views {
    async fn until(&mut self, is_wanted: impl Fn(&ClusterView) -> bool) -> ClusterView {
        let mut last = None;
        timeout(DEADLINE, async {
            loop {
                let view = ClusterView::try_from(self.0.message().await.unwrap().unwrap()).unwrap();
                if is_wanted(&view) {
                    return view;
                }
                last = Some(view);
            }
        })
        .await
        .unwrap_or_else(|_| panic!("no such view; the last was {last:?}"))
    }

    async fn until_workers(&mut self, names: &[&str]) -> ClusterView {
        self.until(|view| view.engines.iter().map(|view| view.engine.worker.as_str()).eq(names.iter().copied())).await
    }
}

fn worker(id: &str) -> Member {
    let identity = ModelIdentity {
        name: "m".into(),
        block_size: 16,
        context_length: 100,
        vocab_size: 10,
        model: Fingerprint([1; 16]),
        tokenizer: Fingerprint([2; 16]),
        hash_key: Fingerprint([3; 16]),
        numerics: Fingerprint([4; 16]),
    };
    Member {
        kind: MemberKind::Worker,
        id: id.to_owned(),
        incarnation: Incarnation(daemon::random::u64()),
        address: "127.0.0.1:1".to_owned(),
        n_data_ranks: 1,
        identity: Some(identity),
        draining: false,
        role: None,
        epoch: 0,
    }
}

fn occupancy(member: &Member, step: u64) -> Occupancy {
    Occupancy {
        engine: EngineId { worker: member.id.as_str().into(), incarnation: member.incarnation, data_rank: DataRank(0) },
        step,
        blocks: BlockCounts { total: 10, allocated: 3, cached: 2, free: 5 },
        requests_waiting: 0,
        requests_running: 1,
        slots: 8,
        tokens_queued: 0,
        tokens_running: 7,
        cost: CostCoefficients::default(),
        step_tokens: 0,
        pairs_queued: 0.0,
        computed: StepLoad::default(),
        requests_begun: 0,
        prompt_tokens_begun: 0,
        is_stalled: false,
        transfer_ms_per_token: 0.0,
    }
}

async fn register(membership: &Arc<dyn Membership>, member: &Member) -> Lease {
    membership.register(member.clone(), TTL).await.unwrap()
}

fn report(occupancy: &Occupancy) -> wire::OccupancyReport {
    wire::OccupancyReport { occupancy: Some(occupancy.into()) }
}

#[tokio::test]
async fn the_view_shows_both_members_until_the_lease_of_one_runs_out() {
    let scheduler = Running::start("127.0.0.1:0").await;
    let tasks = Tasks::new();
    let membership = scheduler.membership(&tasks);
    let mut views = scheduler.views().await;
    let first = views.until(|_| true).await;
    assert!(first.engines.is_empty(), "the whole view comes first, even when nobody is there");
    let (_stays, dies) = (register(&membership, &worker("a")).await, register(&membership, &worker("b")).await);
    views.until_workers(&["a", "b"]).await;
    drop(dies);
    let dropped = clock::now();
    views.until_workers(&["a"]).await;
    let took = clock::now() - dropped;
    assert!(took < TTL + Duration::from_millis(500), "{took:?}");
    scheduler.stop().await;
}

#[tokio::test]
async fn occupancy_is_shown_and_goes_with_its_stream() {
    let scheduler = Running::start("127.0.0.1:0").await;
    let tasks = Tasks::new();
    let member = worker("a");
    let _lease = register(&scheduler.membership(&tasks), &member).await;
    let mut views = scheduler.views().await;
    views.until_workers(&["a"]).await;
    let (sender, receiver) = mpsc::channel(4);
    let mut client = scheduler.client().await;
    let receiver = futures::stream::unfold(receiver, |mut receiver| async { Some((receiver.recv().await?, receiver)) });
    let reporting = tasks.spawn("reports", async move { client.report_occupancy(receiver).await });
    let reported = occupancy(&member, 1);
    sender.send(report(&reported)).await.unwrap();
    let view = views.until(|view| view.engines[0].occupancy.is_some()).await;
    assert_eq!(view.engines[0].occupancy, Some(reported));
    drop(sender);
    timeout(DEADLINE, reporting).await.unwrap().unwrap().unwrap();
    views.until(|view| view.engines[0].occupancy.is_none()).await;
    scheduler.stop().await;
}

#[tokio::test]
async fn a_report_without_its_engine_is_an_invalid_argument() {
    let scheduler = Running::start("127.0.0.1:0").await;
    let mut client = scheduler.client().await;
    let reports = futures::stream::iter([wire::OccupancyReport { occupancy: Some(wire::Occupancy::default()) }]);
    let status = client.report_occupancy(reports).await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::InvalidArgument, "{status}");
    scheduler.stop().await;
}

#[tokio::test]
async fn the_same_view_comes_again_with_every_heartbeat() {
    let scheduler = Running::start("127.0.0.1:0").await;
    let mut views = scheduler.views().await;
    let first = views.until(|_| true).await;
    assert_eq!(views.until(|_| true).await, first);
    scheduler.stop().await;
}

#[tokio::test]
async fn after_a_restart_the_view_is_whole_again_under_a_higher_epoch() {
    let scheduler = Running::start("127.0.0.1:0").await;
    let tasks = Tasks::new();
    let membership = scheduler.membership(&tasks);
    let leases = [register(&membership, &worker("a")).await, register(&membership, &worker("b")).await];
    let before = scheduler.views().await.until_workers(&["a", "b"]).await;
    let address = scheduler.stop().await;
    let again = Running::start(&address).await;
    let after = again.views().await.until_workers(&["a", "b"]).await;
    assert!(after.epoch > before.epoch, "{} after {}", after.epoch, before.epoch);
    for lease in &leases {
        timeout(DEADLINE, lease.state().wait_for(|state| state.held && state.epoch == 2)).await.unwrap().unwrap();
    }
    again.stop().await;
}

#[tokio::test]
async fn a_port_in_use_and_a_broken_endpoint_are_typed_errors() {
    let taken = Listener::bind("127.0.0.1:0").unwrap();
    let config = Config { listen: taken.local_addr().to_string(), ..Config::default() };
    let error = run(config, Shutdown::never()).await.unwrap_err();
    assert!(matches!(error, scheduler::Error::Bind(_)), "{error}");
    let membership = MembershipConfig {
        kind: membership::Kind::Etcd,
        endpoints: vec!["not an address".to_owned()],
        ..MembershipConfig::default()
    };
    let config = Config { listen: "127.0.0.1:0".to_owned(), membership, ..Config::default() };
    let error = run(config, Shutdown::never()).await.unwrap_err();
    assert!(matches!(error, scheduler::Error::Membership(_)), "{error}");
}
