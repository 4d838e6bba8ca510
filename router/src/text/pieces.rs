//! Byte-level tokens of a text, piece by piece, without the offsets and copies that the tokenizer library makes.
//!
//! The steps are those of the library, in its order: added tokens, composing characters, added tokens that are composed
//! too, then the pre-tokenizer's cuts, and merges within each piece. Merging is left to the library; a word's tokens are
//! looked up when it was merged before.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use contract::ids::Token;
use tokenizers::pre_tokenizers::split::SplitPattern;
use tokenizers::utils::SysRegex;
use tokenizers::{
    Model as _, NormalizedString, Normalizer as _, NormalizerWrapper, PreTokenizerWrapper, SplitDelimiterBehavior,
    Tokenizer as HuggingFace,
};

use super::added::Added;
use super::pre_tokenizer::GPT2;
use super::token_bytes::byte_of_char;
use super::words::Words;

/// Words that one memory of merged words holds.
const WORDS_MAX: usize = 1 << 15;
/// Longer words are merged anew each time.
const WORD_BYTES_MAX: usize = 64;

/// How one tokenizer cuts and merges.
#[derive(Debug)]
pub(super) struct Pieces {
    /// Added tokens as they are written.
    written: Added,
    /// Added tokens that are found once characters are composed.
    composed: Added,
    steps: Vec<Step>,
    /// Characters of the byte-level alphabet.
    alphabet: Vec<char>,
    /// Memories that nobody uses now.
    merged: Mutex<Vec<Merged>>,
}

#[derive(Debug)]
enum Step {
    Words(Words),
    /// Matches, and what is between them.
    Regex(SysRegex),
    /// Numeric characters, each by itself, and what is between them.
    Digits,
}

/// Tokens of words.
#[derive(Debug, Default)]
struct Merged {
    words: HashMap<Box<str>, (u32, u32)>,
    tokens: Vec<Token>,
}

impl Pieces {
    /// Reads the steps of `tokenizer`; none when it has others.
    pub(super) fn of(tokenizer: &HuggingFace) -> Option<Self> {
        if !matches!(tokenizer.get_normalizer(), None | Some(NormalizerWrapper::NFC(_))) {
            return None;
        }
        let (written, composed) = Added::of(tokenizer.get_added_vocabulary())?;
        let mut steps = Vec::new();
        let has_bytes = add_steps(tokenizer.get_pre_tokenizer()?, &mut steps)?;
        let alphabet =
            (0..=u8::MAX).filter_map(|byte| ('\0'..='\u{143}').find(|&char| byte_of_char(char) == Some(byte)));
        let alphabet: Vec<char> = alphabet.collect();
        (has_bytes && alphabet.len() == 256).then(|| Self {
            written,
            composed,
            steps,
            alphabet,
            merged: Mutex::default(),
        })
    }

    /// Appends the tokens of `text`; what is appended means nothing when the library refuses a piece, which gives none.
    pub(super) fn encode(&self, tokenizer: &HuggingFace, text: &str, tokens: &mut Vec<Token>) -> Option<()> {
        let free = self.merged.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut merged = free.unwrap_or_default();
        let encoded = self.encode_written(tokenizer, text, &mut merged, tokens);
        self.merged.lock().unwrap_or_else(PoisonError::into_inner).push(merged);
        encoded
    }

    fn encode_written(
        &self,
        tokenizer: &HuggingFace,
        text: &str,
        merged: &mut Merged,
        tokens: &mut Vec<Token>,
    ) -> Option<()> {
        self.written.split(text, |text, token| {
            if let Some(token) = token {
                tokens.push(token);
                return Some(());
            }
            match tokenizer.get_normalizer() {
                Some(normalizer) if !text.is_ascii() => {
                    let mut normalized = NormalizedString::from(text);
                    normalizer.normalize(&mut normalized).ok()?;
                    self.encode_composed(tokenizer, normalized.get(), merged, tokens)
                }
                _ => self.encode_composed(tokenizer, text, merged, tokens),
            }
        })
    }

    fn encode_composed(
        &self,
        tokenizer: &HuggingFace,
        text: &str,
        merged: &mut Merged,
        tokens: &mut Vec<Token>,
    ) -> Option<()> {
        self.composed.split(text, |text, token| {
            if let Some(token) = token {
                tokens.push(token);
                return Some(());
            }
            cut(&self.steps, text, &mut |piece| self.merge(tokenizer, piece, merged, tokens))
        })
    }

    fn merge(&self, tokenizer: &HuggingFace, piece: &str, merged: &mut Merged, tokens: &mut Vec<Token>) -> Option<()> {
        if let Some(&(start, end)) = merged.words.get(piece) {
            tokens.extend_from_slice(&merged.tokens[start as usize..end as usize]);
            return Some(());
        }
        let spelled: String = piece.bytes().map(|byte| self.alphabet[usize::from(byte)]).collect();
        let first = tokens.len();
        tokens.extend(tokenizer.get_model().tokenize(&spelled).ok()?.into_iter().map(|token| token.id));
        if piece.len() <= WORD_BYTES_MAX {
            merged.put(piece, &tokens[first..]);
        }
        Some(())
    }
}

impl Merged {
    fn put(&mut self, word: &str, tokens: &[Token]) {
        if self.words.len() >= WORDS_MAX {
            *self = Self::default();
        }
        let start = self.tokens.len();
        self.tokens.extend_from_slice(tokens);
        // Words and their number are bounded, so the sum of their tokens is.
        let [start, end] =
            [start, self.tokens.len()].map(|index| u32::try_from(index).expect("few words of few bytes"));
        self.words.insert(word.into(), (start, end));
    }
}

/// Adds what `part` does; whether it ends with bytes as characters, or none when it does something else.
fn add_steps(part: &PreTokenizerWrapper, steps: &mut Vec<Step>) -> Option<bool> {
    match part {
        PreTokenizerWrapper::Sequence(sequence) => {
            let (last, first) = sequence.as_ref().split_last()?;
            for part in first {
                if add_steps(part, steps)? {
                    return None;
                }
            }
            add_steps(last, steps)
        }
        PreTokenizerWrapper::ByteLevel(bytes) if !bytes.add_prefix_space => {
            if bytes.use_regex {
                steps.push(Step::Words(Words::of(GPT2)?));
            }
            Some(true)
        }
        PreTokenizerWrapper::Digits(digits) if digits.individual_digits => {
            steps.push(Step::Digits);
            Some(false)
        }
        PreTokenizerWrapper::Split(split) if split.behavior == SplitDelimiterBehavior::Isolated && !split.invert => {
            let SplitPattern::Regex(pattern) = &split.pattern else { return None };
            let words = Words::of(pattern).map(Step::Words);
            steps.push(words.or_else(|| SysRegex::new(pattern).ok().map(Step::Regex))?);
            Some(false)
        }
        _ => None,
    }
}

/// Gives the pieces that `steps` leave of `text`, until one gives none.
fn cut(steps: &[Step], text: &str, give: &mut dyn FnMut(&str) -> Option<()>) -> Option<()> {
    let Some((step, later)) = steps.split_first() else { return give(text) };
    let mut rest = text;
    match step {
        Step::Words(words) => {
            while !rest.is_empty() {
                let (piece, after) = rest.split_at(words.first(rest));
                cut(later, piece, give)?;
                rest = after;
            }
        }
        Step::Digits => {
            while let Some((at, digit)) = rest.char_indices().find(|(_, char)| char.is_numeric()) {
                let (before, after) = rest.split_at(at);
                let (digit, after) = after.split_at(digit.len_utf8());
                for piece in [before, digit] {
                    if !piece.is_empty() {
                        cut(later, piece, give)?;
                    }
                }
                rest = after;
            }
        }
        Step::Regex(pattern) => {
            let mut at = 0;
            for (start, end) in pattern.find_iter(text) {
                for piece in [&text[at..start], &text[start..end]] {
                    if !piece.is_empty() {
                        cut(later, piece, give)?;
                    }
                }
                at = end;
            }
            rest = &text[at..];
        }
    }
    if rest.is_empty() { Some(()) } else { cut(later, rest, give) }
}
