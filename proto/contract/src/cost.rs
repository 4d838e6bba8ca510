//! Predicts step times from an engine's fitted coefficients; one formula for router, scheduler and simulation.

use serde::{Deserialize, Serialize};

use crate::plan::ForwardPlan;

/// Coefficients that a worker fits from its own steps; milliseconds throughout.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CostCoefficients {
    /// Of any prefill.
    pub prefill_base_ms: f64,
    /// Per new token.
    pub prefill_per_token_ms: f64,
    /// Per new token and token of context before it.
    pub prefill_per_token_context_ms: f64,
    /// Of any decode step.
    pub decode_base_ms: f64,
    /// Per sequence in the step.
    pub decode_per_sequence_ms: f64,
    /// Per token of context over all sequences.
    pub decode_per_context_token_ms: f64,
}

/// What the time of a step depends on; loads of several add up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepLoad {
    /// New tokens of prompts.
    pub prefill_tokens: u64,
    /// Pairs of a new token and a token of context before it.
    pub prefill_pairs: f64,
    /// Sequences that decode.
    pub decode_sequences: u64,
    /// Tokens of context over sequences that decode.
    pub decode_context: u64,
}

impl StepLoad {
    /// Sums up a plan.
    pub fn of(plan: &ForwardPlan) -> Self {
        let mut load = Self::default();
        for sequence in &plan.sequences {
            let context = u64::from(sequence.position);
            if sequence.is_decode() {
                load.add_decode(1, context);
            } else {
                load.add_prefill(sequence.query.len() as u64, context);
            }
        }
        load
    }

    /// Adds the prefill of `new` tokens after `context` cached ones.
    pub fn add_prefill(&mut self, new: u64, context: u64) {
        self.prefill_tokens += new;
        self.prefill_pairs += new as f64 * (context as f64 + new as f64 / 2.0);
    }

    /// Adds the decoding of `batch` sequences with `context` tokens in all.
    pub fn add_decode(&mut self, batch: u64, context: u64) {
        self.decode_sequences += batch;
        self.decode_context += context;
    }
}

impl CostCoefficients {
    /// Predicts a step: its prefill and its decoding, one after the other.
    pub fn step_ms(&self, load: &StepLoad) -> f64 {
        let mut ms = 0.0;
        if load.prefill_tokens > 0 {
            ms += self.prefill_base_ms
                + self.prefill_per_token_ms * load.prefill_tokens as f64
                + self.prefill_per_token_context_ms * load.prefill_pairs;
        }
        if load.decode_sequences > 0 {
            ms += self.decode_base_ms
                + self.decode_per_sequence_ms * load.decode_sequences as f64
                + self.decode_per_context_token_ms * load.decode_context as f64;
        }
        ms
    }

    /// Predicts the prefill of `new` tokens after `context` cached ones.
    pub fn prefill_ms(&self, new: u64, context: u64) -> f64 {
        let mut load = StepLoad::default();
        load.add_prefill(new, context);
        self.step_ms(&load)
    }

    /// Predicts one decode step of `batch` sequences with `context` tokens in all.
    pub fn decode_ms(&self, batch: u64, context: u64) -> f64 {
        let mut load = StepLoad::default();
        load.add_decode(batch, context);
        self.step_ms(&load)
    }

    /// Predicts the prefill of `new` tokens after `context` cached ones in chunks of `budget`, where each step also
    /// decodes `decode_batch` sequences that have `decode_context` tokens in all in the first.
    ///
    /// A `budget` of 0 is taken as 1.
    pub fn prefill_beside_ms(
        &self,
        new: u64,
        context: u64,
        budget: u64,
        decode_batch: u64,
        decode_context: u64,
    ) -> f64 {
        if new == 0 {
            return 0.0;
        }
        let n_steps = new.div_ceil(budget.max(1)) as f64;
        // Chunks have as many pairs as the whole, each step has the bases, and contexts grow by a token a step.
        let grown = decode_batch as f64 * (n_steps - 1.0) / 2.0;
        self.prefill_ms(new, context)
            + self.prefill_base_ms * (n_steps - 1.0)
            + n_steps * (self.decode_ms(decode_batch, decode_context) + self.decode_per_context_token_ms * grown)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::ids::{SlotId, StepId};
    use crate::plan::{BlockTableDelta, QueryToken, SequencePlan};

    fn costs() -> impl Strategy<Value = CostCoefficients> {
        (0.0..9.0, 0.0..9.0, 0.0..0.1, 0.0..9.0, 0.0..9.0, 0.0..0.1).prop_map(|(a, b, c, d, e, f)| CostCoefficients {
            prefill_base_ms: a,
            prefill_per_token_ms: b,
            prefill_per_token_context_ms: c,
            decode_base_ms: d,
            decode_per_sequence_ms: e,
            decode_per_context_token_ms: f,
        })
    }

    fn is_close(a: f64, b: f64) -> bool {
        (a - b).abs() <= 1e-9 * a.abs().max(b.abs())
    }

    #[test]
    fn nothing_to_do_costs_nothing() {
        let cost = CostCoefficients { prefill_base_ms: 5.0, decode_base_ms: 5.0, ..CostCoefficients::default() };
        assert_eq!(cost.prefill_ms(0, 100), 0.0);
        assert_eq!(cost.decode_ms(0, 0), 0.0);
        assert_eq!(cost.prefill_beside_ms(0, 100, 10, 3, 1_000), 0.0);
        assert_eq!(cost.step_ms(&StepLoad::default()), 0.0);
    }

    #[test]
    fn prefill_in_two_chunks_costs_one_base_more() {
        let cost = CostCoefficients {
            prefill_base_ms: 3.0,
            prefill_per_token_ms: 0.5,
            prefill_per_token_context_ms: 0.01,
            ..CostCoefficients::default()
        };
        let whole = cost.prefill_ms(100, 0);
        let chunks = cost.prefill_ms(60, 0) + cost.prefill_ms(40, 60);
        assert!((chunks - whole - 3.0).abs() < 1e-9, "{chunks} {whole}");
    }

    #[test]
    fn a_plan_is_prompts_and_decodes() {
        let sequence = |n_query: usize, position, n_rows| SequencePlan {
            slot: SlotId(0),
            query: vec![QueryToken::Value(1); n_query],
            position,
            blocks: BlockTableDelta::default(),
            logits_rows: n_query as u32 - n_rows..n_query as u32,
            start: None,
            adapter: None,
            mask: None,
        };
        let sequences = vec![sequence(1, 70, 1), sequence(1, 30, 1), sequence(10, 5, 1), sequence(1, 9, 0)];
        let load = StepLoad::of(&ForwardPlan { step: StepId(1), padded_tokens: 13, sequences });
        let expected = StepLoad { prefill_tokens: 11, prefill_pairs: 109.5, decode_sequences: 2, decode_context: 100 };
        assert_eq!(load, expected);
    }

    proptest! {
        #[test]
        fn a_chunked_prefill_costs_what_its_steps_cost(
            cost in costs(),
            (new, context, budget) in (1..5_000_u64, 0..50_000_u64, 1..3_000_u64),
            (batch, mut decode_context) in (0..50_u64, 0..50_000_u64),
        ) {
            let predicted = cost.prefill_beside_ms(new, context, budget, batch, decode_context);
            let (mut done, mut ms) = (0, 0.0);
            while done < new {
                let mut load = StepLoad::default();
                let chunk = budget.min(new - done);
                load.add_prefill(chunk, context + done);
                load.add_decode(batch, decode_context);
                ms += cost.step_ms(&load);
                done += chunk;
                decode_context += batch;
            }
            prop_assert!(is_close(predicted, ms), "{} is predicted, {} adds up", predicted, ms);
        }

        #[test]
        fn a_mixed_step_costs_both_halves(
            cost in costs(),
            (new, context) in (0..5_000_u64, 0..50_000_u64),
            (batch, decode_context) in (0..50_u64, 0..50_000_u64),
        ) {
            let mut load = StepLoad::default();
            load.add_prefill(new, context);
            load.add_decode(batch, decode_context);
            let halves = cost.prefill_ms(new, context) + cost.decode_ms(batch, decode_context);
            prop_assert!(is_close(cost.step_ms(&load), halves));
        }
    }
}
