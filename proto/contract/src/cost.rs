//! Predicts step times from an engine's fitted coefficients; one formula for router, scheduler and simulation.

use serde::{Deserialize, Serialize};

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

impl CostCoefficients {
    /// Predicts the prefill of `new` tokens after `context` cached ones.
    pub fn prefill_ms(&self, new: u64, context: u64) -> f64 {
        if new == 0 {
            return 0.0;
        }
        let (new, context) = (new as f64, context as f64);
        self.prefill_base_ms
            + self.prefill_per_token_ms * new
            + self.prefill_per_token_context_ms * new * (context + new / 2.0)
    }

    /// Predicts one decode step of `batch` sequences with `context` tokens in all.
    pub fn decode_ms(&self, batch: u64, context: u64) -> f64 {
        if batch == 0 {
            return 0.0;
        }
        self.decode_base_ms
            + self.decode_per_sequence_ms * batch as f64
            + self.decode_per_context_token_ms * context as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_to_do_costs_nothing() {
        let cost = CostCoefficients { prefill_base_ms: 5.0, decode_base_ms: 5.0, ..CostCoefficients::default() };
        assert_eq!(cost.prefill_ms(0, 100), 0.0);
        assert_eq!(cost.decode_ms(0, 0), 0.0);
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
}
