//! Where a text may be cut so that the tokens of its parts, one after another, are the tokens of the whole.
//!
//! A cut is after an ASCII letter, an ASCII digit or a CJK ideograph (`before`) and ahead of ASCII that is neither, but
//! for the apostrophe, or of a CJK comma or full stop (`after`); no more of the text is looked at. That this is enough
//! follows from what a tokenizer does, step by step, and holds only for steps that are known:
//! - Added tokens are found first. None has `before` and `after` next to each other, so none lies across the cut, and
//!   the leftmost longest ones on either side are what they are without the other side. Their rules about neighbours
//!   end at the cut too: `before` is no white space that one on the right could take, and tokenizers with added tokens
//!   that look at what follows a letter are not cut.
//! - Composing characters (NFC) changes neither of the two and joins nothing to ASCII or a CJK mark.
//! - Patterns that cut words are matched from left to right without looking back. Those listed always end a match
//!   between the two: `before` only occurs in runs of its own kind, which `after` cannot go on, and only white space is
//!   followed by a look ahead. So the match before the cut ends there whatever follows, and the next one begins there.
//! - Where no pattern cuts (SentencePiece), merges may join anything that is a token. No token has `before` and `after`
//!   next to each other, and both are tokens by themselves, so no merge goes across the cut, and merges on one side do
//!   not depend on those on the other. A mark put before each text goes before its first part only, so the later ones
//!   are encoded with one character before them whose tokens are then dropped.
//!
//! A tokenizer of which one of these cannot be shown is not cut.

use std::collections::HashSet;

use serde_json::Value;
use tokenizers::{AddedVocabulary, ModelWrapper, Tokenizer as HuggingFace};

use super::pre_tokenizer::ends_words;

/// Longer parts are not made: the pattern matcher gives up in runs of a million characters, and what it does then
/// depends on the whole text.
const PART_BYTES_MAX: usize = 64 << 10;

/// What SentencePiece puts in the place of a space.
const SPACE_MARK: &str = "\u{2581}";

/// The cuts of one tokenizer.
#[derive(Debug)]
pub(super) struct Cuts {
    after: After,
    /// Pairs that a token holds next to each other.
    joined: HashSet<(char, char)>,
    /// Characters that are tokens by themselves, for tokenizers that merge alone; else none.
    alone: Option<HashSet<char>>,
    /// A mark is put before every text, and before what follows an added token.
    pub(super) is_start_marked: bool,
}

/// How a text is changed before it is cut into pieces.
#[derive(Clone, Copy, Debug, Default)]
struct Marks {
    is_for_spaces: bool,
    is_for_start: bool,
}

/// What a cut is ahead of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum After {
    /// ASCII white space.
    Whitespace,
    /// ASCII but for letters, digits and the apostrophe; a CJK comma or full stop.
    NoWord,
}

impl Cuts {
    /// Reads from its parts how `tokenizer` may be cut; `texts` are its tokens as the vocabulary spells them.
    pub(super) fn of(tokenizer: &HuggingFace, texts: &[Option<String>]) -> Option<Self> {
        let normalizers = steps(serde_json::to_value(tokenizer.get_normalizer()).ok()?, "normalizers");
        let pre_tokenizers = steps(serde_json::to_value(tokenizer.get_pre_tokenizer()).ok()?, "pretokenizers");
        let marks = Marks::of(&normalizers)?;
        let mut joined = joined_by_added(tokenizer.get_added_vocabulary(), marks)?;
        let mut alone = None;
        let after = match marks.is_for_spaces {
            true if pre_tokenizers.iter().all(is_at_spaces) && is_merging_alone(tokenizer.get_model()) => {
                joined.extend(texts.iter().flatten().flat_map(|text| pairs(text)));
                alone = Some(characters(texts));
                After::NoWord
            }
            false if !marks.is_for_start => words_end(&pre_tokenizers)?,
            _ => return None,
        };
        Some(Self { after, joined, alone, is_start_marked: marks.is_for_start })
    }

    /// The parts of `text`, each the shortest of at least `bytes_min`; only the last may be shorter.
    ///
    /// None when one would be too long.
    pub(super) fn split<'a>(&self, text: &'a str, bytes_min: usize) -> Option<Vec<&'a str>> {
        let mut parts = Vec::with_capacity(text.len() / bytes_min.max(1) + 1);
        let mut rest = text;
        while let Some(cut) = self.first(rest, bytes_min) {
            let (part, after) = rest.split_at(cut);
            parts.push(part);
            rest = after;
        }
        parts.push(rest);
        parts.iter().all(|part| part.len() <= PART_BYTES_MAX).then_some(parts)
    }

    /// The first cut of `text` at `from` bytes or later.
    fn first(&self, text: &str, from: usize) -> Option<usize> {
        let from = text.ceil_char_boundary(from);
        let mut before = text[..from].chars().next_back()?;
        for (offset, after) in text[from..].char_indices() {
            if self.has(before, after) {
                return Some(from + offset);
            }
            before = after;
        }
        None
    }

    fn has(&self, before: char, after: char) -> bool {
        is_word(before)
            && self.after.has(after)
            && !self.joined.contains(&(before, after))
            && self.alone.as_ref().is_none_or(|alone| alone.contains(&before) && alone.contains(&after))
    }
}

impl Marks {
    /// None when more is done than putting marks and composing characters.
    fn of(normalizers: &[Value]) -> Option<Self> {
        let mut marks = Self::default();
        for step in normalizers {
            match step["type"].as_str()? {
                "NFC" => {}
                "Prepend" if step["prepend"] == SPACE_MARK => marks.is_for_start = true,
                "Replace" if step["pattern"]["String"] == " " && step["content"] == SPACE_MARK => {
                    marks.is_for_spaces = true
                }
                _ => return None,
            }
        }
        Some(marks)
    }
}

impl After {
    fn has(self, char: char) -> bool {
        match self {
            Self::Whitespace => char.is_ascii_whitespace(),
            Self::NoWord => {
                char.is_ascii() && !char.is_ascii_alphanumeric() && char != '\'' || matches!(char, '。' | '，')
            }
        }
    }
}

fn is_word(char: char) -> bool {
    char.is_ascii_alphanumeric() || ('\u{4E00}'..='\u{9FA5}').contains(&char)
}

/// The steps of a sequence, in order.
fn steps(part: Value, key: &str) -> Vec<Value> {
    match part {
        Value::Null => Vec::new(),
        Value::Object(mut part) if part.get("type").is_some_and(|kind| kind == "Sequence") => match part.remove(key) {
            Some(Value::Array(parts)) => parts.into_iter().flat_map(|part| steps(part, key)).collect(),
            _ => Vec::new(),
        },
        part => vec![part],
    }
}

/// Cuts at spaces only, of which there are none once they are marked.
fn is_at_spaces(step: &Value) -> bool {
    step["type"] == "Split" && step["pattern"]["String"] == " "
}

/// Pairs next to each other in an added token; none when what follows one depends on it.
fn joined_by_added(added: &AddedVocabulary, marks: Marks) -> Option<HashSet<(char, char)>> {
    let mut joined = HashSet::new();
    for (&token, added_token) in added.get_added_tokens_decoder() {
        let is_last_word = added_token.content.chars().next_back().is_some_and(is_word);
        if added_token.single_word || is_last_word && (added_token.rstrip || marks.is_for_start) {
            return None;
        }
        joined.extend(pairs(&added_token.content));
        joined.extend(pairs(&added.simple_id_to_token(token)?));
    }
    Some(joined)
}

/// Nothing but merges makes the tokens of a piece, and each is the text of its parts.
fn is_merging_alone(model: &ModelWrapper) -> bool {
    let ModelWrapper::BPE(model) = model else { return false };
    let is_empty = |affix: &Option<String>| affix.as_ref().is_none_or(String::is_empty);
    !model.ignore_merges && is_empty(&model.continuing_subword_prefix) && is_empty(&model.end_of_word_suffix)
}

/// Tokens of one character that a cut could be next to, a space for its mark.
fn characters(texts: &[Option<String>]) -> HashSet<char> {
    let single = texts.iter().flatten().filter(|text| text.chars().nth(1).is_none());
    let chars = single.filter_map(|text| text.replace(SPACE_MARK, " ").chars().next());
    chars.filter(|&char| is_word(char) || After::NoWord.has(char)).collect()
}

/// Neighbours in a token's text that a cut could be between, with spaces for their marks.
fn pairs(text: &str) -> Vec<(char, char)> {
    let chars: Vec<char> = text.replace(SPACE_MARK, " ").chars().collect();
    let pairs = chars.windows(2).map(|pair| (pair[0], pair[1]));
    pairs.filter(|&(before, after)| is_word(before) && After::NoWord.has(after)).collect()
}

/// Ahead of what each word ends; none when a step is not known, or words go on.
fn words_end(pre_tokenizers: &[Value]) -> Option<After> {
    let (mut is_ended, mut after) = (false, After::NoWord);
    for step in pre_tokenizers {
        match step["type"].as_str()? {
            "Digits" => {}
            "ByteLevel" if step["add_prefix_space"] == false => is_ended |= step["use_regex"] == true,
            "WhitespaceSplit" | "Whitespace" => (is_ended, after) = (true, After::Whitespace),
            "Split" if step["behavior"] == "Isolated" && step["invert"] == false => {
                is_ended |= ends_words(step["pattern"]["Regex"].as_str()?)?;
            }
            _ => return None,
        }
    }
    is_ended.then_some(after)
}
