//! The engine that holds most of the prompt, if that is enough of it and waiting there is worth it.

use super::least_loaded::least;
use crate::route::{Choice, Reason, RoutePolicy, Situation};

/// Share of the prompt, as a divisor, below which a cached prefix does not count: templates share a little of everything.
const SHARE_DIVISOR: u64 = 8;

/// Follows cached prefixes as long as they outweigh the queue.
///
/// A prefix is worth as many tokens as it spares, and a queue costs as many as it holds, so the engine with the longest
/// prefix is taken unless the least loaded one would begin sooner even though it computes the prefix again.
#[derive(Clone, Copy, Debug)]
pub struct PrefixThreshold;

impl RoutePolicy for PrefixThreshold {
    fn name(&self) -> &'static str {
        "prefix_threshold"
    }

    fn choose(&self, situation: &Situation<'_>) -> Choice {
        let all = situation.candidates;
        if all.len() == 1 {
            return Choice { index: 0, reason: Reason::Only };
        }
        let idlest = least(situation, |index| all[index].load_tokens());
        let longest = all.iter().map(|candidate| candidate.tokens_cached).max().unwrap_or(0);
        if longest == 0 || longest < situation.n_prompt_tokens / SHARE_DIVISOR {
            return Choice { index: idlest, reason: Reason::Load };
        }
        // Tokens until the prompt is computed: those ahead of it and its own uncached ones.
        let index = least(situation, |index| {
            let candidate = &all[index];
            let own = situation.n_prompt_tokens.saturating_sub(candidate.tokens_cached);
            candidate.load_tokens().saturating_add(own)
        });
        let reason = if all[index].tokens_cached == longest { Reason::Prefix } else { Reason::Balance };
        Choice { index, reason }
    }
}
