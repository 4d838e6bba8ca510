//! Grouped-query attention over the paged cache, with optional norms of queries and keys.
//!
//! Hot path: no allocation, no lock, no log.

use kernels::{Arena, Attention, DType, LayerCache, Norm, Qkv, Result, RopeTable, Tensor};

use super::{Linear, Pass};
use crate::config::ModelConfig;

pub(crate) struct SelfAttention {
    pub(crate) query: Linear,
    pub(crate) key: Linear,
    pub(crate) value: Linear,
    pub(crate) output: Linear,
    pub(crate) query_norm: Option<Norm>,
    pub(crate) key_norm: Option<Norm>,
    pub(crate) rope: RopeTable,
    pub(crate) scale: f32,
    pub(crate) window: Option<u32>,
    pub(crate) soft_cap: Option<f32>,
}

/// Tensors that every layer's attention uses in turn.
pub(crate) struct AttentionScratch {
    /// `[tokens, heads, dim]`.
    query: Tensor,
    /// `[tokens, kv_heads, dim]`.
    key: Tensor,
    /// `[tokens, kv_heads, dim]`.
    value: Tensor,
    /// `[tokens, heads, dim]`.
    mixed: Tensor,
}

impl AttentionScratch {
    pub(crate) fn take(arena: &mut Arena, config: &ModelConfig, n_tokens: usize) -> Result<Self> {
        let (heads, kv_heads, dim) = (config.n_heads, config.n_kv_heads, config.head_dim);
        Ok(Self {
            query: arena.take([n_tokens, heads, dim], DType::F32)?,
            key: arena.take([n_tokens, kv_heads, dim], DType::F32)?,
            value: arena.take([n_tokens, kv_heads, dim], DType::F32)?,
            mixed: arena.take([n_tokens, heads, dim], DType::F32)?,
        })
    }
}

impl SelfAttention {
    /// # Shapes
    /// `x, out: [tokens, hidden]`.
    pub(crate) fn forward(
        &self,
        pass: &Pass<'_>,
        x: &Tensor,
        cache: &LayerCache,
        scratch: &AttentionScratch,
        out: &Tensor,
    ) -> Result<()> {
        let AttentionScratch { query, key, value, mixed } = scratch;
        let (ops, stream) = (pass.ops, pass.stream);
        let args = Qkv {
            query: self.query.operand(),
            key: self.key.operand(),
            value: self.value.operand(),
            query_norm: self.query_norm.as_ref(),
            key_norm: self.key_norm.as_ref(),
            rope: &self.rope,
            positions: &pass.positions,
            cache,
            query_out: query,
            key_scratch: key,
            value_scratch: value,
        };
        ops.qkv(stream, pass.step, x, &args)?;
        let (scale, window, soft_cap) = (self.scale, self.window, self.soft_cap);
        ops.paged_attention(stream, pass.step, &Attention { query, cache, scale, window, soft_cap, out: mixed })?;
        self.output.forward(pass, &flat(mixed)?, out)
    }

    pub(crate) fn n_bytes(&self) -> usize {
        [&self.query, &self.key, &self.value, &self.output].into_iter().map(Linear::n_bytes).sum()
    }
}

/// `[tokens, heads, dim]` as `[tokens, heads * dim]`.
fn flat(x: &Tensor) -> Result<Tensor> {
    let dims = x.dims();
    x.view([dims[0], dims[1] * dims[2]])
}
