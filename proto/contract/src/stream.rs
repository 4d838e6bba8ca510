//! Frames of a worker's answer: bursts coalesce, replays de-duplicate by position.

use crate::plan::SampledToken;

/// Why a stream that ended well ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// A stop token was sampled; it is the stream's last token.
    Stop,
    /// `max_tokens` or the context is reached.
    Length,
}

/// A burst of tokens of one request.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateFrame {
    /// Which placement of the request produced it.
    pub attempt: u32,
    /// Output index of the first token, counted from the end of the prompt.
    pub first_position: u32,
    /// Consecutive tokens.
    pub tokens: Vec<SampledToken>,
    /// Set on the last frame.
    pub finish: Option<FinishReason>,
    /// Prompt tokens that were cached; set on the first frame.
    pub cached_tokens: Option<u32>,
}
