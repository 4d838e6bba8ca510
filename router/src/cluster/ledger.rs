//! The load ledger shared with other routers: a stream to each scheduler, on which both sides tell what is new at once.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use contract::ids::Incarnation;
use contract::ledger::LedgerEvent;
use contract::placements::{LedgerBatch, MissedEvents};
use daemon::clock;
use proto::WireError;
use proto::cluster::v1 as wire;
use proto::cluster::v1::scheduler_client::SchedulerClient;
use thiserror::Error;
use tokio::sync::Notify;
use tonic::Streaming;
use tonic::transport::Channel;

use super::Cluster;
use super::others::{Others, StreamId};
use super::outbox::{Outbox, Reader};

/// What this router tells and what it is told.
pub(super) struct SharedLedger {
    pub(super) outbox: Arc<Outbox>,
    others: Mutex<Others>,
    /// The grace of a stream began.
    ended: Notify,
}

/// Why a stream is over.
#[derive(Debug, Error)]
enum Lost {
    #[error("{0}")]
    Status(#[from] tonic::Status),
    #[error("{0}")]
    Wire(#[from] WireError),
    #[error("{0}")]
    Missed(#[from] MissedEvents),
    #[error("the scheduler ended the stream")]
    Ended,
}

impl SharedLedger {
    /// Knows nothing; what a scheduler told is kept for `grace` after its stream broke.
    pub(super) fn new(router: Incarnation, grace: Duration) -> Self {
        let others = Mutex::new(Others::new(router, grace));
        Self { outbox: Arc::new(Outbox::new(router)), others, ended: Notify::new() }
    }

    fn others(&self) -> MutexGuard<'_, Others> {
        self.others.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Shares the ledger over one scheduler; never returns.
pub(super) async fn share(cluster: &Cluster, mut client: SchedulerClient<Channel>) {
    let (least, most) = (cluster.settings.backoff_ms_min.max(1), cluster.settings.backoff_ms_max.max(1));
    let mut backoff_ms = least;
    loop {
        let Err(lost) = match open(cluster, &mut client).await {
            Ok(batches) => {
                backoff_ms = least;
                follow(cluster, batches).await
            }
            Err(lost) => Err(lost),
        };
        tracing::debug!("the load ledger is not shared over this scheduler: {lost}");
        tokio::time::sleep(Duration::from_millis(backoff_ms)).await;
        backoff_ms = (backoff_ms * 2).min(most);
    }
}

/// Forgets what no living stream tells, when its grace is over; never returns.
pub(super) async fn forget_lost(cluster: &Cluster) {
    loop {
        let ended = cluster.ledger.ended.notified();
        let next = cluster.ledger.others().next_tick();
        let due = async {
            match next {
                Some(at) => tokio::time::sleep(at.saturating_duration_since(clock::now())).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = ended => {}
            () = due => {
                let mut others = cluster.ledger.others();
                let changes = others.tick(clock::now());
                enter(cluster, &mut others, changes);
            }
        }
    }
}

async fn open(cluster: &Cluster, client: &mut SchedulerClient<Channel>) -> Result<Streaming<wire::LedgerBatch>, Lost> {
    let told = futures::stream::unfold(Reader::new(&cluster.ledger.outbox), |mut reader| async move {
        let batch = reader.next().await;
        Some((wire::LedgerBatch::from(&batch), reader))
    });
    Ok(client.share_ledger(told).await?.into_inner())
}

async fn follow(
    cluster: &Cluster,
    mut batches: Streaming<wire::LedgerBatch>,
) -> Result<std::convert::Infallible, Lost> {
    let stream = Living { cluster, id: cluster.ledger.others().begin() };
    loop {
        let batch = LedgerBatch::try_from(batches.message().await?.ok_or(Lost::Ended)?)?;
        // Locked until the changes are entered, so that those of two schedulers are entered in their order.
        let mut others = cluster.ledger.others();
        let changes = others.take(stream.id, &batch)?;
        enter(cluster, &mut others, changes);
    }
}

fn enter(cluster: &Cluster, others: &mut Others, changes: Vec<LedgerEvent>) {
    let now = clock::now();
    for event in changes {
        if let LedgerEvent::Placed(key, work) = &event {
            cluster.elsewhere.placed(key.router, work);
        }
        cluster.placer.tell(event, now);
    }
    if others.take_is_demand_new() {
        cluster.elsewhere.demands.send_replace(others.demands());
    }
    cluster.room.notify_one();
    cluster.metrics.ledger_placements.set(i64::try_from(others.n_placements()).unwrap_or(i64::MAX));
    cluster.metrics.ledger_routers.set(i64::try_from(others.n_routers()).unwrap_or(i64::MAX));
}

/// A stream that lives until this is dropped, however that comes.
struct Living<'a> {
    cluster: &'a Cluster,
    id: StreamId,
}

impl Drop for Living<'_> {
    fn drop(&mut self) {
        self.cluster.ledger.others().ended(self.id, clock::now());
        self.cluster.ledger.ended.notify_one();
    }
}
