//! A watcher's stream: snapshot in parts, then events, then heartbeats; a watcher that lags starts anew.

use std::time::Duration;

use async_stream::try_stream;
use contract::error::RequestError;
use contract::kv::KvDigest;
use daemon::clock;
use futures::Stream;
use proto::status::to_status;
use proto::worker::v1 as wire;
use proto::worker::v1::kv_frame::Body;
use tokio::sync::broadcast::error::RecvError;
use tokio::time::timeout;
use tonic::Status;

use super::Service;
use crate::kv_events::{KvBatch, KvView};

/// What to send next.
enum Next {
    Batch(KvBatch),
    Heartbeat,
    Lagged,
    Ended(RequestError),
}

/// All frames of a watch that begins with `view`.
pub(super) fn frames(service: Service, view: KvView) -> impl Stream<Item = Result<wire::KvFrame, Status>> {
    try_stream! {
        let mut view = view;
        loop {
            let (mut sequence, mut digest) = (view.sequence, view.digest);
            for part in parts(&view, service.snapshot_blocks_max) {
                yield frame(&service, sequence, Body::Snapshot(part));
            }
            view.blocks = Vec::new();
            let mut heartbeat_at = clock::now();
            loop {
                let left = heartbeat_at.saturating_duration_since(clock::now());
                match next(&service, &mut view, left, sequence).await {
                    Next::Batch(batch) => {
                        (sequence, digest) = (batch.last_sequence(), batch.digest);
                        yield frame(&service, sequence, Body::Events(events(&batch)));
                    }
                    Next::Heartbeat => {
                        heartbeat_at = clock::now() + service.heartbeat;
                        yield frame(&service, sequence, Body::Heartbeat(wire_digest(digest)));
                    }
                    Next::Lagged => break,
                    Next::Ended(error) => Err(to_status(&error))?,
                }
            }
            view = service.engine.watch_kv().await.map_err(|error| to_status(&error))?;
        }
    }
}

async fn next(service: &Service, view: &mut KvView, left: Duration, sequence: u64) -> Next {
    let received = tokio::select! {
        biased;
        () = service.shutdown.triggered() => {
            return Next::Ended(RequestError::ShuttingDown(format!("worker {}", service.id.worker)));
        }
        received = timeout(left, view.batches.recv()) => received,
    };
    match received {
        Err(_) => Next::Heartbeat,
        Ok(Ok(batch)) if batch.first_sequence == sequence + 1 => Next::Batch(batch),
        // Events that the engine itself had no room for are a gap like any other.
        Ok(Ok(_) | Err(RecvError::Lagged(_))) => Next::Lagged,
        Ok(Err(RecvError::Closed)) => Next::Ended(RequestError::Internal("the engine has stopped".to_owned())),
    }
}

/// The snapshot in messages of bounded size, at least one.
fn parts(view: &KvView, blocks_max: usize) -> Vec<wire::KvSnapshot> {
    let chunks = view.blocks.chunks(blocks_max.max(1));
    let stored = |chunk: &[_]| chunk.iter().map(|&(hash, parent)| wire::StoredBlock::new(hash, parent)).collect();
    let mut parts: Vec<_> = chunks.map(|chunk| wire::KvSnapshot { blocks: stored(chunk), last: false }).collect();
    match parts.last_mut() {
        Some(last) => last.last = true,
        None => parts.push(wire::KvSnapshot { blocks: Vec::new(), last: true }),
    }
    parts
}

fn frame(service: &Service, sequence: u64, body: Body) -> wire::KvFrame {
    wire::KvFrame { engine: Some((&service.id).into()), sequence, body: Some(body) }
}

fn events(batch: &KvBatch) -> wire::KvEvents {
    wire::KvEvents { events: batch.events.iter().map(|&event| event.into()).collect() }
}

fn wire_digest(digest: KvDigest) -> wire::KvDigest {
    digest.into()
}
