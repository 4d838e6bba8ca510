//! What this router itself sent to an engine and has not got back.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::Engine;

/// Counters of one engine.
#[derive(Debug, Default)]
pub(super) struct Load {
    n_in_flight: AtomicU32,
    tokens_pending: AtomicU64,
}

impl Load {
    pub(super) fn n_in_flight(&self) -> u32 {
        self.n_in_flight.load(Ordering::Relaxed)
    }

    pub(super) fn tokens_pending(&self) -> u64 {
        self.tokens_pending.load(Ordering::Relaxed)
    }
}

/// Counts one stream on an engine until it is dropped.
#[derive(Debug)]
pub(crate) struct InFlight {
    load: Arc<Load>,
    tokens_pending: u64,
}

impl InFlight {
    /// Counts a stream whose prompt has `tokens` left to compute.
    pub(crate) fn new(engine: &Engine, tokens: u64) -> Self {
        let load = Arc::clone(&engine.load);
        load.n_in_flight.fetch_add(1, Ordering::Relaxed);
        load.tokens_pending.fetch_add(tokens, Ordering::Relaxed);
        Self { load, tokens_pending: tokens }
    }

    /// The prompt is computed: the first token came.
    pub(crate) fn prefilled(&mut self) {
        let tokens = std::mem::take(&mut self.tokens_pending);
        self.load.tokens_pending.fetch_sub(tokens, Ordering::Relaxed);
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.prefilled();
        self.load.n_in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}
