//! Rebuilds from GGUF metadata the tokenizer that the same model has as a tokenizer.json.

use std::collections::HashSet;

use models::{GgufTokenizer, GgufTokenizerModel, TokenType};
use serde_json::json;
use tokenizers::decoders::byte_fallback::ByteFallback;
use tokenizers::decoders::byte_level::ByteLevel;
use tokenizers::decoders::fuse::Fuse;
use tokenizers::decoders::sequence::Sequence as Decoders;
use tokenizers::decoders::strip::Strip;
use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::normalizers::{Prepend, Replace, Sequence as Normalizers};
use tokenizers::{AddedToken, DecoderWrapper, NormalizerWrapper, PostProcessorWrapper, Tokenizer};

use super::error::TextError;
use super::pre_tokenizer::PreTokenizer;
use super::sentencepiece::{self, Scored};
use super::token_bytes::byte_token;

/// Stands for a space in SentencePiece vocabularies.
const SPACE_MARK: &str = "\u{2581}";

/// Builds it.
///
/// # Errors
/// [`TextError::UnsupportedTokenizer`] for a pre-tokenizer that is not known, [`TextError::InvalidTokenizer`] when the
/// metadata contradicts itself.
pub(super) fn build(source: &GgufTokenizer) -> Result<Tokenizer, TextError> {
    check(source)?;
    let mut tokenizer = match source.model {
        GgufTokenizerModel::Gpt2 => byte_level(source)?,
        GgufTokenizerModel::Llama => sentencepiece(source)?,
    };
    let added = source.tokens.iter().zip(types(source)).filter_map(|(text, kind)| added_token(text, kind));
    tokenizer.add_tokens(added).map_err(|error| invalid(format!("its added tokens: {error}")))?;
    if let Some(template) = post_processor(source)? {
        tokenizer.with_post_processor(Some(template));
    }
    Ok(tokenizer)
}

fn check(source: &GgufTokenizer) -> Result<(), TextError> {
    let n_tokens = source.tokens.len();
    if n_tokens == 0 {
        return Err(TextError::MissingTokenizer {
            expected: "tokenizer.ggml.tokens with at least one token".to_owned(),
        });
    }
    for (key, length) in [("scores", source.scores.len()), ("token_type", source.token_types.len())] {
        if length != 0 && length != n_tokens {
            return Err(invalid(format!("tokenizer.ggml.{key} has {length} entries for {n_tokens} tokens")));
        }
    }
    for (key, token) in [("bos", source.bos), ("eos", source.eos), ("unknown", source.unk)] {
        if let Some(token) = token.filter(|&token| token as usize >= n_tokens) {
            return Err(invalid(format!("tokenizer.ggml.{key}_token_id is {token}, there are {n_tokens} tokens")));
        }
    }
    Ok(())
}

fn byte_level(source: &GgufTokenizer) -> Result<Tokenizer, TextError> {
    let pre = PreTokenizer::named(if source.pre.is_empty() { "default" } else { &source.pre })?;
    let model = BPE::builder()
        .vocab_and_merges(vocabulary(source), listed_merges(source)?)
        .ignore_merges(pre.ignore_merges)
        .build()
        .map_err(|error| invalid(format!("its merges: {error}")))?;
    let mut tokenizer = Tokenizer::new(model);
    if let Some(normalizer) = pre.normalizer() {
        with_normalizer(&mut tokenizer, normalizer)?;
    }
    tokenizer.with_pre_tokenizer(Some(pre.build())).with_decoder(Some(ByteLevel::new(false, true, true)));
    Ok(tokenizer)
}

/// The merges as pairs, each checked to give a token: the library indexes with what it is given.
fn listed_merges(source: &GgufTokenizer) -> Result<Merges, TextError> {
    if source.merges.is_empty() {
        return Err(invalid("tokenizer.ggml.merges is absent or empty".to_owned()));
    }
    let known: HashSet<&str> = source.tokens.iter().map(String::as_str).collect();
    let mut merges = Merges::with_capacity(source.merges.len());
    for (index, merge) in source.merges.iter().enumerate() {
        // A token may itself begin with a space in no byte-level vocabulary, so the first space separates.
        let parts = merge.split_once(' ').filter(|(left, right)| {
            [*left, *right, &[*left, *right].concat()].iter().all(|part| known.contains(part)) && !right.is_empty()
        });
        let Some((left, right)) = parts else {
            return Err(invalid(format!("merge {index} {merge:?} is not of two tokens that make a third")));
        };
        merges.push((left.to_owned(), right.to_owned()));
    }
    Ok(merges)
}

fn sentencepiece(source: &GgufTokenizer) -> Result<Tokenizer, TextError> {
    if source.scores.is_empty() {
        return Err(invalid("tokenizer.ggml.scores is absent, so its merges are unknown".to_owned()));
    }
    let scored: Vec<Scored<'_>> = source
        .tokens
        .iter()
        .zip(&source.scores)
        .zip(types(source))
        .filter(|(_, kind)| matches!(kind, TokenType::Normal | TokenType::Unused))
        .map(|((text, &score), _)| Scored { text, score })
        .collect();
    let has_bytes = types(source).any(|kind| kind == TokenType::Byte)
        || source.tokens.iter().any(|text| byte_token(text).is_some());
    let mut model = BPE::builder()
        .vocab_and_merges(vocabulary(source), sentencepiece::merges(&scored))
        .byte_fallback(has_bytes)
        .fuse_unk(true);
    if let Some(unk) = source.unk {
        model = model.unk_token(source.tokens[unk as usize].clone());
    }
    let model = model.build().map_err(|error| invalid(format!("its merges: {error}")))?;
    let mut tokenizer = Tokenizer::new(model);
    let spaces = Replace::new(" ", SPACE_MARK).expect("a plain string is a valid pattern");
    let mut normalizers: Vec<NormalizerWrapper> = vec![spaces.into()];
    let back = Replace::new(SPACE_MARK, " ").expect("a plain string is a valid pattern");
    let mut decoders: Vec<DecoderWrapper> = vec![back.into(), ByteFallback::new().into(), Fuse::new().into()];
    if source.add_space_prefix {
        normalizers.insert(0, Prepend::new(SPACE_MARK.to_owned()).into());
        decoders.push(Strip::new(' ', 1, 0).into());
    }
    with_normalizer(&mut tokenizer, Normalizers::new(normalizers).into())?;
    tokenizer.with_decoder(Some(Decoders::new(decoders)));
    Ok(tokenizer)
}

/// Tokens by text; of two with one text the first counts, the other can only be decoded.
fn vocabulary(source: &GgufTokenizer) -> Vocab {
    (0..).zip(&source.tokens).map(|(token, text)| (text.clone(), token)).collect::<Vec<_>>().into_iter().rev().collect()
}

fn types(source: &GgufTokenizer) -> impl Iterator<Item = TokenType> {
    source.token_types.iter().copied().chain(std::iter::repeat(TokenType::Normal))
}

fn added_token(text: &str, kind: TokenType) -> Option<AddedToken> {
    let is_special = match kind {
        TokenType::Control | TokenType::Unknown => true,
        TokenType::UserDefined => false,
        TokenType::Normal | TokenType::Unused | TokenType::Byte => return None,
    };
    Some(AddedToken::from(text, is_special).normalized(false))
}

/// What puts BOS before a text and EOS after it.
fn post_processor(source: &GgufTokenizer) -> Result<Option<PostProcessorWrapper>, TextError> {
    let wanted = |is_wanted: bool, token: Option<u32>, key: &str| match (is_wanted, token) {
        (true, None) => Err(invalid(format!("tokenizer.ggml.add_{key}_token is set without a {key} token"))),
        (true, Some(token)) => Ok(Some((token, source.tokens[token as usize].as_str()))),
        (false, _) => Ok(None),
    };
    let bos = wanted(source.add_bos, source.bos, "bos")?;
    let eos = wanted(source.add_eos, source.eos, "eos")?;
    if bos.is_none() && eos.is_none() {
        return Ok(None);
    }
    let special =
        |token: Option<(u32, &str)>| token.map(|(_, text)| json!({"SpecialToken": {"id": text, "type_id": 0}}));
    let text = |id: &str| Some(json!({"Sequence": {"id": id, "type_id": 0}}));
    let single: Vec<_> = [special(bos), text("A"), special(eos)].into_iter().flatten().collect();
    let pair: Vec<_> = [special(bos), text("A"), text("B"), special(eos)].into_iter().flatten().collect();
    let tokens: serde_json::Map<_, _> = [bos, eos]
        .into_iter()
        .flatten()
        .map(|(token, text)| (text.to_owned(), json!({"id": text, "ids": [token], "tokens": [text]})))
        .collect();
    let template = json!({"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens});
    serde_json::from_value(template).map(Some).map_err(|error| invalid(format!("its BOS and EOS tokens: {error}")))
}

fn with_normalizer(tokenizer: &mut Tokenizer, normalizer: NormalizerWrapper) -> Result<(), TextError> {
    tokenizer.with_normalizer(Some(normalizer)).map(|_| ()).map_err(|error| invalid(format!("its normalizer: {error}")))
}

fn invalid(reason: String) -> TextError {
    TextError::InvalidTokenizer { reason }
}
