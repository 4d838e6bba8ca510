//! What a scheduler wishes: engines that stand still are left alone, for as long as somebody says so.

use std::net::SocketAddr;

use contract::ids::{DataRank, EngineId, Incarnation};
use contract::view::{ClusterView, DrainReason, EngineView, Role};
use daemon::shutdown::{Shutdown, Trigger};
use daemon::task::Tasks;
use futures::stream::{BoxStream, StreamExt as _, pending};
use proto::cluster::v1 as wire;
use proto::cluster::v1::scheduler_server::{Scheduler, SchedulerServer};
use serde_json::json;
use tokio::sync::watch;
use tonic::{Request, Response, Status, Streaming};

use crate::client::post;
use crate::place::{Place, until};
use crate::worker::Fake;

/// A scheduler that says what a test wants it to.
struct Fixed {
    address: SocketAddr,
    views: watch::Sender<wire::ClusterView>,
    stop: Trigger,
}

struct Service(watch::Receiver<wire::ClusterView>);

#[tonic::async_trait]
impl Scheduler for Service {
    type WatchViewStream = BoxStream<'static, Result<wire::ClusterView, Status>>;
    type ShareLedgerStream = BoxStream<'static, Result<wire::LedgerBatch, Status>>;

    async fn report_occupancy(
        &self,
        _: Request<Streaming<wire::OccupancyReport>>,
    ) -> Result<Response<wire::ReportOccupancyResponse>, Status> {
        Err(Status::unimplemented("nobody reports"))
    }

    async fn watch_view(&self, _: Request<wire::WatchViewRequest>) -> Result<Response<Self::WatchViewStream>, Status> {
        let views = futures::stream::unfold((self.0.clone(), true), |(mut views, is_first)| async move {
            if !is_first {
                views.changed().await.ok()?;
            }
            let view = views.borrow_and_update().clone();
            Some((Ok(view), (views, false)))
        });
        Ok(Response::new(views.boxed()))
    }

    async fn share_ledger(
        &self,
        _: Request<Streaming<wire::LedgerBatch>>,
    ) -> Result<Response<Self::ShareLedgerStream>, Status> {
        Ok(Response::new(pending().boxed()))
    }
}

impl Fixed {
    async fn start(tasks: &Tasks) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (views, seen) = watch::channel(wire::ClusterView::default());
        let (stop, shutdown) = Shutdown::pair();
        let incoming = tonic::transport::server::TcpIncoming::from(listener).with_nodelay(Some(true));
        tasks.spawn("scheduler", async move {
            let server = tonic::transport::Server::builder().add_service(SchedulerServer::new(Service(seen)));
            tokio::select! {
                result = server.serve_with_incoming(incoming) => result.unwrap(),
                () = shutdown.triggered() => {}
            }
        });
        Self { address, views, stop }
    }

    /// Tells which of the workers stand still.
    fn wish(&self, workers: &[Fake], stalled: &[bool]) {
        let view = |(worker, is_stalled): (&Fake, &bool)| EngineView {
            engine: EngineId {
                worker: worker.id.as_str().into(),
                incarnation: Incarnation(worker.incarnation),
                data_rank: DataRank(0),
            },
            address: worker.address.to_string(),
            identity: worker.identity.clone(),
            role: Some(Role::Mixed),
            draining: is_stalled.then_some(DrainReason::Stalled),
            occupancy: None,
        };
        let engines = workers.iter().zip(stalled).map(view).collect();
        self.views.send_modify(|last| {
            *last = (&ClusterView { epoch: 1, version: last.version + 1, engines }).into();
        });
    }
}

/// Which of two workers get requests: asks until it is as expected.
async fn until_served_by(place: &Place, expected: [bool; 2]) {
    until("requests go where they should", async || {
        let before = [0, 1].map(|index| place.workers[index].n_requests());
        for _ in 0..4 {
            let (status, answer) = post(place.http, "/v1/completions", &json!({"prompt": [5], "max_tokens": 2})).await;
            assert_eq!(status, 200, "{answer}");
        }
        [0, 1].map(|index| place.workers[index].n_requests() > before[index]) == expected
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_stands_still_gets_nothing_until_it_is_said_to_go_on_or_nobody_says_anything() {
    let tasks = Tasks::new();
    let scheduler = Fixed::start(&tasks).await;
    let change = |config: &mut router::Config| {
        config.policy = "round_robin".to_owned();
        config.scheduler_addresses = vec![scheduler.address.to_string()];
        config.workers.view_silence_ms_max = 60_000;
    };
    let place = Place::start_with(2, change).await;
    for (stalled, served) in
        [([false, false], [true, true]), ([true, false], [false, true]), ([false, false], [true, true])]
    {
        scheduler.wish(&place.workers, &stalled);
        until_served_by(&place, served).await;
    }
    scheduler.wish(&place.workers, &[true, false]);
    until_served_by(&place, [false, true]).await;
    assert_eq!(place.n_workers().await, 2, "it is not lost");
    let Fixed { views, stop, .. } = scheduler;
    stop.fire();
    drop(views);
    until_served_by(&place, [true, true]).await;
}
