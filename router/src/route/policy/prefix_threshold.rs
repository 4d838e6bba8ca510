//! The engine that holds most of the prompt, unless the load is out of balance: fixed thresholds, as SGLang's gateway has.

use super::least;
use crate::route::{Candidate, Choice, Reason, RoutePolicy, Situation};

/// Follows prefixes while load is in balance, and load while it is not.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PrefixThreshold {
    /// Part of the prompt that must be cached for its engine to be followed.
    pub share_min: f64,
    /// The load is out of balance when the most loaded engine has so many requests more than the least loaded one,
    pub imbalance_requests: u32,
    /// and so many times as many.
    pub imbalance_ratio: f64,
}

impl PrefixThreshold {
    /// Thresholds that do in most places.
    pub const USUAL: Self = Self { share_min: 0.25, imbalance_requests: 16, imbalance_ratio: 1.5 };

    /// Whether the most loaded engine has too many requests more than the least loaded one.
    pub fn is_out_of_balance(&self, all: &[Candidate<'_>]) -> bool {
        let n_requests = || all.iter().map(Candidate::n_requests);
        let (fewest, most) = (n_requests().min().unwrap_or(0), n_requests().max().unwrap_or(0));
        most - fewest > self.imbalance_requests && f64::from(most) > self.imbalance_ratio * f64::from(fewest)
    }
}

impl RoutePolicy for PrefixThreshold {
    fn name(&self) -> &'static str {
        "prefix_threshold"
    }

    fn choose(&self, situation: &Situation<'_>) -> Choice {
        let all = situation.candidates;
        if all.len() == 1 {
            return Choice { index: 0, reason: Reason::Only };
        }
        let by_load = |index: usize| f64::from(all[index].n_requests());
        if self.is_out_of_balance(all) {
            return Choice { index: least(situation, by_load), reason: Reason::Balance };
        }
        let longest = all.iter().map(|candidate| candidate.tokens_cached).max().unwrap_or(0);
        if longest == 0 || (longest as f64) < self.share_min * situation.n_prompt_tokens as f64 {
            return Choice { index: least(situation, by_load), reason: Reason::Load };
        }
        // Of those that hold the longest prefix the least loaded one.
        let behind = |index: usize| (longest - all[index].tokens_cached) as f64 * 1e9 + by_load(index);
        Choice { index: least(situation, behind), reason: Reason::Prefix }
    }
}
