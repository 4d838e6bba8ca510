//! What a client may ask of an answer, and how that becomes a worker's parameters.

use std::time::Duration;

use contract::error::RequestError;
use contract::ids::Token;
use contract::request::{SamplingParams, StopParams};
use models::GenerationDefaults;

use crate::config::Limits;

/// A client's wishes; absent ones take the model's defaults.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    pub(crate) max_tokens: Option<u32>,
    /// How the client called it.
    pub(crate) max_tokens_field: &'static str,
    pub(crate) min_tokens: u32,
    pub(crate) temperature: Option<f32>,
    pub(crate) top_p: Option<f32>,
    pub(crate) top_k: Option<u32>,
    pub(crate) min_p: Option<f32>,
    pub(crate) repetition_penalty: Option<f32>,
    pub(crate) presence_penalty: f32,
    pub(crate) frequency_penalty: f32,
    pub(crate) logit_bias: Vec<(Token, f32)>,
    pub(crate) seed: Option<u64>,
    pub(crate) stop: Vec<String>,
    pub(crate) include_stop: bool,
    pub(crate) stop_token_ids: Vec<Token>,
    pub(crate) ignore_eos: bool,
    pub(crate) logprobs: Option<u32>,
    /// How the client called it.
    pub(crate) logprobs_field: &'static str,
    pub(crate) n: u32,
    pub(crate) priority: i32,
    pub(crate) cache_salt: String,
    pub(crate) adapter: String,
    pub(crate) skip_special: bool,
    pub(crate) add_special: Option<bool>,
    /// How long the client waits.
    pub(crate) timeout: Option<Duration>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            max_tokens: None,
            max_tokens_field: "max_tokens",
            min_tokens: 0,
            temperature: None,
            top_p: None,
            top_k: None,
            min_p: None,
            repetition_penalty: None,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: None,
            stop: Vec::new(),
            include_stop: false,
            stop_token_ids: Vec::new(),
            ignore_eos: false,
            logprobs: None,
            logprobs_field: "logprobs",
            n: 1,
            priority: 0,
            cache_salt: String::new(),
            adapter: String::new(),
            skip_special: true,
            add_special: None,
            timeout: None,
        }
    }
}

impl Options {
    /// Checks what no worker checks: the number of choices and the stop strings.
    ///
    /// # Errors
    /// The first that is out of range.
    pub(crate) fn check(&self, limits: &Limits, n_prompts: usize) -> Result<(), RequestError> {
        let most = limits.n_choices_max;
        if self.n == 0 || self.n > most {
            return Err(RequestError::invalid("n", format!("{} is out of range; give 1 to {most}", self.n)));
        }
        if n_prompts as u64 * u64::from(self.n) > u64::from(most) {
            let message = format!("{n_prompts} prompts with n = {} are more than {most} choices", self.n);
            return Err(RequestError::invalid("prompt", message));
        }
        if self.stop.len() > limits.n_stops_max {
            let message = format!("{} stop strings are more than {}", self.stop.len(), limits.n_stops_max);
            return Err(RequestError::invalid("stop", message));
        }
        if let Some(stop) = self.stop.iter().find(|stop| stop.is_empty() || stop.len() > limits.stop_bytes_max) {
            let message = format!("a stop string of {} bytes; give 1 to {}", stop.len(), limits.stop_bytes_max);
            return Err(RequestError::invalid("stop", message));
        }
        Ok(())
    }

    /// Distribution parameters, with `seed` for the first choice.
    pub(crate) fn sampling(&self, defaults: &GenerationDefaults, seed: u64) -> SamplingParams {
        let neutral = SamplingParams::default();
        SamplingParams {
            temperature: self.temperature.or(defaults.temperature).unwrap_or(neutral.temperature),
            top_k: self.top_k.or(defaults.top_k).unwrap_or(neutral.top_k),
            top_p: self.top_p.or(defaults.top_p).unwrap_or(neutral.top_p),
            min_p: self.min_p.or(defaults.min_p).unwrap_or(neutral.min_p),
            repetition_penalty: self
                .repetition_penalty
                .or(defaults.repetition_penalty)
                .unwrap_or(neutral.repetition_penalty),
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            logit_bias: self.logit_bias.clone(),
            seed,
        }
    }

    /// When to end a prompt of `n_prompt_tokens`.
    pub(crate) fn stops(&self, eos: &[Token], n_prompt_tokens: usize, context_length: u32) -> StopParams {
        let mut token_ids = self.stop_token_ids.clone();
        if !self.ignore_eos {
            token_ids.extend_from_slice(eos);
        }
        token_ids.sort_unstable();
        token_ids.dedup();
        let n_prompt_tokens = u32::try_from(n_prompt_tokens).unwrap_or(u32::MAX);
        let rest = context_length.saturating_sub(n_prompt_tokens).max(1);
        // More than the context holds ends at its end, but a wish of 0 is an error of its own.
        let max_tokens = self.max_tokens.map_or(rest, |wish| wish.min(rest));
        StopParams { token_ids, min_tokens: self.min_tokens, max_tokens }
    }

    /// Names a field as the client did.
    pub(crate) fn rename(&self, error: RequestError) -> RequestError {
        let RequestError::InvalidArgument { field, message } = error else { return error };
        match field.as_ref() {
            "max_tokens" => RequestError::invalid(self.max_tokens_field, message),
            "logprobs" => RequestError::invalid(self.logprobs_field, message),
            _ => RequestError::InvalidArgument { field, message },
        }
    }
}

/// The seed of a choice: the first keeps the request's own, so that n = 1 repeats the first of many.
pub(crate) fn seed_of(seed: u64, choice: u32) -> u64 {
    if choice == 0 {
        return seed;
    }
    // SplitMix64 (Steele, Lea and Flood, 2014), whose outputs for different states are different.
    let mut z = seed.wrapping_add(u64::from(choice).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_have_seeds_of_their_own_and_the_first_keeps_the_requests() {
        assert_eq!(seed_of(7, 0), 7);
        let mut seeds: Vec<u64> = (0..128).map(|choice| seed_of(7, choice)).collect();
        seeds.sort_unstable();
        seeds.dedup();
        assert_eq!(seeds.len(), 128);
    }

    #[test]
    fn an_answer_takes_the_rest_of_the_context_at_most() {
        let with = |max_tokens| Options { max_tokens, ..Options::default() }.stops(&[2], 90, 100).max_tokens;
        assert_eq!((with(None), with(Some(4)), with(Some(50)), with(Some(0))), (10, 4, 10, 0));
    }

    #[test]
    fn ignored_ends_leave_the_clients_own() {
        let options = Options { ignore_eos: true, stop_token_ids: vec![9, 9], ..Options::default() };
        assert_eq!(options.stops(&[2], 1, 100).token_ids, [9]);
        assert_eq!(Options { ignore_eos: false, ..options }.stops(&[2], 1, 100).token_ids, [2, 9]);
    }

    #[test]
    fn errors_use_the_clients_own_field_name() {
        let options = Options { max_tokens_field: "max_completion_tokens", ..Options::default() };
        let error = options.rename(RequestError::invalid("max_tokens", "0 is less than 1"));
        assert_eq!(error.to_string(), "max_completion_tokens: 0 is less than 1");
    }
}
