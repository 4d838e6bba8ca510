//! Layers that architectures are put together from.
//!
//! Hot path: no allocation, no lock, no log.

mod attention;
mod feed_forward;

use kernels::{Norm, Ops, Result, StepInputs, StreamId, Tensor, Weight};

pub(crate) use self::attention::{AttentionScratch, SelfAttention};
pub(crate) use self::feed_forward::{FeedForward, FeedForwardScratch};

/// What all layers of one step share.
pub(crate) struct Pass<'a> {
    pub(crate) ops: &'a dyn Ops,
    pub(crate) stream: StreamId,
    pub(crate) step: &'a StepInputs,
    pub(crate) positions: Tensor,
}

/// `x W^T + bias`.
pub(crate) struct Linear {
    pub(crate) weight: Weight,
    pub(crate) bias: Option<Weight>,
}

impl Linear {
    pub(crate) fn forward(&self, pass: &Pass<'_>, x: &Tensor, out: &Tensor) -> Result<()> {
        pass.ops.matmul(pass.stream, x, &self.weight, self.bias.as_ref(), out)
    }

    /// As fused operators take it.
    pub(crate) fn operand(&self) -> kernels::Linear<'_> {
        kernels::Linear { weight: &self.weight, bias: self.bias.as_ref() }
    }

    pub(crate) fn n_bytes(&self) -> usize {
        self.weight.n_bytes() + self.bias.as_ref().map_or(0, Weight::n_bytes)
    }
}

/// Attention and feed-forward with their norms, around one residual stream.
pub(crate) struct Layer {
    pub(crate) attention_norm: Norm,
    pub(crate) attention: SelfAttention,
    pub(crate) post_attention_norm: Option<Norm>,
    pub(crate) feed_forward_norm: Norm,
    pub(crate) feed_forward: FeedForward,
    pub(crate) post_feed_forward_norm: Option<Norm>,
}

/// Norm of a branch's output before it joins the residual stream, where the architecture has one.
pub(crate) fn post_norm<'a>(
    pass: &Pass<'_>,
    norm: Option<&Norm>,
    branch: &'a Tensor,
    spare: &'a Tensor,
) -> Result<&'a Tensor> {
    match norm {
        None => Ok(branch),
        Some(norm) => pass.ops.rms_norm(pass.stream, branch, norm, spare).map(|()| spare),
    }
}
