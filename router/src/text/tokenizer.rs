//! A model's tokenizer: text to tokens, and each token's bytes.

use std::panic::{AssertUnwindSafe, catch_unwind};

use contract::ids::Token;
use models::TokenizerSource;
use serde_json::Value;
use tokenizers::{ModelWrapper, Tokenizer as HuggingFace};

use super::cuts::Cuts;
use super::error::TextError;
use super::frame::Frame;
use super::gguf_tokenizer;
use super::parts::Parts;
use super::pieces::Pieces;
use super::token_bytes::TokenBytes;

/// Highest token id that a vocabulary may have.
const TOKEN_MAX: u32 = 1 << 24;

/// Parts of long texts are this long or the little longer that it takes to a cut: what two texts that go apart encode
/// twice, against what looking a part up costs.
const PART_BYTES: usize = 1 << 10;

/// An immutable tokenizer, which may remember what it encoded.
#[derive(Debug)]
pub(super) struct Tokenizer {
    inner: HuggingFace,
    bytes: TokenBytes,
    is_special: Vec<bool>,
    /// What goes around a text's own tokens; none where that is for the library to say, and so is all else.
    frame: Option<Frame>,
    cuts: Option<Cuts>,
    pieces: Option<Pieces>,
    parts: Parts,
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
        let frame = Some(&inner).filter(|inner| is_fixed(inner.get_model())).and_then(Frame::of);
        let cuts = Cuts::of(&inner, &texts);
        let pieces = Pieces::of(&inner);
        let added = inner.get_added_vocabulary();
        let is_special =
            texts.iter().map(|text| text.as_deref().is_some_and(|text| added.is_special_token(text))).collect();
        let decoder =
            serde_json::to_value(inner.get_decoder()).map_err(|error| invalid(format!("its decoder: {error}")))?;
        let bytes = TokenBytes::new(&decoder, texts)?;
        Ok(Self { inner, bytes, is_special, frame, cuts, pieces, parts: Parts::new(0) })
    }

    /// Remembers parts of long texts in up to `bytes_max` bytes.
    pub(super) fn remembering(self, bytes_max: usize) -> Self {
        Self { parts: Parts::new(bytes_max), ..self }
    }

    /// Tokens of `text`, with BOS and EOS as the model wants them when `add_special`.
    ///
    /// # Errors
    /// [`TextError::Encode`].
    pub(super) fn encode(&self, text: &str, add_special: bool) -> Result<Vec<Token>, TextError> {
        let Some(frame) = &self.frame else { return self.encode_by_library(text, add_special) };
        let mut tokens = Vec::with_capacity(text.len() / 3);
        if add_special {
            tokens.extend_from_slice(&frame.before);
        }
        if self.append_parts(text, PART_BYTES, &self.parts, &mut tokens).is_none() {
            tokens.truncate(if add_special { frame.before.len() } else { 0 });
            tokens.extend(self.encode_whole(text)?);
        }
        if add_special {
            tokens.extend_from_slice(&frame.after);
        }
        Ok(tokens)
    }

    /// Appends the tokens of the parts of `text`, which are those of the whole; none when it is not cut, nothing is
    /// gained, or a part cannot be encoded.
    fn append_parts(&self, text: &str, part_bytes: usize, parts: &Parts, tokens: &mut Vec<Token>) -> Option<()> {
        let cuts = self.cuts.as_ref().filter(|_| parts.is_on() && text.len() > 2 * part_bytes)?;
        let mut before = None;
        for part in cuts.split(text, part_bytes)? {
            let is_marked = before.is_none() && cuts.is_start_marked;
            match parts.get(part).filter(|_| !is_marked) {
                Some(known) => tokens.extend_from_slice(&known.tokens),
                None => {
                    let new = match before.filter(|_| cuts.is_start_marked) {
                        Some(before) => self.encode_after(before, part)?,
                        None => self.encode_whole(part).ok()?,
                    };
                    tokens.extend_from_slice(&new);
                    if !is_marked {
                        parts.put(part, &new);
                    }
                }
            }
            before = part.chars().next_back();
        }
        Some(())
    }

    /// Tokens of a part that does not begin a text, when there is a cut after `before`.
    fn encode_after(&self, before: char, part: &str) -> Option<Vec<Token>> {
        let before = before.to_string();
        let n_before = self.encode_whole(&before).ok()?.len();
        let mut tokens = self.encode_whole(&(before + part)).ok()?;
        tokens.drain(..n_before);
        Some(tokens)
    }

    /// Tokens of `text` itself.
    fn encode_whole(&self, text: &str) -> Result<Vec<Token>, TextError> {
        if let Some(pieces) = &self.pieces {
            let mut tokens = Vec::with_capacity(text.len() / 3);
            if pieces.encode(&self.inner, text, &mut tokens).is_some() {
                return Ok(tokens);
            }
        }
        self.encode_by_library(text, false)
    }

    fn encode_by_library(&self, text: &str, add_special: bool) -> Result<Vec<Token>, TextError> {
        let encoding = self
            .inner
            .encode_fast(text, add_special)
            .map_err(|error| TextError::Encode { bytes: text.len(), reason: error.to_string() })?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Whether texts are encoded piece by piece, which takes a tenth of the time.
    pub(super) fn is_in_pieces(&self) -> bool {
        self.frame.is_some() && self.pieces.is_some()
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

/// Gives one text the same tokens each time.
fn is_fixed(model: &ModelWrapper) -> bool {
    !matches!(model, ModelWrapper::BPE(model) if model.dropout.is_some_and(|rate| rate != 0.0))
}

fn invalid(reason: String) -> TextError {
    TextError::InvalidTokenizer { reason }
}

#[cfg(test)]
#[path = "tokenizer_tests.rs"]
mod tests;
