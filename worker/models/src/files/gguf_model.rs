//! Makes a model of a GGUF file: configuration, tokenizer and tensors from one header.

use std::path::Path;

use contract::ids::Token;
use kernels::memory::file::MappedFile;

use super::error::OpenError;
use super::gguf::{Gguf, GgufError, Value};
use super::metadata::Metadata;
use super::tensors::TensorPlace;
use super::{FileKind, GenerationDefaults, ModelFiles, TextSettings, WeightFiles};
use crate::architectures::{self, ARCHITECTURES};
use crate::config::ModelConfig;
use crate::tokenizer::{GgufTokenizer, GgufTokenizerModel, TokenType, TokenizerSource};

/// Control tokens that end a turn, for files that name only the end of a text.
const TURN_ENDS: [&str; 6] =
    ["<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"];

pub(super) fn open(path: &Path) -> Result<ModelFiles, OpenError> {
    let map = MappedFile::open(path).map_err(OpenError::io(path))?;
    let (config, text, mut weights) = read(path, map.as_slice())?;
    weights.maps.push(map);
    ModelFiles::new(path, FileKind::Gguf, config, text, weights)
}

fn read(path: &Path, bytes: &[u8]) -> Result<(ModelConfig, TextSettings, WeightFiles), OpenError> {
    let gguf = Gguf::parse(bytes).map_err(|error| parse_error(path, error))?;
    let metadata = Metadata::new(path, &gguf)?;
    if metadata.whole_opt("split.count")?.is_some_and(|count| count > 1) {
        return Err(metadata.bad("split.count", "1: merge the parts into one file"));
    }
    let name = metadata.architecture();
    let architecture = architectures::by_gguf_name(name).ok_or_else(|| OpenError::UnknownArchitecture {
        path: path.to_owned(),
        found: format!("{:?}", name.chars().take(100).collect::<String>()),
        supported: ARCHITECTURES.map(|architecture| architecture.gguf_names.join(", ")).join(", "),
    })?;
    let config = (architecture.from_gguf)(metadata)?;
    let text = text_settings(metadata, &config)?;
    let place = |tensor: &super::gguf::GgufTensor<'_>| {
        let (format, shape) = (tensor.format, tensor.shape.clone());
        (tensor.name.to_owned(), TensorPlace { format, shape, file: 0, offset: tensor.offset, len: tensor.len })
    };
    let tensors = gguf.tensors().iter().map(place).collect();
    Ok((config, text, WeightFiles { maps: Vec::new(), tensors }))
}

fn parse_error(path: &Path, error: GgufError) -> OpenError {
    match error {
        GgufError::Format { tensor, format } => OpenError::UnsupportedFormat {
            path: path.to_owned(),
            tensor,
            format: format!("number {}", format.found),
            supported: format.supported,
        },
        other => OpenError::corrupt(path, other),
    }
}

fn text_settings(metadata: Metadata<'_>, config: &ModelConfig) -> Result<TextSettings, OpenError> {
    let tokenizer = tokenizer(metadata, config.vocab_size)?;
    let token_text = |id: Option<Token>| id.map(|id| tokenizer.tokens[id as usize].clone());
    let mut stop_token_ids: Vec<Token> = tokenizer.eos.into_iter().collect();
    for key in ["tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"] {
        stop_token_ids.extend(token_id(metadata, key, tokenizer.tokens.len())?);
    }
    let types = tokenizer.token_types.iter().zip(&tokenizer.tokens).zip(0..);
    stop_token_ids.extend(
        types
            .filter(|((kind, text), _)| **kind == TokenType::Control && TURN_ENDS.contains(&text.as_str()))
            .map(|(_, id)| id),
    );
    let stem = || metadata.path.file_stem().map_or_else(|| "model".into(), |stem| stem.to_string_lossy().into_owned());
    let name = metadata.text_opt("general.name")?.map(str::trim).filter(|name| !name.is_empty());
    Ok(TextSettings {
        chat_template: metadata.text_opt("tokenizer.chat_template")?.map(str::to_owned),
        bos_text: token_text(tokenizer.bos),
        eos_text: token_text(tokenizer.eos),
        stop_token_ids,
        defaults: GenerationDefaults::default(),
        suggested_name: name.map_or_else(stem, str::to_owned),
        tokenizer: TokenizerSource::Gguf(Box::new(tokenizer)),
    })
}

fn tokenizer(metadata: Metadata<'_>, vocab_size: usize) -> Result<GgufTokenizer, OpenError> {
    const MODEL: &str = "tokenizer.ggml.model";
    const TOKENS: &str = "tokenizer.ggml.tokens";
    let model = match metadata.text(MODEL)? {
        "gpt2" => GgufTokenizerModel::Gpt2,
        "llama" => GgufTokenizerModel::Llama,
        _ => return Err(metadata.bad(MODEL, "gpt2 or llama")),
    };
    let tokens = texts(metadata, TOKENS)?.ok_or_else(|| OpenError::missing_key(metadata.path, TOKENS))?;
    if tokens.is_empty() || tokens.len() > vocab_size {
        return Err(metadata.bad(TOKENS, &format!("1 to {vocab_size} tokens, as many as the embedding has rows")));
    }
    let n_tokens = tokens.len();
    let pre = metadata.text_opt("tokenizer.ggml.pre")?.unwrap_or("default").to_owned();
    let flag = |name: &str| metadata.flag_opt(&format!("tokenizer.ggml.{name}"));
    let id = |name: &str| token_id(metadata, &format!("tokenizer.ggml.{name}_token_id"), n_tokens);
    let sentence_piece = model == GgufTokenizerModel::Llama;
    let merges = texts(metadata, "tokenizer.ggml.merges")?;
    if !sentence_piece && merges.is_none() {
        return Err(OpenError::missing_key(metadata.path, "tokenizer.ggml.merges"));
    }
    Ok(GgufTokenizer {
        model,
        scores: scores(metadata, n_tokens)?,
        token_types: token_types(metadata, n_tokens)?,
        merges: merges.unwrap_or_default(),
        bos: id("bos")?,
        eos: id("eos")?,
        unk: id("unknown")?,
        pad: id("padding")?,
        add_bos: flag("add_bos_token")?.unwrap_or(sentence_piece || matches!(pre.as_str(), "llama3" | "llama-bpe")),
        add_eos: flag("add_eos_token")?.unwrap_or(false),
        add_space_prefix: flag("add_space_prefix")?.unwrap_or(sentence_piece),
        pre,
        tokens,
    })
}

fn texts(metadata: Metadata<'_>, key: &str) -> Result<Option<Vec<String>>, OpenError> {
    let Some(array) = metadata.array_opt(key)? else { return Ok(None) };
    let text = |value| match value {
        Value::Text(text) => Ok(text.to_owned()),
        _ => Err(metadata.bad(key, "an array of texts")),
    };
    array.iter().map(text).collect::<Result<_, _>>().map(Some)
}

fn scores(metadata: Metadata<'_>, n_tokens: usize) -> Result<Vec<f32>, OpenError> {
    const KEY: &str = "tokenizer.ggml.scores";
    let Some(array) = metadata.array_opt(KEY)? else { return Ok(Vec::new()) };
    let score = |value| match value {
        Value::Float(score) if !score.is_nan() => Some(score as f32),
        _ => None,
    };
    let scores: Option<Vec<f32>> = array.iter().map(score).collect();
    scores
        .filter(|scores| scores.len() == n_tokens)
        .ok_or_else(|| metadata.bad(KEY, &format!("{n_tokens} numbers, one for each token")))
}

fn token_types(metadata: Metadata<'_>, n_tokens: usize) -> Result<Vec<TokenType>, OpenError> {
    const KEY: &str = "tokenizer.ggml.token_type";
    let Some(array) = metadata.array_opt(KEY)? else { return Ok(Vec::new()) };
    let kind = |value| match value {
        Value::Signed(1) | Value::Unsigned(1) => Some(TokenType::Normal),
        Value::Signed(2) | Value::Unsigned(2) => Some(TokenType::Unknown),
        Value::Signed(3) | Value::Unsigned(3) => Some(TokenType::Control),
        Value::Signed(4) | Value::Unsigned(4) => Some(TokenType::UserDefined),
        Value::Signed(5) | Value::Unsigned(5) => Some(TokenType::Unused),
        Value::Signed(6) | Value::Unsigned(6) => Some(TokenType::Byte),
        _ => None,
    };
    let types: Option<Vec<TokenType>> = array.iter().map(kind).collect();
    types
        .filter(|types| types.len() == n_tokens)
        .ok_or_else(|| metadata.bad(KEY, &format!("{n_tokens} numbers from 1 to 6, one for each token")))
}

/// A token id; some writers say "none" as the largest 32-bit number.
fn token_id(metadata: Metadata<'_>, key: &str, n_tokens: usize) -> Result<Option<Token>, OpenError> {
    let Some(id) = metadata.whole_opt(key)?.filter(|&id| id != u64::from(u32::MAX)) else { return Ok(None) };
    match Token::try_from(id) {
        Ok(token) if (token as usize) < n_tokens => Ok(Some(token)),
        _ => Err(metadata.bad(key, &format!("below the {n_tokens} tokens"))),
    }
}
