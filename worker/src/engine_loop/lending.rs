//! The engine thread's share in prompts that move between workers: who reads which blocks, and who fills which.

use std::collections::HashMap;
use std::sync::Arc;

use contract::error::RequestError;
use contract::ids::{RequestId, SlotId};
use contract::plan::ForwardPlan;
use engine::{CachedHold, Engine, Hold, HoldUsage, SequenceKey};
use tokio::sync::watch;

use crate::lent::Watched;
use crate::transfer::Progress;

/// Prompts that are computed for others, and what is read of them.
#[derive(Debug, Default)]
pub struct Lendings {
    by_id: HashMap<RequestId, Lent>,
    slots: HashMap<SlotId, RequestId>,
    /// Reused from turn to turn.
    holds: Vec<Hold>,
}

#[derive(Debug)]
struct Lent {
    key: SequenceKey,
    /// Where plans name it, while they do.
    slot: Option<SlotId>,
    progress: watch::Sender<Progress>,
}

impl Lendings {
    /// A prompt was queued for others, under an id of its own.
    pub fn begin(&mut self, request: RequestId, key: SequenceKey, progress: watch::Sender<Progress>) {
        self.by_id.insert(request, Lent { key, slot: None, progress });
    }

    /// What is cached of a prompt is lent, and all the reader gets: `error` says why it is not more.
    pub fn begin_cached(
        &mut self,
        request: RequestId,
        hold: CachedHold,
        progress: watch::Sender<Progress>,
        error: &RequestError,
    ) {
        let n_tokens = u32::try_from(hold.n_tokens).unwrap_or(u32::MAX);
        progress.send_modify(|progress| {
            progress.table = Arc::from(hold.table);
            Arc::make_mut(&mut progress.tokens_by_layer).fill(n_tokens);
            progress.failed = Some(error.clone());
        });
        self.begin(request, hold.key, progress);
    }

    /// Nothing is computed for others any more: their readers have what is there by now.
    pub fn cut(&mut self, engine: &mut Engine, error: &RequestError) {
        let requests: Vec<RequestId> = self.by_id.keys().copied().collect();
        for request in requests {
            if engine.abort(request) {
                self.over(request, Some(error));
            }
        }
    }

    /// Its reader has gone.
    pub fn end(&mut self, request: RequestId, engine: &mut Engine) {
        let Some(lent) = self.by_id.remove(&request) else { return };
        if let Some(slot) = lent.slot {
            self.slots.remove(&slot);
        }
        // Before the engine has room for it there is nothing to let go.
        if !engine.let_go(lent.key, 0) {
            engine.abort(request);
        }
    }

    /// All of it is computed, or it failed: no plan names it any more. False when nobody reads it.
    pub fn over(&mut self, request: RequestId, error: Option<&RequestError>) -> bool {
        let Some(lent) = self.by_id.get_mut(&request) else { return false };
        if let Some(slot) = lent.slot.take() {
            self.slots.remove(&slot);
        }
        if let Some(error) = error {
            lent.progress.send_modify(|progress| progress.failed = Some(error.clone()));
        }
        true
    }

    /// Shows readers the blocks that were lent to them since, and returns the holds of those who fill blocks.
    pub fn take_holds(&mut self, engine: &mut Engine) -> Vec<Hold> {
        engine.drain_holds(&mut self.holds);
        let mut to_fill = Vec::new();
        for hold in self.holds.drain(..) {
            match hold.usage {
                HoldUsage::Fill => to_fill.push(hold),
                HoldUsage::Read => {
                    // A reader that has gone since has let go.
                    let Some(lent) = self.by_id.get_mut(&hold.request) else { continue };
                    lent.slot = Some(hold.slot);
                    self.slots.insert(hold.slot, hold.request);
                    let n_cached = u32::try_from(hold.n_cached).unwrap_or(u32::MAX);
                    lent.progress.send_modify(|progress| {
                        progress.table = Arc::from(hold.table);
                        Arc::make_mut(&mut progress.tokens_by_layer).fill(n_cached);
                    });
                }
            }
        }
        to_fill
    }

    /// Whose progress a plan makes; call it after [`Self::take_holds`].
    pub fn watched(&self, plan: &ForwardPlan) -> Vec<Watched> {
        if self.slots.is_empty() {
            return Vec::new();
        }
        let watched = |sequence: &contract::plan::SequencePlan| {
            let lent = &self.by_id[self.slots.get(&sequence.slot)?];
            let n_tokens = sequence.position + sequence.query.len() as u32;
            Some(Watched { progress: lent.progress.clone(), n_tokens })
        };
        plan.sequences.iter().filter_map(watched).collect()
    }
}
