//! Llama 2 and 3, SmolLM2, Mistral: the plain decoder, with a sliding window where Mistral has one.

use kernels::{Activation, RopeStyle};

use super::{Architecture, gguf_base, huggingface_base};
use crate::config::{CONTEXT_MAX, LayerKind, ModelConfig};
use crate::files::error::OpenError;
use crate::files::keys::Keys;
use crate::files::metadata::Metadata;

/// `llama` and `mistral`.
pub(super) static ARCHITECTURE: Architecture = Architecture {
    name: "llama",
    model_types: &["llama", "mistral"],
    gguf_names: &["llama"],
    from_huggingface,
    from_gguf,
    huggingface_names: &[],
};

fn from_huggingface(keys: Keys<'_>) -> Result<ModelConfig, OpenError> {
    let mut config = huggingface_base(ARCHITECTURE.name, Activation::Silu, keys)?;
    config.qkv_bias = keys.flag_or("attention_bias", false)?;
    config.output_bias = config.qkv_bias;
    config.mlp_bias = keys.flag_or("mlp_bias", false)?;
    if keys.text_opt("model_type")? == Some("mistral")
        && let Some(window) = keys.size_opt("sliding_window", CONTEXT_MAX)?
    {
        config.sliding_window = Some(window as u32);
        config.layers.fill(LayerKind::Sliding);
    }
    if let Some(layers) = keys.layer_types(config.layers.len())? {
        config.layers = layers;
    }
    Ok(config)
}

fn from_gguf(metadata: Metadata<'_>) -> Result<ModelConfig, OpenError> {
    let mut config = gguf_base(ARCHITECTURE.name, Activation::Silu, metadata)?;
    // Conversion to GGUF permutes query and key rows so that pairs lie side by side.
    config.rope_style = RopeStyle::Interleaved;
    if let Some(window) = metadata.size_opt(&metadata.key("attention.sliding_window"), CONTEXT_MAX)? {
        config.sliding_window = Some(window as u32);
        config.layers.fill(LayerKind::Sliding);
    }
    Ok(config)
}
