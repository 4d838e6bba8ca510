//! Whether two workers run on one host and one may read the other's memory: shown by reading, not believed.

use kernels::memory::runs::pull_bytes;

use super::message::Accept;

/// Bytes of a proof.
pub(super) const PROOF_BYTES: usize = 16;

/// What this process shows to peers.
#[derive(Debug)]
pub(super) struct Host {
    /// Changes with each start of the system; empty where it cannot be told, and then no peer is on the same host.
    pub(super) boot_id: String,
    /// Random bytes that are nowhere but in this process's memory, and in what it says to peers.
    pub(super) proof: Box<[u8; PROOF_BYTES]>,
}

impl Host {
    pub(super) fn new() -> Self {
        let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        Self { boot_id: boot_id.trim().to_owned(), proof: Box::new(daemon::random::u128().to_le_bytes()) }
    }

    /// Where a peer that may read this process's memory finds the proof.
    pub(super) fn proof_address(&self) -> u64 {
        self.proof.as_ptr().expose_provenance() as u64
    }

    /// Whether a peer runs on this host, as far as its word goes.
    pub(super) fn is_also(&self, peer: &Accept) -> bool {
        !self.boot_id.is_empty() && self.boot_id == peer.boot_id
    }

    /// Whether this process may read the peer's memory and finds there what the peer says.
    ///
    /// The number of a process can mean another one in a container of its own; the proof tells.
    pub(super) fn can_pull(&self, peer: &Accept) -> bool {
        let mut read = [0; PROOF_BYTES];
        self.is_also(peer)
            && peer.proof.len() == PROOF_BYTES
            && pull_bytes(peer.pid, peer.proof_address, &mut read).is_ok()
            && peer.proof == read
    }
}
