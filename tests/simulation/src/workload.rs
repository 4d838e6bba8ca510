//! What is asked and when: traces replayed, or Poisson arrivals of tenants whose prompts share prefixes.

use std::time::Duration;

use contract::ids::Token;

use crate::random::Random;

/// Tokens that one block id of a request stands for.
pub const TRACE_BLOCK_TOKENS: u32 = 512;

/// Longest time over which requests of one time are spread.
const SPREAD_MAX: Duration = Duration::from_secs(3);

/// One request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Time after the first.
    pub after: Duration,
    /// Tokens of the prompt, at least one.
    pub n_prompt: u32,
    /// Tokens that are generated, at least one.
    pub n_output: u32,
    /// Prompts with equal ids at the beginning share as many blocks of [`TRACE_BLOCK_TOKENS`]; what has no id is shared
    /// with nobody.
    pub blocks: Vec<u64>,
    /// Who asks.
    pub tenant: u32,
}

/// Requests in the order of their times.
#[derive(Clone, Debug)]
pub struct Workload {
    name: String,
    requests: Vec<Request>,
    is_batched: bool,
}

/// A load without a trace.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Synthetic {
    /// Requests.
    pub n_requests: usize,
    /// Requests per second, with Poisson arrivals.
    pub rate: f64,
    /// Tenants, each with prefixes of its own.
    pub n_tenants: u32,
    /// Prefixes of a tenant.
    pub n_prefixes: u32,
    /// Mean tokens of the prompt, of which the shared prefix is a half.
    pub n_prompt: u32,
    /// Mean tokens of the output.
    pub n_output: u32,
}

impl Default for Synthetic {
    fn default() -> Self {
        Self { n_requests: 2_000, rate: 8.0, n_tenants: 4, n_prefixes: 16, n_prompt: 6_000, n_output: 200 }
    }
}

impl Workload {
    /// Takes requests, which are put in the order of their times.
    ///
    /// # Panics
    /// When a request has no prompt or no output.
    #[must_use]
    pub fn new(name: impl Into<String>, mut requests: Vec<Request>) -> Self {
        assert!(requests.iter().all(|request| request.n_prompt > 0 && request.n_output > 0), "prompts and outputs");
        requests.sort_by_key(|request| request.after);
        let n_times = 1 + requests.windows(2).filter(|pair| pair[0].after != pair[1].after).count();
        for (index, request) in requests.iter_mut().enumerate() {
            let n_blocks = request.n_prompt.div_ceil(TRACE_BLOCK_TOKENS) as usize;
            let own = (1 << 63) | (index as u64) << 24;
            request.blocks.extend((request.blocks.len()..n_blocks).map(|block| own | block as u64));
            request.blocks.truncate(n_blocks);
        }
        let is_batched = requests.len() > 2 * n_times;
        Self { name: name.into(), requests, is_batched }
    }

    /// Makes a load of its own.
    #[must_use]
    pub fn synthetic(load: &Synthetic, seed: u64) -> Self {
        let mut random = Random::new(seed, 1);
        let mut after = 0.0;
        let requests = (0..load.n_requests).map(|index| {
            after += random.exponential() / load.rate.max(f64::MIN_POSITIVE);
            let tenant = random.below(load.n_tenants.max(1).into());
            // The first prefixes are asked for most.
            let prefix = (random.unit() * random.unit() * f64::from(load.n_prefixes)) as u64;
            let prefix_id = (tenant << 32) | prefix << 16;
            let n_shared = u64::from(load.n_prompt / 2 / TRACE_BLOCK_TOKENS);
            let own = f64::from(load.n_prompt) / 2.0 * random.exponential();
            let n_prompt = n_shared as u32 * TRACE_BLOCK_TOKENS + (own as u32).clamp(1, 1 << 17);
            let n_output = (f64::from(load.n_output) * random.exponential()) as u32 + 1;
            let own_id = (1 << 62) | (index as u64) << 24;
            let n_own = u64::from(n_prompt.div_ceil(TRACE_BLOCK_TOKENS)) - n_shared;
            let blocks = (0..n_shared).map(|block| prefix_id | block).chain((0..n_own).map(|block| own_id | block));
            Request {
                // Times beyond what a duration holds are beyond what can be simulated, too.
                after: Duration::try_from_secs_f64(after).unwrap_or(Duration::MAX),
                n_prompt,
                n_output,
                blocks: blocks.collect(),
                tenant: tenant as u32,
            }
        });
        let requests = requests.collect();
        Self { is_batched: false, ..Self::new("synthetic load", requests) }
    }

    /// What it is called.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// All requests.
    #[must_use]
    pub fn requests(&self) -> &[Request] {
        &self.requests
    }

    /// When each request arrives at `speed` times the pace, in order.
    ///
    /// Traces that have several requests at most times were rounded: `random` spreads those of one time up to the next.
    pub(crate) fn arrivals(&self, speed: f64, random: &mut Random) -> Vec<(Duration, usize)> {
        let mut arrivals: Vec<(Duration, usize)> =
            self.requests.iter().enumerate().map(|(index, request)| (request.after, index)).collect();
        if self.is_batched {
            let times: Vec<Duration> = arrivals.iter().map(|&(at, _)| at).collect();
            for (at, _) in &mut arrivals {
                let next = times.get(times.partition_point(|time| time <= at)).copied();
                let gap = next.map_or(SPREAD_MAX, |next| next - *at).min(SPREAD_MAX);
                *at += gap.mul_f64(random.unit());
            }
        }
        for (at, _) in &mut arrivals {
            *at = at.div_f64(speed);
        }
        arrivals.sort();
        arrivals
    }
}

impl Request {
    /// Its prompt: the tokens of a block are a function of the block's id.
    pub(crate) fn prompt(&self, vocab_size: u32) -> Vec<Token> {
        let mut tokens = Vec::with_capacity(self.n_prompt as usize);
        for (block, &id) in self.blocks.iter().enumerate() {
            let start = Random::new(id, 2).draw() as u32;
            let n = (self.n_prompt - block as u32 * TRACE_BLOCK_TOKENS).min(TRACE_BLOCK_TOKENS);
            tokens.extend((0..n).map(|offset| {
                let mixed = start.wrapping_add(offset.wrapping_mul(0x9e37_79b9));
                ((u64::from(mixed) * u64::from(vocab_size)) >> 32) as Token
            }));
        }
        tokens
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(after_ms: u64, n_prompt: u32, blocks: &[u64]) -> Request {
        Request { after: Duration::from_millis(after_ms), n_prompt, n_output: 1, blocks: blocks.to_vec(), tenant: 0 }
    }

    #[test]
    fn equal_ids_are_equal_tokens_and_no_ids_are_shared_with_nobody() {
        let load =
            Workload::new("t", vec![request(0, 1100, &[7, 8, 9]), request(0, 1100, &[7, 8, 3]), request(0, 700, &[])]);
        let prompts: Vec<_> = load.requests().iter().map(|request| request.prompt(1 << 17)).collect();
        assert_eq!(prompts.iter().map(Vec::len).collect::<Vec<_>>(), [1100, 1100, 700]);
        assert_eq!(prompts[0][..1024], prompts[1][..1024]);
        assert_ne!(prompts[0][1024..], prompts[1][1024..]);
        assert_ne!(prompts[0][..512], prompts[2][..512]);
    }

    #[test]
    fn batches_are_spread_by_seed_up_to_the_next_and_speed_divides() {
        let rounded: Vec<_> = (0..30).map(|n| request(n / 10 * 3000, 10, &[])).collect();
        let load = Workload::new("t", rounded);
        let at = |seed, speed| load.arrivals(speed, &mut Random::new(seed, 0));
        assert_eq!(at(1, 1.0), at(1, 1.0));
        assert_ne!(at(1, 1.0), at(2, 1.0));
        for (time, index) in at(1, 2.0) {
            let batch = index as u128 / 10 * 1500;
            assert!((batch..batch + 1500).contains(&time.as_millis()), "request {index} at {time:?}");
        }
        let exact = Workload::new("t", vec![request(0, 10, &[]), request(5, 10, &[]), request(9, 10, &[])]);
        assert_eq!(exact.arrivals(1.0, &mut Random::new(1, 0))[1].0, Duration::from_millis(5));
    }
}
