//! Places prompts on engines: what is cached where, what is placed where, and a policy that chooses; pure but for locks.
//!
//! A router drives it by its clock and its streams, a simulation by virtual time.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use contract::cost::CostCoefficients;
use contract::hash::BlockHash;
use contract::ids::{EngineId, Incarnation, TenantId};
use contract::ledger::{Ledger, LedgerEvent, PlacedWork, PlacementKey};
use contract::model::Fingerprint;
use contract::occupancy::Occupancy;
use contract::view::Role;

use super::directory::{Match, PrefixDirectory};
use super::recent::Recent;
use super::{Candidate, Choice, Prediction, Reason, Room, RoutePolicy, Situation, split};

/// What an engine is taken to cost before any has reported: only the order of candidates depends on it.
const COST_UNKNOWN: CostCoefficients = CostCoefficients {
    prefill_base_ms: 0.0,
    prefill_per_token_ms: 0.125,
    prefill_per_token_context_ms: 0.0,
    decode_base_ms: 20.0,
    decode_per_sequence_ms: 0.2,
    decode_per_context_token_ms: 0.000_1,
};

/// How a router places.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PlacerSettings {
    /// For so long blocks of a prompt just placed are taken for cached.
    pub promise: Duration,
    /// Longest time between two tokens that running requests should see, in milliseconds.
    pub decode_ms_goal: f64,
    /// Predicted wait at an engine, in milliseconds, from which on nothing more is placed there; requests wait at the
    /// router instead, where their order and place can still change.
    pub dispatch_ahead_ms: f64,
    /// For so long room at an engine that is new is left to each that comes before a prompt elsewhere.
    pub give_way: Duration,
    /// Bound of the prefix directory.
    pub directory_bytes_max: usize,
}

/// An engine that is ready.
#[derive(Clone, Copy, Debug)]
pub struct Target<'a> {
    /// Which engine.
    pub engine: &'a EngineId,
    /// Its last report, none before the first.
    pub occupancy: Option<&'a Occupancy>,
    /// Takes no new work.
    pub draining: bool,
    /// Is about to leave, and sends others what it has cached until then.
    pub lends: bool,
    /// It can fetch what others have cached.
    pub fetches: bool,
    /// Engines of equal ones take each other's blocks without a token changing.
    pub numerics: Fingerprint,
    /// What it does of a request.
    pub role: Role,
    /// Predicted prefill of what waits at this router for the engine and goes before the prompt, in milliseconds.
    pub backlog_ms: f64,
}

impl Target<'_> {
    /// Those of `candidates`, which are `targets`, whose blocks it can take and go on with as if they were its own.
    fn can_fetch_from<'c>(&self, targets: &[&Target<'_>], candidates: &[Candidate<'c>]) -> Vec<Candidate<'c>> {
        let fits = |target: &Target<'_>| self.fetches && target.numerics == self.numerics;
        let fitting = targets.iter().zip(candidates).filter(|(target, _)| fits(target));
        fitting.map(|(_, candidate)| *candidate).collect()
    }
}

/// What a prompt waits for where engines have `dispatch_ahead_ms` of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    /// Nothing: it is placed at once.
    None,
    /// Room at the engine that suits it best.
    Best,
    /// Room anywhere: the choice is among those that have some.
    Any,
}

/// A prompt to be placed.
#[derive(Clone, Copy, Debug)]
pub struct Prompt<'a> {
    /// Who asks.
    pub tenant: &'a TenantId,
    /// Others that wait at other routers and come first.
    pub n_before: u32,
    /// Its length.
    pub n_tokens: u64,
    /// Hashes of its full blocks that may be reused.
    pub hashes: &'a [BlockHash],
    /// Tokens in a block.
    pub block_size: u32,
    /// Stands for the conversation or user it belongs to.
    pub session: u64,
}

/// One engine as it looked when a prompt was to be placed.
#[derive(Clone, Debug, PartialEq)]
pub struct Considered {
    /// Which engine.
    pub engine: EngineId,
    /// Prompt tokens that were cached there or promised to be.
    pub tokens_cached: u64,
    /// Of these, tokens that were only promised.
    pub tokens_promised: u64,
    /// Prompt tokens ahead of this one.
    pub tokens_ahead: u64,
    /// Requests that waited or ran there.
    pub n_requests: u32,
    /// What was expected of it.
    pub prediction: Prediction,
}

/// A choice and all it was made from.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    /// Engines that took requests, then those that compute prompts for others, each in the order of the targets.
    pub considered: Vec<Considered>,
    /// Index of the chosen one among them.
    pub chosen: usize,
    /// Index of the one that computes the prompt, if that is another.
    pub prefill: Option<usize>,
    /// Index of the one that does when that one fails.
    pub instead: Option<usize>,
    /// Who leaves and sends the chosen one what it has cached.
    pub lender: Option<Lender>,
    /// Why that one.
    pub reason: Reason,
}

/// An engine that leaves and is asked for what it has cached of a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lender {
    /// Which engine.
    pub engine: EngineId,
    /// Prompt tokens that are cached there.
    pub tokens_cached: u64,
}

/// Where a prompt was placed.
#[derive(Clone, Debug, PartialEq)]
pub struct Placed {
    /// Index into the targets.
    pub index: usize,
    /// Why there.
    pub decision: Decision,
    /// Names it in the ledger.
    pub key: PlacementKey,
    /// What other routers are to be told.
    pub work: PlacedWork,
    /// Who computes the prompt, if that is another engine: until the first token it has work of its own.
    pub prefill: Option<PlacedPrefill>,
    /// Index into the targets of the one that does when that one fails.
    pub instead: Option<usize>,
    /// Index into the targets of the one that leaves and is asked first for what it has cached.
    pub lender: Option<usize>,
}

/// The prompt of a placement that another engine computes.
#[derive(Clone, Debug, PartialEq)]
pub struct PlacedPrefill {
    /// Index of that engine into the targets.
    pub index: usize,
    /// Names its share in the ledger.
    pub key: PlacementKey,
    /// What other routers are to be told.
    pub work: PlacedWork,
}

/// Why a prompt was not placed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum NotPlaced {
    /// No target takes work.
    NoEngine,
    /// The chosen engine has enough work placed.
    Busy {
        /// Index of the engine into the targets.
        index: usize,
        /// Until it is predicted to have room, in milliseconds.
        wait_ms: f64,
        /// What the prompt's own prefill is predicted to take there, in milliseconds.
        prefill_ms: f64,
    },
}

/// Places prompts.
pub struct Placer {
    policy: &'static dyn RoutePolicy,
    settings: PlacerSettings,
    router: Incarnation,
    directory: PrefixDirectory,
    ledger: Mutex<Ledger>,
    recent: Mutex<Recent>,
    n_placed: AtomicU64,
    turns: AtomicU64,
}

impl Placer {
    /// Makes a placer that knows of nothing.
    pub fn new(policy: &'static dyn RoutePolicy, settings: PlacerSettings, router: Incarnation) -> Self {
        Self {
            policy,
            settings,
            router,
            directory: PrefixDirectory::new(settings.directory_bytes_max),
            ledger: Mutex::default(),
            recent: Mutex::default(),
            n_placed: AtomicU64::new(0),
            turns: AtomicU64::new(0),
        }
    }

    /// The policy's name.
    pub fn policy(&self) -> &'static str {
        self.policy.name()
    }

    /// The router that places.
    pub fn router(&self) -> Incarnation {
        self.router
    }

    /// What is cached where.
    pub fn directory(&self) -> &PrefixDirectory {
        &self.directory
    }

    /// Chooses an engine for a prompt at `now`, promises it the prompt's blocks and enters the work into the ledger.
    ///
    /// # Errors
    /// Why it was not placed; nothing has changed then.
    pub fn place(
        &self,
        targets: &[Target<'_>],
        prompt: &Prompt<'_>,
        patience: Patience,
        now: Instant,
        random: u64,
    ) -> Result<Placed, NotPlaced> {
        let turn = self.turns.fetch_add(1, Ordering::Relaxed);
        let ahead_ms = self.settings.dispatch_ahead_ms;
        let index_of = |engine: &EngineId| {
            targets.iter().position(|target| target.engine == engine).expect("it is one of the targets")
        };
        let mut decision = self.decide(targets, prompt, turn, now, random).ok_or(NotPlaced::NoEngine)?;
        if patience == Patience::Any && decision.computes().prediction.wait_ms >= ahead_ms {
            let free = decision.considered.iter().filter(|one| one.prediction.wait_ms < ahead_ms);
            let free = free.map(|one| targets[index_of(&one.engine)]);
            let free: Vec<Target<'_>> = free.chain(targets.iter().filter(|target| target.lends).copied()).collect();
            decision = self.decide(&free, prompt, turn, now, random).unwrap_or(decision);
        }
        let (chosen, computes) = (decision.chosen(), decision.computes());
        let (prediction, index) = (computes.prediction, index_of(&computes.engine));
        if patience != Patience::None && prediction.wait_ms >= ahead_ms {
            let wait_ms = prediction.wait_ms - ahead_ms;
            return Err(NotPlaced::Busy { index, wait_ms, prefill_ms: prediction.prefill_ms });
        }
        let held_ms = self.held_ms(&computes.engine, prediction.wait_ms, prompt.n_before, now);
        if patience != Patience::None && held_ms > 0.0 {
            return Err(NotPlaced::Busy { index, wait_ms: held_ms, prefill_ms: prediction.prefill_ms });
        }
        let placed = |engine: &EngineId| {
            let computed = |value: u64| if *engine == computes.engine { value } else { 0 };
            let work = PlacedWork {
                engine: engine.clone(),
                tenant: prompt.tenant.clone(),
                tokens_new: clamp(computed(prompt.n_tokens.saturating_sub(decision.tokens_held()))),
                tokens_prompt: clamp(prompt.n_tokens),
                prefill_us: computed((prediction.prefill_ms * 1e3) as u64),
            };
            let key = self.next_key();
            self.directory.promise(engine, prompt.hashes, now, now + self.settings.promise);
            self.tell(LedgerEvent::Placed(key, work.clone()), now);
            (key, work)
        };
        let (key, work) = placed(&chosen.engine);
        let prefill = decision.prefill.map(|_| {
            let (key, work) = placed(&computes.engine);
            PlacedPrefill { index, key, work }
        });
        let instead = decision.instead.map(|instead| index_of(&decision.considered[instead].engine));
        let lender = decision.lender.as_ref().map(|lender| index_of(&lender.engine));
        Ok(Placed { index: index_of(&chosen.engine), key, work, prefill, instead, lender, decision })
    }

    /// What `place` would choose, without placing anything; none when no target takes work.
    pub fn explain(&self, targets: &[Target<'_>], prompt: &Prompt<'_>, now: Instant, random: u64) -> Option<Decision> {
        self.decide(targets, prompt, self.turns.load(Ordering::Relaxed), now, random)
    }

    /// Enters a further choice of a prompt that was placed, where the first computes the prompt for all.
    pub fn place_beside(&self, work: &PlacedWork, now: Instant) -> (PlacementKey, PlacedWork) {
        let key = self.next_key();
        let work = PlacedWork { tokens_new: 0, prefill_us: 0, ..work.clone() };
        self.tell(LedgerEvent::Placed(key, work.clone()), now);
        (key, work)
    }

    /// Takes a change of the ledger: this router's own, or what others told.
    pub fn tell(&self, event: LedgerEvent, now: Instant) {
        if let LedgerEvent::Placed(_, work) = &event {
            self.recent().add(&work.engine, now);
        }
        self.ledger().apply(event, now);
    }

    /// What is placed and has not ended.
    pub fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn recent(&self) -> MutexGuard<'_, Recent> {
        self.recent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How long room at an engine is still left to others that come first: for a moment each after it appeared, by which
    /// time they have taken it if they could. Engines have `dispatch_ahead_ms` of work meanwhile.
    ///
    /// Room appears when the ledger changes, or as work is done in between.
    fn held_ms(&self, engine: &EngineId, wait_ms: f64, n_before: u32, now: Instant) -> f64 {
        if n_before == 0 {
            return 0.0;
        }
        let Some(changed) = self.ledger().changed(engine) else { return 0.0 };
        let unchanged_ms = now.saturating_duration_since(changed).as_secs_f64() * 1e3;
        let room_ms = unchanged_ms.min(self.settings.dispatch_ahead_ms - wait_ms);
        (self.settings.give_way * n_before).as_secs_f64() * 1e3 - room_ms
    }

    fn next_key(&self) -> PlacementKey {
        PlacementKey { router: self.router, number: self.n_placed.fetch_add(1, Ordering::Relaxed) }
    }

    fn decide(
        &self,
        targets: &[Target<'_>],
        prompt: &Prompt<'_>,
        turn: u64,
        now: Instant,
        random: u64,
    ) -> Option<Decision> {
        let usable = || targets.iter().filter(|target| !target.draining);
        // Where all compute prompts for others, there are no others.
        let takes_requests = |target: &&Target<'_>| target.role != Role::Prefill;
        let is_any = usable().any(|target| takes_requests(&target));
        let (takers, prefill_targets): (Vec<_>, Vec<_>) =
            usable().partition(|target| !is_any || takes_requests(target));
        let lenders: Vec<_> = targets.iter().filter(|target| target.lends).collect();
        let candidates = self.candidates(takers.iter().chain(&prefill_targets).chain(&lenders).copied(), prompt, now);
        let (candidates, lending) = candidates.split_at(takers.len() + prefill_targets.len());
        let (candidates, prefills) = candidates.split_at(takers.len());
        if candidates.is_empty() {
            return None;
        }
        let situation = Situation {
            candidates,
            n_prompt_tokens: prompt.n_tokens,
            session: prompt.session,
            decode_ms_goal: self.settings.decode_ms_goal,
            turn,
            random,
        };
        let Choice { index: chosen, reason } = self.policy.choose(&situation);
        let considered = |candidate: &Candidate<'_>, prediction| Considered {
            engine: candidate.engine.clone(),
            tokens_cached: candidate.tokens_cached,
            tokens_promised: candidate.tokens_promised,
            tokens_ahead: candidate.tokens_ahead(),
            n_requests: candidate.n_requests(),
            prediction,
        };
        let mut predictions: Vec<Prediction> = candidates.iter().map(|one| situation.predict(one)).collect();
        let decode = &candidates[chosen];
        let (lending, prefills) = (
            takers[chosen].can_fetch_from(&lenders, lending),
            takers[chosen].can_fetch_from(&prefill_targets, prefills),
        );
        let lent = split::choose_lender(&situation, decode, &lending);
        let decode = (decode, lent.map_or(predictions[chosen], |(.., helped)| helped));
        let pairs = split::predict_pairs(&situation, decode, &prefills);
        let [prefill, instead] = split::choose(&situation, decode, &prefills, &pairs)
            .map(|of_prefills| of_prefills.map(|index| candidates.len() + index));
        // Who computes a prompt for another has none of what is lent.
        let lender = lent.filter(|_| prefill.is_none()).map(|(index, tokens_cached, helped)| {
            predictions[chosen] = helped;
            Lender { engine: lending[index].engine.clone(), tokens_cached }
        });
        predictions.extend(pairs);
        let all = candidates.iter().chain(&prefills).zip(predictions);
        let considered = all.map(|(candidate, prediction)| considered(candidate, prediction)).collect();
        Some(Decision { considered, chosen, prefill, instead, lender, reason })
    }

    fn candidates<'a>(
        &self,
        targets: impl Iterator<Item = &'a Target<'a>> + Clone,
        prompt: &Prompt<'_>,
        now: Instant,
    ) -> Vec<Candidate<'a>> {
        let cost = usual_cost(targets.clone());
        let matches = self.directory.lookup(prompt.hashes, now);
        let (ledger, recent) = (self.ledger(), self.recent());
        let block_size = u64::from(prompt.block_size);
        let candidate = |target: &'a Target<'a>| {
            let found = self.directory.slot(target.engine).map_or(Match::default(), |slot| matches.of(slot));
            let tokens_cached = (found.n_blocks as u64 * block_size).min(prompt.n_tokens);
            let reported = target.occupancy;
            Candidate {
                engine: target.engine,
                load: ledger.load(target.engine, now),
                tokens_queued: reported.map_or(0, |occupancy| occupancy.tokens_queued),
                n_reported: reported.map_or(0, |occupancy| occupancy.requests_waiting + occupancy.requests_running),
                // Who computes prompts for others holds a slot no longer than it computes.
                slots: reported.filter(|_| target.role != Role::Prefill).map_or(0, |occupancy| occupancy.slots),
                tokens_running: reported.map_or(0, |occupancy| occupancy.tokens_running),
                blocks: reported.map(|occupancy| Room {
                    tokens_available: (u64::from(occupancy.blocks.free) + u64::from(occupancy.blocks.cached))
                        * block_size,
                    tokens_total: u64::from(occupancy.blocks.total) * block_size,
                }),
                cost: reported.map(|occupancy| occupancy.cost).filter(is_known).unwrap_or(cost),
                step_tokens: reported.map_or(0, |occupancy| u64::from(occupancy.step_tokens)),
                transfer_ms_per_token: reported.map_or(0.0, |occupancy| occupancy.transfer_ms_per_token),
                n_recent: recent.of(target.engine, now),
                backlog_ms: target.backlog_ms,
                tokens_cached,
                tokens_promised: (found.n_promised as u64 * block_size).min(tokens_cached),
            }
        };
        targets.map(candidate).collect()
    }
}

impl Decision {
    /// The chosen engine.
    pub fn chosen(&self) -> &Considered {
        &self.considered[self.chosen]
    }

    /// The engine that computes the prompt.
    pub fn computes(&self) -> &Considered {
        &self.considered[self.prefill.unwrap_or(self.chosen)]
    }

    /// Prompt tokens that nobody computes.
    pub fn tokens_held(&self) -> u64 {
        self.lender.as_ref().map_or(self.computes().tokens_cached, |lender| lender.tokens_cached)
    }

    /// The same with the chosen engine first, then the one that computes its prompt, if that is another, then those whose
    /// first token was expected soonest.
    pub(crate) fn soonest_first(mut self) -> Self {
        self.considered.swap(0, self.chosen);
        // Those that compute for others come after those that can be chosen, so that the first swap moved none of them.
        let prefill = self.prefill.map(|index| self.considered.swap(1, index)).map(|()| 1);
        self.considered[1 + prefill.unwrap_or(0)..]
            .sort_by(|one, two| one.prediction.first_token_ms.total_cmp(&two.prediction.first_token_ms));
        // Nobody is told of who was not asked.
        Self { chosen: 0, prefill, instead: None, ..self }
    }
}

/// What engines cost that have not reported: as much as the one of the first that has.
fn usual_cost<'a>(targets: impl Iterator<Item = &'a Target<'a>>) -> CostCoefficients {
    let mut known = targets.filter_map(|target| target.occupancy).map(|occupancy| occupancy.cost).filter(is_known);
    known.next().unwrap_or(COST_UNKNOWN)
}

fn is_known(cost: &CostCoefficients) -> bool {
    cost.prefill_per_token_ms > 0.0
}

fn clamp(n: u64) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use contract::ids::DataRank;

    use super::*;
    use crate::route::directory::Update;
    use crate::route::policy;

    const SETTINGS: PlacerSettings = PlacerSettings {
        promise: Duration::from_secs(10),
        decode_ms_goal: f64::INFINITY,
        dispatch_ahead_ms: 200.0,
        give_way: Duration::from_millis(10),
        directory_bytes_max: 1 << 20,
    };

    fn placer() -> Placer {
        Placer::new(policy::by_name(policy::DEFAULT).unwrap(), SETTINGS, Incarnation(1))
    }

    fn engine(worker: &str) -> EngineId {
        EngineId { worker: worker.into(), incarnation: Incarnation(2), data_rank: DataRank(0) }
    }

    fn target(engine: &EngineId) -> Target<'_> {
        let (numerics, role) = (Fingerprint([1; 16]), Role::Mixed);
        Target {
            engine,
            occupancy: None,
            draining: false,
            lends: false,
            fetches: true,
            numerics,
            role,
            backlog_ms: 0.0,
        }
    }

    #[test]
    fn who_leaves_is_asked_for_what_only_it_has_cached() {
        let (placer, leaves, stays) = (placer(), engine("leaves"), engine("stays"));
        let hashes: Vec<BlockHash> = (1..=60_u8).map(|n| BlockHash([n; 16])).collect();
        for (engine, n_blocks) in [(&leaves, 60), (&stays, 2)] {
            placer.directory().begin(engine);
            let blocks = hashes[..n_blocks].to_vec();
            placer.directory().apply(engine, 0, Update::Snapshot { blocks, last: true }).unwrap();
        }
        let (tenant, now) = ("t".into(), daemon::clock::now());
        let hashes = &hashes[..];
        let prompt = Prompt { tenant: &tenant, n_before: 0, n_tokens: 1_000, hashes, block_size: 16, session: 0 };
        let leaving = |lends, numerics| Target { draining: true, lends, numerics, ..target(&leaves) };
        let numerics = target(&stays).numerics;
        let ask = |leaving: Target<'_>| placer.explain(&[leaving, target(&stays)], &prompt, now, 0).unwrap();
        let alone = ask(leaving(false, numerics));
        assert_eq!((&alone.chosen().engine, alone.tokens_held(), &alone.lender), (&stays, 32, &None));
        assert_eq!(ask(leaving(true, Fingerprint([2; 16]))), alone, "its blocks are others");
        let helped = ask(leaving(true, numerics));
        assert_eq!((&helped.chosen().engine, helped.tokens_held()), (&stays, 960));
        assert_eq!(helped.lender.as_ref().map(|lender| &lender.engine), Some(&leaves));
        let placed = placer.place(&[leaving(true, numerics), target(&stays)], &prompt, Patience::Best, now, 0).unwrap();
        assert_eq!((placed.index, placed.lender, placed.work.tokens_new), (1, Some(0), 40));
        assert!(placed.work.prefill_us * 10 < (alone.computes().prediction.prefill_ms * 1e3) as u64);
        let again = ask(leaving(true, numerics));
        assert_eq!((again.tokens_held(), again.lender), (960, helped.lender), "what is promised may come later");
    }

    #[test]
    fn prompts_are_computed_only_by_those_whose_blocks_fit() {
        let (placer, computes, decodes) = (placer(), engine("computes"), engine("decodes"));
        let (tenant, now) = ("t".into(), daemon::clock::now());
        let prompt = Prompt { tenant: &tenant, n_before: 0, n_tokens: 1_000, hashes: &[], block_size: 16, session: 0 };
        // Eight decode there, which a prompt would hold up.
        for number in 0..8 {
            let key = PlacementKey { router: Incarnation(9), number };
            let (engine, tenant) = (decodes.clone(), tenant.clone());
            let work = PlacedWork { engine, tenant, tokens_new: 1, tokens_prompt: 1, prefill_us: 1 };
            placer.tell(LedgerEvent::Placed(key, work), now);
            placer.tell(LedgerEvent::FirstToken(key), now);
        }
        let ask = |numerics, fetches| {
            let computes = Target { role: Role::Prefill, numerics, ..target(&computes) };
            let decodes = Target { role: Role::Decode, fetches, ..target(&decodes) };
            let decision = placer.explain(&[computes, decodes], &prompt, now, 0).unwrap();
            decision.prefill.map(|index| decision.considered[index].engine.clone())
        };
        let numerics = target(&decodes).numerics;
        assert_eq!(ask(numerics, true), Some(computes.clone()));
        assert_eq!(ask(Fingerprint([2; 16]), true), None, "its blocks are others");
        assert_eq!(ask(numerics, false), None, "nobody can fetch them");
    }

    #[test]
    fn new_room_is_left_for_a_moment_to_each_that_comes_first() {
        let (placer, engine) = (placer(), engine("w"));
        let targets = [target(&engine)];
        let (tenant, start) = ("t".into(), daemon::clock::now());
        // Each takes 125 ms.
        let left_ms = |n_before, after_ms| {
            let prompt = Prompt { tenant: &tenant, n_before, n_tokens: 1_000, hashes: &[], block_size: 16, session: 0 };
            let now = start + Duration::from_millis(after_ms);
            match placer.place(&targets, &prompt, Patience::Best, now, 0) {
                Ok(_) => None,
                Err(NotPlaced::Busy { wait_ms, .. }) => Some(wait_ms.round()),
                Err(NotPlaced::NoEngine) => panic!("there is one"),
            }
        };
        assert_eq!(left_ms(5, 0), None, "an engine that does nothing has had room for long");
        assert_eq!(left_ms(2, 10), Some(10.0));
        assert_eq!(left_ms(1, 10), None);
        assert_eq!(left_ms(0, 20), Some(30.0), "there is none");
        assert_eq!(left_ms(1, 55), Some(5.0), "it appeared 5 ms ago as work was done");
        assert_eq!(left_ms(0, 55), None, "who comes first does not wait");
    }
}
