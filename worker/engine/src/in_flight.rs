//! Plans made and not applied: what they compute, and what returns with them.

use contract::ids::{BlockId, SlotId, StepId};

use crate::sequence::SequenceIdx;

/// A plan in flight.
#[derive(Debug, Default)]
pub(crate) struct PlanInFlight {
    pub(crate) step: StepId,
    /// In the plan's order.
    pub(crate) sequences: Vec<PlannedSequence>,
    /// References to drop when it is applied.
    pub(crate) releases: Vec<BlockId>,
}

/// A sequence's share of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlannedSequence {
    pub(crate) idx: SequenceIdx,
    pub(crate) slot: SlotId,
    /// Tokens whose KV is computed after the step.
    pub(crate) n_computed: usize,
    /// Whether it samples a token.
    pub(crate) samples: bool,
}

/// Buffers to use again.
#[derive(Debug, Default)]
pub(crate) struct Spare {
    pub(crate) plans: Vec<Vec<contract::plan::SequencePlan>>,
    pub(crate) queries: Vec<Vec<contract::plan::QueryToken>>,
    pub(crate) records: Vec<PlanInFlight>,
}
