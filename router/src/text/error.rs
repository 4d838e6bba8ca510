//! Why text could not become tokens, or a conversation text.

use thiserror::Error;

/// An error of the text layer: opening a model's tokenizer, encoding, or rendering a chat template.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum TextError {
    /// The model comes without a tokenizer.
    #[error("the model has no tokenizer: expected {expected}")]
    MissingTokenizer {
        /// Which file or metadata was looked for.
        expected: String,
    },
    /// The tokenizer is of a kind nothing here builds.
    #[error("tokenizer {what} {found:?} is not supported; supported are {supported}")]
    UnsupportedTokenizer {
        /// Which part of it, as the model's files name it.
        what: &'static str,
        /// Its value there.
        found: String,
        /// What there is.
        supported: String,
    },
    /// The tokenizer contradicts itself or cannot be read.
    #[error("the model's tokenizer is not valid: {reason}")]
    InvalidTokenizer {
        /// The first thing that is wrong, with values.
        reason: String,
    },
    /// A text could not be encoded.
    #[error("cannot encode a text of {bytes} bytes: {reason}")]
    Encode {
        /// Length of the text.
        bytes: usize,
        /// What the tokenizer said.
        reason: String,
    },
    /// The model comes without a chat template: only plain completions are possible.
    #[error("the model has no chat template: use a plain completion, or add chat_template to the model's files")]
    MissingChatTemplate,
    /// The template cannot be compiled, or fails on these messages.
    #[error("the model's chat template failed{}: {message}", at_line(.line))]
    Template {
        /// Line in the template, from 1.
        line: Option<usize>,
        /// What the engine said.
        message: String,
    },
    /// The template refuses the messages by `raise_exception`: change them.
    #[error("the model's chat template refuses these messages{}: {message}", at_line(.line))]
    MessagesRefused {
        /// Line in the template, from 1.
        line: Option<usize>,
        /// The template's own words.
        message: String,
    },
    /// Rendering took more steps or gave more text than allowed.
    #[error("rendering the chat template exceeds the limit of {limit}")]
    TemplateLimit {
        /// Which limit.
        limit: String,
    },
}

fn at_line(line: &Option<usize>) -> String {
    line.map_or_else(String::new, |line| format!(" at line {line}"))
}
