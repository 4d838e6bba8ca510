//! When a request's first token would come from an engine, and what that does to those that run there.

use super::{Candidate, Situation};

/// Tokens that an answer is taken to have before any has ended.
const ANSWER_TOKENS: f64 = 100.0;

/// What is expected of a placement, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Prediction {
    /// Until the prefill work placed before it is done and there is a slot for it.
    pub wait_ms: f64,
    /// Its own prefill of what is not cached.
    pub prefill_ms: f64,
    /// From placement to first token.
    pub first_token_ms: f64,
    /// A decode step with this request among the others.
    pub decode_ms: f64,
}

impl Situation<'_> {
    /// Predicts what a candidate would do with the request.
    pub fn predict(&self, candidate: &Candidate<'_>) -> Prediction {
        let context = candidate.tokens_cached.min(self.n_prompt_tokens);
        // The last token is computed even where everything is cached.
        let new = (self.n_prompt_tokens - context).max(1);
        let prefill_ms = candidate.cost.prefill_ms(new, context);
        let work_ms = candidate.work_ms();
        let batch = u64::from(candidate.load.n_decoding);
        let tokens = candidate.load.tokens_decoding.max(candidate.tokens_running);
        // Each step of a prefill also decodes for those that run: its own, and those ahead of it.
        // Where its size is not known, all is one step.
        let budget = if candidate.step_tokens == 0 { u64::MAX } else { candidate.step_tokens };
        let steps_ahead = work_ms / candidate.cost.prefill_ms(budget, 0);
        let ahead_ms = work_ms + steps_ahead * candidate.cost.decode_ms(batch, tokens);
        let slot_ms = candidate.slot_ms();
        let wait_ms = work_ms.max(slot_ms);
        let first_token_ms =
            ahead_ms.max(slot_ms) + candidate.cost.prefill_beside_ms(new, context, budget, batch, tokens);
        let decode_ms = candidate.cost.decode_ms(batch + 1, tokens + self.n_prompt_tokens);
        Prediction { wait_ms, prefill_ms, first_token_ms, decode_ms }
    }
}

impl Candidate<'_> {
    /// Predicted time until a new request is begun, in milliseconds: the work ahead of it is done while it waits for a slot.
    pub fn wait_ms(&self) -> f64 {
        self.work_ms().max(self.slot_ms())
    }

    /// Predicted time until there is a slot for a new request, in milliseconds.
    ///
    /// Slots that are all taken become free one after the other, in the time that an answer takes (Little's law).
    fn slot_ms(&self) -> f64 {
        // The report says nothing of slots that became free since, and of none any more when nobody tells of it.
        let n_ahead = (self.load.n_prefilling + self.load.n_decoding + 1).saturating_sub(self.slots);
        if self.slots == 0 || n_ahead == 0 {
            return 0.0;
        }
        let answer_ms = if self.load.answer_ms > 0.0 {
            self.load.answer_ms
        } else {
            ANSWER_TOKENS * self.cost.decode_ms(u64::from(self.slots), self.tokens_running)
        };
        f64::from(n_ahead) * answer_ms / f64::from(self.slots)
    }

    /// Predicted time until the prefill work ahead of a new request is done, in milliseconds.
    fn work_ms(&self) -> f64 {
        // Where the ledger knows of less than the engine reports, the rest is counted as one prompt.
        let unknown = self.tokens_queued.saturating_sub(self.load.tokens_prefilling);
        let unknown_ms = if self.load.n_prefilling == 0 { self.cost.prefill_ms(unknown, 0) } else { 0.0 };
        self.load.wait_ms + unknown_ms + self.backlog_ms
    }
}
