//! The least that a model must read and compute, whoever computes it.

use contract::kv::KvDtype;
use kernels::ComputeDtype;
use kernels::bound::Arithmetic;
use models::ModelConfig;

use crate::roofline::{Roofline, attention_arithmetic};

/// What a model needs of a machine.
#[derive(Clone, Debug)]
pub(crate) struct Work {
    /// Bytes of weights read by a step, however many rows it has.
    weight_bytes: f64,
    kv_bytes_per_token: f64,
    /// Elements of all matrices but the output head.
    layer_elements: f64,
    head_elements: f64,
    /// Multiplications and additions of one query with one key and value, over all layers.
    attention_flops: f64,
    arithmetic: Arithmetic,
    attention_arithmetic: Arithmetic,
}

impl Work {
    /// `weight_bytes` are those in memory, whatever the format.
    pub(crate) fn new(
        config: &ModelConfig,
        (dtype, kv_dtype): (ComputeDtype, KvDtype),
        weight_bytes: usize,
        kv_bytes_per_token: usize,
    ) -> Self {
        let [hidden, inner, dim] = [config.hidden_size, config.intermediate_size, config.head_dim].map(|n| n as f64);
        let [heads, kv_heads, layers] = [config.n_heads, config.n_kv_heads, config.n_layers()].map(|n| n as f64);
        let layer = hidden * dim * (2.0 * heads + 2.0 * kv_heads) + 3.0 * hidden * inner;
        let (layer_elements, head_elements) = (layers * layer, hidden * config.vocab_size as f64);
        // An embedding that is not the head too is only looked up.
        let all = layer_elements + if config.tie_embeddings { head_elements } else { 2.0 * head_elements };
        let read = (layer_elements + head_elements) / all;
        // Files mix formats; what an element takes on average tells which most are.
        let arithmetic = match (dtype, weight_bytes as f64 / all) {
            (ComputeDtype::Bf16, _) => Arithmetic::Bf16,
            (ComputeDtype::F32, _) => Arithmetic::F32,
            (ComputeDtype::Int8, _) => Arithmetic::Int8,
            (ComputeDtype::Stored, bytes) if bytes < 3.0 => Arithmetic::Bf16,
            (ComputeDtype::Stored, _) => Arithmetic::F32,
        };
        Self {
            arithmetic,
            attention_arithmetic: attention_arithmetic(kv_dtype),
            weight_bytes: weight_bytes as f64 * read,
            kv_bytes_per_token: kv_bytes_per_token as f64,
            layer_elements,
            head_elements,
            attention_flops: 4.0 * layers * heads * dim,
        }
    }

    /// Shortest time for a prompt of `tokens` in steps of `chunk`, with one row of logits.
    pub(crate) fn prefill_seconds(&self, roofline: &Roofline, tokens: usize, chunk: usize) -> f64 {
        let n_steps = tokens.div_ceil(chunk) as f64;
        let tokens = tokens as f64;
        let pairs = tokens * (tokens + 1.0) / 2.0;
        let flops = 2.0 * (self.layer_elements * tokens + self.head_elements);
        roofline.seconds(self.weight_bytes * n_steps, &self.flops(flops, pairs))
    }

    /// Shortest time for one token of each of `batch` sequences that have `context` tokens.
    ///
    /// Sliding layers are counted as if they saw everything.
    pub(crate) fn decode_seconds(&self, roofline: &Roofline, batch: usize, context: usize) -> f64 {
        let (batch, pairs) = (batch as f64, (batch * (context + 1)) as f64);
        let bytes = self.weight_bytes + self.kv_bytes_per_token * pairs;
        let flops = 2.0 * (self.layer_elements + self.head_elements) * batch;
        roofline.seconds(bytes, &self.flops(flops, pairs))
    }

    /// What the weights take, and attention of so many pairs of a query and a key.
    fn flops(&self, weights: f64, pairs: f64) -> [(f64, Arithmetic); 2] {
        [(weights, self.arithmetic), (self.attention_flops * pairs, self.attention_arithmetic)]
    }
}
