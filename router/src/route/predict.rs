//! When a request's first token would come from an engine, and what that does to those that run there.

use super::{Candidate, Situation};

/// What is expected of a placement, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Prediction {
    /// Until the prefill work placed before it is done.
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
        let wait_ms = candidate.wait_ms();
        let batch = u64::from(candidate.load.n_decoding);
        let tokens = candidate.load.tokens_decoding.max(candidate.tokens_running);
        // Each step of a prefill also decodes for those that run: its own, and those ahead of it.
        // Where its size is not known, all is one step.
        let budget = if candidate.step_tokens == 0 { u64::MAX } else { candidate.step_tokens };
        let steps_ahead = wait_ms / candidate.cost.prefill_ms(budget, 0);
        let first_token_ms = wait_ms
            + steps_ahead * candidate.cost.decode_ms(batch, tokens)
            + candidate.cost.prefill_beside_ms(new, context, budget, batch, tokens);
        let decode_ms = candidate.cost.decode_ms(batch + 1, tokens + self.n_prompt_tokens);
        Prediction { wait_ms, prefill_ms, first_token_ms, decode_ms }
    }
}

impl Candidate<'_> {
    /// Predicted time until the prefill work ahead of a new request is done, in milliseconds.
    pub fn wait_ms(&self) -> f64 {
        // Where the ledger knows of less than the engine reports, the rest is counted as one prompt.
        let unknown = self.tokens_queued.saturating_sub(self.load.tokens_prefilling);
        let unknown_ms = if self.load.n_prefilling == 0 { self.cost.prefill_ms(unknown, 0) } else { 0.0 };
        self.load.wait_ms + unknown_ms + self.backlog_ms
    }
}
