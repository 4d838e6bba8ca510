//! What an engine tells about its requests.

use contract::cost::StepLoad;
use contract::error::RequestError;
use contract::ids::{RequestId, SlotId, StepId};
use contract::plan::SampledToken;
use contract::stream::FinishReason;
use thiserror::Error;

/// Names one submission for ever: numbers grow in order of arrival and are not used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceKey(pub u64);

/// News of one request.
#[derive(Clone, Debug, PartialEq)]
pub struct Output {
    /// The submission.
    pub key: SequenceKey,
    /// The request's id.
    pub request: RequestId,
    /// The request's attempt.
    pub attempt: u32,
    /// What happened.
    pub event: OutputEvent,
}

/// What happened to a request.
#[derive(Clone, Debug, PartialEq)]
pub enum OutputEvent {
    /// It has new tokens.
    Tokens {
        /// Output index of the first, counted from the end of the prompt; earlier attempts count.
        first_position: u32,
        /// The tokens, at least one.
        tokens: Vec<SampledToken>,
        /// Set with the last tokens: the engine has forgotten the request.
        finish: Option<FinishReason>,
        /// Prompt tokens that were cached at admission; set with the first tokens only.
        cached_tokens: Option<u32>,
    },
    /// The KV of all its tokens is computed: the engine has forgotten the request, and others may read its blocks until
    /// they let go.
    Prefilled,
    /// It ended badly: the engine has forgotten the request.
    Failed(RequestError),
}

/// An executor returned what no plan asked for: a defect; the engine is unchanged.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ApplyError {
    /// Another step was due, or none.
    #[error("output of step {} was applied, but {} is due", .got.0, due(.expected))]
    WrongStep {
        /// The oldest step in flight.
        expected: Option<StepId>,
        /// The step of the output.
        got: StepId,
    },
    /// Sequences differ from the plan's with logits rows.
    #[error("output {index} of step {} does not match its plan: slot {expected:?} is due, {got:?} came", .step.0)]
    WrongSequence {
        /// The step.
        step: StepId,
        /// Place in the output.
        index: usize,
        /// Slot and number of tokens that the plan asked for.
        expected: Option<(SlotId, usize)>,
        /// Slot and number of tokens that came.
        got: Option<(SlotId, usize)>,
    },
}

fn due(step: &Option<StepId>) -> String {
    step.map_or_else(|| "none".to_owned(), |step| format!("step {}", step.0))
}

/// Sums over an engine's life.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Counters {
    /// Plans made.
    pub steps: u64,
    /// Running requests that lost their blocks to others and were to be computed again.
    pub preemptions: u64,
    /// Prompt tokens found cached when their request was first admitted.
    pub prefix_hit_tokens: u64,
    /// Prompt tokens not found then.
    pub prefix_miss_tokens: u64,
    /// All steps together; outputs that were computed again count as prompts.
    pub computed: StepLoad,
    /// Requests whose first token is from here.
    pub requests_begun: u64,
    /// Prompt tokens of those.
    pub prompt_tokens_begun: u64,
    /// Tokens emitted.
    pub tokens_generated: u64,
    /// KV events dropped because nobody drained them; readers see the gap.
    pub kv_events_dropped: u64,
}
