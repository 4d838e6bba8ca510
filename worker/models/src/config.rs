//! What a model is: sizes, norms, rotary embedding and which layers see how far, whatever file said so.

use kernels::{Activation, RopeStyle};

use crate::rope::RopeConfig;

/// Largest value of any dimension, so that products of a few of them cannot overflow.
pub(crate) const DIMENSION_MAX: usize = 1 << 24;
/// Largest head dimension; published models have up to 512.
const HEAD_DIM_MAX: usize = 1 << 14;
/// Most layers of a model.
pub(crate) const LAYERS_MAX: usize = 1 << 12;
/// Longest context that a config may name.
pub(crate) const CONTEXT_MAX: usize = 1 << 24;

/// Architecture and sizes of a decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Row of [`crate::architectures::ARCHITECTURES`].
    pub architecture: &'static str,
    /// One entry for each layer: how far its attention sees.
    pub layers: Vec<LayerKind>,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Query heads.
    pub n_heads: usize,
    /// Key and value heads; divides `n_heads`.
    pub n_kv_heads: usize,
    /// Elements of a query, key or value head.
    pub head_dim: usize,
    /// Width inside the feed-forward layer.
    pub intermediate_size: usize,
    /// Entries of the embedding and of the output head.
    pub vocab_size: usize,
    /// Longest sequence the model was made for, in tokens.
    pub context_length: usize,
    /// Added to the mean of squares in norms.
    pub norm_epsilon: f32,
    /// Added to stored norm weights (gemma in Hugging Face folders: 1).
    pub norm_weight_offset: f32,
    /// Nonlinearity of the feed-forward layer.
    pub activation: Activation,
    /// Positions that a sliding layer sees, its own included.
    pub sliding_window: Option<u32>,
    /// Rotary embedding of layers that see everything.
    pub rope_full: RopeConfig,
    /// Rotary embedding of sliding layers.
    pub rope_sliding: RopeConfig,
    /// Which elements are rotated together: depends on the file, since GGUF permutes llama's weights.
    pub rope_style: RopeStyle,
    /// Whether the embedding is the output head too.
    pub tie_embeddings: bool,
    /// Whether query, key and value projections have biases.
    pub qkv_bias: bool,
    /// Whether the attention's output projection has a bias.
    pub output_bias: bool,
    /// Whether the feed-forward projections have biases.
    pub mlp_bias: bool,
    /// Whether queries and keys are normalised per head before rotation.
    pub qk_norm: bool,
    /// Whether attention and feed-forward outputs are normalised before they join the residual stream.
    pub post_norms: bool,
    /// `cap * tanh(score / cap)` on attention scores.
    pub attention_soft_cap: Option<f32>,
    /// The same on logits.
    pub logits_soft_cap: Option<f32>,
    /// Factor of attention scores.
    pub attention_scale: f32,
    /// Factor of embeddings.
    pub embedding_scale: f32,
}

/// How far a layer's attention sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LayerKind {
    /// All positions before.
    Full,
    /// The last `sliding_window` positions.
    Sliding,
}

impl ModelConfig {
    /// Number of layers.
    pub fn n_layers(&self) -> usize {
        self.layers.len()
    }

    /// Positions that layer `index` sees; none sees all.
    pub fn window(&self, index: usize) -> Option<u32> {
        match self.layers[index] {
            LayerKind::Full => None,
            LayerKind::Sliding => self.sliding_window,
        }
    }

    /// Checks what must hold between the numbers; each alone was checked when it was read.
    ///
    /// # Errors
    /// The key, its value and what was expected.
    pub(crate) fn check(&self) -> Result<(), (&'static str, String, String)> {
        let positive = |value: f32| value.is_finite() && value > 0.0;
        if self.n_kv_heads == 0 || !self.n_heads.is_multiple_of(self.n_kv_heads) {
            let expected = format!("a divisor of the {} attention heads", self.n_heads);
            return Err(("number of key-value heads", self.n_kv_heads.to_string(), expected));
        }
        if self.head_dim > HEAD_DIM_MAX {
            return Err(("head dimension", self.head_dim.to_string(), format!("at most {HEAD_DIM_MAX}")));
        }
        for rope in [&self.rope_full, &self.rope_sliding] {
            let dim = rope.rotary_dim;
            if dim == 0 || dim % 2 != 0 || dim > self.head_dim {
                let expected = format!("even and at most the head dimension {}", self.head_dim);
                return Err(("rotary dimension", dim.to_string(), expected));
            }
            rope.check()?;
        }
        if self.sliding_window == Some(0)
            || (self.sliding_window.is_none() && self.layers.contains(&LayerKind::Sliding))
        {
            return Err((
                "sliding_window",
                format!("{:?}", self.sliding_window),
                "at least 1 for sliding layers".into(),
            ));
        }
        let numbers = [
            ("norm epsilon", self.norm_epsilon),
            ("attention scale", self.attention_scale),
            ("embedding scale", self.embedding_scale),
            ("attention soft cap", self.attention_soft_cap.unwrap_or(1.0)),
            ("logits soft cap", self.logits_soft_cap.unwrap_or(1.0)),
        ];
        match numbers.into_iter().find(|&(_, value)| !positive(value)) {
            Some((key, value)) => Err((key, value.to_string(), "a positive number".into())),
            None => Ok(()),
        }
    }
}
