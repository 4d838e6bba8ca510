//! Small models with random sizes and weights, in any format that files store.

use kernels::{Activation, RopeStyle, WeightFormat};
use models::rope::RopeConfig;
use models::{LayerKind, ModelConfig};

use super::Random;
use super::convert::metadata;
use super::gguf_writer::{GgufWriter, Meta};
use super::quantise::quantise;

/// Architectures to choose from; gemma3 brings a sliding window, both soft caps and norms on both sides.
const ARCHITECTURES: [&str; 4] = ["llama", "qwen2", "qwen3", "gemma3"];

/// How long its sequences will be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Length {
    /// Tens of tokens: a model of usual shape.
    Short,
    /// A thousand and more: a narrow one, so that attention over the cache is most of the work.
    Long,
}

/// Draws an architecture and sizes that `format` can store.
pub fn config(random: &mut Random, format: WeightFormat, length: Length) -> ModelConfig {
    let architecture = ARCHITECTURES[random.below(ARCHITECTURES.len())];
    let gemma = architecture == "gemma3";
    let (n_heads, n_kv_heads, head_dim) = heads(random, format);
    let width = |random: &mut Random, most: usize| match format.block_elements() {
        1 => 40 + 2 * random.below(most / 2 - 20),
        block => block * (1 + random.below((most / block).max(1))),
    };
    let most = if length == Length::Long { 128 } else { 320 };
    let n_layers = match (gemma, length) {
        (true, _) => 6,
        (_, Length::Short) => 2 + random.below(2),
        (_, Length::Long) => 1,
    };
    let rope = RopeConfig::plain(if random.below(2) == 0 { 10_000.0 } else { 500_000.0 }, head_dim);
    ModelConfig {
        architecture,
        layers: vec![LayerKind::Full; n_layers],
        hidden_size: width(random, most),
        n_heads,
        n_kv_heads,
        head_dim,
        intermediate_size: width(random, most + 160),
        vocab_size: 97 + random.below(200),
        context_length: 4096,
        norm_epsilon: 1e-5,
        norm_weight_offset: 0.0,
        activation: if gemma { Activation::GeluTanh } else { Activation::Silu },
        sliding_window: gemma.then(|| 1 + random.below(70) as u32),
        rope_sliding: rope.clone(),
        rope_full: rope,
        rope_style: RopeStyle::HalfSplit,
        tie_embeddings: gemma || random.below(2) == 0,
        qkv_bias: architecture == "qwen2",
        output_bias: false,
        mlp_bias: false,
        qk_norm: matches!(architecture, "qwen3" | "gemma3"),
        post_norms: gemma,
        attention_soft_cap: (gemma && random.below(2) == 0).then_some(5.0),
        logits_soft_cap: (gemma && random.below(2) == 0).then_some(8.0),
        attention_scale: 1.0,
        embedding_scale: 1.0,
    }
}

/// Query heads, key-value heads and their size; rows of the output projection must be whole blocks.
fn heads(random: &mut Random, format: WeightFormat) -> (usize, usize, usize) {
    let choices: &[(usize, usize, usize)] = match format.block_elements() {
        256 => &[(8, 2, 32), (4, 1, 64), (4, 4, 64), (2, 1, 128), (1, 1, 256), (16, 4, 16)],
        32 => &[(4, 2, 16), (3, 1, 64), (9, 3, 32), (4, 1, 24), (2, 2, 48), (1, 1, 128)],
        _ => &[(4, 2, 10), (3, 1, 64), (9, 3, 20), (5, 5, 8), (2, 1, 36), (7, 1, 16)],
    };
    choices[random.below(choices.len())]
}

/// A file of such a model with random weights; vectors are f32 as in published files.
pub fn gguf(random: &mut Random, config: &ModelConfig, format: WeightFormat) -> GgufWriter {
    let mut writer = GgufWriter::new();
    metadata(&mut writer, config);
    for (name, cap) in
        [("attn_logit_softcapping", config.attention_soft_cap), ("final_logit_softcapping", config.logits_soft_cap)]
    {
        if let Some(cap) = cap {
            writer.meta(&format!("{}.{name}", config.architecture), Meta::F32(cap));
        }
    }
    let (hidden, inner) = (config.hidden_size, config.intermediate_size);
    let (queries, keys) = (config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim);
    let mut weights = Weights { writer, random, format };
    weights.matrix("token_embd", config.vocab_size, hidden, 1.0);
    if !config.tie_embeddings {
        weights.matrix("output", config.vocab_size, hidden, 1.0);
    }
    weights.norm("output_norm", hidden);
    for layer in 0..config.n_layers() {
        let name = |part: &str| format!("blk.{layer}.{part}");
        for norm in norms(config) {
            weights.norm(&name(norm), hidden);
        }
        for norm in ["attn_q_norm", "attn_k_norm"].into_iter().filter(|_| config.qk_norm) {
            weights.norm(&name(norm), config.head_dim);
        }
        for (part, rows) in [("attn_q", queries), ("attn_k", keys), ("attn_v", keys)] {
            weights.matrix(&name(part), rows, hidden, 1.5);
            if config.qkv_bias {
                weights.vector(&format!("{}.bias", name(part)), rows, 0.0);
            }
        }
        weights.matrix(&name("attn_output"), hidden, queries, 1.0);
        weights.matrix(&name("ffn_gate"), inner, hidden, 1.0);
        weights.matrix(&name("ffn_up"), inner, hidden, 1.0);
        weights.matrix(&name("ffn_down"), hidden, inner, 1.0);
    }
    weights.writer
}

fn norms(config: &ModelConfig) -> &'static [&'static str] {
    match config.post_norms {
        true => &["attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm"],
        false => &["attn_norm", "ffn_norm"],
    }
}

struct Weights<'a> {
    writer: GgufWriter,
    random: &'a mut Random,
    format: WeightFormat,
}

impl Weights<'_> {
    /// Elements about normal, such that a row keeps `gain` times the size of what it is multiplied with.
    fn matrix(&mut self, name: &str, rows: usize, columns: usize, gain: f32) {
        let scale = gain / (columns as f32).sqrt();
        let values: Vec<f32> = (0..rows * columns).map(|_| scale * self.normal()).collect();
        self.writer.matrix(&format!("{name}.weight"), [rows, columns], self.format, quantise(self.format, &values));
    }

    fn norm(&mut self, name: &str, dim: usize) {
        self.vector(&format!("{name}.weight"), dim, 1.0);
    }

    fn vector(&mut self, name: &str, dim: usize, middle: f32) {
        let values: Vec<f32> = (0..dim).map(|_| middle + 0.2 * self.normal()).collect();
        self.writer.f32s(name, &[dim], &values);
    }

    /// Twelve uniform numbers summed are about normal.
    fn normal(&mut self) -> f32 {
        let mut sum = -6.0;
        for _ in 0..3 {
            let bits = self.random.next();
            sum += (0..4).map(|part| (bits >> (16 * part) & 0xffff) as f32 / 65536.0).sum::<f32>();
        }
        sum
    }
}
