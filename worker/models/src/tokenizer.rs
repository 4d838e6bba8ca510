//! What turns text into tokens, as the files hold it; the router builds its tokenizer from this.

use std::sync::Arc;

use contract::ids::Token;
use contract::model::Fingerprint;

/// Where a tokenizer comes from.
#[derive(Clone, Debug)]
pub enum TokenizerSource {
    /// `tokenizer.json` of a Hugging Face folder.
    HuggingFace {
        /// The file's bytes.
        json: Arc<[u8]>,
    },
    /// Metadata of a GGUF file.
    Gguf(Box<GgufTokenizer>),
}

/// Kind of a GGUF tokenizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GgufTokenizerModel {
    /// Byte-level byte-pair encoding with a list of merges.
    Gpt2,
    /// SentencePiece with scores and byte fall-back.
    Llama,
}

/// Kind of a vocabulary entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenType {
    /// Text.
    Normal,
    /// Stands for what cannot be encoded.
    Unknown,
    /// Never made from text, nor shown as text.
    Control,
    /// Added text that is matched whole.
    UserDefined,
    /// Never occurs.
    Unused,
    /// A single byte, written `<0xNN>`.
    Byte,
}

/// A tokenizer from GGUF metadata.
#[derive(Clone, Debug)]
pub struct GgufTokenizer {
    /// Kind of tokenizer.
    pub model: GgufTokenizerModel,
    /// Name of the rule that splits text before merging (`smollm`, `llama-bpe`, `qwen2`, …).
    pub pre: String,
    /// Vocabulary, by token id.
    pub tokens: Vec<String>,
    /// Score of each token; empty when the file has none.
    pub scores: Vec<f32>,
    /// Kind of each token; empty when the file has none.
    pub token_types: Vec<TokenType>,
    /// Merges, best first, as `left right`; empty for SentencePiece.
    pub merges: Vec<String>,
    /// Begins a text.
    pub bos: Option<Token>,
    /// Ends a text.
    pub eos: Option<Token>,
    /// Stands for what cannot be encoded.
    pub unk: Option<Token>,
    /// Fills up.
    pub pad: Option<Token>,
    /// Whether `bos` goes before every text.
    pub add_bos: bool,
    /// Whether `eos` goes after every text.
    pub add_eos: bool,
    /// Whether a space goes before every text.
    pub add_space_prefix: bool,
}

impl TokenizerSource {
    /// Stands for everything in this source.
    pub fn fingerprint(&self) -> Fingerprint {
        match self {
            Self::HuggingFace { json } => Fingerprint::of(&[b"tokenizer.json", json]),
            Self::Gguf(tokenizer) => tokenizer.fingerprint(),
        }
    }
}

impl GgufTokenizer {
    fn fingerprint(&self) -> Fingerprint {
        let settings = format!(
            "{:?} {} {:?} {} {} {}",
            self.model,
            self.pre,
            [self.bos, self.eos, self.unk, self.pad],
            self.add_bos,
            self.add_eos,
            self.add_space_prefix
        );
        let tokens = hash_texts(&self.tokens);
        let merges = hash_texts(&self.merges);
        let scores: Vec<u8> = self.scores.iter().flat_map(|score| score.to_le_bytes()).collect();
        let types: Vec<u8> = self.token_types.iter().map(|&kind| kind as u8).collect();
        Fingerprint::of(&[b"gguf", settings.as_bytes(), &tokens, &merges, &scores, &types])
    }
}

fn hash_texts(texts: &[String]) -> [u8; 32] {
    // Joined first: for words of a few bytes each update would cost more than hashing them.
    const JOINED_BYTES: usize = 1 << 16;
    let mut hasher = blake3::Hasher::new();
    let mut joined = Vec::with_capacity(JOINED_BYTES);
    for text in texts {
        joined.extend_from_slice(&(text.len() as u64).to_le_bytes());
        joined.extend_from_slice(text.as_bytes());
        if joined.len() >= JOINED_BYTES {
            hasher.update(&joined);
            joined.clear();
        }
    }
    *hasher.update(&joined).finalize().as_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_hashed_with_their_lengths() {
        let owned = |texts: &[&str]| texts.iter().map(|&text| text.to_owned()).collect::<Vec<_>>();
        let words: Vec<String> = (0..20_000).map(|n| format!("word {n}")).collect();
        for texts in [owned(&[]), owned(&["", "a"]), words, vec!["x".repeat(100_000), "y".into()]] {
            let bytes: Vec<u8> =
                texts.iter().flat_map(|text| [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()).collect();
            assert_eq!(hash_texts(&texts), *blake3::hash(&bytes).as_bytes());
        }
        assert_ne!(hash_texts(&owned(&["ab", "c"])), hash_texts(&owned(&["a", "bc"])));
    }
}
