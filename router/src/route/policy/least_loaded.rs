//! The engine with the least work ahead; equal ones by chance.

use crate::route::{Choice, Reason, RoutePolicy, Situation};

/// Takes the engine with the least work ahead.
#[derive(Clone, Copy, Debug)]
pub struct LeastLoaded;

impl RoutePolicy for LeastLoaded {
    fn name(&self) -> &'static str {
        "least_loaded"
    }

    fn choose(&self, situation: &Situation<'_>) -> Choice {
        let all = situation.candidates;
        let reason = if all.len() == 1 { Reason::Only } else { Reason::Load };
        Choice { index: least(situation, |index| all[index].load_tokens()), reason }
    }
}

/// Index of the candidate with the least `cost`; among equal ones the situation's randomness decides.
pub(super) fn least(situation: &Situation<'_>, cost: impl Fn(usize) -> u64) -> usize {
    let n = situation.candidates.len();
    let start = usize::try_from(situation.random % n as u64).expect("it is below a length");
    (0..n).map(|step| (start + step) % n).min_by_key(|&index| cost(index)).expect("candidates are never empty")
}
