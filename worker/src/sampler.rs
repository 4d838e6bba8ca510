//! Draws the next token from a row of logits: a pure function of logits, parameters, earlier tokens, seed and position.
//! Hot path: no allocation, no lock, no log.
//!
//! Order, as in vLLM: log-probabilities are taken from the raw logits; then `min_tokens` masks stop tokens, logit bias
//! is added, repetition penalty (prompt and output) and frequency and presence penalties (output) are applied;
//! temperature below [`GREEDY_BELOW`] takes the largest logit (lowest id on ties); else the logits are divided by
//! temperature, then min-p, top-k and top-p drop tokens, each on what the one before left, and one is drawn by inverse
//! distribution function from the rest.
//!
//! All arithmetic is additions and multiplications in a fixed order, so that every platform draws the same token from
//! the same logits; random numbers come from [`philox`], keyed by seed and position.

mod counts;
mod exp;
pub mod philox;
mod top;

use contract::ids::Token;
use contract::plan::{SampledToken, SamplingSpec};
use contract::request::SamplingParams;

pub use counts::TokenCounts;
use top::{Candidate, TopSelect};

/// Temperatures below this are greedy, as in vLLM.
pub const GREEDY_BELOW: f32 = 1e-5;

/// Candidates that the first attempt at a nucleus sorts; each further attempt sorts eight times as many.
const NUCLEUS_FIRST: usize = 64;
/// Weights summed together when a token is looked for by its cumulative weight.
const CHUNK: usize = 64;

/// Buffers of sampling, kept from token to token.
#[derive(Debug, Default)]
pub struct Sampler {
    /// Logits after bias, masks and penalties.
    adjusted: Vec<f32>,
    /// Unnormalised probabilities at temperature, the likeliest token's being 1.
    weights: Vec<f32>,
    top: TopSelect,
}

impl Sampler {
    /// Makes a sampler with room for a vocabulary.
    #[must_use]
    pub fn new(vocab_size: usize) -> Self {
        Self {
            adjusted: Vec::with_capacity(vocab_size),
            weights: Vec::with_capacity(vocab_size),
            top: TopSelect::default(),
        }
    }

    /// Draws the token at absolute `position` from `logits`, one for each entry of the vocabulary.
    ///
    /// `counts` holds earlier tokens where `spec` has penalties. Logits that are not numbers count as impossible.
    ///
    /// # Panics
    /// When `logits` is empty.
    pub fn sample(&mut self, logits: &[f32], spec: &SamplingSpec, counts: &TokenCounts, position: u32) -> SampledToken {
        assert!(!logits.is_empty(), "a vocabulary has at least one token");
        let masks_stops = position.saturating_sub(spec.n_prompt) < spec.min_tokens && !spec.stop_token_ids.is_empty();
        let penalised = spec.params.has_penalties() && !counts.is_empty();
        let token = if masks_stops || penalised || !spec.params.logit_bias.is_empty() {
            let mut adjusted = std::mem::take(&mut self.adjusted);
            adjusted.clear();
            adjusted.extend_from_slice(logits);
            if masks_stops {
                mask(&mut adjusted, &spec.stop_token_ids);
            }
            add_bias(&mut adjusted, &spec.params.logit_bias);
            if penalised {
                counts.penalise(&mut adjusted, &spec.params);
            }
            let token = self.draw(&adjusted, &spec.params, position);
            self.adjusted = adjusted;
            token
        } else {
            self.draw(logits, &spec.params, position)
        };
        match spec.logprobs {
            None => SampledToken { token, logprob: f32::NAN, top: Vec::new() },
            Some(n) => self.with_logprobs(logits, token, n as usize),
        }
    }

    fn draw(&mut self, logits: &[f32], params: &SamplingParams, position: u32) -> Token {
        let best = argmax(logits);
        let max = logits[best as usize];
        if params.temperature < GREEDY_BELOW || !max.is_finite() {
            return best;
        }
        let scale = params.temperature.recip();
        let weight = |logit: f32| {
            let weight = exp::exp((logit - max) * scale);
            if weight < params.min_p { 0.0 } else { weight }
        };
        let uniform = philox::uniform(params.seed, position);
        let top_k = match params.top_k as usize {
            0 => logits.len(),
            k => k.min(logits.len()),
        };
        if top_k == logits.len() {
            self.weights.clear();
            self.weights.extend(logits.iter().map(|&logit| weight(logit)));
            if params.top_p >= 1.0 {
                return draw_from_all(&self.weights, uniform).unwrap_or(best);
            }
        }
        self.draw_from_top(logits, top_k, params.top_p, uniform, weight).unwrap_or(best)
    }

    /// Draws from the `top_k` likeliest tokens, of these from as many as it takes to reach `top_p` of their weight.
    ///
    /// `self.weights` holds all weights when `top_k` does not limit.
    fn draw_from_top(
        &mut self,
        logits: &[f32],
        top_k: usize,
        top_p: f32,
        uniform: f64,
        weight: impl Fn(f32) -> f32,
    ) -> Option<Token> {
        let limited = top_k < logits.len();
        let weight = |candidate: &Candidate| f64::from(weight(candidate.logit));
        let total = if limited { None } else { Some(chunk_sums(&self.weights).sum::<f64>()) };
        let mut n = if limited { top_k } else { NUCLEUS_FIRST.min(logits.len()) };
        loop {
            let kept = self.top.select(logits, n);
            let mass: f64 = kept.iter().map(weight).sum();
            let total = total.unwrap_or(mass);
            let goal = if top_p >= 1.0 { total } else { total * f64::from(top_p) };
            if mass < goal && n < top_k {
                n = n.saturating_mul(8).min(top_k);
                continue;
            }
            let mut nucleus_mass = 0.0;
            let mut n_nucleus = 0;
            for candidate in kept {
                nucleus_mass += weight(candidate);
                n_nucleus += 1;
                if nucleus_mass >= goal {
                    break;
                }
            }
            let mut left = uniform * nucleus_mass;
            let nucleus = &kept[..n_nucleus];
            let drawn = nucleus.iter().find(|candidate| {
                let weight = weight(candidate);
                let hit = left < weight;
                left -= weight;
                hit
            });
            // Rounding may leave a sliver beyond the last one.
            return drawn.or_else(|| nucleus.iter().rev().find(|c| weight(c) > 0.0)).map(|c| c.token);
        }
    }

    fn with_logprobs(&mut self, logits: &[f32], token: Token, n: usize) -> SampledToken {
        let max = logits[argmax(logits) as usize];
        self.weights.clear();
        self.weights.extend(logits.iter().map(|&logit| exp::exp(logit - max)));
        let normaliser = f64::from(max) + exp::ln(chunk_sums(&self.weights).sum());
        let logprob =
            |logit: f32| if logit.is_nan() { f32::NEG_INFINITY } else { (f64::from(logit) - normaliser) as f32 };
        let top = match n {
            0 => Vec::new(),
            n => self.top.select(logits, n.min(logits.len())).iter().map(|c| (c.token, logprob(c.logit))).collect(),
        };
        SampledToken { token, logprob: logprob(logits[token as usize]), top }
    }
}

/// The largest logit's index, the lowest on ties; what is not a number is never chosen before a number.
///
/// One pass: only a block whose largest logit is the largest so far is searched for its place.
#[must_use]
pub fn argmax(logits: &[f32]) -> Token {
    const BLOCK: usize = 512;
    let mut max = f32::NEG_INFINITY;
    let mut at = 0;
    for (index, block) in logits.chunks(BLOCK).enumerate() {
        let largest = largest(block);
        if largest > max {
            (max, at) = (largest, index * BLOCK);
        }
    }
    let block = &logits[at..logits.len().min(at + BLOCK)];
    let place = block.iter().position(|&logit| logit == max);
    // Not there when its block holds no number at all.
    place.map_or_else(|| logits.iter().position(|&logit| logit == max).unwrap_or(0), |place| at + place) as Token
}

/// The largest number of `logits`, minus infinity when there is none.
fn largest(logits: &[f32]) -> f32 {
    const LANES: usize = 16;
    let larger = |max: f32, logit: f32| if logit > max { logit } else { max };
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (groups, rest) = logits.as_chunks::<LANES>();
    for group in groups {
        for (max, &logit) in lanes.iter_mut().zip(group) {
            *max = larger(*max, logit);
        }
    }
    lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |max, &logit| larger(max, logit))
}

fn mask(logits: &mut [f32], tokens: &[Token]) {
    for &token in tokens {
        if let Some(logit) = logits.get_mut(token as usize) {
            *logit = f32::NEG_INFINITY;
        }
    }
}

fn add_bias(logits: &mut [f32], bias: &[(Token, f32)]) {
    for &(token, bias) in bias {
        if let Some(logit) = logits.get_mut(token as usize) {
            *logit += bias;
        }
    }
}

/// Sums of consecutive [`CHUNK`]s, each over eight lanes, so that the order does not depend on the machine.
fn chunk_sums(weights: &[f32]) -> impl Iterator<Item = f64> {
    weights.chunks(CHUNK).map(|chunk| {
        let (lanes, rest) = chunk.as_chunks::<8>();
        let mut sums = [0.0_f32; 8];
        for lane in lanes {
            for (sum, weight) in sums.iter_mut().zip(lane) {
                *sum += weight;
            }
        }
        sums.iter().chain(rest).map(|&weight| f64::from(weight)).sum()
    })
}

/// The token at which the cumulative weight, in order of ids, passes `uniform` of the whole.
fn draw_from_all(weights: &[f32], uniform: f64) -> Option<Token> {
    let total: f64 = chunk_sums(weights).sum();
    let mut left = uniform * total;
    for (index, (chunk, sum)) in weights.chunks(CHUNK).zip(chunk_sums(weights)).enumerate() {
        if left >= sum {
            left -= sum;
            continue;
        }
        for (offset, &weight) in chunk.iter().enumerate() {
            if weight > 0.0 && left < f64::from(weight) {
                return Some((index * CHUNK + offset) as Token);
            }
            left -= f64::from(weight);
        }
        // Rounding of the chunk's sum may leave a sliver beyond its last token.
        if let Some(offset) = chunk.iter().rposition(|&weight| weight > 0.0) {
            return Some((index * CHUNK + offset) as Token);
        }
    }
    weights.iter().rposition(|&weight| weight > 0.0).map(|index| index as Token)
}

#[cfg(test)]
mod tests;
