//! One worker from handshake to loss: it is ready while its cache's events flow, and tried again when they do not.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use contract::ids::{EngineId, Incarnation, WorkerId};
use contract::kv::KvEvent;
use contract::model::{IdentityMismatch, ModelIdentity};
use daemon::shutdown::Shutdown;
use daemon::task::Tasks;
use proto::WireError;
use proto::exchange;
use proto::worker::v1::kv_frame::Body;
use proto::worker::v1::worker_client::WorkerClient;
use proto::worker::v1::{DescribeRequest, KvFrame, WatchKvRequest};
use thiserror::Error;
use tonic::Streaming;
use tonic::transport::Channel;

use super::{Cluster, Engine};
use crate::route::directory::{Resync, Update};

/// Largest frame of cache events.
const FRAME_BYTES_MAX: usize = 64 << 20;

/// A worker to be linked with.
#[derive(Clone, Debug)]
pub(super) struct Peer {
    pub(super) worker: WorkerId,
    pub(super) incarnation: Incarnation,
    pub(super) address: String,
    pub(super) draining: Arc<AtomicBool>,
    /// Told whether requests can be placed on it.
    pub(super) is_ready: Arc<AtomicBool>,
}

/// Why a link is not ready or no longer so.
#[derive(Debug, Error)]
enum Lost {
    #[error("it does not answer within {0} ms")]
    Silent(u64),
    #[error("{}: {}", .0.code().description(), .0.message())]
    Status(#[from] tonic::Status),
    #[error("{0}")]
    Mismatch(#[from] IdentityMismatch),
    #[error("{0}")]
    Wire(#[from] WireError),
    #[error("it is {0} now")]
    Another(String),
    #[error("it ended the stream")]
    Ended,
    #[error("{0}")]
    Address(#[from] daemon::client::AddressError),
}

/// A worker that cannot be linked so often in a row is told of: with usual waits in between that is a second and a half.
const TELL_AFTER: u32 = 6;

/// Keeps a worker linked; never returns.
pub(super) async fn keep(cluster: Arc<Cluster>, peer: Peer, tasks: Tasks, shutdown: Shutdown) {
    let (least, most) = (cluster.settings.backoff_ms_min.max(1), cluster.settings.backoff_ms_max.max(1));
    let mut backoff_ms = least;
    let (mut told_mismatch, mut n_failed) = (None, 0_u32);
    loop {
        let mut linked = Linked { cluster: &cluster, engines: Vec::new(), is_ready: &peer.is_ready };
        let Err(lost) = Box::pin(link(&cluster, &peer, &mut linked, (&tasks, &shutdown))).await;
        let was_ready = peer.is_ready.load(Ordering::Relaxed);
        let leaves = peer.draining.load(Ordering::Relaxed)
            || linked.engines.iter().any(|engine| engine.leaves.load(Ordering::Relaxed));
        drop(linked);
        n_failed = n_failed.saturating_add(1);
        if was_ready {
            (backoff_ms, n_failed) = (least, 0);
        }
        match &lost {
            Lost::Mismatch(mismatch) => {
                cluster.metrics.mismatches.inc();
                if told_mismatch.as_ref() != Some(mismatch) {
                    tracing::error!(worker = %peer.worker, address = %peer.address, "worker is not used: {mismatch}");
                    told_mismatch = Some(mismatch.clone());
                }
            }
            _ if was_ready && leaves => tracing::info!(worker = %peer.worker, "worker has left"),
            lost if was_ready => tracing::warn!(worker = %peer.worker, "worker is lost: {lost}"),
            lost if n_failed == TELL_AFTER => {
                tracing::warn!(worker = %peer.worker, address = %peer.address, "worker cannot be reached yet: {lost}");
            }
            lost => tracing::debug!(worker = %peer.worker, "worker is not ready: {lost}"),
        }
        tokio::time::sleep(Duration::from_millis(backoff_ms)).await;
        backoff_ms = (backoff_ms * 2).min(most);
    }
}

/// Engines that the directory follows, and that are published when ready, for as long as this lives, also when the link's
/// task is dropped.
struct Linked<'a> {
    cluster: &'a Cluster,
    engines: Vec<Arc<Engine>>,
    is_ready: &'a AtomicBool,
}

impl Drop for Linked<'_> {
    fn drop(&mut self) {
        // Before the change is told.
        self.is_ready.store(false, Ordering::Relaxed);
        if !self.engines.is_empty() {
            self.cluster.withdraw(&self.engines);
            self.cluster.count_blocks();
        }
    }
}

async fn link(
    cluster: &Cluster,
    peer: &Peer,
    linked: &mut Linked<'_>,
    (tasks, shutdown): (&Tasks, &Shutdown),
) -> Result<std::convert::Infallible, Lost> {
    let channel = daemon::client::channel(&peer.address, &cluster.settings.channel_to_worker())?;
    let client = WorkerClient::new(channel).max_decoding_message_size(FRAME_BYTES_MAX);
    let Described { identity, ids, transfer_address } = describe(cluster, peer, &client).await?;
    let opening = exchange::open(client.clone(), cluster.settings.reader_tokens_max as usize);
    let (line, traffic) = within(cluster.settings.handshake_timeout_ms, opening).await??;
    // Calls that run outlive the link: a worker that drains ends its watch first.
    let shutdown = shutdown.clone();
    let mut driven = tasks.spawn("worker calls", async move {
        tokio::select! {
            () = shutdown.triggered() => {}
            status = traffic.run() => tracing::debug!("the calls to a worker end: {}", status.message()),
        }
    });
    let engine = |id| Engine {
        id,
        line: line.clone(),
        context_length: identity.context_length,
        numerics: identity.numerics,
        transfer_address: transfer_address.clone(),
        draining: Arc::clone(&peer.draining),
        leaves: AtomicBool::new(false),
        is_emptied: AtomicBool::new(false),
        hands_over: AtomicBool::new(false),
    };
    linked.engines = ids.into_iter().map(|id| Arc::new(engine(id))).collect();
    drop(line);
    let mut frames = watch(cluster, &client, &linked.engines, &identity).await?;
    linked.is_ready.store(true, Ordering::Relaxed);
    cluster.publish(&linked.engines);
    tracing::info!(worker = %peer.worker, address = %peer.address, n_engines = linked.engines.len(), "worker is ready");
    loop {
        let frame = tokio::select! {
            frame = next(&mut frames, cluster.settings.kv_silence_ms_max) => frame,
            _ = &mut driven => return Err(Lost::Ended),
        };
        if let Err(Lost::Silent(_)) = frame {
            // It may hang: its calls go on elsewhere.
            driven.abort();
        }
        let frame = frame?;
        if let Err(resync) = take(cluster, &linked.engines, frame)? {
            tracing::debug!(worker = %peer.worker, reason = resync.name(), "asks for a snapshot of cached blocks");
            cluster.metrics.resync(resync.name());
            frames = watch(cluster, &client, &linked.engines, &identity).await?;
        }
        cluster.count_blocks();
    }
}

/// What a worker says of itself.
struct Described {
    /// The model as both have it, with the worker's longest sequence and numerics.
    identity: ModelIdentity,
    ids: Vec<EngineId>,
    transfer_address: String,
}

async fn describe(cluster: &Cluster, peer: &Peer, client: &WorkerClient<Channel>) -> Result<Described, Lost> {
    let timeout_ms = cluster.settings.handshake_timeout_ms;
    let description = within(timeout_ms, client.clone().describe(DescribeRequest {})).await??.into_inner();
    let theirs: ModelIdentity = description.identity.ok_or(WireError::Missing("identity"))?.try_into()?;
    let ours = cluster.model.agree(&theirs, &format!("worker {}", peer.worker))?;
    let engines: Vec<EngineId> = description.engines.into_iter().map(EngineId::from).collect();
    if let Some(other) = engines.iter().find(|id| (&id.worker, id.incarnation) != (&peer.worker, peer.incarnation)) {
        return Err(Lost::Another(other.to_string()));
    }
    if engines.is_empty() {
        return Err(WireError::Missing("engines").into());
    }
    let identity = ModelIdentity { context_length: theirs.context_length, numerics: theirs.numerics, ..ours };
    Ok(Described { identity, ids: engines, transfer_address: description.transfer_address })
}

async fn watch(
    cluster: &Cluster,
    client: &WorkerClient<Channel>,
    engines: &[Arc<Engine>],
    identity: &ModelIdentity,
) -> Result<Streaming<KvFrame>, Lost> {
    for engine in engines {
        cluster.directory().begin(&engine.id);
    }
    let request = WatchKvRequest { identity: Some(identity.into()) };
    let timeout_ms = cluster.settings.handshake_timeout_ms;
    Ok(within(timeout_ms, client.clone().watch_kv(request)).await??.into_inner())
}

/// Waits for the next frame.
///
/// Silence is counted in thirds: a router that stood still itself finds one of them over when it goes on, and then hears
/// what came meanwhile.
async fn next(frames: &mut Streaming<KvFrame>, silence_ms: u64) -> Result<KvFrame, Lost> {
    for _ in 0..3 {
        if let Ok(frame) = within(silence_ms.div_ceil(3), frames.message()).await {
            return frame?.ok_or(Lost::Ended);
        }
    }
    Err(Lost::Silent(silence_ms))
}

/// Takes a frame; the inner result says whether the directory can go on.
fn take(cluster: &Cluster, engines: &[Arc<Engine>], frame: KvFrame) -> Result<Result<(), Resync>, Lost> {
    let engine = EngineId::from(frame.engine.ok_or(WireError::Missing("engine"))?);
    if engines.iter().all(|known| known.id != engine) {
        return Err(Lost::Another(engine.to_string()));
    }
    let update = match frame.body.ok_or(WireError::Missing("body"))? {
        Body::Snapshot(snapshot) => {
            let hashes = snapshot.blocks.iter().map(|block| block.hashes().map(|(hash, _)| hash));
            Update::Snapshot { blocks: hashes.collect::<Result<_, _>>()?, last: snapshot.last }
        }
        Body::Events(events) => {
            let events: Result<Vec<KvEvent>, WireError> = events.events.into_iter().map(TryInto::try_into).collect();
            Update::Events(events?)
        }
        Body::Heartbeat(digest) => Update::Heartbeat(digest.into()),
    };
    Ok(cluster.directory().apply(&engine, frame.sequence, update))
}

async fn within<T>(timeout_ms: u64, work: impl Future<Output = T>) -> Result<T, Lost> {
    tokio::time::timeout(Duration::from_millis(timeout_ms), work).await.map_err(|_| Lost::Silent(timeout_ms))
}
