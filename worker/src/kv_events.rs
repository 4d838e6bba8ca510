//! From the engine thread to those who follow its prefix cache: batches over a bounded channel, a snapshot to start from.

use std::sync::Arc;

use contract::hash::BlockHash;
use contract::kv::{KvDigest, KvEvent};
use engine::Engine;
use tokio::sync::broadcast;

/// Events of one moment with what they lead to.
#[derive(Clone, Debug)]
pub(crate) struct KvBatch {
    /// Number of the first event.
    pub(crate) first_sequence: u64,
    /// The events, at least one.
    pub(crate) events: Arc<[KvEvent]>,
    /// Digest after the last.
    pub(crate) digest: KvDigest,
}

impl KvBatch {
    /// Number of the last event.
    pub(crate) fn last_sequence(&self) -> u64 {
        self.first_sequence + self.events.len() as u64 - 1
    }
}

/// The prefix cache at one moment, and all batches after it.
#[derive(Debug)]
pub(crate) struct KvView {
    /// Number of the last event in it.
    pub(crate) sequence: u64,
    /// Cached blocks with their parents, parents first.
    pub(crate) blocks: Vec<(BlockHash, Option<BlockHash>)>,
    /// Their digest.
    pub(crate) digest: KvDigest,
    /// Batches from `sequence + 1` on.
    pub(crate) batches: broadcast::Receiver<KvBatch>,
}

/// The engine thread's end.
#[derive(Debug)]
pub(crate) struct KvPublisher {
    sender: broadcast::Sender<KvBatch>,
    events: Vec<KvEvent>,
}

impl KvPublisher {
    /// Makes a publisher whose watchers may lag by `batches_max` batches.
    pub(crate) fn new(batches_max: usize) -> Self {
        Self { sender: broadcast::Sender::new(batches_max.max(1)), events: Vec::new() }
    }

    /// Sends what has happened to the cache since the last call.
    pub(crate) fn publish(&mut self, engine: &mut Engine) {
        self.events.clear();
        let first_sequence = engine.drain_kv_events(&mut self.events);
        if !self.events.is_empty() && self.sender.receiver_count() > 0 {
            let events = self.events.as_slice().into();
            // A watcher that has just gone needs nothing.
            let _ = self.sender.send(KvBatch { first_sequence, events, digest: engine.kv_digest() });
        }
    }

    /// The cache now, and a place in the channel right after it.
    pub(crate) fn view(&mut self, engine: &mut Engine) -> KvView {
        self.publish(engine);
        KvView {
            sequence: engine.kv_sequence(),
            blocks: engine.kv_snapshot(),
            digest: engine.kv_digest(),
            batches: self.sender.subscribe(),
        }
    }
}
