//! What the simulated model says: a token is a hash of all tokens before it, the seed and the position.
//! Hot path: no allocation, no lock, no log.

use contract::ids::Token;
use contract::plan::SamplingSpec;

/// The state before the first token.
pub(super) const EMPTY: u64 = 0x243f_6a88_85a3_08d3;

/// The state after `token`: a function of all tokens so far, however they were cut into steps.
pub(super) fn extend(state: u64, token: Token) -> u64 {
    mix(state ^ (u64::from(token) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

/// Draws the token at `position` after the tokens that `state` stands for.
///
/// As from a model, greedy requests have no seed, and a token that would end the request is not drawn before `min_tokens`;
/// after that one is drawn with probability `eos_probability`, and never by chance.
pub(super) fn draw(state: u64, position: u32, spec: &SamplingSpec, vocab_size: u32, eos_probability: f64) -> Token {
    let seed = if spec.params.temperature == 0.0 { 0 } else { spec.params.seed };
    let drawn = mix(mix(state ^ u64::from(position).rotate_left(32)) ^ seed.wrapping_mul(0xd6e8_feb8_6659_fd93));
    let stops = &spec.stop_token_ids[..];
    let may_stop = position.saturating_sub(spec.n_prompt) >= spec.min_tokens && !stops.is_empty();
    if may_stop && uniform(mix(drawn)) < eos_probability {
        return stops[drawn as usize % stops.len()];
    }
    let first = (drawn % u64::from(vocab_size)) as Token;
    // Among one more tokens in a row than would end it there is one that does not, unless the vocabulary has no other.
    let mut candidates = (0..=stops.len() as u32).map(|i| (first + i) % vocab_size);
    candidates.find(|token| !stops.contains(token)).unwrap_or(first)
}

/// The first `n` tokens that the simulated model says after `tokens`, when it runs alone.
///
/// `spec.n_prompt` of `tokens` are the prompt, the rest is output of earlier attempts.
#[must_use]
pub fn answer(tokens: &[Token], spec: &SamplingSpec, vocab_size: u32, eos_probability: f64, n: usize) -> Vec<Token> {
    let mut state = tokens.iter().fold(EMPTY, |state, &token| extend(state, token));
    let draws = (tokens.len()..tokens.len() + n).map(|position| {
        let token = draw(state, position as u32, spec, vocab_size, eos_probability);
        state = extend(state, token);
        token
    });
    draws.collect()
}

/// The finalizer of MurmurHash3 (Appleby), a bijection that spreads every bit over all.
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    x = (x ^ (x >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    x ^ (x >> 33)
}

/// A number in [0, 1) of 53 of the bits.
fn uniform(bits: u64) -> f64 {
    (bits >> 11) as f64 / (1_u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use contract::request::SamplingParams;

    use super::*;

    fn spec(n_prompt: u32, min_tokens: u32, stop_token_ids: Vec<Token>) -> SamplingSpec {
        let params = SamplingParams { seed: 5, ..SamplingParams::default() };
        SamplingSpec { params, logprobs: None, n_prompt, min_tokens, stop_token_ids, history: Vec::new() }
    }

    #[test]
    fn a_resumed_request_goes_on_as_if_it_had_not_stopped() {
        let spec = spec(3, 0, vec![]);
        let whole = answer(&[1, 2, 3], &spec, 1_000, 0.0, 20);
        let resumed = answer(&[&[1, 2, 3], &whole[..8]].concat(), &spec, 1_000, 0.0, 12);
        assert_eq!(resumed, whole[8..]);
    }

    #[test]
    fn every_earlier_token_and_the_seed_decide_and_greedy_has_no_seed() {
        let mut spec = spec(3, 0, vec![]);
        let mut answers = HashSet::new();
        for prompt in [[1, 2, 3], [2, 1, 3], [0, 2, 3], [1, 2, 2], [0, 0, 0]] {
            assert!(answers.insert(answer(&prompt, &spec, 1 << 20, 0.0, 3)));
        }
        assert!(answers.insert(answer(&[0, 0], &spec, 1 << 20, 0.0, 3)), "zeros count");
        spec.params.seed += 1;
        assert!(answers.insert(answer(&[1, 2, 3], &spec, 1 << 20, 0.0, 3)));
        spec.params.temperature = 0.0;
        let greedy = answer(&[1, 2, 3], &spec, 1 << 20, 0.0, 3);
        spec.params.seed += 1;
        assert_eq!(answer(&[1, 2, 3], &spec, 1 << 20, 0.0, 3), greedy);
    }

    #[test]
    fn stop_tokens_come_as_often_as_asked_and_not_too_early() {
        let stops: Vec<Token> = (0..9).collect();
        let n_stops = |spec: &SamplingSpec, vocab_size, probability| {
            let tokens = answer(&[1, 2], spec, vocab_size, probability, 10_000);
            (tokens[..5_000].iter().filter(|&token| stops.contains(token)).count(), tokens)
        };
        assert_eq!(n_stops(&spec(2, 0, stops.clone()), 10, 0.0).1, vec![9; 10_000], "all others would end it");
        let (early, tokens) = n_stops(&spec(2, 5_000, stops.clone()), 100, 0.1);
        let late = tokens[5_000..].iter().filter(|&token| stops.contains(token)).count();
        assert!(early == 0 && (400..600).contains(&late), "{early} and {late} of 5,000");
        assert_eq!(n_stops(&spec(2, 0, vec![]), 100, 1.0).1.len(), 10_000);
        assert_eq!(answer(&[1], &spec(1, 9, vec![0]), 1, 0.0, 2), [0, 0], "a vocabulary of stops says what it can");
    }
}
