//! The engine thread's share in prompts that move between workers: who reads which blocks, and who fills which.

use std::collections::HashMap;
use std::sync::Arc;

use contract::error::RequestError;
use contract::ids::{RequestId, SlotId};
use contract::plan::ForwardPlan;
use engine::{Engine, Hold, HoldUsage, SequenceKey};
use tokio::sync::watch;

use crate::lent::Watched;
use crate::transfer::Progress;

/// Prompts that are computed for others, and what is read of them.
#[derive(Debug, Default)]
pub struct Lendings {
    by_ticket: HashMap<u64, Lent>,
    tickets: HashMap<RequestId, u64>,
    slots: HashMap<SlotId, u64>,
    /// Reused from turn to turn.
    holds: Vec<Hold>,
}

#[derive(Debug)]
struct Lent {
    request: RequestId,
    key: SequenceKey,
    slot: Option<SlotId>,
    has_hold: bool,
    progress: watch::Sender<Progress>,
}

impl Lendings {
    /// A prompt was queued for others.
    pub fn begin(&mut self, ticket: u64, request: RequestId, key: SequenceKey, progress: watch::Sender<Progress>) {
        self.tickets.insert(request, ticket);
        self.by_ticket.insert(ticket, Lent { request, key, slot: None, has_hold: false, progress });
    }

    /// Its reader has gone.
    pub fn end(&mut self, ticket: u64, engine: &mut Engine) {
        let Some(lent) = self.by_ticket.remove(&ticket) else { return };
        self.tickets.remove(&lent.request);
        lent.slot.map(|slot| self.slots.remove(&slot));
        if lent.has_hold {
            engine.let_go(lent.key, 0);
        } else {
            engine.abort(lent.request);
        }
    }

    /// All of it is computed, or it failed: no plan names it any more. False when nobody reads it.
    pub fn over(&mut self, request: RequestId, error: Option<&RequestError>) -> bool {
        let Some(lent) = self.tickets.remove(&request).and_then(|ticket| self.by_ticket.get_mut(&ticket)) else {
            return false;
        };
        lent.slot.take().map(|slot| self.slots.remove(&slot));
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
                    let ticket = self.tickets.get(&hold.request).copied();
                    let Some((ticket, lent)) =
                        ticket.and_then(|ticket| Some((ticket, self.by_ticket.get_mut(&ticket)?)))
                    else {
                        engine.let_go(hold.key, 0);
                        continue;
                    };
                    lent.has_hold = true;
                    lent.slot = Some(hold.slot);
                    self.slots.insert(hold.slot, ticket);
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
            let lent = &self.by_ticket[self.slots.get(&sequence.slot)?];
            let n_tokens = sequence.position + sequence.query.len() as u32;
            Some(Watched { progress: lent.progress.clone(), n_tokens })
        };
        plan.sequences.iter().filter_map(watched).collect()
    }
}
