//! The engine whose first token is predicted to come soonest, subject to decode latency and free blocks.

use super::least;
use crate::route::{Candidate, Choice, Prediction, Reason, RoutePolicy, Situation};

/// What a millisecond of prefill costs those that come later, beside what it costs this request, where nobody waits.
const PRICE_OF_WORK: f64 = 0.6;
/// How much more it costs for each millisecond that engines have ahead of them on average: the more wait, the more a
/// prompt that is computed again delays, and under overload hits are all that keeps up.
const PRICE_OF_WORK_PER_MS: f64 = 0.004;
/// Candidates that are so much of a decode step apart are equally good: what is predicted is not that exact.
const EQUAL_STEPS: f64 = 0.25;

/// Takes the least predicted time to first token, plus a price for the work that delays later requests.
///
/// Of those that are equally good it takes the one that got fewest requests of late, so that prompts that all hold, and
/// new ones, spread evenly.
#[derive(Clone, Copy, Debug)]
pub struct PrefixLatency;

impl RoutePolicy for PrefixLatency {
    fn name(&self) -> &'static str {
        "prefix_latency"
    }

    fn choose(&self, situation: &Situation<'_>) -> Choice {
        let all = situation.candidates;
        if all.len() == 1 {
            return Choice { index: 0, reason: Reason::Only };
        }
        let wait_ms_mean = all.iter().map(Candidate::wait_ms).sum::<f64>() / all.len() as f64;
        let price = PRICE_OF_WORK + PRICE_OF_WORK_PER_MS * wait_ms_mean;
        let scores: Vec<Score> = all.iter().map(|candidate| Score::of(situation, candidate, price)).collect();
        let best = scores.iter().copied().min_by(|one, two| one.ms.total_cmp(&two.ms)).expect("there are several");
        let good_ms = best.ms + EQUAL_STEPS * best.decode_ms;
        let index =
            least(situation, |index| if scores[index].ms <= good_ms { all[index].n_recent } else { f64::INFINITY });
        let cached = |candidate: &Candidate<'_>| candidate.tokens_cached;
        let longest = all.iter().map(cached).max().unwrap_or(0);
        let reason = match cached(&all[index]) {
            0 if longest == 0 => Reason::Load,
            tokens if tokens == longest => Reason::Prefix,
            _ => Reason::Balance,
        };
        Choice { index, reason }
    }
}

/// What a candidate is worth, in milliseconds; less is better.
#[derive(Clone, Copy)]
struct Score {
    ms: f64,
    /// Its decode step.
    decode_ms: f64,
}

impl Score {
    fn of(situation: &Situation<'_>, candidate: &Candidate<'_>, price: f64) -> Self {
        let Prediction { first_token_ms, prefill_ms, decode_ms, .. } = situation.predict(candidate);
        let missed_ms = decode_ms - situation.decode_ms_goal;
        // A goal is a bound, not a price: where some engine meets it, one that does not is not taken.
        let goal_ms = if missed_ms > 0.0 { 1e5 + missed_ms } else { 0.0 };
        let needed = situation.n_prompt_tokens - candidate.tokens_cached.min(situation.n_prompt_tokens);
        let lacks_room = candidate.blocks.is_some_and(|room| room.tokens_available < needed);
        // Whoever lacks blocks waits for others to end, which takes longer than any queue of prompts.
        let room_ms = if lacks_room { 1e6 } else { 0.0 };
        Self { ms: first_token_ms + price * prefill_ms + goal_ms + room_ms, decode_ms }
    }
}
