//! The load ledger: what routers placed on engines and has not ended, as events and their fold.
//!
//! Routers tell each placement at once, apart from the slower occupancy and KV streams, and each folds what all tell:
//! so replicas see one another's placements before the engines report them.
//! An entry lives until it is finished or its router is gone, however long the request runs.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::ids::{EngineId, Incarnation, TenantId};

/// Names one placement in the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PlacementKey {
    /// The life of the router that placed it.
    pub router: Incarnation,
    /// Counts that router's placements.
    pub number: u64,
}

/// What a placement asks of its engine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlacedWork {
    /// Where it was placed.
    pub engine: EngineId,
    /// Whom it is served to.
    pub tenant: TenantId,
    /// Prompt tokens to compute: those that were not cached there.
    pub tokens_new: u32,
    /// Length of the prompt.
    pub tokens_prompt: u32,
    /// Predicted time of its prefill alone on an idle engine, in microseconds.
    pub prefill_us: u64,
}

/// A change of the ledger.
#[derive(Clone, Debug, PartialEq)]
pub enum LedgerEvent {
    /// A request was placed.
    Placed(PlacementKey, PlacedWork),
    /// Its prompt is computed.
    FirstToken(PlacementKey),
    /// It ended, well or badly.
    Finished(PlacementKey),
    /// A router is gone, and its requests with it.
    RouterGone(Incarnation),
}

/// What is placed on one engine.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EngineLoad {
    /// Requests whose first token is out.
    pub n_prefilling: u32,
    /// Prompt tokens that these compute.
    pub tokens_prefilling: u64,
    /// Predicted time until they are computed, in milliseconds: their prefills one after the other, less the time that
    /// the oldest has had.
    pub wait_ms: f64,
    /// Requests past their first token.
    pub n_decoding: u32,
    /// Prompt tokens of those.
    pub tokens_decoding: u64,
    /// Mean time from first token to end of requests that ended of late, on any engine, in milliseconds; 0 before the first.
    pub answer_ms: f64,
}

/// How much of the mean time of answers the last one decides.
const ANSWER_WEIGHT: f64 = 1.0 / 32.0;

/// The fold of all events.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    placements: HashMap<PlacementKey, Entry>,
    engines: HashMap<EngineId, Account>,
    n_placed: u64,
    answer_ms: Option<f64>,
}

#[derive(Clone, Debug)]
struct Entry {
    work: PlacedWork,
    progress: Progress,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Progress {
    /// Since its first token.
    Decodes(Instant),
    /// With its place in the order of placements.
    Prefills(u64),
}

#[derive(Clone, Debug, Default)]
struct Account {
    /// Requests before their first token.
    n_prefilling: u32,
    /// Their predicted prefill times in microseconds by order of placement, of those that the engine itself computes.
    computing: BTreeMap<u64, u64>,
    /// Their sum.
    prefilling_us: u64,
    tokens_prefilling: u64,
    n_decoding: u32,
    tokens_decoding: u64,
    /// Since when the oldest prefill has the engine.
    oldest_since: Option<Instant>,
    /// When the last prefill came or went.
    changed: Option<Instant>,
}

impl Ledger {
    /// Takes an event at `now`; one about a placement that is not known changes nothing.
    pub fn apply(&mut self, event: LedgerEvent, now: Instant) {
        match event {
            LedgerEvent::Placed(key, work) => self.place(key, work, now),
            LedgerEvent::FirstToken(key) => self.first_token(key, now),
            LedgerEvent::Finished(key) => self.finish(key, now),
            LedgerEvent::RouterGone(router) => self.forget(|key, _| key.router == router, now),
        }
    }

    /// Forgets what is placed on engines that are gone.
    pub fn retain_engines(&mut self, is_kept: impl Fn(&EngineId) -> bool, now: Instant) {
        self.forget(|_, entry| !is_kept(&entry.work.engine), now);
    }

    /// What is placed on an engine.
    pub fn load(&self, engine: &EngineId, now: Instant) -> EngineLoad {
        let load = self.engines.get(engine).map(|account| account.load(now)).unwrap_or_default();
        EngineLoad { answer_ms: self.answer_ms.unwrap_or(0.0), ..load }
    }

    /// When a prefill last came to an engine or went from it; none where nothing is placed.
    pub fn changed(&self, engine: &EngineId) -> Option<Instant> {
        self.engines.get(engine)?.changed
    }

    /// Placements that have not ended.
    pub fn len(&self) -> usize {
        self.placements.len()
    }

    /// Whether nothing is placed.
    pub fn is_empty(&self) -> bool {
        self.placements.is_empty()
    }

    /// Events that make an empty ledger like this one, in the order of placement of what prefills.
    pub fn snapshot(&self) -> Vec<LedgerEvent> {
        let mut entries: Vec<(&PlacementKey, &Entry)> = self.placements.iter().collect();
        entries.sort_unstable_by_key(|&(key, entry)| (entry.progress, *key));
        let mut events = Vec::with_capacity(entries.len());
        for (&key, entry) in entries {
            events.push(LedgerEvent::Placed(key, entry.work.clone()));
            if matches!(entry.progress, Progress::Decodes(_)) {
                events.push(LedgerEvent::FirstToken(key));
            }
        }
        events
    }

    fn place(&mut self, key: PlacementKey, work: PlacedWork, now: Instant) {
        // Told twice after a reconnection, or told again with another engine: the last word counts.
        self.finish(key, now);
        let order = self.n_placed;
        self.n_placed += 1;
        let account = self.engines.entry(work.engine.clone()).or_default();
        account.changed = Some(now);
        account.n_prefilling += 1;
        if work.prefill_us > 0 {
            account.oldest_since.get_or_insert(now);
            account.computing.insert(order, work.prefill_us);
        }
        account.prefilling_us += work.prefill_us;
        account.tokens_prefilling += u64::from(work.tokens_new);
        self.placements.insert(key, Entry { work, progress: Progress::Prefills(order) });
    }

    fn first_token(&mut self, key: PlacementKey, now: Instant) {
        let Some(entry) = self.placements.get_mut(&key) else { return };
        let Progress::Prefills(order) = entry.progress else { return };
        entry.progress = Progress::Decodes(now);
        let account = self.engines.get_mut(&entry.work.engine).expect(ACCOUNT);
        account.prefilled(order, &entry.work, now);
        account.n_decoding += 1;
        account.tokens_decoding += u64::from(entry.work.tokens_prompt);
    }

    fn finish(&mut self, key: PlacementKey, now: Instant) {
        let Some(Entry { work, progress }) = self.placements.remove(&key) else { return };
        let account = self.engines.get_mut(&work.engine).expect(ACCOUNT);
        match progress {
            Progress::Prefills(order) => account.prefilled(order, &work, now),
            Progress::Decodes(since) => {
                let ms = now.saturating_duration_since(since).as_secs_f64() * 1e3;
                let mean = self.answer_ms.get_or_insert(ms);
                *mean += ANSWER_WEIGHT * (ms - *mean);
                account.n_decoding -= 1;
                account.tokens_decoding -= u64::from(work.tokens_prompt);
            }
        }
        if account.n_prefilling == 0 && account.n_decoding == 0 {
            self.engines.remove(&work.engine);
        }
    }

    fn forget(&mut self, is_over: impl Fn(&PlacementKey, &Entry) -> bool, now: Instant) {
        let over: Vec<PlacementKey> =
            self.placements.iter().filter(|(key, entry)| is_over(key, entry)).map(|(&key, _)| key).collect();
        over.into_iter().for_each(|key| self.finish(key, now));
    }
}

const ACCOUNT: &str = "an engine has an account as long as something is placed there";

impl Account {
    /// Takes a prefill out that is computed or over; who is oldest then has the engine from now on.
    fn prefilled(&mut self, order: u64, work: &PlacedWork, now: Instant) {
        if self.computing.first_key_value().is_some_and(|(&oldest, _)| oldest == order) {
            self.oldest_since = (self.computing.len() > 1).then_some(now);
        }
        self.computing.remove(&order);
        self.n_prefilling -= 1;
        self.prefilling_us -= work.prefill_us;
        self.tokens_prefilling -= u64::from(work.tokens_new);
        self.changed = Some(now);
    }

    fn load(&self, now: Instant) -> EngineLoad {
        let oldest_us = self.computing.first_key_value().map_or(0, |(_, &us)| us);
        let elapsed = self.oldest_since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
        // A prefill that takes longer than predicted is about to end, but says nothing of those behind it.
        let done_us = u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX).min(oldest_us);
        EngineLoad {
            n_prefilling: self.n_prefilling,
            tokens_prefilling: self.tokens_prefilling,
            wait_ms: (self.prefilling_us - done_us) as f64 / 1e3,
            n_decoding: self.n_decoding,
            tokens_decoding: self.tokens_decoding,
            answer_ms: 0.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::ids::DataRank;

    #[expect(clippy::disallowed_methods, reason = "tests need some instant to count from")]
    fn some_instant() -> Instant {
        Instant::now()
    }

    fn engine(n: u64) -> EngineId {
        EngineId { worker: "w".into(), incarnation: Incarnation(n), data_rank: DataRank(0) }
    }

    fn key(router: u64, number: u64) -> PlacementKey {
        PlacementKey { router: Incarnation(router), number }
    }

    fn work(n: u64, tokens: u32) -> PlacedWork {
        PlacedWork {
            engine: engine(n),
            tenant: "t".into(),
            tokens_new: tokens,
            tokens_prompt: 2 * tokens,
            prefill_us: 1000 * u64::from(tokens),
        }
    }

    #[test]
    fn prefills_queue_up_and_the_oldest_gets_on() {
        let (mut ledger, start) = (Ledger::default(), some_instant());
        let at = |ms| start + Duration::from_millis(ms);
        ledger.apply(LedgerEvent::Placed(key(1, 1), work(1, 100)), at(0));
        ledger.apply(LedgerEvent::Placed(key(2, 1), work(1, 50)), at(10));
        assert_eq!(ledger.load(&engine(1), at(40)).wait_ms, 110.0);
        assert_eq!(ledger.load(&engine(1), at(400)).wait_ms, 50.0, "what is late does not use up what is behind it");
        ledger.apply(LedgerEvent::FirstToken(key(1, 1)), at(400));
        let load = ledger.load(&engine(1), at(420));
        assert_eq!((load.wait_ms, load.n_prefilling, load.n_decoding, load.tokens_decoding), (30.0, 1, 1, 200));
        assert_eq!(ledger.load(&engine(2), at(420)), EngineLoad::default());
    }

    #[test]
    fn only_the_end_of_the_oldest_prefill_begins_the_next() {
        let (mut ledger, start) = (Ledger::default(), some_instant());
        let at = |ms| start + Duration::from_millis(ms);
        let wait_ms = |ledger: &Ledger, ms| ledger.load(&engine(1), at(ms)).wait_ms;
        // Another engine computes the first; the second is computed here.
        ledger.apply(LedgerEvent::Placed(key(1, 1), work(1, 0)), at(0));
        ledger.apply(LedgerEvent::Placed(key(1, 2), work(1, 100)), at(0));
        ledger.apply(LedgerEvent::Placed(key(1, 3), work(1, 50)), at(0));
        assert_eq!(wait_ms(&ledger, 40), 110.0);
        ledger.apply(LedgerEvent::Finished(key(1, 3)), at(40));
        assert_eq!(wait_ms(&ledger, 40), 60.0, "one behind it was cancelled");
        ledger.apply(LedgerEvent::FirstToken(key(1, 1)), at(60));
        assert_eq!((wait_ms(&ledger, 60), ledger.load(&engine(1), at(60)).n_prefilling), (40.0, 1));
        ledger.apply(LedgerEvent::FirstToken(key(1, 2)), at(100));
        assert_eq!(ledger.load(&engine(1), at(100)).wait_ms, 0.0);
    }

    #[test]
    fn answers_take_as_long_as_those_that_ended_took_on_any_engine() {
        let (mut ledger, start) = (Ledger::default(), some_instant());
        let answer_ms = |ledger: &Ledger| ledger.load(&engine(9), start).answer_ms;
        assert_eq!(answer_ms(&ledger), 0.0, "none has ended");
        for number in 1..=200_u64 {
            let ms = if number <= 100 { 80 } else { 20 };
            ledger.apply(LedgerEvent::Placed(key(1, number), work(number % 3, 10)), start);
            ledger.apply(LedgerEvent::FirstToken(key(1, number)), start);
            ledger.apply(LedgerEvent::Finished(key(1, number)), start + Duration::from_millis(ms));
            if number == 100 {
                assert_eq!(answer_ms(&ledger), 80.0);
            }
        }
        assert!((20.0..23.0).contains(&answer_ms(&ledger)), "{}", answer_ms(&ledger));
        ledger.apply(LedgerEvent::Placed(key(1, 0), work(1, 10)), start);
        ledger.apply(LedgerEvent::Finished(key(1, 0)), start + Duration::from_secs(9));
        assert!(answer_ms(&ledger) < 23.0, "what ended without a token is no answer");
    }

    #[test]
    fn a_router_that_is_gone_takes_its_placements_along() {
        let (mut ledger, now) = (Ledger::default(), some_instant());
        for (router, number) in [(1, 1), (1, 2), (2, 1)] {
            ledger.apply(LedgerEvent::Placed(key(router, number), work(number, 10)), now);
        }
        ledger.apply(LedgerEvent::FirstToken(key(1, 1)), now);
        ledger.apply(LedgerEvent::RouterGone(Incarnation(1)), now);
        assert_eq!((ledger.len(), ledger.load(&engine(1), now).n_prefilling), (1, 1));
        ledger.retain_engines(|_| false, now);
        assert!(ledger.is_empty() && ledger.engines.is_empty());
    }

    proptest! {
        #[test]
        fn loads_are_those_of_the_placements_and_a_snapshot_makes_them_again(
            events in proptest::collection::vec((0..5_u8, 0..3_u64, 0..6_u64, 0..4_u64, 1..1000_u32), 0..200),
        ) {
            let (mut ledger, now) = (Ledger::default(), some_instant());
            let mut model: BTreeMap<PlacementKey, (PlacedWork, bool)> = BTreeMap::new();
            for (what, router, number, n, tokens) in events {
                let key = key(router, number);
                let event = match what {
                    0 | 1 => {
                        model.insert(key, (work(n, tokens), true));
                        LedgerEvent::Placed(key, work(n, tokens))
                    }
                    2 => {
                        model.entry(key).and_modify(|entry| entry.1 = false);
                        LedgerEvent::FirstToken(key)
                    }
                    3 => {
                        model.remove(&key);
                        LedgerEvent::Finished(key)
                    }
                    _ => {
                        model.retain(|key, _| key.router != Incarnation(router));
                        LedgerEvent::RouterGone(Incarnation(router))
                    }
                };
                ledger.apply(event, now);
            }
            let mut again = Ledger::default();
            ledger.snapshot().into_iter().for_each(|event| again.apply(event, now));
            for n in 0..4 {
                let mut expected = EngineLoad::default();
                for (work, prefills) in model.values().filter(|(work, _)| work.engine == engine(n)) {
                    if *prefills {
                        expected.n_prefilling += 1;
                        expected.tokens_prefilling += u64::from(work.tokens_new);
                        expected.wait_ms += work.prefill_us as f64 / 1e3;
                    } else {
                        expected.n_decoding += 1;
                        expected.tokens_decoding += u64::from(work.tokens_prompt);
                    }
                }
                prop_assert_eq!(ledger.load(&engine(n), now), expected);
                prop_assert_eq!(again.load(&engine(n), now), expected);
            }
            prop_assert_eq!((ledger.len(), again.len()), (model.len(), model.len()));
        }
    }
}
