//! Turns tokens into text one at a time without ever splitting a character. Hot path: no lock, no log.
//!
//! Others decode a window of tokens twice and emit the difference. Here every token is known as bytes beforehand
//! ([`TokenBytes`]), so a token costs its bytes once, and a character that is still incomplete waits as at most three
//! bytes.
//! Bytes that no continuation can make valid become U+FFFD as Hugging Face's decoders have it: one for each malformed
//! sequence in byte-level vocabularies, one for each byte where bytes are tokens of their own (`<0xE5>`).
//! In the latter Hugging Face also gives up the valid characters in the same run of byte tokens; here they stay, since
//! they may have been sent already.

use super::token_bytes::{LeadingSpace, Malformed, TokenBytes};
use contract::ids::Token;

/// State between two tokens of one text.
#[derive(Clone, Debug, Default)]
pub(super) struct Detokenizer {
    /// The beginning of a character, at most three bytes between calls.
    pending: Vec<u8>,
    /// A token has been taken.
    has_token: bool,
    /// Text has been given out.
    has_text: bool,
    /// Text stands before the first token, so its leading space stays.
    continues: bool,
}

impl Detokenizer {
    /// Begins a text; `continues` when other text stands before it.
    pub(super) fn new(continues: bool) -> Self {
        Self { continues, ..Self::default() }
    }

    /// Takes one token and appends to `out` the characters that are complete.
    pub(super) fn push(&mut self, tokens: &TokenBytes, token: Token, out: &mut String) {
        let Some(bytes) = tokens.bytes(token) else { return };
        if self.has_token {
            self.pending.extend_from_slice(tokens.separator());
        }
        let is_first = !std::mem::replace(&mut self.has_token, true) && !self.continues;
        match tokens.leading_space() {
            LeadingSpace::DroppedFromFirstToken if is_first => {
                self.pending.extend(tokens.without_marks(token).as_bytes());
            }
            _ => self.pending.extend_from_slice(bytes),
        }
        self.drain(tokens, out);
    }

    /// Appends U+FFFD for a character that stayed incomplete.
    pub(super) fn finish(&mut self, tokens: &TokenBytes, out: &mut String) {
        if !self.pending.is_empty() {
            push_malformed(tokens.malformed(), self.pending.len(), out);
            self.pending.clear();
        }
    }

    fn drain(&mut self, tokens: &TokenBytes, out: &mut String) {
        let start = out.len();
        let mut rest = self.pending.as_slice();
        while !rest.is_empty() {
            match std::str::from_utf8(rest) {
                Ok(text) => {
                    out.push_str(text);
                    rest = &[];
                }
                Err(error) => {
                    let (valid, after) = rest.split_at(error.valid_up_to());
                    out.push_str(std::str::from_utf8(valid).expect("valid up to here"));
                    rest = after;
                    let Some(n_bytes) = error.error_len() else { break };
                    push_malformed(tokens.malformed(), n_bytes, out);
                    rest = &rest[n_bytes..];
                }
            }
        }
        let n_taken = self.pending.len() - rest.len();
        self.pending.drain(..n_taken);
        if !self.has_text && out.len() > start {
            self.has_text = true;
            if tokens.leading_space() == LeadingSpace::OneDropped && !self.continues && out[start..].starts_with(' ') {
                out.remove(start);
            }
        }
    }
}

fn push_malformed(malformed: Malformed, n_bytes: usize, out: &mut String) {
    let n = match malformed {
        Malformed::OnePerSequence => 1,
        Malformed::OnePerByte => n_bytes,
    };
    out.extend(std::iter::repeat_n(char::REPLACEMENT_CHARACTER, n));
}
