//! What each number of prefill engines promises for a demand: the part of requests that would meet both goals.
//!
//! Demand is in terms that do not depend on roles: work of prompts and tokens of answers that come in a second.
//! A first token is late if its prompt waits too long: waits are those of a queue with as many servers as engines compute
//! prompts (Erlang, 1917), longer where work comes in large pieces (Lee and Longton, 1959), and exponential.
//! Prompts that would wait long for engines that compute them for others are computed where they decode.
//! A request is slow if steps take too long, or if too much of others' prompts is computed while it decodes: the sum of
//! many random pieces, which is taken for normal.
//! Where prompts move, two engines keep each of them, so that less of others is cached.
//!
//! Constants that no theory gives are those with which the promises order what the simulation measures: Mooncake's whole
//! conversation and synthetic traces at several speeds on eight engines, each with most splits (`cargo xtask full roles`).

use contract::cost::CostCoefficients;

/// What all engines are asked for together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Demand {
    /// Engines.
    pub(super) n_engines: usize,
    /// Time that one engine would compute prompts in a second, in seconds.
    pub(super) prefill: f64,
    /// Variance of that, in square seconds for each second.
    pub(super) prefill_variance: f64,
    /// Part of prompts' tokens that is cached where all engines do everything; less than 1.
    pub(super) hits: f64,
    /// Requests in a second.
    pub(super) requests: f64,
    /// Tokens that are decoded in a second.
    pub(super) tokens: f64,
    /// Tokens in the context of each.
    pub(super) context: f64,
    /// Tokens of a prompt that a step computes.
    pub(super) step_tokens: u64,
    /// What an engine's steps cost.
    pub(super) cost: CostCoefficients,
}

/// What requests should meet, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Goals {
    /// From asking to the first token.
    pub(super) first_token_s: f64,
    /// Between two tokens, on average over a request.
    pub(super) token_s: f64,
}

/// Most of its time that an engine computes prompts for others; what is more, routers let be computed where requests
/// decode.
const UTILIZATION_MAX: f64 = 0.95;
/// What it costs, in parts of requests that meet their goals, when the slowest of a hundred tokens takes
/// [`GAP_GOALS`] times the goal.
const PRICE_OF_GAP: f64 = 0.03;
/// See [`PRICE_OF_GAP`].
const GAP_GOALS: f64 = 4.0;
/// What it costs, in the same, if as much more of prompts is computed as there was: their first tokens come later.
const PRICE_OF_MISSES: f64 = 0.3;
/// Part of [`Demand::hits`] that is cached no more where prompts move: 0.2 to 0.34 in simulation.
const HITS_LOST: f64 = 0.3;
/// As many times what an engine takes for a prompt are waited for an engine that computes it for others.
const PATIENCE: f64 = 8.0;
/// How much of waiting engines that decode take off those that compute prompts for them.
const HELPED: f64 = 0.8;
/// How much a batch's work varies, as a multiple of what it would if requests came by chance and were equally long: they
/// come in waves, and contexts vary as much as they are long.
const BATCH_VARIES: f64 = 6.0;

/// How engines decode beside prompts.
struct Decoding {
    /// A step's decoding, in seconds.
    step_s: f64,
    /// Part of requests whose mean time per token meets the goal.
    on_time: f64,
    /// The slowest of a hundred tokens, in seconds.
    gap_s: f64,
}

impl Demand {
    /// What `n_prefill` engines that compute prompts for the others promise; where it is none, all do both.
    ///
    /// It is at most 1; where nobody would decode it is infinitely bad.
    pub(super) fn promise(&self, n_prefill: usize, goals: &Goals) -> f64 {
        if n_prefill >= self.n_engines {
            return f64::NEG_INFINITY;
        }
        if n_prefill == 0 {
            let all = self.n_engines as f64;
            let beside = self.hold_up() / all;
            let decoding = self.decoding(all, beside * self.prefill, beside * self.prefill_variance, goals);
            // Each step of a prompt also decodes.
            let slowed = 1.0 + decoding.step_s / self.chunk_s();
            return self.first_tokens_on_time(self.n_engines, slowed, goals) * decoding.on_time
                - price_of_gap(decoding.gap_s, goals);
        }
        let (more, n_decode) = (computed_again(self.hits), (self.n_engines - n_prefill) as f64);
        let (prefill, prefill_variance) = (self.prefill * (1.0 + more), self.prefill_variance * (1.0 + more));
        let split = Self { prefill, prefill_variance, ..*self };
        let left = split.left_to_decode(n_prefill) / n_decode;
        let decoding = self.decoding(n_decode, left * prefill, left * prefill_variance, goals);
        let on_time = |n| split.first_tokens_on_time(n, 1.0, goals);
        (HELPED * on_time(self.n_engines) + (1.0 - HELPED) * on_time(n_prefill)) * decoding.on_time
            - price_of_gap(decoding.gap_s, goals)
            - PRICE_OF_MISSES * more
    }

    /// Part of prompts that hold up requests where all engines do everything: an engine that has nothing to do takes a
    /// prompt before one that decodes, so that only those hold up others that find none (Erlang's B).
    fn hold_up(&self) -> f64 {
        let n = self.n_engines as f64;
        let decoding = self.tokens * (self.cost.decode_base_ms + self.cost.decode_per_sequence_ms) / 1e3;
        let found_none = blocked(self.n_engines, self.prefill + decoding);
        // Who finds none holds up one request at least, of as many as an engine has on average.
        (found_none * (n / decoding.max(f64::MIN_POSITIVE)).max(1.0)).min(1.0)
    }

    /// Part of prompts that engines compute which decode, since `n_prefill` others have too much to do.
    fn left_to_decode(&self, n_prefill: usize) -> f64 {
        let (n, busy) = (n_prefill as f64, self.prefill.min(UTILIZATION_MAX * n_prefill as f64));
        let impatient = waiting(n_prefill, busy) * (-PATIENCE * (n - busy)).exp();
        let too_many = 1.0 - busy / self.prefill.max(f64::MIN_POSITIVE);
        impatient.max(too_many)
    }

    /// Part of prompts that do not wait too long where `n` engines compute them, `slowed` times as long as alone.
    fn first_tokens_on_time(&self, n: usize, slowed: f64, goals: &Goals) -> f64 {
        if self.prefill <= 0.0 {
            return 1.0;
        }
        let busy = (self.prefill * slowed).min(UTILIZATION_MAX * n as f64);
        // Mean of what is left of a prompt that is being computed.
        let rest_s = slowed * self.prefill_variance / (2.0 * self.prefill);
        let wait_s = rest_s / (n as f64 - busy);
        let room_s = (goals.first_token_s - slowed * self.prompt_s()).max(0.0);
        1.0 - waiting(n, busy) * (-room_s / wait_s.max(f64::MIN_POSITIVE)).exp()
    }

    /// How `n` engines decode that compute prompts for a share `beside` of their time, of which the work varies by
    /// `variance`, in square seconds for each second.
    fn decoding(&self, n: f64, beside: f64, variance: f64, goals: &Goals) -> Decoding {
        let each_s = (self.cost.decode_per_sequence_ms + self.cost.decode_per_context_token_ms * self.context) / 1e3;
        let base_s = self.cost.decode_base_ms / 1e3;
        if self.tokens <= 0.0 {
            return Decoding { step_s: 0.0, on_time: 1.0, gap_s: 0.0 };
        }
        let (tokens, free) = (self.tokens / n, 1.0 - beside);
        // Of the time that is free, what each sequence of a batch costs beside the step's base.
        let busy = tokens * each_s / free;
        if free <= 0.0 || busy >= 1.0 {
            return Decoding { step_s: base_s, on_time: 0.0, gap_s: f64::INFINITY };
        }
        let step_s = base_s / (1.0 - busy);
        let batch = tokens * step_s / free;
        let of_steps = each_s * each_s * batch * BATCH_VARIES;
        let n_tokens = self.tokens / self.requests.max(f64::MIN_POSITIVE);
        let of_prompts = variance * goals.token_s / n_tokens.max(1.0);
        let room_s = goals.token_s * free - step_s;
        let on_time = normal(room_s / (of_steps + of_prompts).sqrt().max(f64::MIN_POSITIVE));
        // Of so many tokens one waits for a part of a prompt.
        let share = beside / free * step_s / self.chunk_s();
        Decoding { step_s, on_time, gap_s: step_s + self.chunk_s() * (share / 0.01).min(1.0) }
    }

    /// A step's part of a prompt, in seconds: as much as there is room for, or all of one that is short.
    fn chunk_s(&self) -> f64 {
        (self.cost.prefill_ms(self.step_tokens.max(1), 0) / 1e3).min(self.prompt_s()).max(f64::MIN_POSITIVE)
    }

    /// A prompt, in seconds.
    fn prompt_s(&self) -> f64 {
        self.prefill / self.requests.max(f64::MIN_POSITIVE)
    }
}

/// How much more of prompts is computed where they move, as a part of what else would be, where a part `hits` is cached.
pub(super) fn computed_again(hits: f64) -> f64 {
    HITS_LOST * hits / (1.0 - hits)
}

fn price_of_gap(gap_s: f64, goals: &Goals) -> f64 {
    PRICE_OF_GAP * (gap_s / (GAP_GOALS * goals.token_s)).min(2.0)
}

/// Part of those that come to `n` servers of which `busy` are busy on average who find no server free (Erlang's C).
fn waiting(n: usize, busy: f64) -> f64 {
    let blocked = blocked(n, busy);
    let free = 1.0 - busy / n as f64;
    blocked / (free + (1.0 - free) * blocked)
}

/// Part of those that come to `n` servers who find no server free and go away, where as many as `busy` would be busy if
/// there were enough (Erlang's B, by its recursion in the number of servers).
fn blocked(n: usize, busy: f64) -> f64 {
    (1..=n).fold(1.0, |blocked, n| busy * blocked / (n as f64 + busy * blocked))
}

/// The normal distribution, within 0.01 of it (a logistic one that is as wide).
fn normal(z: f64) -> f64 {
    1.0 / (1.0 + (-1.702 * z).exp())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GOALS: Goals = Goals { first_token_s: 2.0, token_s: 0.05 };

    /// A 7B model on a device as of `ascend-910b`, asked for prompts of 13,000 tokens and answers of 350.
    fn large(n_engines: usize, requests: f64, prompt_s: f64) -> Demand {
        Demand {
            n_engines,
            prefill: requests * prompt_s,
            // As much as prompts vary in a conversation: the mean of their squares is 6.5 times the square of the mean.
            prefill_variance: 6.5 * requests * prompt_s * prompt_s,
            hits: 0.2,
            requests,
            tokens: requests * 350.0,
            context: 13_000.0,
            step_tokens: 4_096,
            cost: CostCoefficients {
                prefill_base_ms: 1.0,
                prefill_per_token_ms: 0.09,
                prefill_per_token_context_ms: 2.7e-6,
                decode_base_ms: 15.6,
                decode_per_sequence_ms: 0.03,
                decode_per_context_token_ms: 6e-5,
            },
        }
    }

    fn best(demand: &Demand) -> usize {
        let promise = |n: &usize| demand.promise(*n, &GOALS);
        (0..demand.n_engines).max_by(|one, two| promise(one).total_cmp(&promise(two))).unwrap()
    }

    #[test]
    fn prompts_are_computed_apart_where_they_would_hold_up_many_and_there_is_room_for_them() {
        assert_eq!(best(&large(8, 3.0, 1.4)), 6, "one engine could not decode for all");
        assert_eq!(best(&large(8, 0.1, 0.1)), 0, "there is hardly a prompt");
        assert_eq!(best(&large(1, 0.3, 1.0)), 0, "there is nobody else");
        assert_eq!(best(&large(2, 1.2, 1.0)), 0, "one engine cannot compute them all");
        assert_eq!(best(&Demand { tokens: 3.0, ..large(8, 3.0, 1.4) }), 7, "hardly anything is decoded");
        assert_eq!(best(&Demand { tokens: 0.0, ..large(8, 3.0, 1.4) }), 0, "nothing is decoded");
    }

    #[test]
    fn prompts_that_come_evenly_wait_for_none_before_them() {
        let even = Demand { prefill_variance: 0.0, ..large(8, 3.0, 1.4) };
        assert!(even.promise(5, &GOALS) > large(8, 3.0, 1.4).promise(5, &GOALS) + 0.2);
    }

    #[test]
    fn who_waits_is_as_known() {
        // M/M/1: as many as the server is busy; M/M/2 at 1: a third.
        assert!((waiting(1, 0.7) - 0.7).abs() < 1e-12);
        assert!((waiting(2, 1.0) - 1.0 / 3.0).abs() < 1e-12);
    }

    proptest! {
        #[test]
        fn a_promise_is_a_part_of_all_less_its_price(
            (n_engines, n) in (1..20_usize, 0..20_usize),
            (requests, prompt_s, tokens) in (0.0..100.0, 0.0..30.0, 0.0..1e5),
        ) {
            let promise = Demand { tokens, ..large(n_engines, requests, prompt_s) }.promise(n, &GOALS);
            if n < n_engines {
                prop_assert!((-1.0..=1.0).contains(&promise), "{}", promise);
            } else {
                prop_assert_eq!(promise, f64::NEG_INFINITY);
            }
        }
    }
}
