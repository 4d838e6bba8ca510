//! Gemma 3: norms on both sides of each layer, five sliding layers to a full one with another rotary base.

use kernels::Activation;
use serde_json::{Map, Value, json};

use super::{Architecture, gguf_base, huggingface_base};
use crate::config::{CONTEXT_MAX, LAYERS_MAX, LayerKind, ModelConfig};
use crate::files::error::OpenError;
use crate::files::keys::Keys;
use crate::files::metadata::Metadata;
use crate::names::Part;
use crate::rope::RopeConfig;

/// `gemma3_text`, and the language model inside `gemma3`.
pub(super) static ARCHITECTURE: Architecture = Architecture {
    name: "gemma3",
    model_types: &["gemma3_text", "gemma3"],
    gguf_names: &["gemma3"],
    from_huggingface,
    from_gguf,
    huggingface_names: &[
        (Part::PostAttentionNorm, "post_attention_layernorm.weight"),
        (Part::MlpNorm, "pre_feedforward_layernorm.weight"),
        (Part::PostMlpNorm, "post_feedforward_layernorm.weight"),
    ],
};

/// Every sixth layer sees everything.
const PATTERN: usize = 6;
/// Rotary base of sliding layers.
const THETA_SLIDING: f64 = 10000.0;
/// Rotary base of full layers.
const THETA_FULL: f64 = 1_000_000.0;
/// The 27B model alone scales scores by hidden size over heads; GGUF tells it by its layers.
const LAYERS_27B: usize = 62;

fn from_huggingface(keys: Keys<'_>) -> Result<ModelConfig, OpenError> {
    let nested = keys.object("text_config")?;
    let object = with_defaults(nested.unwrap_or(keys));
    let keys = Keys::new(keys.path, &object);
    if keys.flag_or("use_bidirectional_attention", false)? {
        return Err(keys.bad("use_bidirectional_attention", "false: this serves causal models"));
    }
    let mut config = huggingface_base(ARCHITECTURE.name, Activation::GeluTanh, keys)?;
    // Published context lengths count the stretched positions already.
    config.context_length = keys.size_up_to("max_position_embeddings", CONTEXT_MAX)?;
    finish(&mut config);
    config.norm_weight_offset = 1.0;
    config.attention_scale = (keys.number("query_pre_attn_scalar")? as f32).sqrt().recip();
    config.attention_soft_cap = keys.number_opt("attn_logit_softcapping")?.map(|cap| cap as f32);
    config.logits_soft_cap = keys.number_opt("final_logit_softcapping")?.map(|cap| cap as f32);
    config.qkv_bias = keys.flag_or("attention_bias", false)?;
    config.output_bias = config.qkv_bias;
    config.sliding_window = Some(keys.size_up_to("sliding_window", CONTEXT_MAX)? as u32);
    config.rope_full = keys.rope(LayerKind::Full, THETA_FULL, config.head_dim)?;
    config.rope_sliding = match keys.object("rope_parameters")? {
        Some(parameters) if parameters.get("sliding_attention").is_some() => {
            keys.rope(LayerKind::Sliding, THETA_SLIDING, config.head_dim)?
        }
        _ => {
            let theta = keys.number_opt("rope_local_base_freq")?.unwrap_or(THETA_SLIDING);
            RopeConfig::plain(theta, config.rope_full.rotary_dim)
        }
    };
    config.layers = match keys.layer_types(config.layers.len())? {
        Some(layers) => layers,
        None => pattern(config.layers.len(), pattern_length(keys)?),
    };
    Ok(config)
}

fn from_gguf(metadata: Metadata<'_>) -> Result<ModelConfig, OpenError> {
    let mut config = gguf_base(ARCHITECTURE.name, Activation::GeluTanh, metadata)?;
    finish(&mut config);
    let key = metadata.key("attention.sliding_window");
    let window = metadata.size_opt(&key, CONTEXT_MAX)?.ok_or_else(|| OpenError::missing_key(metadata.path, key))?;
    config.sliding_window = Some(window as u32);
    if config.layers.len() == LAYERS_27B {
        config.attention_scale = (config.hidden_size as f32 / config.n_heads as f32).sqrt().recip();
    }
    let theta = metadata.number_opt("rope.freq_base_swa")?.unwrap_or(THETA_SLIDING);
    config.rope_sliding = RopeConfig::plain(theta, config.rope_full.rotary_dim);
    config.attention_soft_cap = metadata.number_opt("attn_logit_softcapping")?.map(|cap| cap as f32);
    config.logits_soft_cap = metadata.number_opt("final_logit_softcapping")?.map(|cap| cap as f32);
    config.layers = pattern(config.layers.len(), PATTERN);
    Ok(config)
}

/// What is the same in every Gemma 3, whatever the file.
fn finish(config: &mut ModelConfig) {
    config.qk_norm = true;
    config.post_norms = true;
    config.embedding_scale = (config.hidden_size as f32).sqrt();
}

fn pattern(n_layers: usize, length: usize) -> Vec<LayerKind> {
    let kind = |index: usize| if (index + 1).is_multiple_of(length) { LayerKind::Full } else { LayerKind::Sliding };
    (0..n_layers).map(kind).collect()
}

fn pattern_length(keys: Keys<'_>) -> Result<usize, OpenError> {
    let length = keys.size_opt("sliding_window_pattern", LAYERS_MAX)?;
    Ok(length.or(keys.size_opt("_sliding_window_pattern", LAYERS_MAX)?).unwrap_or(PATTERN))
}

/// Published multimodal configs leave out what equals the defaults of the text model.
fn with_defaults(keys: Keys<'_>) -> Map<String, Value> {
    let defaults = json!({
        "vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "max_position_embeddings": 131_072, "rms_norm_eps": 1e-6, "query_pre_attn_scalar": 256,
        "sliding_window": 4096, "tie_word_embeddings": true, "rope_theta": THETA_FULL,
    });
    let mut object = keys.as_map().clone();
    for (key, value) in defaults.as_object().into_iter().flatten() {
        object.entry(key).or_insert_with(|| value.clone());
    }
    object
}
