//! The bytes of every token, made once from what the tokenizer's decoder would do.

use contract::ids::Token;
use serde_json::Value;

use super::error::TextError;

const SUPPORTED: &str = "none, ByteLevel, Metaspace, and a Sequence of Replace with a string, ByteFallback, Fuse, then Strip of one leading space";

/// The byte-level alphabet of GPT-2: printable bytes stand for themselves, the others for characters from U+0100 on.
pub(super) fn byte_of_char(char: char) -> Option<u8> {
    // Of 0..=255 these are unprintable: 0..=32, 127..=160 and 173, given U+0100.. in that order.
    let code = u32::from(char);
    match code {
        33..=126 | 161..=172 | 174..=255 => u8::try_from(code).ok(),
        0x100..=0x120 => u8::try_from(code - 0x100).ok(),
        0x121..=0x142 => u8::try_from(code - 0x121 + 127).ok(),
        0x143 => Some(173),
        _ => None,
    }
}

/// What U+FFFD stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Malformed {
    /// A maximal malformed sequence.
    OnePerSequence,
    /// A byte.
    OnePerByte,
}

/// What becomes of the space that SentencePiece puts before a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LeadingSpace {
    /// It is kept.
    Kept,
    /// The text's first character is dropped when it is a space.
    OneDropped,
    /// All marks of the first token are dropped.
    DroppedFromFirstToken,
}

/// Every token's bytes, and how they join.
#[derive(Debug)]
pub(super) struct TokenBytes {
    bytes: Vec<u8>,
    /// Token `t` is `bytes[ends[t - 1]..ends[t]]`.
    ends: Vec<u32>,
    is_known: Vec<bool>,
    separator: &'static [u8],
    malformed: Malformed,
    leading_space: LeadingSpace,
    mark: char,
    /// Texts of tokens, only where the first one is treated apart.
    texts: Vec<String>,
}

/// One step of a decoder, applied to each token by itself.
enum Step {
    ByteLevel,
    Replace(String, String),
    ByteFallback,
    Metaspace(char),
}

struct Plan {
    steps: Vec<Step>,
    separator: &'static [u8],
    leading_space: LeadingSpace,
    mark: char,
}

impl TokenBytes {
    /// Applies `decoder` (as in a tokenizer.json) to each of `texts`, which is indexed by token.
    ///
    /// # Errors
    /// [`TextError::UnsupportedTokenizer`] when a token's bytes depend on its neighbours.
    pub(super) fn new(decoder: &Value, texts: Vec<Option<String>>) -> Result<Self, TextError> {
        let plan = Plan::new(decoder)?;
        let malformed = match plan.steps.iter().any(|step| matches!(step, Step::ByteFallback)) {
            true => Malformed::OnePerByte,
            false => Malformed::OnePerSequence,
        };
        let (mut bytes, mut ends, mut is_known) = (Vec::new(), Vec::with_capacity(texts.len()), Vec::new());
        for text in &texts {
            if let Some(text) = text {
                bytes.extend(plan.bytes(text));
            }
            is_known.push(text.is_some());
            let end = u32::try_from(bytes.len())
                .map_err(|_| TextError::InvalidTokenizer { reason: "its tokens exceed 4 GiB".to_owned() })?;
            ends.push(end);
        }
        let texts = match plan.leading_space {
            LeadingSpace::DroppedFromFirstToken => texts.into_iter().map(Option::unwrap_or_default).collect(),
            _ => Vec::new(),
        };
        let Plan { separator, leading_space, mark, .. } = plan;
        Ok(Self { bytes, ends, is_known, separator, malformed, leading_space, mark, texts })
    }

    /// Ids there are, unused ones below the last included.
    pub(super) fn n_tokens(&self) -> usize {
        self.ends.len()
    }

    /// Bytes of the longest token; at least 1.
    pub(super) fn longest(&self) -> usize {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        self.ends.iter().zip(starts).map(|(end, start)| (end - start) as usize).max().unwrap_or(0).max(1)
    }

    /// The token's bytes, or none when there is no such token.
    pub(super) fn bytes(&self, token: Token) -> Option<&[u8]> {
        let index = usize::try_from(token).ok()?;
        if !*self.is_known.get(index)? {
            return None;
        }
        let start = index.checked_sub(1).map_or(0, |before| self.ends[before]);
        Some(&self.bytes[start as usize..self.ends[index] as usize])
    }

    /// The token's text without marks for spaces, for [`LeadingSpace::DroppedFromFirstToken`].
    pub(super) fn without_marks(&self, token: Token) -> String {
        usize::try_from(token)
            .ok()
            .and_then(|index| self.texts.get(index))
            .map_or_else(String::new, |text| text.chars().filter(|&char| char != self.mark).collect())
    }

    /// What stands between two tokens.
    pub(super) fn separator(&self) -> &'static [u8] {
        self.separator
    }

    /// What U+FFFD stands for.
    pub(super) fn malformed(&self) -> Malformed {
        self.malformed
    }

    /// What becomes of a leading space.
    pub(super) fn leading_space(&self) -> LeadingSpace {
        self.leading_space
    }
}

impl Plan {
    fn new(decoder: &Value) -> Result<Self, TextError> {
        let mut plan = Self { steps: Vec::new(), separator: b"", leading_space: LeadingSpace::Kept, mark: '▁' };
        let mut is_fused = false;
        for part in flatten(decoder) {
            match (kind(part), is_fused) {
                ("ByteLevel", false) => plan.steps.push(Step::ByteLevel),
                ("ByteFallback", false) => plan.steps.push(Step::ByteFallback),
                ("Replace", false) => plan.steps.push(replace(part)?),
                ("Metaspace", false) => plan.add_metaspace(part)?,
                ("Fuse", _) => is_fused = true,
                ("Strip", true) if part["content"] == " " && part["start"] == 1 && part["stop"] == 0 => {
                    plan.leading_space = LeadingSpace::OneDropped;
                }
                _ => return Err(unsupported(decoder)),
            }
        }
        if decoder.is_null() {
            plan.separator = b" ";
        }
        let is_order_fixed = |step: &Step| matches!(step, Step::ByteLevel | Step::ByteFallback);
        // A step after bytes were made would see characters that only the whole text has.
        if plan.steps.iter().rev().skip(1).any(is_order_fixed) {
            return Err(unsupported(decoder));
        }
        Ok(plan)
    }

    fn add_metaspace(&mut self, part: &Value) -> Result<(), TextError> {
        let mark = part["replacement"].as_str().and_then(|text| text.chars().next()).unwrap_or('▁');
        // `add_prefix_space` is the older spelling of `prepend_scheme`.
        let is_never = part["prepend_scheme"] == "never"
            || (part["prepend_scheme"].is_null() && part["add_prefix_space"] == false);
        if !self.steps.is_empty() {
            return Err(unsupported(part));
        }
        if !is_never {
            self.leading_space = LeadingSpace::DroppedFromFirstToken;
        }
        self.mark = mark;
        self.steps.push(Step::Metaspace(mark));
        Ok(())
    }

    fn bytes(&self, text: &str) -> Vec<u8> {
        let mut text = text.to_owned();
        for step in &self.steps {
            match step {
                Step::Replace(from, to) => text = text.replace(from.as_str(), to),
                Step::Metaspace(mark) => text = text.replace(*mark, " "),
                Step::ByteFallback => {
                    if let Some(byte) = byte_token(&text) {
                        return vec![byte];
                    }
                }
                Step::ByteLevel => {
                    if let Some(bytes) = text.chars().map(byte_of_char).collect::<Option<Vec<u8>>>() {
                        return bytes;
                    }
                }
            }
        }
        text.into_bytes()
    }
}

/// The byte that a token like `<0xE5>` stands for.
pub(super) fn byte_token(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() != 2 {
        return None;
    }
    u8::from_str_radix(digits, 16).ok()
}

fn flatten(decoder: &Value) -> Vec<&Value> {
    match decoder["decoders"].as_array() {
        Some(parts) if kind(decoder) == "Sequence" => parts.iter().flat_map(flatten).collect(),
        _ if decoder.is_null() => Vec::new(),
        _ => vec![decoder],
    }
}

fn kind(part: &Value) -> &str {
    part["type"].as_str().unwrap_or_default()
}

fn replace(part: &Value) -> Result<Step, TextError> {
    match (part["pattern"]["String"].as_str(), part["content"].as_str()) {
        (Some(from), Some(to)) if !from.is_empty() => Ok(Step::Replace(from.to_owned(), to.to_owned())),
        _ => Err(unsupported(part)),
    }
}

fn unsupported(decoder: &Value) -> TextError {
    let mut found = decoder.to_string();
    if let Some((end, _)) = found.char_indices().nth(200) {
        found.truncate(end);
    }
    TextError::UnsupportedTokenizer { what: "decoder", found, supported: SUPPORTED.to_owned() }
}
