//! One choice's frames as text: stop strings end it, and the token that ended it shows no text.

use contract::error::RequestError;
use contract::ids::Token;
use contract::stream::{FinishReason, GenerateFrame};

use super::{Delta, Finish, StoppedBy};
use crate::dispatch::Dispatch;
use crate::text::OutputText;

/// A choice that is being generated.
pub(super) struct Choice {
    pub(super) index: u32,
    /// None once the choice is complete, which ends the call to the worker.
    dispatch: Option<Dispatch>,
    text: TextOf,
}

/// What a choice has said.
struct TextOf {
    output: OutputText,
    /// Stop tokens that the client asked for; others are the model's own.
    stop_token_ids: Vec<Token>,
    n_tokens: usize,
}

/// News of a choice.
pub(super) struct Progress {
    pub(super) delta: Delta,
    /// Prompt tokens that were cached, on the first news.
    pub(super) cached_tokens: Option<u32>,
}

impl Choice {
    pub(super) fn new(index: u32, dispatch: Dispatch, output: OutputText, stop_token_ids: Vec<Token>) -> Self {
        Self { index, dispatch: Some(dispatch), text: TextOf { output, stop_token_ids, n_tokens: 0 } }
    }

    /// What is new; none when the choice is complete.
    pub(super) async fn next(&mut self) -> Option<Result<Progress, RequestError>> {
        let frame = match self.dispatch.as_mut()?.next().await? {
            Ok(frame) => frame,
            Err(error) => {
                self.dispatch = None;
                return Some(Err(error));
            }
        };
        let cached_tokens = frame.cached_tokens;
        let delta = self.text.take(self.index, frame);
        if delta.finish.is_some() {
            self.dispatch = None;
        }
        Some(Ok(Progress { delta, cached_tokens }))
    }
}

impl TextOf {
    fn take(&mut self, index: u32, frame: GenerateFrame) -> Delta {
        let GenerateFrame { mut tokens, finish, .. } = frame;
        let ids: Vec<Token> = tokens.iter().map(|sampled| sampled.token).collect();
        // The stop token is a token of the answer but no text of it.
        let n_spoken = ids.len() - usize::from(finish == Some(FinishReason::Stop) && !ids.is_empty());
        let pushed = self.output.push(&ids[..n_spoken]);
        let mut text = pushed.text;
        let n_before = self.n_tokens;
        self.n_tokens += ids.len();
        let finish = if let Some(hit) = pushed.stopped {
            tokens.truncate(hit.n_tokens.saturating_sub(n_before));
            Some(Finish { reason: "stop", stopped_by: Some(StoppedBy::Text(hit.stop)) })
        } else {
            finish.map(|reason| {
                text.push_str(&self.output.finish());
                self.finish(reason, ids.last().copied())
            })
        };
        Delta { index, text, tokens, finish }
    }

    fn finish(&self, reason: FinishReason, last: Option<Token>) -> Finish {
        match reason {
            FinishReason::Length => Finish { reason: "length", stopped_by: None },
            FinishReason::Stop => {
                let asked = last.filter(|token| self.stop_token_ids.contains(token));
                Finish { reason: "stop", stopped_by: asked.map(StoppedBy::Token) }
            }
        }
    }
}
