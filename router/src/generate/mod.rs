//! From a client's question to a stream of text: what both APIs share.

mod admit;
mod choice;
mod explain;
mod gate;
mod options;
mod place;
mod prepare;
mod record;
mod service;
mod share;
mod stream;

use std::sync::Arc;

use contract::ids::Token;
use contract::plan::SampledToken;

use crate::admission::Tenant;
use crate::text::{ChatMessage, ChatOptions};

pub(crate) use admit::Permit;
pub(crate) use options::Options;
pub(crate) use service::Service;

/// What kind of question it is; values index metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    /// Text that goes on.
    Completion = 0,
    /// A conversation.
    Chat = 1,
}

/// A client's question.
#[derive(Debug)]
pub(crate) struct Question {
    pub(crate) operation: Operation,
    /// Who asks.
    pub(crate) tenant: Arc<Tenant>,
    /// Empty takes the model that is served.
    pub(crate) model: String,
    pub(crate) input: Input,
    pub(crate) options: Options,
    pub(crate) is_stream: bool,
}

/// What is to be continued.
#[derive(Debug)]
pub(crate) enum Input {
    /// Prompts, each by itself.
    Prompts(Vec<Prompt>),
    /// A conversation.
    Chat(Vec<ChatMessage>, Box<ChatOptions>),
}

/// A prompt.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Prompt {
    /// As text.
    Text(String),
    /// As tokens.
    Tokens(Vec<Token>),
}

/// Part of an answer.
#[derive(Debug)]
pub(crate) enum Event {
    /// New text or tokens of a choice.
    Delta(Delta),
    /// All choices are complete.
    End(Usage),
}

/// What is new of one choice.
#[derive(Debug)]
pub(crate) struct Delta {
    /// Which choice: prompts in order, the choices of each in order.
    pub(crate) index: u32,
    pub(crate) text: String,
    pub(crate) tokens: Vec<SampledToken>,
    /// Set on the last one.
    pub(crate) finish: Option<Finish>,
}

/// How a choice ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Finish {
    /// `stop` or `length`.
    pub(crate) reason: &'static str,
    pub(crate) stopped_by: Option<StoppedBy>,
}

/// What the client asked to stop at and was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum StoppedBy {
    Text(String),
    Token(Token),
}

/// Tokens of a whole answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) prompt_tokens: u32,
    pub(crate) completion_tokens: u32,
    pub(crate) cached_tokens: u32,
}

impl Operation {
    /// Name by the semantic conventions.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Completion => "text_completion",
            Self::Chat => "chat",
        }
    }
}
