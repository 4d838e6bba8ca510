//! Engines in turn, whatever they do.

use crate::route::{Choice, Reason, RoutePolicy, Situation};

/// Takes each engine in turn.
#[derive(Clone, Copy, Debug)]
pub struct RoundRobin;

impl RoutePolicy for RoundRobin {
    fn name(&self) -> &'static str {
        "round_robin"
    }

    fn choose(&self, situation: &Situation<'_>) -> Choice {
        let n = situation.candidates.len() as u64;
        let index = usize::try_from(situation.turn % n).expect("it is below a length");
        Choice { index, reason: Reason::Turn }
    }
}
