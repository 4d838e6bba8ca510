//! Qwen3: queries and keys are normalised per head, and the head dimension is its own.

use kernels::Activation;

use super::qwen2::slide_upper_layers;
use super::{Architecture, gguf_base, huggingface_base};
use crate::config::{DIMENSION_MAX, ModelConfig};
use crate::files::error::OpenError;
use crate::files::keys::Keys;
use crate::files::metadata::Metadata;

/// `qwen3`.
pub(super) static ARCHITECTURE: Architecture = Architecture {
    name: "qwen3",
    model_types: &["qwen3"],
    gguf_names: &["qwen3"],
    from_huggingface,
    from_gguf,
    huggingface_names: &[],
};

fn from_huggingface(keys: Keys<'_>) -> Result<ModelConfig, OpenError> {
    // Unlike elsewhere the head dimension does not follow from the hidden size, so it must be there.
    keys.size_up_to("head_dim", DIMENSION_MAX)?;
    let mut config = huggingface_base(ARCHITECTURE.name, Activation::Silu, keys)?;
    config.qk_norm = true;
    config.qkv_bias = keys.flag_or("attention_bias", false)?;
    config.output_bias = config.qkv_bias;
    slide_upper_layers(&mut config, keys)?;
    Ok(config)
}

fn from_gguf(metadata: Metadata<'_>) -> Result<ModelConfig, OpenError> {
    let mut config = gguf_base(ARCHITECTURE.name, Activation::Silu, metadata)?;
    config.qk_norm = true;
    Ok(config)
}
