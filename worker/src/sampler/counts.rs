//! Which tokens occurred in a request, for penalties.

use std::collections::HashMap;

use contract::ids::Token;
use contract::request::SamplingParams;

/// Tokens of prompt and output with how often each is in the output.
#[derive(Clone, Debug, Default)]
pub struct TokenCounts {
    entries: Vec<(Token, u32)>,
    index: HashMap<Token, usize>,
}

impl TokenCounts {
    /// Forgets everything; capacity stays.
    pub fn clear(&mut self) {
        self.entries.clear();
        self.index.clear();
    }

    /// Counts a token of the prompt.
    pub fn add_prompt(&mut self, token: Token) {
        self.entry(token);
    }

    /// Counts a token of the output.
    pub fn add_output(&mut self, token: Token) {
        let at = self.entry(token);
        self.entries[at].1 += 1;
    }

    /// Whether no token occurred.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Applies repetition, then frequency and presence penalties.
    pub(super) fn penalise(&self, logits: &mut [f32], params: &SamplingParams) {
        for &(token, n_output) in &self.entries {
            let Some(logit) = logits.get_mut(token as usize) else { continue };
            *logit = if *logit > 0.0 { *logit / params.repetition_penalty } else { *logit * params.repetition_penalty };
            if n_output > 0 {
                *logit -= params.frequency_penalty * n_output as f32;
                *logit -= params.presence_penalty;
            }
        }
    }

    fn entry(&mut self, token: Token) -> usize {
        *self.index.entry(token).or_insert_with(|| {
            self.entries.push((token, 0));
            self.entries.len() - 1
        })
    }
}
