//! One placement as the ledger has it, for as long as its stream lives.

use std::sync::Arc;

use contract::error::RequestError;
use contract::ids::RequestId;
use contract::ledger::{LedgerEvent, PlacedWork, PlacementKey};
use daemon::clock;

use super::Cluster;

/// Keeps a placement in the ledger until it is dropped.
pub(crate) struct Flight {
    cluster: Arc<Cluster>,
    request: RequestId,
    key: PlacementKey,
    work: PlacedWork,
    is_prefilled: bool,
}

impl Flight {
    /// Takes over a placement that is in this router's ledger already, and tells the others of it.
    pub(super) fn new(cluster: &Arc<Cluster>, request: RequestId, key: PlacementKey, work: PlacedWork) -> Self {
        cluster.ledger.outbox.put(LedgerEvent::Placed(key, work.clone()));
        Self { cluster: Arc::clone(cluster), request, key, work, is_prefilled: false }
    }

    /// Enters another choice of the same prompt.
    pub(crate) fn beside(&self) -> Self {
        let (key, work) = self.cluster.placer.place_beside(&self.work, clock::now());
        Self::new(&self.cluster, self.request, key, work)
    }

    /// The prompt is computed: the first token came.
    pub(crate) fn prefilled(&mut self) {
        if self.is_prefilled {
            return;
        }
        self.is_prefilled = true;
        self.tell(LedgerEvent::FirstToken(self.key));
        if let Some((actual_ms, predicted_ms)) =
            self.cluster.decisions.first_token(self.request, self.key, clock::now())
        {
            self.cluster.metrics.predicted(actual_ms, predicted_ms);
        }
    }

    /// Nothing comes of it: `explain` tells why.
    pub(crate) fn failed(&self, error: &RequestError) {
        self.cluster.decisions.failed(self.request, self.key, error.code(), clock::now());
    }

    /// Prompt tokens that are computed for it.
    pub(crate) fn tokens_new(&self) -> u64 {
        u64::from(self.work.tokens_new)
    }

    fn tell(&self, event: LedgerEvent) {
        self.cluster.placer.tell(event.clone(), clock::now());
        self.cluster.ledger.outbox.put(event);
        self.cluster.room.notify_one();
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.tell(LedgerEvent::Finished(self.key));
    }
}
