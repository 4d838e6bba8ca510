//! The decoder that all architectures here are: embedding, layers around a residual stream, norm, output head.
//!
//! Hot path: no allocation, no lock, no log.

use std::sync::Arc;

use kernels::{Arena, DType, DryRun, Error, Norm, Ops, Result, StepInputs, StepLimits, StreamId, Tensor, Weight};

use crate::config::ModelConfig;
use crate::kv_cache::{KvCache, KvSpec};
use crate::layers::{AttentionScratch, FeedForwardScratch, Layer, Pass, post_norm};
use crate::model::Model;
use contract::kv::{BlockOrder, KvDtype};

/// Weights and structure.
pub(crate) struct Decoder {
    pub(crate) config: ModelConfig,
    pub(crate) embedding: Weight,
    pub(crate) layers: Vec<Layer>,
    pub(crate) final_norm: Norm,
    pub(crate) head: Weight,
    pub(crate) positions_max: usize,
}

/// A decoder with its device and the scratch memory for its steps.
pub(crate) struct LoadedDecoder {
    decoder: Decoder,
    ops: Arc<dyn Ops>,
    arena: Arena,
}

impl LoadedDecoder {
    /// Sizes scratch memory by a dry run of the largest step and allocates it.
    pub(crate) fn new(decoder: Decoder, ops: Arc<dyn Ops>, limits: StepLimits) -> Result<Self> {
        let mut step = StepInputs::new(&DryRun, limits)?;
        step.fill_to_limits();
        let block_size = u32::try_from(limits.block_size).unwrap_or(u32::MAX);
        let layout = decoder.kv_spec().layout(BlockOrder::HeadsFirst, block_size, KvDtype::F32);
        let kv = KvCache::allocate(&DryRun, layout, 1)?;
        let mut arena = Arena::measuring();
        decoder.forward(&DryRun, &mut arena, &step, &kv)?;
        let arena = Arena::with_capacity(ops.as_ref(), arena.peak())?;
        Ok(Self { decoder, ops, arena })
    }
}

impl Model for LoadedDecoder {
    fn config(&self) -> &ModelConfig {
        &self.decoder.config
    }

    fn kv_spec(&self) -> KvSpec {
        self.decoder.kv_spec()
    }

    fn positions_max(&self) -> usize {
        self.decoder.positions_max
    }

    fn weight_bytes(&self) -> usize {
        self.decoder.weight_bytes()
    }

    fn forward(&mut self, inputs: &StepInputs, kv: &KvCache) -> Result<Tensor> {
        check_cache(self.decoder.kv_spec(), inputs, kv)?;
        self.arena.clear();
        self.decoder.forward(self.ops.as_ref(), &mut self.arena, inputs, kv)
    }
}

impl Decoder {
    fn kv_spec(&self) -> KvSpec {
        let small = |n: usize| u32::try_from(n).expect("dimensions were bounded when the config was read");
        let dim = small(self.config.head_dim);
        KvSpec {
            n_layers: small(self.layers.len()),
            kv_heads: small(self.config.n_kv_heads),
            key_dim: dim,
            value_dim: dim,
        }
    }

    fn weight_bytes(&self) -> usize {
        let layers = self.layers.iter().map(|layer| layer.attention.n_bytes() + layer.feed_forward.n_bytes());
        let head = if self.config.tie_embeddings { 0 } else { self.head.n_bytes() };
        self.embedding.n_bytes() + head + layers.sum::<usize>()
    }

    fn forward(&self, ops: &dyn Ops, arena: &mut Arena, step: &StepInputs, kv: &KvCache) -> Result<Tensor> {
        let (config, stream, n_tokens) = (&self.config, StreamId::MAIN, step.n_tokens());
        if n_tokens == 0 {
            return arena.take([0, config.vocab_size], DType::F32);
        }
        let pass = Pass { ops, stream, step, positions: step.positions()? };
        let mut hidden = || arena.take([n_tokens, config.hidden_size], DType::F32);
        let (residual, normed, branch, spare) = (hidden()?, hidden()?, hidden()?, hidden()?);
        let attention_scratch = AttentionScratch::take(arena, config, n_tokens)?;
        let feed_forward_scratch = FeedForwardScratch::take(arena, config, n_tokens)?;
        ops.embed(stream, &step.token_ids()?, &self.embedding, config.embedding_scale, &residual)?;
        // Output of the branch before, not yet added to the residual stream: the next norm adds it.
        let mut pending: Option<&Tensor> = None;
        for (index, layer) in self.layers.iter().enumerate() {
            match pending {
                None => ops.rms_norm(stream, &residual, &layer.attention_norm, &normed)?,
                Some(x) => ops.add_rms_norm(stream, &residual, x, &layer.attention_norm, &normed)?,
            }
            layer.attention.forward(&pass, &normed, kv.layer(index), &attention_scratch, &branch)?;
            kv.written(index);
            let attended = post_norm(&pass, layer.post_attention_norm.as_ref(), &branch, &spare)?;
            ops.add_rms_norm(stream, &residual, attended, &layer.feed_forward_norm, &normed)?;
            layer.feed_forward.forward(&pass, &normed, &feed_forward_scratch, &branch)?;
            pending = Some(post_norm(&pass, layer.post_feed_forward_norm.as_ref(), &branch, &spare)?);
        }
        if let Some(x) = pending {
            ops.add(stream, &residual, x)?;
        }
        self.logits(&pass, arena, &residual)
    }

    /// Final norm and output head, for the rows that need logits.
    fn logits(&self, pass: &Pass<'_>, arena: &mut Arena, residual: &Tensor) -> Result<Tensor> {
        let (ops, stream, n_rows) = (pass.ops, pass.stream, pass.step.n_logits_rows());
        let logits = arena.take([n_rows, self.config.vocab_size], DType::F32)?;
        if n_rows == 0 {
            return Ok(logits);
        }
        let rows = arena.take([n_rows, self.config.hidden_size], DType::F32)?;
        let normed = arena.take([n_rows, self.config.hidden_size], DType::F32)?;
        ops.gather_rows(stream, residual, &pass.step.logits_rows()?, &rows)?;
        ops.rms_norm(stream, &rows, &self.final_norm, &normed)?;
        ops.matmul(stream, &normed, &self.head, None, &logits)?;
        if let Some(cap) = self.config.logits_soft_cap {
            ops.soft_cap(stream, &logits, cap)?;
        }
        Ok(logits)
    }
}

fn check_cache(spec: KvSpec, inputs: &StepInputs, kv: &KvCache) -> Result<()> {
    let layout = kv.layout();
    let block_size = inputs.limits().block_size;
    if layout != spec.layout(layout.order, layout.block_size, layout.dtype) || layout.block_size as usize != block_size
    {
        let what = format!("a cache {layout:?} for a model {spec:?} and steps of blocks of {block_size}");
        return Err(Error::Unsupported { op: "forward", what });
    }
    Ok(())
}
