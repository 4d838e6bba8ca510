//! A model's tokenizer: text to tokens, and each token's bytes.

use std::panic::{AssertUnwindSafe, catch_unwind};

use contract::ids::Token;
use models::TokenizerSource;
use serde_json::Value;
use tokenizers::Tokenizer as HuggingFace;

use super::error::TextError;
use super::gguf_tokenizer;
use super::token_bytes::TokenBytes;

/// Highest token id that a vocabulary may have.
const TOKEN_MAX: u32 = 1 << 24;

/// An immutable tokenizer.
#[derive(Debug)]
pub(super) struct Tokenizer {
    inner: HuggingFace,
    bytes: TokenBytes,
    is_special: Vec<bool>,
}

impl Tokenizer {
    /// Reads a tokenizer.json or rebuilds one from GGUF metadata.
    ///
    /// # Errors
    /// [`TextError::InvalidTokenizer`] and [`TextError::UnsupportedTokenizer`].
    pub(super) fn open(source: &TokenizerSource) -> Result<Self, TextError> {
        // The library panics on some files that contradict themselves, for example merges longer than any token.
        let built = catch_unwind(AssertUnwindSafe(|| match source {
            TokenizerSource::HuggingFace { json } => Self::new(parse(json)?, None),
            TokenizerSource::Gguf(gguf) => Self::new(gguf_tokenizer::build(gguf)?, Some(&gguf.tokens)),
        }));
        built.unwrap_or_else(|_| Err(invalid("it contradicts itself".to_owned())))
    }

    /// `texts` are all tokens by id where the tokenizer's own table may lack some.
    fn new(mut inner: HuggingFace, texts: Option<&[String]>) -> Result<Self, TextError> {
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|error| invalid(error.to_string()))?;
        let texts = token_texts(&inner, texts)?;
        let added = inner.get_added_vocabulary();
        let is_special =
            texts.iter().map(|text| text.as_deref().is_some_and(|text| added.is_special_token(text))).collect();
        let decoder =
            serde_json::to_value(inner.get_decoder()).map_err(|error| invalid(format!("its decoder: {error}")))?;
        let bytes = TokenBytes::new(&decoder, texts)?;
        Ok(Self { inner, bytes, is_special })
    }

    /// Tokens of `text`, with BOS and EOS as the model wants them when `add_special`.
    ///
    /// # Errors
    /// [`TextError::Encode`].
    pub(super) fn encode(&self, text: &str, add_special: bool) -> Result<Vec<Token>, TextError> {
        let encoding = self
            .inner
            .encode_fast(text, add_special)
            .map_err(|error| TextError::Encode { bytes: text.len(), reason: error.to_string() })?;
        Ok(encoding.get_ids().to_vec())
    }

    /// What each token is in bytes.
    pub(super) fn bytes(&self) -> &TokenBytes {
        &self.bytes
    }

    /// The token steers the model and is not text.
    pub(super) fn is_special(&self, token: Token) -> bool {
        self.is_special.get(token as usize).copied().unwrap_or(false)
    }

    /// The token's text as the vocabulary has it.
    pub(super) fn text(&self, token: Token) -> Option<String> {
        self.inner.id_to_token(token)
    }
}

fn parse(json: &[u8]) -> Result<HuggingFace, TextError> {
    let document: Value = serde_json::from_slice(json).map_err(|error| invalid(format!("tokenizer.json: {error}")))?;
    // The library cuts merged tokens by the length of this prefix, unchecked; no language model here has one.
    let prefix = &document["model"]["continuing_subword_prefix"];
    if document["model"]["type"] == "BPE" && prefix.as_str().is_some_and(|prefix| !prefix.is_empty()) {
        return Err(TextError::UnsupportedTokenizer {
            what: "continuing_subword_prefix",
            found: prefix.to_string(),
            supported: "BPE without one".to_owned(),
        });
    }
    HuggingFace::from_bytes(json).map_err(|error| invalid(format!("tokenizer.json: {error}")))
}

/// The text that the decoder sees for each token.
fn token_texts(inner: &HuggingFace, listed: Option<&[String]>) -> Result<Vec<Option<String>>, TextError> {
    let vocabulary = inner.get_vocab(true);
    let n_listed = listed.map_or(0, <[String]>::len);
    let last = vocabulary.values().copied().max().unwrap_or(0);
    if last > TOKEN_MAX {
        return Err(invalid(format!("it has token {last}, the highest allowed is {TOKEN_MAX}")));
    }
    let mut texts: Vec<Option<String>> = vec![None; n_listed.max(last as usize + 1)];
    for (slot, text) in texts.iter_mut().zip(listed.unwrap_or_default()) {
        *slot = Some(text.clone());
    }
    let added = inner.get_added_vocabulary();
    for (text, token) in vocabulary {
        texts[token as usize] = Some(added.simple_id_to_token(token).unwrap_or(text));
    }
    Ok(texts)
}

fn invalid(reason: String) -> TextError {
    TextError::InvalidTokenizer { reason }
}
