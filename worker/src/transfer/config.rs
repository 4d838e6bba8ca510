//! How keys and values travel between workers, as operators may say.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Way;

/// The `[worker.transfer]` table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TransferConfig {
    /// Where the worker listens for others that order prompts from it; empty takes any port beside `worker.listen`.
    pub listen: String,
    /// The address others reach that at; empty takes the one that is listened on.
    pub advertise: String,
    /// Longest time from the order of a prompt to its last block, in milliseconds; then the rest is computed here.
    pub deadline_ms: u64,
    /// Longest silence of a worker that computes a prompt for this one, in milliseconds, between two messages or inside
    /// one; then the rest is computed here. Who has nothing to send says so twice a second.
    pub silence_ms: u64,
    /// Longest time that computed blocks are kept for a worker that takes or acknowledges nothing, in milliseconds.
    pub lease_ms: u64,
    /// Ways to move blocks, the best first; the first that two workers can use is used. A pair that can use none of them
    /// does not exchange blocks.
    pub ways: Vec<Way>,
    /// Most bytes a second that this worker sends to all others together; absent is as fast as it goes.
    pub bytes_per_s_max: Option<u64>,
    /// Bytes of the ring of one connection, where that is the way; two frames at least.
    pub ring_bytes: u64,
    /// Connections from other workers at once, those that are kept for their next order included; beyond it they are
    /// closed.
    pub connections_max: u32,
    /// Idle connections kept to one other worker.
    pub idle_per_peer_max: u32,
    /// Longest time to connect to a worker and agree with it, in milliseconds.
    pub pairing_timeout_ms: u64,
    /// How long a connection is kept without an order, in milliseconds.
    pub idle_timeout_ms: u64,
}

impl Default for TransferConfig {
    fn default() -> Self {
        Self {
            listen: String::new(),
            advertise: String::new(),
            deadline_ms: 60_000,
            silence_ms: 2_000,
            lease_ms: 5_000,
            ways: vec![Way::Pull, Way::Ring, Way::Tcp],
            bytes_per_s_max: None,
            ring_bytes: 4 << 20,
            connections_max: 512,
            idle_per_peer_max: 4,
            pairing_timeout_ms: 1_000,
            idle_timeout_ms: 60_000,
        }
    }
}

impl TransferConfig {
    /// Longest time from an order to its last block.
    pub(crate) fn deadline(&self) -> Duration {
        Duration::from_millis(self.deadline_ms)
    }

    /// Longest silence of who computes.
    pub(super) fn silence(&self) -> Duration {
        Duration::from_millis(self.silence_ms)
    }

    /// How long unacknowledged blocks are kept.
    pub(crate) fn lease(&self) -> Duration {
        Duration::from_millis(self.lease_ms)
    }

    /// Longest time to connect and agree.
    pub(super) fn pairing_timeout(&self) -> Duration {
        Duration::from_millis(self.pairing_timeout_ms)
    }

    /// How long the listening side keeps an idle connection.
    pub(super) fn idle_timeout(&self) -> Duration {
        Duration::from_millis(self.idle_timeout_ms)
    }
}
