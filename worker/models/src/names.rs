//! Names of tensors in Hugging Face folders and in GGUF.

/// A weight of a decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Embedding,
    FinalNorm,
    Head,
    /// Divisors of rotary frequencies; GGUF only.
    RopeDivisors,
    AttentionNorm,
    Query,
    Key,
    Value,
    Output,
    QueryBias,
    KeyBias,
    ValueBias,
    OutputBias,
    QueryNorm,
    KeyNorm,
    PostAttentionNorm,
    MlpNorm,
    Gate,
    Up,
    Down,
    GateBias,
    UpBias,
    DownBias,
    PostMlpNorm,
}

/// Where a weight is: once in a model, or once in each layer.
enum Place {
    Model,
    Layer,
}

impl Part {
    /// Name under the model's prefix in most Hugging Face folders.
    pub(crate) fn huggingface(self) -> &'static str {
        self.row().1
    }

    /// Whether each layer has one.
    pub(crate) fn is_in_layer(self) -> bool {
        matches!(self.row().0, Place::Layer)
    }

    /// Name in GGUF.
    pub(crate) fn gguf(self, layer: usize) -> String {
        match self.row() {
            (Place::Model, _, name) => name.to_owned(),
            (Place::Layer, _, name) => format!("blk.{layer}.{name}"),
        }
    }

    fn row(self) -> (Place, &'static str, &'static str) {
        use Place::{Layer, Model};
        match self {
            Self::Embedding => (Model, "embed_tokens.weight", "token_embd.weight"),
            Self::FinalNorm => (Model, "norm.weight", "output_norm.weight"),
            Self::Head => (Model, "lm_head.weight", "output.weight"),
            Self::RopeDivisors => (Model, "rope_divisors", "rope_freqs.weight"),
            Self::AttentionNorm => (Layer, "input_layernorm.weight", "attn_norm.weight"),
            Self::Query => (Layer, "self_attn.q_proj.weight", "attn_q.weight"),
            Self::Key => (Layer, "self_attn.k_proj.weight", "attn_k.weight"),
            Self::Value => (Layer, "self_attn.v_proj.weight", "attn_v.weight"),
            Self::Output => (Layer, "self_attn.o_proj.weight", "attn_output.weight"),
            Self::QueryBias => (Layer, "self_attn.q_proj.bias", "attn_q.bias"),
            Self::KeyBias => (Layer, "self_attn.k_proj.bias", "attn_k.bias"),
            Self::ValueBias => (Layer, "self_attn.v_proj.bias", "attn_v.bias"),
            Self::OutputBias => (Layer, "self_attn.o_proj.bias", "attn_output.bias"),
            Self::QueryNorm => (Layer, "self_attn.q_norm.weight", "attn_q_norm.weight"),
            Self::KeyNorm => (Layer, "self_attn.k_norm.weight", "attn_k_norm.weight"),
            Self::PostAttentionNorm => (Layer, "post_self_attn_layernorm.weight", "post_attention_norm.weight"),
            Self::MlpNorm => (Layer, "post_attention_layernorm.weight", "ffn_norm.weight"),
            Self::Gate => (Layer, "mlp.gate_proj.weight", "ffn_gate.weight"),
            Self::Up => (Layer, "mlp.up_proj.weight", "ffn_up.weight"),
            Self::Down => (Layer, "mlp.down_proj.weight", "ffn_down.weight"),
            Self::GateBias => (Layer, "mlp.gate_proj.bias", "ffn_gate.bias"),
            Self::UpBias => (Layer, "mlp.up_proj.bias", "ffn_up.bias"),
            Self::DownBias => (Layer, "mlp.down_proj.bias", "ffn_down.bias"),
            Self::PostMlpNorm => (Layer, "post_mlp_layernorm.weight", "post_ffw_norm.weight"),
        }
    }
}
