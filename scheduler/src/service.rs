//! The scheduler over gRPC; the one file of this role that knows generated types.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use contract::occupancy::Occupancy;
use contract::placements::LedgerBatch;
use daemon::shutdown::Shutdown;
use daemon::task::Tasks;
use futures::{Stream, StreamExt as _};
use proto::WireError;
use proto::cluster::v1 as wire;
use proto::cluster::v1::scheduler_server::{Scheduler, SchedulerServer};
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;
use tonic::service::Routes;
use tonic::{Request, Response, Status, Streaming};

use crate::publish::{Event, Latest};
use crate::relay::{self, Relay};
use crate::state::StreamId;

/// Largest batch of the ledger: a snapshot of several hundred thousand placements.
const LEDGER_BYTES_MAX: usize = 64 << 20;

/// Names of what [`routes`] serves.
pub(crate) const NAMES: [&str; 2] = ["tessera.cluster.v1.Membership", "tessera.cluster.v1.Scheduler"];

/// Answers `tessera.cluster.v1.Scheduler`.
#[derive(Clone, Debug)]
pub(crate) struct Service {
    pub(crate) events: mpsc::Sender<Event>,
    pub(crate) views: watch::Receiver<Latest>,
    pub(crate) relay: Arc<Relay>,
    pub(crate) tasks: Tasks,
    pub(crate) heartbeat: Duration,
    pub(crate) ledger_silence: Duration,
    pub(crate) shutdown: Shutdown,
    pub(crate) next_stream: Arc<AtomicU64>,
}

/// Mounts the scheduler beside the store of members.
pub(crate) fn routes(service: Service, store: membership::embedded::Store) -> Routes {
    let membership = membership::embedded::Service::new(store, service.shutdown.clone());
    let scheduler = SchedulerServer::new(service).max_decoding_message_size(LEDGER_BYTES_MAX);
    Routes::new(scheduler).add_service(membership)
}

#[tonic::async_trait]
impl Scheduler for Service {
    type WatchViewStream = Pin<Box<dyn Stream<Item = Result<wire::ClusterView, Status>> + Send>>;
    type ShareLedgerStream = Pin<Box<dyn Stream<Item = Result<wire::LedgerBatch, Status>> + Send>>;

    async fn report_occupancy(
        &self,
        request: Request<Streaming<wire::OccupancyReport>>,
    ) -> Result<Response<wire::ReportOccupancyResponse>, Status> {
        let mut reports = request.into_inner();
        let mut ended = Ended::new(self);
        loop {
            let report = tokio::select! {
                () = self.shutdown.triggered() => return Err(Status::unavailable("the scheduler is shutting down")),
                report = reports.message() => report,
            };
            // A silent connection is ended by the server's pings; a silent worker goes stale in the state.
            let Some(report) = report? else {
                ended.tell().await;
                return Ok(Response::new(wire::ReportOccupancyResponse {}));
            };
            let occupancy = Occupancy::try_from(report.occupancy.ok_or(WireError::Missing("occupancy"))?)?;
            let event = Event::Report { stream: ended.stream, occupancy: Box::new(occupancy) };
            self.events.send(event).await.map_err(|_| Status::unavailable("the scheduler is shutting down"))?;
        }
    }

    async fn watch_view(
        &self,
        request: Request<wire::WatchViewRequest>,
    ) -> Result<Response<Self::WatchViewStream>, Status> {
        tracing::info!(router = request.into_inner().router, "a router watches the view");
        let (mut views, heartbeat, shutdown) = (self.views.clone(), self.heartbeat, self.shutdown.clone());
        let stream = async_stream::stream! {
            loop {
                let view = views.borrow_and_update().clone();
                if let Some(view) = view {
                    yield Ok(wire::ClusterView::from(&*view));
                }
                // Ends with an error when the state is gone; without a change the same view is sent again.
                if let Ok(Err(_)) = timeout(heartbeat, views.changed()).await {
                    return;
                }
            }
        };
        Ok(Response::new(stream.take_until(async move { shutdown.triggered().await }).boxed()))
    }

    async fn share_ledger(
        &self,
        request: Request<Streaming<wire::LedgerBatch>>,
    ) -> Result<Response<Self::ShareLedgerStream>, Status> {
        let stream = self.new_stream();
        let mut waiting = self.relay.open(stream);
        let (relay, batches, shutdown) = (Arc::clone(&self.relay), request.into_inner(), self.shutdown.clone());
        let silence = self.ledger_silence;
        // A task of its own, so that a router which does not read is still listened to.
        self.tasks.spawn("ledger-stream", async move {
            let ended = listen(&relay, stream, batches, silence, &shutdown).await.err();
            relay.end(stream, ended);
        });
        let batches = async_stream::stream! {
            loop {
                match waiting.next().await {
                    Ok(Some(batch)) => yield Ok(wire::LedgerBatch::from(&*batch)),
                    Ok(None) => return,
                    Err(ended) => {
                        yield Err(status(ended));
                        return;
                    }
                }
            }
        };
        Ok(Response::new(batches.boxed()))
    }
}

impl Service {
    fn new_stream(&self) -> StreamId {
        StreamId(self.next_stream.fetch_add(1, Ordering::Relaxed))
    }
}

/// Takes what a router tells until it ends or breaks its stream.
async fn listen(
    relay: &Relay,
    stream: StreamId,
    mut batches: Streaming<wire::LedgerBatch>,
    silence: Duration,
    shutdown: &Shutdown,
) -> Result<(), relay::Ended> {
    loop {
        let batch = tokio::select! {
            () = shutdown.triggered() => return Err(relay::Ended::ShuttingDown),
            batch = timeout(silence, batches.message()) => batch.map_err(|_| relay::Ended::Silent { silence })?,
        };
        let Ok(Some(batch)) = batch else { return Ok(()) };
        relay.take(stream, LedgerBatch::try_from(batch)?)?;
    }
}

fn status(ended: relay::Ended) -> Status {
    let message = ended.to_string();
    match ended {
        relay::Ended::Lagging { .. } => Status::resource_exhausted(message),
        relay::Ended::Silent { .. } => Status::deadline_exceeded(message),
        relay::Ended::Refused(_) => Status::failed_precondition(message),
        relay::Ended::Malformed(malformed) => malformed.into(),
        relay::Ended::ShuttingDown => Status::unavailable(message),
    }
}

/// Tells the state that a stream of reports ended, however it ended.
struct Ended {
    stream: StreamId,
    events: Option<mpsc::Sender<Event>>,
}

impl Ended {
    fn new(service: &Service) -> Self {
        Self { stream: service.new_stream(), events: Some(service.events.clone()) }
    }

    async fn tell(&mut self) {
        if let Some(events) = self.events.take() {
            // Fails only when the state is gone.
            let _ = events.send(Event::StreamEnded(self.stream)).await;
        }
    }
}

impl Drop for Ended {
    fn drop(&mut self) {
        if let Some(events) = self.events.take() {
            // When the queue is full the reports go stale by themselves.
            let _ = events.try_send(Event::StreamEnded(self.stream));
        }
    }
}
