//! Finds added tokens in a text: from left to right, of those that begin at one place the longest.

use contract::ids::Token;
use tokenizers::AddedVocabulary;

/// Added tokens of one kind.
#[derive(Debug)]
pub(super) struct Added {
    /// By first byte, longest first.
    tokens: Vec<Vec<(Box<str>, Token)>>,
}

impl Added {
    /// Tokens found in a text as it is, and those found once it is normalized; none when some mind their neighbours.
    pub(super) fn of(added: &AddedVocabulary) -> Option<(Self, Self)> {
        let (mut written, mut normalized) = (Vec::new(), Vec::new());
        for (&id, token) in added.get_added_tokens_decoder() {
            let text = if token.normalized { added.simple_id_to_token(id)? } else { token.content.clone() };
            if token.single_word || token.lstrip || token.rstrip || text.is_empty() {
                return None;
            }
            let tokens = if token.normalized { &mut normalized } else { &mut written };
            tokens.push((text.into_boxed_str(), id));
        }
        Some((Self::new(written), Self::new(normalized)))
    }

    fn new(mut texts: Vec<(Box<str>, Token)>) -> Self {
        texts.sort_by_key(|(text, _)| std::cmp::Reverse(text.len()));
        let mut tokens = vec![Vec::new(); 256];
        for (text, token) in texts {
            tokens[usize::from(text.as_bytes()[0])].push((text, token));
        }
        Self { tokens }
    }

    /// Gives each token and each text between two that is not empty, in order, until one gives none.
    pub(super) fn split(&self, text: &str, mut give: impl FnMut(&str, Option<Token>) -> Option<()>) -> Option<()> {
        let (mut start, mut at) = (0, 0);
        while at < text.len() {
            let known = &self.tokens[usize::from(text.as_bytes()[at])];
            let found = known.iter().find(|(token, _)| text.as_bytes()[at..].starts_with(token.as_bytes()));
            let Some((found, token)) = found else {
                at += 1;
                continue;
            };
            if start < at {
                give(&text[start..at], None)?;
            }
            give(found, Some(*token))?;
            at += found.len();
            start = at;
        }
        if start < at { give(&text[start..], None) } else { Some(()) }
    }
}
