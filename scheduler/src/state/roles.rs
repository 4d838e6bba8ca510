//! Which workers compute prompts for others: as few as serve all better than if each did everything.
//!
//! A worker that does everything holds up those that decode whenever it computes a part of a prompt; one that only
//! computes prompts lies idle when there are none. What is expected of each number of prefill workers is weighed against
//! goals, and a change must promise enough for long enough, so that roles do not swing with the load.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use contract::cost::CostCoefficients;
use contract::ids::EngineId;
use contract::occupancy::Occupancy;
use contract::view::{EngineView, Role};
use serde::{Deserialize, Serialize};

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
    /// For so long another split must promise more before roles change, in milliseconds.
    pub settle_ms: u64,
}

impl Default for RoleSettings {
    fn default() -> Self {
        Self { auto: true, decode_ms_goal: 50.0, first_token_ms_goal: 2_000.0, settle_ms: 10_000 }
    }
}

/// Time over which the demand for prompts is averaged.
const DEMAND_OVER: Duration = Duration::from_secs(10);
/// How much better another split must promise to be.
const GAIN_MIN: f64 = 0.15;
/// What a missed goal costs beside its share of the goal.
const PRICE_OF_MISS: f64 = 4.0;
/// How many times the goal for tokens the slowest of a hundred may take.
const SLOWEST: f64 = 4.0;
/// What it costs when prompts come faster than they are computed, more than anything else.
const OVERLOADED: f64 = 1e9;
/// Most of its time that a worker can compute.
const UTILIZATION_MAX: f64 = 0.95;

/// What all engines do together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Demand {
    /// Engines.
    pub n_engines: usize,
    /// Time that one engine would compute prompts in a second, in seconds.
    pub prefill: f64,
    /// Requests that decode.
    pub batch: u64,
    /// Tokens in their context.
    pub context: u64,
    /// Tokens of a prompt that a step computes.
    pub step_tokens: u64,
    /// What an engine's steps cost.
    pub cost: CostCoefficients,
}

/// Who has which role, and what is seen of the demand.
#[derive(Clone, Debug)]
pub struct Roles {
    settings: RoleSettings,
    given: BTreeMap<EngineId, Role>,
    seen: BTreeMap<EngineId, Seen>,
    /// Another number of prefill engines that promises more, and since when.
    wanted: Option<(usize, Instant)>,
}

#[derive(Clone, Copy, Debug)]
struct Seen {
    tokens: u64,
    at: Instant,
    tokens_per_s: f64,
}

impl Roles {
    pub(super) fn new(settings: RoleSettings) -> Self {
        Self { settings, given: BTreeMap::new(), seen: BTreeMap::new(), wanted: None }
    }

    /// Takes an engine's report.
    pub(super) fn observe(&mut self, occupancy: &Occupancy, now: Instant) {
        let tokens = occupancy.tokens_prefilled + occupancy.tokens_queued;
        let seen = self.seen.entry(occupancy.engine.clone());
        let seen = seen.or_insert(Seen { tokens, at: now, tokens_per_s: 0.0 });
        let seconds = now.saturating_duration_since(seen.at).as_secs_f64();
        // Reports come in bursts: a rate over less than this says little.
        if seconds < 0.25 {
            return;
        }
        let rate = tokens.saturating_sub(seen.tokens) as f64 / seconds;
        let weight = 1.0 - (-seconds / DEMAND_OVER.as_secs_f64()).exp();
        *seen = Seen { tokens, at: now, tokens_per_s: seen.tokens_per_s + weight * (rate - seen.tokens_per_s) };
    }

    /// The roles that engines were given, for those that come into view anew.
    pub(super) fn of(&self, engine: &EngineId) -> Option<Role> {
        self.given.get(engine).copied()
    }

    /// Looks whether roles should change at `now`; yields those of all `engines` when they do.
    ///
    /// `engines` are those that were not told a role and do not drain.
    pub(super) fn decide(&mut self, engines: &[&EngineView], now: Instant) -> Option<&BTreeMap<EngineId, Role>> {
        self.seen.retain(|engine, _| engines.iter().any(|view| view.engine == *engine));
        let n_now = engines.iter().filter(|view| view.role == Role::Prefill).count();
        let demand = self.demand(engines);
        let n_best = match &demand {
            Some(demand) if self.settings.auto => demand.n_prefill(&self.settings, n_now),
            _ => 0,
        };
        if n_best == n_now {
            self.wanted = None;
            return None;
        }
        let is_same = self.wanted.is_some_and(|(n, _)| n == n_best);
        let since = self.wanted.filter(|_| is_same).map_or(now, |(_, since)| since);
        self.wanted = Some((n_best, since));
        if now.saturating_duration_since(since) < Duration::from_millis(self.settings.settle_ms) {
            return None;
        }
        self.wanted = None;
        self.assign(engines, n_best);
        Some(&self.given)
    }

    fn demand(&self, engines: &[&EngineView]) -> Option<Demand> {
        let reports: Vec<&Occupancy> = engines.iter().filter_map(|view| view.occupancy.as_ref()).collect();
        let known = reports.iter().find(|report| report.cost.prefill_per_token_ms > 0.0)?;
        let tokens_per_s: f64 = self.seen.values().map(|seen| seen.tokens_per_s).sum();
        Some(Demand {
            n_engines: engines.len(),
            prefill: tokens_per_s * known.cost.prefill_per_token_ms / 1e3,
            batch: reports.iter().map(|report| u64::from(report.requests_running)).sum(),
            context: reports.iter().map(|report| report.tokens_running).sum(),
            step_tokens: u64::from(known.step_tokens),
            cost: known.cost,
        })
    }

    /// Gives `n` engines the role of prefill: those that have it, then those that run least.
    fn assign(&mut self, engines: &[&EngineView], n: usize) {
        let mut order: Vec<&&EngineView> = engines.iter().collect();
        let running = |view: &EngineView| view.occupancy.as_ref().map_or(0, |report| report.requests_running);
        order.sort_by_key(|view| (view.role != Role::Prefill, running(view), view.engine.clone()));
        let role = |index: usize| match (n, index < n) {
            (0, _) => Role::Mixed,
            (_, true) => Role::Prefill,
            (_, false) => Role::Decode,
        };
        self.given = order.iter().enumerate().map(|(index, view)| (view.engine.clone(), role(index))).collect();
    }
}

impl Demand {
    /// The number of prefill engines that serves it best; another than `n_now` only if it promises enough.
    fn n_prefill(&self, settings: &RoleSettings, n_now: usize) -> usize {
        let costs = (0..self.n_engines).map(|n| (n, self.cost_of(n, settings)));
        let (n_best, best) = costs.min_by(|(_, one), (_, two)| one.total_cmp(two)).unwrap_or_default();
        let now = if n_now < self.n_engines { self.cost_of(n_now, settings) } else { f64::INFINITY };
        if best < (1.0 - GAIN_MIN) * now { n_best } else { n_now.min(self.n_engines.saturating_sub(1)) }
    }

    /// What requests would see if `n_prefill` engines computed the prompts for the others, against the goals; where it is
    /// none, all compute and decode. Less is better.
    fn cost_of(&self, n_prefill: usize, settings: &RoleSettings) -> f64 {
        let (n_computing, n_decoding) =
            if n_prefill == 0 { (self.n_engines, self.n_engines) } else { (n_prefill, self.n_engines - n_prefill) };
        let each = |all: u64| (all as f64 / n_decoding as f64).ceil() as u64;
        let decode_ms = self.cost.decode_ms(each(self.batch).max(1), each(self.context));
        let chunk_ms = self.cost.prefill_ms(self.step_tokens.max(1), 0);
        let busy = self.prefill / n_computing as f64;
        if busy >= UTILIZATION_MAX {
            return OVERLOADED * busy;
        }
        let first_token_ms = chunk_ms / (1.0 - busy);
        let (token_ms, slowest_ms) = if n_prefill > 0 {
            (decode_ms, decode_ms)
        } else {
            // Of so many tokens one waits for a part of a prompt.
            let share = busy / (1.0 - busy) * decode_ms / chunk_ms;
            (decode_ms / (1.0 - busy), decode_ms + chunk_ms * (share / 0.01).min(1.0))
        };
        let term = |ms: f64, goal: f64| ms / goal + PRICE_OF_MISS * (ms / goal - 1.0).max(0.0);
        term(first_token_ms, settings.first_token_ms_goal)
            + term(token_ms, settings.decode_ms_goal)
            + slowest_ms / (SLOWEST * settings.decode_ms_goal)
    }
}

#[cfg(test)]
mod tests {
    use contract::ids::{DataRank, Incarnation};
    use contract::model::{Fingerprint, ModelIdentity};
    use contract::occupancy::BlockCounts;

    use super::*;

    const COST: CostCoefficients = CostCoefficients {
        prefill_base_ms: 0.0,
        prefill_per_token_ms: 0.66,
        prefill_per_token_context_ms: 0.0,
        decode_base_ms: 8.0,
        decode_per_sequence_ms: 0.75,
        decode_per_context_token_ms: 0.0,
    };

    fn demand(n_engines: usize, prefill: f64, batch: u64) -> Demand {
        Demand { n_engines, prefill, batch, context: 0, step_tokens: 512, cost: COST }
    }

    fn n_prefill(n_engines: usize, prefill: f64, batch: u64) -> usize {
        demand(n_engines, prefill, batch).n_prefill(&RoleSettings::default(), 0)
    }

    #[test]
    fn prompts_are_computed_apart_where_they_would_hold_up_many_and_there_is_room_for_them() {
        assert_eq!(n_prefill(2, 0.7, 32), 1, "prompts hold up 32 requests");
        assert_eq!(n_prefill(2, 1.5, 32), 0, "one engine cannot compute them all");
        assert_eq!(n_prefill(2, 0.001, 32), 0, "there is hardly a prompt");
        assert_eq!(n_prefill(1, 0.7, 32), 0, "there is nobody else");
        assert_eq!(n_prefill(8, 2.1, 160), 4, "enough that prompts hardly wait for each other");
    }

    fn view(index: u64, running: u32, tokens_prefilled: u64, role: Role) -> EngineView {
        let engine =
            EngineId { worker: format!("w{index}").into(), incarnation: Incarnation(1), data_rank: DataRank(0) };
        let one = Fingerprint([1; 16]);
        EngineView {
            engine: engine.clone(),
            address: String::new(),
            identity: ModelIdentity {
                name: "m".into(),
                block_size: 16,
                context_length: 100,
                vocab_size: 10,
                model: one,
                tokenizer: one,
                hash_key: one,
                numerics: one,
            },
            role,
            draining: None,
            occupancy: Some(Occupancy {
                engine,
                step: 1,
                blocks: BlockCounts { total: 4, allocated: 0, cached: 0, free: 4 },
                requests_waiting: 0,
                requests_running: running,
                tokens_queued: 0,
                tokens_running: 0,
                cost: COST,
                step_tokens: 512,
                tokens_prefilled,
                is_stalled: false,
            }),
        }
    }

    #[test]
    fn roles_change_when_a_split_promises_more_for_long_enough_and_change_back() {
        let mut roles = Roles::new(RoleSettings::default());
        let start = daemon::clock::now();
        let (mut current, mut changes) = ([Role::Mixed; 2], Vec::new());
        for second in 0..120_u64 {
            // From the first minute on there are no prompts any more.
            let tokens = second.min(60) * 530;
            let views = [0, 1].map(|i| view(i, 16, tokens, current[i as usize]));
            let now = start + Duration::from_secs(second);
            views.iter().for_each(|view| roles.observe(view.occupancy.as_ref().unwrap(), now));
            if let Some(given) = roles.decide(&[&views[0], &views[1]], now) {
                current = [0, 1].map(|i| given[&views[i].engine]);
                changes.push((second, current));
            }
        }
        let [(first, split), (second, mixed)] = changes[..] else { panic!("{changes:?}") };
        assert!((10..30).contains(&first) && (70..110).contains(&second), "{changes:?}");
        assert_eq!((split, mixed), ([Role::Prefill, Role::Decode], [Role::Mixed; 2]));
    }
}
