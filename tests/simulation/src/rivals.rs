//! Policies of others, to compare with.

use router::route::policy::{PrefixThreshold, least};
use router::route::{Choice, Reason, RoutePolicy, Situation};

/// The least predicted time to first token and nothing else.
#[derive(Clone, Copy, Debug)]
pub struct LeastPredicted;

impl RoutePolicy for LeastPredicted {
    fn name(&self) -> &'static str {
        "least_predicted"
    }

    fn choose(&self, situation: &Situation<'_>) -> Choice {
        let all = situation.candidates;
        let time = |index: usize| situation.predict(&all[index]).first_token_ms;
        Choice { index: least(situation, time), reason: Reason::Load }
    }
}

/// The rule of SGLang's gateway (`sgl-router/src/policies/cache_aware.rs`), over a directory that knows what is cached
/// where the gateway guesses from what it sent.
///
/// Its tree names one of the workers that hold the longest prefix, whichever that is; here chance does.
/// What matches too little goes to the worker with the smallest tree; here to the one that got fewest requests of late.
#[derive(Clone, Copy, Debug)]
pub struct SglangRule(pub PrefixThreshold);

impl RoutePolicy for SglangRule {
    fn name(&self) -> &'static str {
        "sglang"
    }

    fn choose(&self, situation: &Situation<'_>) -> Choice {
        let all = situation.candidates;
        if self.0.is_out_of_balance(all) {
            let by_load = |index: usize| f64::from(all[index].n_requests());
            return Choice { index: least(situation, by_load), reason: Reason::Balance };
        }
        let longest = all.iter().map(|candidate| candidate.tokens_cached).max().unwrap_or(0);
        if longest as f64 <= self.0.share_min * situation.n_prompt_tokens as f64 {
            return Choice { index: least(situation, |index| all[index].n_recent), reason: Reason::Load };
        }
        let behind = |index: usize| (longest - all[index].tokens_cached) as f64;
        Choice { index: least(situation, behind), reason: Reason::Prefix }
    }
}

/// Counts blocks, as Dynamo's KV router does: blocks to prefill, less those that are cached, and blocks that decode.
#[derive(Clone, Copy, Debug)]
pub struct BlockCount {
    /// Tokens in a block.
    pub block_size: u64,
    /// What a block to prefill weighs against one that decodes.
    pub prefill_weight: f64,
}

impl BlockCount {
    /// Blocks of the traces, equal weights.
    pub const USUAL: Self = Self { block_size: 512, prefill_weight: 1.0 };
}

impl RoutePolicy for BlockCount {
    fn name(&self) -> &'static str {
        "block_count"
    }

    fn choose(&self, situation: &Situation<'_>) -> Choice {
        let all = situation.candidates;
        let blocks = |tokens: u64| tokens.div_ceil(self.block_size) as f64;
        let cost = |index: usize| {
            let candidate = &all[index];
            let new = situation.n_prompt_tokens - candidate.tokens_cached.min(situation.n_prompt_tokens);
            let prefill = blocks(candidate.load.tokens_prefilling + new);
            let decode = blocks(candidate.load.tokens_decoding + situation.n_prompt_tokens);
            self.prefill_weight * prefill + decode
        };
        Choice { index: least(situation, cost), reason: Reason::Load }
    }
}

/// Looks a rival up by its name.
#[must_use]
pub fn by_name(name: &str) -> Option<&'static dyn RoutePolicy> {
    let rivals: [&'static dyn RoutePolicy; 3] =
        [&LeastPredicted, &BlockCount::USUAL, &SglangRule(PrefixThreshold::USUAL)];
    rivals.into_iter().find(|policy| policy.name() == name)
}

/// Thresholds to choose the best of, so that these rivals are fairly tuned.
pub static THRESHOLDS: [PrefixThreshold; 27] = sweep();
/// SGLang's rule with each of them.
pub static SGLANG_RULES: [SglangRule; 27] = sglang_rules();

const fn sglang_rules() -> [SglangRule; 27] {
    let (thresholds, mut all) = (sweep(), [SglangRule(PrefixThreshold::USUAL); 27]);
    let mut index = 0;
    while index < all.len() {
        all[index] = SglangRule(thresholds[index]);
        index += 1;
    }
    all
}

const fn sweep() -> [PrefixThreshold; 27] {
    let mut all = [PrefixThreshold::USUAL; 27];
    let mut index = 0;
    while index < all.len() {
        all[index] = PrefixThreshold {
            share_min: [0.0, 0.25, 0.5][index % 3],
            imbalance_requests: [4, 16, 48][index / 3 % 3],
            imbalance_ratio: [1.1, 1.5, 2.5][index / 9],
        };
        index += 1;
    }
    all
}
