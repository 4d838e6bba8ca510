//! The text of one stream of tokens: characters whole, special tokens left out, stop strings never half-emitted.
//!
//! Hot path: no lock, no log.

use std::sync::Arc;

use contract::ids::Token;

use super::detokenizer::Detokenizer;
use super::model::TextModel;
use super::stop::StopScanner;

/// What a stream's text shall be.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OutputOptions {
    /// Strings that end the text.
    pub stop: Vec<String>,
    /// Leaves out special tokens.
    pub skip_special: bool,
    /// Keeps the stop string that was found at the text's end.
    pub include_stop: bool,
    /// Tokens before which no stop string is looked for, as in vLLM.
    pub min_tokens: u32,
    /// The text goes on where a prompt ends, so a leading space of SentencePiece models stays.
    pub continues: bool,
}

/// New text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TextDelta {
    /// May be empty while a character or a stop string is incomplete.
    pub text: String,
    /// A stop string was found: this is the last text.
    pub stopped: Option<StopHit>,
}

/// A stop string that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StopHit {
    /// The stop string.
    pub stop: String,
    /// Tokens pushed since the stream began, up to and including the one that completed the stop string.
    pub n_tokens: usize,
}

/// Text of one stream.
#[derive(Clone, Debug)]
pub struct OutputText {
    model: Arc<TextModel>,
    detokenizer: Detokenizer,
    scanner: StopScanner,
    stop: Vec<String>,
    skip_special: bool,
    min_tokens: usize,
    n_tokens: usize,
    /// Text of the token at hand, kept for its memory.
    piece: String,
}

impl OutputText {
    /// Begins a stream.
    pub fn new(model: Arc<TextModel>, options: OutputOptions) -> Self {
        let OutputOptions { stop, skip_special, include_stop, min_tokens, continues } = options;
        Self {
            model,
            detokenizer: Detokenizer::new(continues),
            scanner: StopScanner::new(&stop, include_stop),
            stop,
            skip_special,
            min_tokens: min_tokens as usize,
            n_tokens: 0,
            piece: String::new(),
        }
    }

    /// Takes the next tokens; after a stop string everything is dropped.
    pub fn push(&mut self, tokens: &[Token]) -> TextDelta {
        let mut delta = TextDelta::default();
        for &token in tokens {
            if self.scanner.is_stopped() {
                break;
            }
            self.n_tokens += 1;
            if self.skip_special && self.model.is_special(token) {
                continue;
            }
            self.piece.clear();
            self.detokenizer.push(self.model.token_bytes(), token, &mut self.piece);
            if self.n_tokens <= self.min_tokens {
                delta.text.push_str(&self.piece);
                continue;
            }
            if let Some(index) = self.scanner.push(&self.piece, &mut delta.text) {
                delta.stopped = Some(StopHit { stop: self.stop[index].clone(), n_tokens: self.n_tokens });
            }
        }
        delta
    }

    /// Whatever was held back, when no more tokens come: an incomplete character as U+FFFD, the beginning of a stop
    /// string.
    pub fn finish(&mut self) -> String {
        let mut text = String::new();
        if !self.scanner.is_stopped() {
            self.piece.clear();
            self.detokenizer.finish(self.model.token_bytes(), &mut self.piece);
            self.scanner.push(&self.piece, &mut text);
            text.push_str(&self.scanner.finish());
        }
        text
    }
}
