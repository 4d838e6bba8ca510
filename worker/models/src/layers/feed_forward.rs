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

/// Tensors that every layer's feed-forward uses in turn, each `[tokens, intermediate]`.
pub(crate) struct FeedForwardScratch {
    gate: Tensor,
    up: Tensor,
    gated: Tensor,
}

impl FeedForwardScratch {
    pub(crate) fn take(arena: &mut Arena, config: &ModelConfig, n_tokens: usize) -> Result<Self> {
        let mut inner = || arena.take([n_tokens, config.intermediate_size], DType::F32);
        Ok(Self { gate: inner()?, up: inner()?, gated: inner()? })
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
        let FeedForwardScratch { gate, up, gated } = scratch;
        self.gate.forward(pass, x, gate)?;
        self.up.forward(pass, x, up)?;
        pass.ops.gated_activation(pass.stream, self.activation, gate, up, gated)?;
        self.down.forward(pass, gated, out)
    }

    pub(crate) fn n_bytes(&self) -> usize {
        [&self.gate, &self.up, &self.down].into_iter().map(Linear::n_bytes).sum()
    }
}
