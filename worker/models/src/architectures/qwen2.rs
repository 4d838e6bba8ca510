//! Qwen2 and Qwen2.5: biases on queries, keys and values.

use kernels::Activation;

use super::{Architecture, gguf_base, huggingface_base};
use crate::config::{CONTEXT_MAX, LAYERS_MAX, LayerKind, ModelConfig};
use crate::files::error::OpenError;
use crate::files::keys::Keys;
use crate::files::metadata::Metadata;

/// `qwen2`.
pub(super) static ARCHITECTURE: Architecture = Architecture {
    name: "qwen2",
    model_types: &["qwen2"],
    gguf_names: &["qwen2"],
    from_huggingface,
    from_gguf,
    huggingface_names: &[],
};

fn from_huggingface(keys: Keys<'_>) -> Result<ModelConfig, OpenError> {
    let mut config = huggingface_base(ARCHITECTURE.name, Activation::Silu, keys)?;
    config.qkv_bias = true;
    slide_upper_layers(&mut config, keys)?;
    Ok(config)
}

fn from_gguf(metadata: Metadata<'_>) -> Result<ModelConfig, OpenError> {
    gguf_base(ARCHITECTURE.name, Activation::Silu, metadata)
}

/// With `use_sliding_window`, layers from `max_window_layers` on slide, unless `layer_types` says otherwise.
pub(super) fn slide_upper_layers(config: &mut ModelConfig, keys: Keys<'_>) -> Result<(), OpenError> {
    if !keys.flag_or("use_sliding_window", false)? {
        return Ok(());
    }
    config.sliding_window = keys.size_opt("sliding_window", CONTEXT_MAX)?.map(|window| window as u32);
    if config.sliding_window.is_none() {
        return Ok(());
    }
    if let Some(layers) = keys.layer_types(config.layers.len())? {
        config.layers = layers;
    } else {
        let first = keys.whole_opt("max_window_layers", 0..=LAYERS_MAX)?.unwrap_or(28);
        config.layers.iter_mut().skip(first).for_each(|layer| *layer = LayerKind::Sliding);
    }
    Ok(())
}
