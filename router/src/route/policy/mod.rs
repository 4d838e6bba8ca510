//! The policies there are, one file each.

mod least_loaded;
mod power_of_two;
mod prefix_latency;
mod prefix_threshold;
mod round_robin;
mod session_hash;
#[cfg(test)]
mod tests;

pub use least_loaded::LeastLoaded;
pub use power_of_two::PowerOfTwo;
pub use prefix_latency::PrefixLatency;
pub use prefix_threshold::PrefixThreshold;
pub use round_robin::RoundRobin;
pub use session_hash::SessionHash;

use super::{RoutePolicy, Situation};

/// Name of the policy that is used unless another is configured.
pub const DEFAULT: &str = "prefix_latency";

/// Every policy.
pub static POLICIES: [&dyn RoutePolicy; 6] =
    [&PrefixLatency, &PrefixThreshold::USUAL, &LeastLoaded, &PowerOfTwo, &RoundRobin, &SessionHash];

/// Looks a policy up by its name.
pub fn by_name(name: &str) -> Option<&'static dyn RoutePolicy> {
    POLICIES.into_iter().find(|policy| policy.name() == name)
}

/// Index of the candidate with the least `cost`; among equal ones the situation's randomness decides.
pub fn least(situation: &Situation<'_>, cost: impl Fn(usize) -> f64) -> usize {
    let n = situation.candidates.len();
    let start = usize::try_from(situation.random % n as u64).expect("it is below a length");
    let in_turn = (0..n).map(|step| (start + step) % n);
    in_turn.min_by(|&one, &two| cost(one).total_cmp(&cost(two))).expect("candidates are never empty")
}
