//! What this router's placements become, for whoever shares the ledger with others.

use contract::ledger::LedgerEvent;
use tokio::sync::broadcast;

/// Events that a slow reader may be behind; beyond it the reader is told so and begins again with a snapshot.
const N_EVENTS_MAX: usize = 8_192;

/// Where events are put; with nobody to read them they are gone.
pub(super) struct Outbox(broadcast::Sender<LedgerEvent>);

impl Outbox {
    pub(super) fn new() -> Self {
        Self(broadcast::Sender::new(N_EVENTS_MAX))
    }

    pub(super) fn put(&self, event: LedgerEvent) {
        // Fails when nobody reads.
        let _ = self.0.send(event);
    }
}
