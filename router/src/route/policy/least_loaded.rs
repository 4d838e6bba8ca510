//! The engine with the least work ahead; equal ones by chance.

use super::least;
use crate::route::{Candidate, Choice, Reason, RoutePolicy, Situation};

/// Takes the engine with the least tokens ahead: prompts to be computed, and a share for each request.
#[derive(Clone, Copy, Debug)]
pub struct LeastLoaded;

/// What a running request costs a prompt that waits behind its decode steps, in tokens.
const TOKENS_PER_REQUEST: f64 = 16.0;

impl RoutePolicy for LeastLoaded {
    fn name(&self) -> &'static str {
        "least_loaded"
    }

    fn choose(&self, situation: &Situation<'_>) -> Choice {
        let all = situation.candidates;
        let reason = if all.len() == 1 { Reason::Only } else { Reason::Load };
        Choice { index: least(situation, |index| load_tokens(&all[index])), reason }
    }
}

/// Work ahead of a new request, in tokens.
pub(super) fn load_tokens(candidate: &Candidate<'_>) -> f64 {
    candidate.tokens_ahead() as f64 + TOKENS_PER_REQUEST * f64::from(candidate.n_requests())
}
