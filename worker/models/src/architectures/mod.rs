//! The architectures there are: one file each, one line in the table.

mod gemma3;
mod llama;
mod qwen2;
mod qwen3;

use kernels::{Activation, RopeStyle};

use crate::config::{CONTEXT_MAX, LAYERS_MAX, LayerKind, ModelConfig};
use crate::files::error::OpenError;
use crate::files::keys::Keys;
use crate::files::metadata::Metadata;
use crate::names::Part;
use crate::rope::{RopeConfig, RopeScaling};

/// Every architecture.
pub static ARCHITECTURES: [&Architecture; 4] =
    [&llama::ARCHITECTURE, &qwen2::ARCHITECTURE, &qwen3::ARCHITECTURE, &gemma3::ARCHITECTURE];

/// What sets one architecture apart from the others.
pub struct Architecture {
    /// Its name in messages and in [`ModelConfig::architecture`].
    pub name: &'static str,
    /// Values of `model_type` in `config.json`.
    pub model_types: &'static [&'static str],
    /// Values of `general.architecture` in GGUF.
    pub gguf_names: &'static [&'static str],
    pub(crate) from_huggingface: fn(Keys<'_>) -> Result<ModelConfig, OpenError>,
    pub(crate) from_gguf: fn(Metadata<'_>) -> Result<ModelConfig, OpenError>,
    /// Names in Hugging Face folders that differ from [`Part::huggingface`].
    pub(crate) huggingface_names: &'static [(Part, &'static str)],
}

/// Finds an architecture by its `model_type`.
pub(crate) fn by_model_type(model_type: &str) -> Option<&'static Architecture> {
    ARCHITECTURES.into_iter().find(|architecture| architecture.model_types.contains(&model_type))
}

/// Finds an architecture by its name in GGUF.
pub(crate) fn by_gguf_name(name: &str) -> Option<&'static Architecture> {
    ARCHITECTURES.into_iter().find(|architecture| architecture.gguf_names.contains(&name))
}

/// Finds an architecture by its own name.
pub(crate) fn by_name(name: &str) -> Option<&'static Architecture> {
    ARCHITECTURES.into_iter().find(|architecture| architecture.name == name)
}

/// The configuration that a plain pre-norm decoder has, from `config.json`; architectures change what differs.
fn huggingface_base(name: &'static str, activation: Activation, keys: Keys<'_>) -> Result<ModelConfig, OpenError> {
    keys.check_activation(activation)?;
    let n_layers = keys.size_up_to("num_hidden_layers", LAYERS_MAX)?;
    let (hidden_size, n_heads) = (keys.size("hidden_size")?, keys.size("num_attention_heads")?);
    let of_hidden = || match hidden_size / n_heads {
        0 => Err(keys.bad("num_attention_heads", &format!("at most the hidden size {hidden_size}"))),
        head_dim => Ok(head_dim),
    };
    let head_dim = keys.size_opt("head_dim", crate::config::DIMENSION_MAX)?.map_or_else(of_hidden, Ok)?;
    let rope = keys.rope(LayerKind::Full, 10000.0, head_dim)?;
    let context_length = keys.size_up_to("max_position_embeddings", CONTEXT_MAX)?;
    Ok(ModelConfig {
        architecture: name,
        layers: vec![LayerKind::Full; n_layers],
        hidden_size,
        n_heads,
        n_kv_heads: keys.size_opt("num_key_value_heads", crate::config::DIMENSION_MAX)?.unwrap_or(n_heads),
        head_dim,
        intermediate_size: keys.size("intermediate_size")?,
        vocab_size: keys.size("vocab_size")?,
        context_length: scaled_context(context_length, &rope),
        norm_epsilon: keys.number("rms_norm_eps")? as f32,
        norm_weight_offset: 0.0,
        activation,
        sliding_window: None,
        rope_sliding: rope.clone(),
        rope_full: rope,
        rope_style: RopeStyle::HalfSplit,
        tie_embeddings: keys.flag_or("tie_word_embeddings", false)?,
        qkv_bias: false,
        output_bias: false,
        mlp_bias: false,
        qk_norm: false,
        post_norms: false,
        attention_soft_cap: None,
        logits_soft_cap: None,
        attention_scale: (head_dim as f32).sqrt().recip(),
        embedding_scale: 1.0,
    })
}

/// The same from GGUF metadata.
fn gguf_base(name: &'static str, activation: Activation, metadata: Metadata<'_>) -> Result<ModelConfig, OpenError> {
    metadata.check_activation(activation)?;
    let layers_key = metadata.key("block_count");
    let n_layers = metadata
        .size_opt(&layers_key, LAYERS_MAX)?
        .ok_or_else(|| OpenError::missing_key(metadata.path, layers_key.as_str()))?;
    // Layers that are left out would be an answer that makes no sense, not an error.
    let layer = |name: &str| name.strip_prefix("blk.")?.split('.').next()?.parse::<usize>().ok();
    if let Some(last) = metadata.gguf.tensors().iter().filter_map(|tensor| layer(tensor.name)).max()
        && last >= n_layers
    {
        return Err(metadata.bad(&layers_key, &format!("the number of layers, of which there is blk.{last}")));
    }
    let hidden_size = metadata.size("embedding_length")?;
    let n_heads = metadata.size("attention.head_count")?;
    let head_dim = match metadata.size_opt(&metadata.key("attention.key_length"), crate::config::DIMENSION_MAX)? {
        Some(head_dim) => head_dim,
        None if hidden_size >= n_heads => hidden_size / n_heads,
        None => {
            let expected = format!("at most the embedding length {hidden_size}");
            return Err(metadata.bad(&metadata.key("attention.head_count"), &expected));
        }
    };
    let context_key = metadata.key("context_length");
    let context_length = metadata
        .size_opt(&context_key, CONTEXT_MAX)?
        .ok_or_else(|| OpenError::missing_key(metadata.path, context_key))?;
    let embedding = metadata.gguf.tensors().iter().find(|tensor| tensor.name == Part::Embedding.gguf(0));
    let vocab_size = embedding
        .and_then(|tensor| tensor.shape.first().copied())
        .filter(|&n| (1..=crate::config::DIMENSION_MAX).contains(&n))
        .ok_or_else(|| OpenError::corrupt(metadata.path, "tensor token_embd.weight is absent or has no rows"))?;
    let rope = metadata.rope(context_length, head_dim)?;
    let kv_heads = metadata.size_opt(&metadata.key("attention.head_count_kv"), crate::config::DIMENSION_MAX)?;
    Ok(ModelConfig {
        architecture: name,
        layers: vec![LayerKind::Full; n_layers],
        hidden_size,
        n_heads,
        n_kv_heads: kv_heads.unwrap_or(n_heads),
        head_dim,
        intermediate_size: metadata.size("feed_forward_length")?,
        vocab_size,
        context_length,
        norm_epsilon: metadata.number("attention.layer_norm_rms_epsilon")? as f32,
        norm_weight_offset: 0.0,
        activation,
        sliding_window: None,
        rope_sliding: rope.clone(),
        rope_full: rope,
        rope_style: RopeStyle::HalfSplit,
        tie_embeddings: !has_tensor(metadata, &Part::Head.gguf(0)),
        qkv_bias: has_tensor(metadata, &Part::QueryBias.gguf(0)),
        output_bias: has_tensor(metadata, &Part::OutputBias.gguf(0)),
        mlp_bias: has_tensor(metadata, &Part::GateBias.gguf(0)),
        qk_norm: has_tensor(metadata, &Part::QueryNorm.gguf(0)),
        post_norms: false,
        attention_soft_cap: None,
        logits_soft_cap: None,
        attention_scale: metadata
            .number_opt("attention.scale")?
            .map_or((head_dim as f32).sqrt().recip(), |scale| scale as f32),
        embedding_scale: 1.0,
    })
}

fn has_tensor(metadata: Metadata<'_>, name: &str) -> bool {
    metadata.gguf.tensors().iter().any(|tensor| tensor.name == name)
}

/// Scalings that stretch positions also stretch the context, unless the config already counts it.
fn scaled_context(context_length: usize, rope: &RopeConfig) -> usize {
    let scaled = match rope.scaling {
        RopeScaling::None | RopeScaling::Llama3 { .. } => 0.0,
        RopeScaling::Linear { factor } => context_length as f64 * factor,
        RopeScaling::Yarn { factor, original_context, .. } => original_context * factor,
    };
    context_length.max(scaled.clamp(0.0, CONTEXT_MAX as f64) as usize)
}
