//! What a request yields when it runs alone: each token is a hash of all before it and the seed.

use contract::ids::{DataRank, EngineId, Incarnation, RequestId, Token};
use contract::request::{GenerateRequest, PrefillPeer, SamplingParams, StopParams};
use contract::stream::FinishReason;

pub const VOCABULARY: u64 = 11;

/// What a test asks for.
#[derive(Clone, Debug)]
pub struct Ask {
    pub family: u32,
    pub n_shared: usize,
    pub n_own: usize,
    pub max_tokens: u32,
    pub min_tokens: u32,
    pub stop: Option<Token>,
    pub priority: i32,
    pub salt: bool,
    pub has_penalties: bool,
    /// Output tokens of an earlier attempt.
    pub n_resumed: usize,
    pub deadline_ms: Option<u64>,
    pub part: Part,
}

/// Which part of a request the engine computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Part {
    #[default]
    Whole,
    /// What follows a prompt whose KV comes from elsewhere.
    Decode,
    /// The prompt's KV, for others.
    Prefill,
}

/// What the request must yield.
#[derive(Clone, Debug)]
pub struct Expected {
    pub request: GenerateRequest,
    /// Prompt, output, and what would follow if nothing ended it.
    pub tokens: Vec<Token>,
    /// State after each token: what the KV at its position stands for.
    pub states: Vec<u64>,
    /// Tokens with which it ends.
    pub length: usize,
    pub finish: FinishReason,
}

pub fn mix(state: u64, value: u64) -> u64 {
    let mut x = state ^ value.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    x ^ (x >> 29)
}

pub fn initial_state(salt: &str) -> u64 {
    salt.bytes().fold(17, |state, byte| mix(state, byte.into()))
}

/// Draws from the state after all tokens, the seed, and with penalties from the sampler's own history.
pub fn sample(state: u64, seed: u64, history: &[Token], forbidden: &[Token]) -> Token {
    let history = history.iter().fold(5, |state, &token| mix(state, token.into()));
    let mut draw = mix(mix(state, seed), history);
    loop {
        draw = mix(draw, 1);
        let token = (draw % VOCABULARY) as Token;
        if !forbidden.contains(&token) {
            return token;
        }
    }
}

/// Runs a request alone, `length_max` tokens at most and a few beyond its end.
pub fn expect(ask: &Ask, number: u64, length_max: usize) -> Expected {
    let salt = if ask.salt { "tenant" } else { "" };
    let mut tokens: Vec<Token> = (0..ask.n_shared as u64)
        .map(|i| (mix(ask.family.into(), i) % VOCABULARY) as Token)
        .chain((0..ask.n_own as u64).map(|i| (mix(number + 100, i) % VOCABULARY) as Token))
        .collect();
    let n_prompt = tokens.len();
    let stop = StopParams {
        token_ids: ask.stop.into_iter().collect(),
        min_tokens: ask.min_tokens.min(ask.max_tokens),
        max_tokens: ask.max_tokens,
    };
    let prompt = tokens.clone();
    let limit = length_max.min(n_prompt + ask.max_tokens as usize);
    let mut states: Vec<u64> = Vec::new();
    let mut state = initial_state(salt);
    for &token in &tokens {
        state = mix(state, token.into());
        states.push(state);
    }
    let mut end = None;
    while tokens.len() < limit + 3 || end.is_none() {
        let index = tokens.len() - n_prompt;
        let history = if ask.has_penalties { &tokens[..] } else { &[] };
        let forbidden = if index < stop.min_tokens as usize { &stop.token_ids[..] } else { &[] };
        let token = sample(state, number, history, forbidden);
        tokens.push(token);
        state = mix(state, token.into());
        states.push(state);
        if end.is_none() && index >= stop.min_tokens as usize && stop.token_ids.contains(&token) {
            end = Some((tokens.len(), FinishReason::Stop));
        } else if end.is_none() && tokens.len() >= limit {
            end = Some((tokens.len(), FinishReason::Length));
        }
    }
    let (length, finish) = end.expect("the loop ends with it");
    let n_resumed = if ask.part == Part::Prefill { 0 } else { ask.n_resumed };
    let n_resumed = n_resumed.min(length.saturating_sub(n_prompt + 1));
    let request = GenerateRequest {
        id: RequestId(number.into()),
        attempt: 0,
        model: "m".into(),
        prompt,
        generated: tokens[n_prompt..n_prompt + n_resumed].to_vec(),
        tenant: "t".into(),
        cache_salt: salt.to_owned(),
        adapter: String::new(),
        priority: ask.priority,
        deadline: ask.deadline_ms.map(std::time::Duration::from_millis),
        sampling: SamplingParams {
            seed: number,
            repetition_penalty: if ask.has_penalties { 1.5 } else { 1.0 },
            ..SamplingParams::default()
        },
        stop,
        logprobs: None,
        prompt_logprobs: None,
        prefill_on: Vec::from_iter((ask.part == Part::Decode).then(|| PrefillPeer {
            engine: EngineId { worker: "p".into(), incarnation: Incarnation(1), data_rank: DataRank(0) },
            address: "127.0.0.1:1".to_owned(),
        })),
    };
    Expected { request, tokens, states, length, finish }
}
