//! The gated feed-forward layer: `down(activation(gate(x)) * up(x))`.
//!
//! Hot path: no allocation, no lock, no log.

use kernels::{Activation, Arena, DType, Result, Tensor};

use super::{Linear, Pass};
use crate::config::ModelConfig;

pub(crate) struct FeedForward {
    pub(crate) gate: Linear,
    pub(crate) up: Linear,
    pub(crate) down: Linear,
    pub(crate) activation: Activation,
}

/// What every layer's feed-forward uses in turn.
pub(crate) struct FeedForwardScratch {
    /// `[tokens, intermediate]`.
    gated: Tensor,
}

impl FeedForwardScratch {
    pub(crate) fn take(arena: &mut Arena, config: &ModelConfig, n_tokens: usize) -> Result<Self> {
        Ok(Self { gated: arena.take([n_tokens, config.intermediate_size], DType::F32)? })
    }
}

impl FeedForward {
    /// # Shapes
    /// `x, out: [tokens, hidden]`.
    pub(crate) fn forward(
        &self,
        pass: &Pass<'_>,
        x: &Tensor,
        scratch: &FeedForwardScratch,
        out: &Tensor,
    ) -> Result<()> {
        let FeedForwardScratch { gated } = scratch;
        let [gate, up, down] = [&self.gate, &self.up, &self.down].map(Linear::operand);
        let args = kernels::FeedForward { gate, up, down, activation: self.activation, gated };
        pass.ops.feed_forward(pass.stream, x, &args, out)
    }

    pub(crate) fn n_bytes(&self) -> usize {
        [&self.gate, &self.up, &self.down].into_iter().map(Linear::n_bytes).sum()
    }
}
