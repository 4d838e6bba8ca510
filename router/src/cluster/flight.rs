//! One placement as the ledger has it, for as long as its stream lives.

use std::sync::Arc;

use contract::error::RequestError;
use contract::ids::RequestId;
use contract::ledger::{LedgerEvent, PlacedWork, PlacementKey};
use daemon::clock;

use super::Cluster;
use crate::route::placer::PlacedPrefill;

/// Keeps a placement in the ledger until it is dropped.
pub(crate) struct Flight {
    cluster: Arc<Cluster>,
    /// What the client asked; none for what the router asks itself.
    request: Option<RequestId>,
    key: PlacementKey,
    work: PlacedWork,
    is_prefilled: bool,
    /// The share of the engine that computes the prompt, while it does.
    prefill: Option<PlacedPrefill>,
}

impl Flight {
    /// Takes over a placement that is in this router's ledger already, and tells the others of it.
    pub(super) fn new(
        cluster: &Arc<Cluster>,
        request: Option<RequestId>,
        key: PlacementKey,
        work: PlacedWork,
        prefill: Option<PlacedPrefill>,
    ) -> Self {
        cluster.ledger.outbox.put(LedgerEvent::Placed(key, work.clone()));
        if let Some(prefill) = &prefill {
            cluster.ledger.outbox.put(LedgerEvent::Placed(prefill.key, prefill.work.clone()));
        }
        Self { cluster: Arc::clone(cluster), request, key, work, is_prefilled: false, prefill }
    }

    /// Enters another choice of the same prompt.
    pub(crate) fn beside(&self) -> Self {
        let (key, work) = self.cluster.placer.place_beside(&self.work, clock::now());
        Self::new(&self.cluster, self.request, key, work, None)
    }

    /// The prompt is computed: the first token came.
    pub(crate) fn prefilled(&mut self) {
        if self.is_prefilled {
            return;
        }
        self.is_prefilled = true;
        self.end_prefill();
        self.tell(LedgerEvent::FirstToken(self.key));
        if let Some(request) = self.request
            && let Some((actual_ms, predicted_ms)) = self.cluster.decisions.first_token(request, self.key, clock::now())
        {
            self.cluster.metrics.predicted(actual_ms, predicted_ms);
        }
    }

    /// Nothing comes of it: `explain` tells why.
    pub(crate) fn failed(&self, error: &RequestError) {
        if let Some(request) = self.request {
            self.cluster.decisions.failed(request, self.key, error.code(), clock::now());
        }
    }

    /// Prompt tokens that are computed for it.
    pub(crate) fn tokens_new(&self) -> u64 {
        let elsewhere = self.prefill.as_ref().map_or(0, |prefill| prefill.work.tokens_new);
        u64::from(self.work.tokens_new + elsewhere)
    }

    fn end_prefill(&mut self) {
        if let Some(prefill) = self.prefill.take() {
            self.tell(LedgerEvent::Finished(prefill.key));
        }
    }

    fn tell(&self, event: LedgerEvent) {
        self.cluster.placer.tell(event.clone(), clock::now());
        self.cluster.ledger.outbox.put(event);
        self.cluster.room.notify_one();
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.end_prefill();
        self.tell(LedgerEvent::Finished(self.key));
    }
}
