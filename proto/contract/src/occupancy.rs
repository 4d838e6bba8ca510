//! How full an engine is.

use serde::{Deserialize, Serialize};

use crate::cost::{CostCoefficients, StepLoad};
use crate::ids::EngineId;

/// Blocks of a pool by state; `allocated + cached + free == total`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockCounts {
    /// Blocks of the pool.
    pub total: u32,
    /// Named by at least one request or plan in flight.
    pub allocated: u32,
    /// Full, hashed and unused: reusable until evicted.
    pub cached: u32,
    /// Holding nothing.
    pub free: u32,
}

impl BlockCounts {
    /// Whether no block is lost or counted twice.
    pub fn is_conserved(&self) -> bool {
        u64::from(self.allocated) + u64::from(self.cached) + u64::from(self.free) == u64::from(self.total)
    }
}

/// What an engine reports of itself, on change.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Occupancy {
    /// Who reports.
    pub engine: EngineId,
    /// Steps taken in this life.
    pub step: u64,
    /// Block pool.
    pub blocks: BlockCounts,
    /// Requests that hold no slot yet.
    pub requests_waiting: u32,
    /// Requests that hold a slot.
    pub requests_running: u32,
    /// Slots; 0 is not known.
    pub slots: u32,
    /// Prompt tokens not yet computed, over waiting and running requests.
    pub tokens_queued: u64,
    /// Pairs of one of these tokens and a token of context before it.
    pub pairs_queued: f64,
    /// Tokens in context of running requests.
    pub tokens_running: u64,
    /// Fitted costs of a step.
    pub cost: CostCoefficients,
    /// Prompt tokens that a step computes at most; 0 is not known.
    pub step_tokens: u32,
    /// All that was computed in this life.
    pub computed: StepLoad,
    /// Requests that had their first token here in this life.
    pub requests_begun: u64,
    /// Prompt tokens of those, whoever computed them; 0 is not known.
    pub prompt_tokens_begun: u64,
    /// It stands still: a step, or the answer to an event, takes longer than it can; its worker ends what runs there.
    pub is_stalled: bool,
    /// What moving a token's keys and values from or to its worker took of late, in milliseconds; 0 is not known.
    pub transfer_ms_per_token: f64,
}
