//! The less loaded of two engines drawn by chance (Mitzenmacher, "The Power of Two Choices", 2001).

use super::least_loaded::load_tokens;
use crate::route::{Choice, Reason, RoutePolicy, Situation};

/// Draws two different engines and takes the one with less work ahead.
#[derive(Clone, Copy, Debug)]
pub struct PowerOfTwo;

impl RoutePolicy for PowerOfTwo {
    fn name(&self) -> &'static str {
        "power_of_two"
    }

    fn choose(&self, situation: &Situation<'_>) -> Choice {
        let all = situation.candidates;
        let n = all.len() as u64;
        if n == 1 {
            return Choice { index: 0, reason: Reason::Only };
        }
        let below_length = |n| usize::try_from(n).expect("it is below a length");
        let (low, high) = (situation.random & 0xFFFF_FFFF, situation.random >> 32);
        let one = below_length(low % n);
        let two = below_length((low % n + 1 + high % (n - 1)) % n);
        let index = if load_tokens(&all[two]) < load_tokens(&all[one]) { two } else { one };
        Choice { index, reason: Reason::Load }
    }
}
