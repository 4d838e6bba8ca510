//! Writes a tiny Hugging Face checkpoint as GGUF, the way published conversions are laid out.

use kernels::WeightFormat;
use models::{ModelConfig, ModelFiles};

use super::gguf_writer::{GgufWriter, Meta};

/// GGUF bytes with the same weights as `files`, a tiny checkpoint.
pub fn to_gguf(files: &ModelFiles) -> GgufWriter {
    let config = files.config();
    let mut writer = GgufWriter::new();
    metadata(&mut writer, config);
    for name in files.tensor_names() {
        let stored = files.tensor(name).expect("it is in the list");
        assert_eq!(stored.format, WeightFormat::F32);
        let (chunks, _) = stored.bytes.as_chunks::<4>();
        let mut values: Vec<f32> = chunks.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        if config.architecture == "llama" {
            for (part, heads) in [("q_proj", config.n_heads), ("k_proj", config.n_kv_heads)] {
                if name.contains(part) {
                    values = interleave_rows(&values, heads, stored.shape[1]);
                }
            }
        }
        if config.architecture == "gemma3" && name.ends_with("norm.weight") {
            values.iter_mut().for_each(|value| *value += 1.0);
        }
        writer.f32s(&gguf_name(name, config), stored.shape, &values);
    }
    writer
}

/// Rows `i` and `i + dim / 2` of each head become neighbours.
fn interleave_rows(values: &[f32], heads: usize, columns: usize) -> Vec<f32> {
    let dim = values.len() / columns / heads;
    let row = |index: usize| &values[index * columns..(index + 1) * columns];
    let order =
        (0..heads).flat_map(|head| (0..dim / 2).flat_map(move |pair| [head * dim + pair, head * dim + pair + dim / 2]));
    order.flat_map(|index| row(index).to_vec()).collect()
}

fn gguf_name(name: &str, config: &ModelConfig) -> String {
    let gemma = config.architecture == "gemma3";
    let inner = [
        ("input_layernorm", "attn_norm"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.k_norm", "attn_k_norm"),
        ("post_attention_layernorm", if gemma { "post_attention_norm" } else { "ffn_norm" }),
        ("pre_feedforward_layernorm", "ffn_norm"),
        ("post_feedforward_layernorm", "post_ffw_norm"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
    ];
    match name {
        "model.embed_tokens.weight" => "token_embd.weight".into(),
        "model.norm.weight" => "output_norm.weight".into(),
        "lm_head.weight" => "output.weight".into(),
        _ => {
            let rest = name.strip_prefix("model.layers.").expect("a layer's tensor");
            let (layer, rest) = rest.split_once('.').expect("layer.name");
            let (stem, kind) = rest.rsplit_once('.').expect("name.kind");
            let (_, short) = inner.iter().find(|(long, _)| *long == stem).expect("a known tensor");
            format!("blk.{layer}.{short}.{kind}")
        }
    }
}

/// Everything but the tensors; the tokenizer is a list of words.
pub fn metadata(writer: &mut GgufWriter, config: &ModelConfig) {
    let architecture = config.architecture;
    let key = |name: &str| format!("{architecture}.{name}");
    writer.meta("general.architecture", Meta::Text(architecture.into()));
    writer.meta("general.name", Meta::Text(format!("tiny {architecture}")));
    let sizes = [
        ("block_count", config.n_layers()),
        ("embedding_length", config.hidden_size),
        ("attention.head_count", config.n_heads),
        ("attention.head_count_kv", config.n_kv_heads),
        ("attention.key_length", config.head_dim),
        ("attention.value_length", config.head_dim),
        ("feed_forward_length", config.intermediate_size),
        ("context_length", config.context_length),
    ];
    for (name, size) in sizes {
        writer.meta(&key(name), Meta::U32(size as u32));
    }
    if let Some(window) = config.sliding_window {
        writer.meta(&key("attention.sliding_window"), Meta::U32(window));
    }
    writer.meta(&key("attention.layer_norm_rms_epsilon"), Meta::F32(config.norm_epsilon));
    writer.meta(&key("rope.freq_base"), Meta::F32(config.rope_full.theta as f32));
    let tokens: Vec<String> = (0..config.vocab_size).map(|id| format!("t{id}")).collect();
    writer.meta("tokenizer.ggml.model", Meta::Text("llama".into()));
    writer.meta("tokenizer.ggml.scores", Meta::F32s(vec![0.0; tokens.len()]));
    writer.meta("tokenizer.ggml.token_type", Meta::I32s(vec![1; tokens.len()]));
    writer.meta("tokenizer.ggml.tokens", Meta::Texts(tokens));
    writer.meta("tokenizer.ggml.bos_token_id", Meta::U32(1));
    writer.meta("tokenizer.ggml.eos_token_id", Meta::U32(2));
    writer.meta("tokenizer.ggml.add_bos_token", Meta::Bool(false));
}
