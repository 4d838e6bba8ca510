//! One step of an engine as plain data: what the executor is to compute, and what it returns.

use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::ids::{AdapterSlot, BlockId, MaskSlot, SlotId, StepId, Token};
use crate::request::SamplingParams;

/// What every rank of a replica computes in one step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ForwardPlan {
    /// Number of this step; consecutive.
    pub step: StepId,
    /// Query tokens to pad to (the graph bucket); at least the sum over sequences, equal to it on a CPU.
    pub padded_tokens: u32,
    /// Sequences in this step, each slot at most once.
    pub sequences: Vec<SequencePlan>,
}

impl ForwardPlan {
    /// Query tokens over all sequences.
    pub fn n_tokens(&self) -> usize {
        self.sequences.iter().map(|sequence| sequence.query.len()).sum()
    }
}

/// One sequence's share of a step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SequencePlan {
    /// Place in the executor's table.
    pub slot: SlotId,
    /// 1..k tokens to compute.
    pub query: Vec<QueryToken>,
    /// Absolute position of the first query token; KV of all earlier positions is in the block table.
    pub position: u32,
    /// Change of the slot's block table, applied before the step.
    pub blocks: BlockTableDelta,
    /// Query rows (indices into `query`) that need logits; one token is sampled for each. Empty while a prompt is incomplete.
    pub logits_rows: Range<u32>,
    /// Set when a request takes the slot: replaces all that the slot held.
    pub start: Option<Arc<SamplingSpec>>,
    /// Adapter to apply; none yet.
    pub adapter: Option<AdapterSlot>,
    /// Vocabulary mask to apply; none yet.
    pub mask: Option<MaskSlot>,
}

impl SequencePlan {
    /// Whether it only takes its request one token further; anything else is a part of a prompt.
    ///
    /// The last token of a prompt whose other tokens are computed or cached counts as such too: it costs the same.
    pub fn is_decode(&self) -> bool {
        self.query.len() == 1 && !self.logits_rows.is_empty() && self.position > 0
    }
}

/// A token to compute, known or still being sampled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum QueryToken {
    /// Known when the plan was made.
    Value(Token),
    /// Whatever row `row` of the slot's output in step `step` was: legal while that step is in flight.
    Sampled {
        /// The earlier step.
        step: StepId,
        /// Index into the tokens that step sampled for this slot.
        row: u32,
    },
}

/// A block table after the change is its first `keep` entries, then `append`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockTableDelta {
    /// Entries that stay.
    pub keep: u32,
    /// Entries that follow them.
    pub append: Vec<BlockId>,
}

/// What the sampler must know of a request, constant while it holds its slot.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SamplingSpec {
    /// Distribution parameters and seed.
    pub params: SamplingParams,
    /// Most likely tokens to report beside each sampled one; none reports no log-probabilities.
    pub logprobs: Option<u32>,
    /// Tokens of the prompt: a sampled token's index in the output is its position minus this.
    pub n_prompt: u32,
    /// Output index below which `stop_token_ids` must not be sampled.
    pub min_tokens: u32,
    /// Tokens that would end the request.
    pub stop_token_ids: Vec<Token>,
    /// Prompt and tokens generated before the slot was taken, for penalties; empty when there are none.
    pub history: Vec<Token>,
}

/// What a step returned.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepOutput {
    /// The plan's step.
    pub step: StepId,
    /// In the plan's order, only sequences with logits rows.
    pub sequences: Vec<SequenceOutput>,
}

/// Tokens sampled for one slot.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SequenceOutput {
    /// The plan's slot.
    pub slot: SlotId,
    /// One for each logits row.
    pub tokens: Vec<SampledToken>,
}

/// A sampled token.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SampledToken {
    /// The token.
    pub token: Token,
    /// Its log-probability before temperature and filters; NaN when none was asked for.
    pub logprob: f32,
    /// Most likely tokens with theirs, likeliest first; empty when none were asked for.
    pub top: Vec<(Token, f32)>,
}
