//! A request to a worker, checked once on receipt.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::RequestError;
use crate::ids::{EngineId, ModelName, RequestId, TenantId, Token};

/// Most alternatives whose log-probabilities may be asked for.
pub const LOGPROBS_MAX: u32 = 128;

/// Continues `prompt` and `generated`.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateRequest {
    /// The same over all attempts.
    pub id: RequestId,
    /// Counts re-placements, from 0.
    pub attempt: u32,
    /// The served model.
    pub model: ModelName,
    /// Prompt, at least one token.
    pub prompt: Vec<Token>,
    /// Output of earlier attempts.
    pub generated: Vec<Token>,
    /// Whoever pays.
    pub tenant: TenantId,
    /// Separates cached prefixes; empty is none.
    pub cache_salt: String,
    /// Adapter by name; empty is none.
    pub adapter: String,
    /// Lower runs first.
    pub priority: i32,
    /// Time left.
    pub deadline: Option<Duration>,
    /// Distribution parameters and seed.
    pub sampling: SamplingParams,
    /// When to end.
    pub stop: StopParams,
    /// Most likely tokens to report beside each sampled one.
    pub logprobs: Option<u32>,
    /// The same for prompt tokens; not supported yet.
    pub prompt_logprobs: Option<u32>,
    /// Who computes the KV of all tokens but the last: the first, and each next one when those before it failed. Then, or
    /// where there is none, the engine itself.
    pub prefill_on: Vec<PrefillPeer>,
}

/// An engine that computes prompts for another, and where its worker is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrefillPeer {
    /// The engine.
    pub engine: EngineId,
    /// host:port where its worker listens for transfers.
    pub address: String,
}

/// When a request ends.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopParams {
    /// Tokens that end the stream.
    pub token_ids: Vec<Token>,
    /// Output tokens before which no stop token may be sampled.
    pub min_tokens: u32,
    /// Output tokens at most, those of earlier attempts included; at least 1.
    pub max_tokens: u32,
}

/// How the next token is drawn. A sample depends on logits, these, seed and position alone.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SamplingParams {
    /// 0 is greedy.
    pub temperature: f32,
    /// Most likely tokens that stay; 0 is all.
    pub top_k: u32,
    /// Probability mass that stays, in (0, 1].
    pub top_p: f32,
    /// Share of the likeliest token's probability below which a token is dropped, in [0, 1].
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens in prompt or output; 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted from logits of tokens in the output, in [-2, 2].
    pub presence_penalty: f32,
    /// Subtracted per occurrence in the output, in [-2, 2].
    pub frequency_penalty: f32,
    /// Added to logits, by token.
    pub logit_bias: Vec<(Token, f32)>,
    /// Seed of the counter-based generator.
    pub seed: u64,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: 0,
        }
    }
}

impl SamplingParams {
    /// Whether sampling needs to know earlier tokens.
    pub fn has_penalties(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }

    /// Checks every value.
    ///
    /// # Errors
    /// `InvalidArgument` that names the first value out of range and the range.
    pub fn validate(&self) -> Result<(), RequestError> {
        check("temperature", self.temperature, 0.0..=100.0)?;
        check("top_p", self.top_p, f32::MIN_POSITIVE..=1.0)?;
        check("min_p", self.min_p, 0.0..=1.0)?;
        check("repetition_penalty", self.repetition_penalty, f32::MIN_POSITIVE..=100.0)?;
        check("presence_penalty", self.presence_penalty, -2.0..=2.0)?;
        check("frequency_penalty", self.frequency_penalty, -2.0..=2.0)?;
        for &(token, bias) in &self.logit_bias {
            if !(-100.0..=100.0).contains(&bias) {
                return Err(RequestError::invalid(
                    "logit_bias",
                    format!("{bias} for token {token} is not between -100 and 100"),
                ));
            }
        }
        Ok(())
    }
}

impl GenerateRequest {
    /// Checks the request against a model's vocabulary and context.
    ///
    /// # Errors
    /// The first thing that is wrong, with the value and the way out.
    pub fn validate(&self, vocab_size: u32, context_length: u32) -> Result<(), RequestError> {
        if !self.adapter.is_empty() {
            return Err(RequestError::Unsupported(format!("adapter {:?}: adapters are not served yet", self.adapter)));
        }
        if self.prompt_logprobs.is_some() {
            return Err(RequestError::Unsupported("prompt_logprobs".to_owned()));
        }
        if self.prompt.is_empty() {
            return Err(RequestError::invalid("prompt", "has no tokens; give at least one"));
        }
        if let Some(n) = self.logprobs.filter(|&n| n > LOGPROBS_MAX) {
            return Err(RequestError::invalid("logprobs", format!("{n} is more than {LOGPROBS_MAX}")));
        }
        self.validate_tokens(vocab_size)?;
        self.validate_lengths(context_length)?;
        self.sampling.validate()
    }

    fn validate_tokens(&self, vocab_size: u32) -> Result<(), RequestError> {
        let bias = self.sampling.logit_bias.iter().map(|&(token, _)| ("logit_bias", token));
        let named = |field, tokens: &[Token]| tokens.iter().copied().find(|&t| t >= vocab_size).map(|t| (field, t));
        let wrong = named("prompt", &self.prompt)
            .or_else(|| named("generated", &self.generated))
            .or_else(|| named("stop_token_ids", &self.stop.token_ids))
            .or_else(|| { bias }.find(|&(_, token)| token >= vocab_size));
        if let Some((field, token)) = wrong {
            return Err(RequestError::invalid(
                field,
                format!("token id {token} is not in the vocabulary of {vocab_size}"),
            ));
        }
        Ok(())
    }

    fn validate_lengths(&self, context_length: u32) -> Result<(), RequestError> {
        let length = self.prompt.len() as u64;
        if length >= u64::from(context_length) {
            let limit = u64::from(context_length) - 1;
            return Err(RequestError::PromptTooLong { n_tokens: length, at_least: false, limit });
        }
        let StopParams { min_tokens, max_tokens, .. } = self.stop;
        if max_tokens == 0 {
            return Err(RequestError::invalid("max_tokens", "0 is less than 1"));
        }
        if min_tokens > max_tokens {
            return Err(RequestError::invalid(
                "min_tokens",
                format!("{min_tokens} is more than max_tokens {max_tokens}"),
            ));
        }
        if self.generated.len() as u64 >= u64::from(max_tokens) {
            return Err(RequestError::invalid(
                "generated",
                format!("{} tokens leave nothing of max_tokens {max_tokens}", self.generated.len()),
            ));
        }
        Ok(())
    }
}

fn check(field: &'static str, value: f32, range: std::ops::RangeInclusive<f32>) -> Result<(), RequestError> {
    if range.contains(&value) {
        return Ok(());
    }
    let low = match *range.start() {
        f32::MIN_POSITIVE => "above 0".to_owned(),
        low => format!("at least {low}"),
    };
    Err(RequestError::invalid(field, format!("{value} is out of range; give {low} and at most {}", range.end())))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request() -> GenerateRequest {
        GenerateRequest {
            id: RequestId(1),
            attempt: 0,
            model: "m".into(),
            prompt: vec![1, 2],
            generated: vec![],
            tenant: "default".into(),
            cache_salt: String::new(),
            adapter: String::new(),
            priority: 0,
            deadline: None,
            sampling: SamplingParams::default(),
            stop: StopParams { token_ids: vec![], min_tokens: 0, max_tokens: 4 },
            logprobs: None,
            prompt_logprobs: None,
            prefill_on: Vec::new(),
        }
    }

    fn error(change: impl FnOnce(&mut GenerateRequest)) -> String {
        let mut request = request();
        change(&mut request);
        request.validate(10, 100).expect_err("is refused").to_string()
    }

    #[test]
    fn a_plain_request_is_valid() {
        assert_eq!(request().validate(10, 100), Ok(()));
    }

    #[test]
    fn errors_name_the_field_and_the_value() {
        assert!(error(|r| r.sampling.temperature = -1.0).contains("temperature: -1 is out of range; give at least 0"));
        assert!(error(|r| r.sampling.temperature = f32::NAN).contains("temperature: NaN"));
        assert!(error(|r| r.sampling.top_p = 0.0).contains("top_p: 0 is out of range; give above 0"));
        assert!(error(|r| r.prompt = vec![]).contains("prompt: has no tokens"));
        assert!(error(|r| r.prompt = vec![10]).contains("prompt: token id 10"));
        assert!(error(|r| r.sampling.logit_bias = vec![(11, 0.0)]).contains("logit_bias: token id 11"));
        assert!(error(|r| r.prompt = vec![1; 100]).contains("100 tokens"));
        assert!(error(|r| r.stop.max_tokens = 0).contains("max_tokens: 0"));
        assert!(error(|r| r.stop.min_tokens = 5).contains("min_tokens: 5"));
        assert!(error(|r| r.generated = vec![1; 4]).contains("generated: 4 tokens"));
        assert!(error(|r| r.adapter = "a".to_owned()).contains("adapter"));
    }
}
