//! Which workers compute prompts for others: as many as let most requests meet their goals, in an order of names.
//!
//! A worker that does everything holds up those that decode whenever it computes a part of a prompt; one that only
//! computes prompts lies idle when there are none. What each number of prefill workers promises is weighed once a second
//! for the demand of the last while, and a change must promise enough for long enough, so that roles do not swing.
//! A split in which tokens take too long all the same is given up, and none is tried for a while.
//!
//! Several schedulers decide each by itself and alike: engines compute prompts up to a name, so that whoever counts as
//! many gives the same ones that role, and an engine that comes back has the role that it had. A scheduler that has not
//! seen the demand for a while says nothing of roles, and routers keep those they know.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use contract::cost::{CostCoefficients, StepLoad};
use contract::ids::{DataRank, EngineId, WorkerId};
use contract::occupancy::Occupancy;
use contract::view::{EngineView, Role};
use serde::{Deserialize, Serialize};

use super::demand::{Demand, Goals, computed_again};

/// How roles are given.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RoleSettings {
    /// Whether workers that were not told a role are given one; else each does everything.
    pub auto: bool,
    /// Mean time between two tokens of a request that is aimed at, in milliseconds.
    pub decode_ms_goal: f64,
    /// Time to first token that is aimed at, in milliseconds.
    pub first_token_ms_goal: f64,
    /// For so long another split must promise more before roles change, in milliseconds; demand is averaged over twelve
    /// times as long.
    pub settle_ms: u64,
}

impl Default for RoleSettings {
    fn default() -> Self {
        Self { auto: true, decode_ms_goal: 50.0, first_token_ms_goal: 2_000.0, settle_ms: 10_000 }
    }
}

/// The demand is averaged over so many times what a change takes to settle.
const AVERAGED_OVER: f64 = 12.0;
/// What comes within such a part of that time counts as one, where the variance of the demand is concerned.
const WINDOW: f64 = 0.5;
/// More tokens are decoded in a second than were: those that end now were begun when fewer came, and decoding that cannot
/// keep up hides how much is asked of it.
const MORE_TOKENS: f64 = 1.1;
/// Engines that decode as many requests at once on average hardly wait for one, so that their steps tell what a token
/// takes.
const LOADED: f64 = 4.0;
/// After so many windows in which tokens took too long a split has not kept its promise.
const SLOW_WINDOWS: u32 = 6;
/// So many times what a change takes to settle no split is believed in then: what made it bad is seen in it only.
const LET_DOWN: u32 = 60;
/// More of prompts than this is not taken for cached, as what a split would lose of it is not known.
const HITS_MAX: f64 = 0.7;
/// How many more of all requests must meet their goals for roles to change.
const GAIN_MIN: f64 = 0.02;

/// Who has which role, and what is seen of the demand.
#[derive(Clone, Debug)]
pub struct Roles {
    settings: RoleSettings,
    given: Given,
    seen: BTreeMap<EngineId, Seen>,
    /// What came since the last window.
    coming: Coming,
    /// Whether enough time has passed for that to count.
    has_begun: bool,
    rates: Option<Rates>,
    /// Since when another number of prefill engines has promised more.
    wanted_since: Option<Instant>,
    /// Windows one after the other in which engines that only decode took longer for a token than is aimed at.
    n_slow: u32,
    /// Until then no split is believed in, since the last one did not keep its promise.
    no_split_until: Option<Instant>,
}

/// The roles of engines that were not told one.
#[derive(Clone, Debug, PartialEq)]
enum Given {
    /// Too little is known of the demand.
    Unknown,
    /// All do everything.
    Mixed,
    /// Engines up to this one compute prompts for those after it.
    UpTo(WorkerId, DataRank),
}

/// What an engine last reported.
#[derive(Clone, Copy, Debug)]
struct Seen {
    at: Instant,
    requests_running: u32,
    step: u64,
    computed: StepLoad,
    tokens_queued: u64,
    pairs_queued: f64,
    requests_begun: u64,
    prompt_tokens_begun: u64,
}

/// What came within a time.
#[derive(Clone, Copy, Debug, Default)]
struct Coming {
    since: Option<Instant>,
    prefill_s: f64,
    requests: f64,
    prompt_tokens: f64,
    prompt_tokens_computed: f64,
    tokens: f64,
    context: f64,
    /// Time in which engines that only decode have something to do, their steps and tokens in it.
    decode_s: f64,
    decode_steps: f64,
    decode_tokens: f64,
}

/// What comes in a second, on average; of prompts what is computed where all engines do everything.
#[derive(Clone, Copy, Debug)]
struct Rates {
    began: Instant,
    prefill: f64,
    prefill_variance: f64,
    requests: f64,
    prompt_tokens: f64,
    prompt_tokens_computed: f64,
    tokens: f64,
    context: f64,
}

impl Roles {
    pub(super) fn new(settings: RoleSettings) -> Self {
        Self {
            settings,
            given: if settings.auto { Given::Unknown } else { Given::Mixed },
            seen: BTreeMap::new(),
            coming: Coming::default(),
            has_begun: false,
            rates: None,
            wanted_since: None,
            n_slow: 0,
            no_split_until: None,
        }
    }

    /// Takes the report of an engine that was not told a role, received `at`.
    pub(super) fn observe(&mut self, occupancy: &Occupancy, at: Instant) {
        let Occupancy { requests_running, step, computed, tokens_queued, pairs_queued, .. } = *occupancy;
        let Occupancy { requests_begun, prompt_tokens_begun, .. } = *occupancy;
        let now = Seen {
            at,
            requests_running,
            step,
            computed,
            tokens_queued,
            pairs_queued,
            requests_begun,
            prompt_tokens_begun,
        };
        let Some(before) = self.seen.insert(occupancy.engine.clone(), now) else { return };
        let grown = |of: fn(&Seen) -> u64| of(&now) as f64 - of(&before) as f64;
        // What was queued and is not computed in the end, since it was cached or is not wanted any more, is taken back.
        let tokens = grown(|seen| seen.computed.prefill_tokens + seen.tokens_queued);
        let pairs = |seen: &Seen| seen.computed.prefill_pairs + seen.pairs_queued;
        self.coming.prefill_s += prefill_s(occupancy, tokens, pairs(&now) - pairs(&before));
        self.coming.requests += grown(|seen| seen.requests_begun);
        self.coming.prompt_tokens += grown(|seen| seen.prompt_tokens_begun);
        self.coming.prompt_tokens_computed += grown(|seen| seen.computed.prefill_tokens);
        self.coming.tokens += grown(|seen| seen.computed.decode_sequences);
        self.coming.context += grown(|seen| seen.computed.decode_context);
        let is_busy = before.requests_running > 0 && requests_running > 0;
        if is_busy && self.of(&occupancy.engine) == Some(Role::Decode) {
            self.coming.decode_s += at.saturating_duration_since(before.at).as_secs_f64();
            self.coming.decode_steps += grown(|seen| seen.step);
            self.coming.decode_tokens += grown(|seen| seen.computed.decode_sequences);
        }
    }

    /// The role of an engine that was not told one, if there is any to be told.
    pub(super) fn of(&self, engine: &EngineId) -> Option<Role> {
        match &self.given {
            Given::Unknown => None,
            Given::Mixed => Some(Role::Mixed),
            Given::UpTo(worker, rank) if (&engine.worker, engine.data_rank) <= (worker, *rank) => Some(Role::Prefill),
            Given::UpTo(..) => Some(Role::Decode),
        }
    }

    /// Looks at `now` whether roles should change; true when they do.
    ///
    /// `engines` are those that were not told a role and do not drain, in the order of their ids.
    pub(super) fn decide(&mut self, engines: &[&EngineView], now: Instant) -> bool {
        self.seen.retain(|engine, _| engines.iter().any(|view| view.engine == *engine));
        if !self.settings.auto {
            return false;
        }
        let n_now = match self.given {
            Given::Unknown => None,
            _ => Some(engines.iter().filter(|view| self.of(&view.engine) == Some(Role::Prefill)).count()),
        };
        self.end_window(n_now.is_some_and(|n| n > 0), now);
        // Whoever does not say what was asked for says nothing of what is cached either.
        let is_old = |seen: &Seen| seen.requests_begun > 0 && seen.prompt_tokens_begun == 0;
        if self.seen.values().any(is_old) {
            return false;
        }
        let Some(demand) = self.demand(engines) else { return false };
        let is_let_down = self.no_split_until.is_some_and(|until| now < until);
        let n_best = if is_let_down { 0 } else { self.n_prefill(&demand, n_now) };
        if n_now == Some(n_best) {
            self.wanted_since = None;
            return false;
        }
        let since = *self.wanted_since.get_or_insert(now);
        if !is_let_down && now.saturating_duration_since(since) < Duration::from_millis(self.settings.settle_ms) {
            return false;
        }
        (self.wanted_since, self.n_slow) = (None, 0);
        // What came under other roles says nothing of these.
        self.coming = Coming::from(now);
        self.given = match n_best.checked_sub(1) {
            None => Given::Mixed,
            Some(last) => Given::UpTo(engines[last].engine.worker.clone(), engines[last].engine.data_rank),
        };
        true
    }

    /// The number of prefill engines that promises most; another than `n_now` only if it promises enough, or is none and
    /// promises as much.
    fn n_prefill(&self, demand: &Demand, n_now: Option<usize>) -> usize {
        let RoleSettings { decode_ms_goal, first_token_ms_goal, .. } = self.settings;
        let goals = Goals { first_token_s: first_token_ms_goal / 1e3, token_s: decode_ms_goal / 1e3 };
        let is_change = |n: usize| n > 0 && n_now.is_some_and(|now| now != n);
        let worth = |n| demand.promise(n, &goals) - if is_change(n) { GAIN_MIN } else { 0.0 };
        let worths = (0..demand.n_engines).map(|n| (n, worth(n)));
        worths.rev().max_by(|(_, one), (_, two)| one.total_cmp(two)).map_or(0, |(n, _)| n)
    }

    fn demand(&self, engines: &[&EngineView]) -> Option<Demand> {
        let rates = self.rates?;
        let mut reports = engines.iter().filter_map(|view| view.occupancy.as_ref());
        let known = reports.find(|report| is_known(&report.cost))?;
        Some(Demand {
            n_engines: engines.len(),
            hits: rates.hits(),
            prefill: rates.prefill.max(0.0),
            prefill_variance: rates.prefill_variance,
            requests: rates.requests,
            tokens: MORE_TOKENS * rates.tokens,
            context: rates.context / rates.tokens.max(f64::MIN_POSITIVE),
            step_tokens: u64::from(known.step_tokens),
            cost: known.cost,
        })
    }

    /// Folds what came into the averages, once there is enough of it.
    fn end_window(&mut self, is_split: bool, now: Instant) {
        let since = *self.coming.since.get_or_insert(now);
        let seconds = now.saturating_duration_since(since).as_secs_f64();
        let settle_s = self.settings.settle_ms.max(1) as f64 / 1e3;
        // At first all begin and nobody ends, so that fewer tokens come than are asked for: that is left out.
        if !self.has_begun && seconds >= settle_s {
            (self.has_begun, self.coming) = (true, Coming::from(now));
            return;
        }
        if !self.has_begun || seconds < WINDOW * settle_s {
            return;
        }
        let mut coming = std::mem::replace(&mut self.coming, Coming::from(now));
        let before = self.rates.unwrap_or(Rates::none(since));
        let token_ms = 1e3 * coming.decode_s / coming.decode_steps;
        let is_slow = coming.decode_tokens > LOADED * coming.decode_steps && token_ms > self.settings.decode_ms_goal;
        self.n_slow = if is_split && is_slow { self.n_slow + 1 } else { 0 };
        if self.n_slow >= SLOW_WINDOWS {
            (self.n_slow, self.no_split_until) =
                (0, Some(now + LET_DOWN * Duration::from_millis(self.settings.settle_ms)));
        }
        if is_split {
            let more = 1.0 + computed_again(before.hits());
            coming.prefill_s /= more;
            coming.prompt_tokens_computed /= more;
        }
        // All count alike at first, and later those that are recent.
        let recent = 1.0 - (-seconds / (AVERAGED_OVER * settle_s)).exp();
        let weight = recent.max(seconds / now.saturating_duration_since(before.began).as_secs_f64());
        let mean = |before: f64, sum: f64| before + weight * (sum / seconds - before);
        let off = coming.prefill_s / seconds - before.prefill;
        self.rates = Some(Rates {
            began: before.began,
            prefill: mean(before.prefill, coming.prefill_s),
            prefill_variance: (1.0 - weight) * (before.prefill_variance + weight * off * off * seconds),
            requests: mean(before.requests, coming.requests),
            prompt_tokens: mean(before.prompt_tokens, coming.prompt_tokens),
            prompt_tokens_computed: mean(before.prompt_tokens_computed, coming.prompt_tokens_computed),
            tokens: mean(before.tokens, coming.tokens),
            context: mean(before.context, coming.context),
        });
    }
}

impl Coming {
    /// Nothing yet, from `since` on.
    fn from(since: Instant) -> Self {
        Self { since: Some(since), ..Self::default() }
    }
}

impl Rates {
    /// Part of prompts that is cached.
    fn hits(&self) -> f64 {
        if self.prompt_tokens <= 0.0 {
            return 0.0;
        }
        (1.0 - self.prompt_tokens_computed / self.prompt_tokens).clamp(0.0, HITS_MAX)
    }

    /// Nothing, from `began` on.
    fn none(began: Instant) -> Self {
        Self {
            began,
            prefill: 0.0,
            prefill_variance: 0.0,
            requests: 0.0,
            prompt_tokens: 0.0,
            prompt_tokens_computed: 0.0,
            tokens: 0.0,
            context: 0.0,
        }
    }
}

/// Time that an engine computes so much of prompts, in chunks as its steps have room for, in seconds.
fn prefill_s(occupancy: &Occupancy, tokens: f64, pairs: f64) -> f64 {
    let CostCoefficients { prefill_base_ms, prefill_per_token_ms, prefill_per_token_context_ms, .. } = occupancy.cost;
    let n_steps = tokens / f64::from(occupancy.step_tokens.max(1));
    (prefill_base_ms * n_steps + prefill_per_token_ms * tokens + prefill_per_token_context_ms * pairs) / 1e3
}

fn is_known(cost: &CostCoefficients) -> bool {
    cost.prefill_per_token_ms > 0.0
}

#[cfg(test)]
mod tests;
