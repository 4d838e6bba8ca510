//! An engine, an executor, and everything that must hold between them after every operation.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use contract::error::RequestError;
use contract::hash::BlockHash;
use contract::ids::{RequestId, SlotId, Token};
use contract::kv::{KvDigest, KvEvent};
use contract::plan::ForwardPlan;
use contract::stream::FinishReason;
use engine::{CachedHold, Engine, EngineConfig, Hold, HoldUsage, Output, OutputEvent, SequenceKey};

use super::executor::Executor;
use super::naive::{self, Ask, Expected, Part};

pub struct World {
    pub engine: Engine,
    pub executor: Executor,
    pub now: Duration,
    /// Plans in flight at most.
    depth: usize,
    expected: HashMap<u64, Expected>,
    live: BTreeMap<RequestId, Live>,
    pub finished: Vec<RequestId>,
    pub cached: HashMap<RequestId, u32>,
    directory: BTreeMap<BlockHash, Option<BlockHash>>,
    kv_sequence: u64,
    n_submitted: u64,
    /// Blocks that others use.
    holds: Vec<Hold>,
    prefilled: HashSet<SequenceKey>,
    /// How often a prompt from elsewhere arrived as a whole, and how often one was computed for others.
    pub n_moved: [u32; 2],
}

struct Live {
    tokens: Vec<Token>,
    has_reported: bool,
}

impl World {
    pub fn new(config: EngineConfig, depth: usize) -> Self {
        Self {
            executor: Executor::new(config.block_size as usize, config.n_blocks as usize),
            engine: Engine::new(config).expect("the bounds work"),
            now: Duration::ZERO,
            depth,
            expected: HashMap::new(),
            live: BTreeMap::new(),
            finished: Vec::new(),
            cached: HashMap::new(),
            directory: BTreeMap::new(),
            kv_sequence: 0,
            n_submitted: 0,
            holds: Vec::new(),
            prefilled: HashSet::new(),
            n_moved: [0; 2],
        }
    }

    pub fn submit(&mut self, ask: &Ask) -> Result<RequestId, RequestError> {
        self.n_submitted += 1;
        let length_max = self.engine.config().length_max() as usize;
        let expected = naive::expect(ask, self.n_submitted, length_max);
        let request = expected.request.clone();
        let (id, tokens) = (request.id, request.generated.clone());
        let n_tokens = request.prompt.len() + tokens.len();
        let is_full = self.engine.n_waiting() >= self.engine.config().max_waiting as usize;
        let result = match ask.part {
            Part::Whole | Part::Decode => self.engine.submit(request, self.now),
            Part::Prefill => self.engine.submit_prefill(request, self.now),
        };
        match &result {
            Ok(_) => {
                assert!(n_tokens < length_max && !is_full);
                self.expected.insert(self.n_submitted, expected);
                self.live.insert(id, Live { tokens, has_reported: false });
            }
            Err(RequestError::PromptTooLong { .. }) => assert!(n_tokens >= length_max),
            Err(RequestError::Overloaded { .. }) => assert!(is_full),
            Err(error) => panic!("{error}"),
        }
        self.check();
        result.map(|_| id)
    }

    /// Lends what is cached of a prompt.
    pub fn lend_cached(&mut self, ask: &Ask) {
        self.n_submitted += 1;
        let expected = naive::expect(ask, self.n_submitted, self.engine.config().length_max() as usize);
        if let Some(CachedHold { key, n_tokens, table }) = self.engine.lend_cached(expected.request.clone()) {
            let (request, usage, slot) = (expected.request.id, HoldUsage::Read, SlotId(0));
            self.holds.push(Hold { key, request, slot, usage, n_tokens, n_cached: n_tokens, table });
            self.prefilled.insert(key);
            self.expected.insert(self.n_submitted, expected);
        }
        self.check();
    }

    /// Aborts the n-th request ever submitted, live or not.
    pub fn abort(&mut self, number: u64) {
        let id = RequestId(u128::from(number));
        assert_eq!(self.engine.abort(id), self.live.remove(&id).is_some());
        assert!(!self.engine.abort(id), "a second abort finds nothing");
        self.check();
    }

    /// Plans one step when the depth allows; false when nothing was planned.
    pub fn plan(&mut self) -> bool {
        if self.executor.n_queued() == self.depth {
            return false;
        }
        let plan = self.engine.plan();
        self.engine.drain_holds(&mut self.holds);
        if self.executor.n_queued() == 0 && !self.live.is_empty() && self.holds.is_empty() {
            assert!(plan.is_some(), "requests are live and nothing is in flight, but nothing is planned");
        }
        let is_planned = plan.is_some();
        if let Some(plan) = plan {
            self.receive(plan);
        }
        self.check();
        is_planned
    }

    /// Adds newcomers to the plan made last, if it has not run.
    pub fn extend(&mut self) -> bool {
        let Some(plan) = self.executor.give_back() else { return false };
        let (step, earlier) = (plan.step, plan.sequences.clone());
        let plan = self.engine.extend(plan);
        assert_eq!((plan.step, &plan.sequences[..earlier.len()]), (step, &earlier[..]));
        assert!(plan.sequences[earlier.len()..].iter().all(|sequence| sequence.start.is_some()));
        self.receive(plan);
        self.check();
        true
    }

    fn receive(&mut self, plan: ForwardPlan) {
        let config = self.engine.config();
        assert!(plan.n_tokens() <= config.token_budget as usize);
        assert_eq!(plan.n_tokens(), plan.padded_tokens as usize);
        assert!(plan.sequences.iter().all(|s| (s.slot.0) < config.max_running && !s.query.is_empty()));
        if let Some(chunk) = config.max_prefill_chunk {
            assert!(plan.sequences.iter().all(|s| s.query.len() <= chunk as usize));
        }
        let n_prefill: usize = plan.sequences.iter().filter(|s| !s.is_decode()).map(|s| s.query.len()).sum();
        assert!(n_prefill <= config.prefill_budget.map_or(usize::MAX, |budget| budget as usize));
        let slots: HashMap<_, _> = plan.sequences.iter().map(|s| (s.slot, s.query.len())).collect();
        self.executor.receive(plan);
        self.engine.drain_holds(&mut self.holds);
        let written: HashSet<_> = self.executor.written().into_iter().map(|(_, block)| block).collect();
        assert!(!slots.is_empty());
        for hold in self.holds.iter().filter(|hold| hold.usage == HoldUsage::Fill) {
            assert!(hold.table.iter().all(|block| !written.contains(block)), "others write these blocks");
        }
    }

    /// Others are done with the n-th hold: they have filled a share of it, or have read it.
    pub fn let_go(&mut self, n: usize, share: f64) {
        if self.holds.is_empty() {
            return;
        }
        let hold = self.holds.remove(n % self.holds.len());
        let states = &self.expected[&(hold.request.0 as u64)].states;
        let (n_cached, n_tokens) = (hold.n_cached, hold.n_tokens);
        let n_filled = n_cached + ((n_tokens - n_cached) as f64 * share).round() as usize;
        match hold.usage {
            HoldUsage::Fill => self.executor.fill(&hold.table, n_cached..n_tokens, &states[..n_filled]),
            HoldUsage::Read if self.prefilled.remove(&hold.key) => {
                self.executor.check_kv(&hold.table, &states[..n_tokens]);
                self.n_moved[1] += 1;
            }
            // They gave up.
            HoldUsage::Read => {
                let id = hold.request;
                self.live.remove(&id);
            }
        }
        self.n_moved[0] += u32::from(hold.usage == HoldUsage::Fill && n_filled == n_tokens);
        assert!(self.engine.let_go(hold.key, n_filled));
        assert!(!self.engine.let_go(hold.key, n_filled), "a hold ends once");
        self.check();
    }

    /// Runs and applies the oldest step; false when none is in flight.
    pub fn apply(&mut self) -> bool {
        let Some((plan, output)) = self.executor.run(&self.expected) else { return false };
        let mut outputs = Vec::new();
        self.engine.apply(output, &mut outputs).expect("the output is what the plan asked for");
        self.engine.recycle(plan);
        self.take(outputs);
        self.check();
        true
    }

    pub fn advance(&mut self, by: Duration) {
        self.now += by;
        let mut outputs = Vec::new();
        self.engine.expire(self.now, &mut outputs);
        assert!(self.engine.next_deadline().is_none_or(|deadline| deadline > self.now));
        self.take(outputs);
        self.check();
    }

    pub fn clear_cache(&mut self) {
        self.engine.clear_cache();
        self.check();
        assert_eq!(self.engine.blocks().cached, 0);
    }

    pub fn fail_all(&mut self) {
        self.executor.forget_plans();
        let mut outputs = Vec::new();
        self.engine.fail_all(&RequestError::Cancelled, &mut outputs);
        self.take(outputs);
        self.check();
        self.let_all_go();
        self.check_empty();
    }

    fn let_all_go(&mut self) {
        while !self.holds.is_empty() {
            self.let_go(0, 1.0);
        }
    }

    /// Steps, as deep as allowed, until nothing is left to do.
    pub fn finish(&mut self) {
        for _ in 0..100_000 {
            while self.plan() {}
            if self.apply() {
                continue;
            }
            if self.live.is_empty() {
                self.let_all_go();
                self.check_empty();
                return;
            }
            self.let_go(0, 1.0);
        }
        panic!("requests do not end");
    }

    fn check_empty(&self) {
        assert_eq!(self.live.len(), 0, "requests have ended");
        assert!(self.engine.is_idle());
        assert_eq!(self.engine.blocks().allocated, 0, "blocks have returned");
        assert_eq!((self.engine.n_waiting(), self.engine.n_running()), (0, 0));
    }

    fn take(&mut self, outputs: Vec<Output>) {
        for output in outputs {
            let id = output.request;
            let live = self.live.get_mut(&id).expect("only live requests have news");
            let (first_position, tokens, finish, cached_tokens) = match output.event {
                OutputEvent::Prefilled => {
                    self.prefilled.insert(output.key);
                    self.live.remove(&id);
                    self.finished.push(id);
                    continue;
                }
                OutputEvent::Failed(error) => {
                    if let RequestError::DeadlineExceeded { n_tokens } = error {
                        assert_eq!(n_tokens as usize, live.tokens.len());
                    }
                    self.live.remove(&id);
                    continue;
                }
                OutputEvent::Tokens { first_position, tokens, finish, cached_tokens } => {
                    (first_position, tokens, finish, cached_tokens)
                }
            };
            assert_eq!(first_position as usize, live.tokens.len());
            assert_eq!(cached_tokens.is_some(), !live.has_reported, "cached tokens come first, once");
            live.has_reported = true;
            live.tokens.extend(tokens.iter().map(|sampled| sampled.token));
            self.cached.extend(cached_tokens.map(|n| (id, n)));
            let expected = &self.expected[&(id.0 as u64)];
            let n_prompt = expected.request.prompt.len();
            assert_eq!(live.tokens, expected.tokens[n_prompt..n_prompt + live.tokens.len()], "output of {id}");
            let is_end = n_prompt + live.tokens.len() == expected.length;
            assert_eq!(finish, Some(expected.finish).filter(|_: &FinishReason| is_end), "end of {id}");
            if finish.is_some() {
                self.live.remove(&id);
                self.finished.push(id);
            }
        }
    }

    fn check(&mut self) {
        self.engine.drain_holds(&mut self.holds);
        self.engine.check_invariants();
        assert_eq!(self.engine.n_held(), self.holds.len());
        assert!(self.engine.blocks().is_conserved());
        assert_eq!(self.engine.n_waiting() + self.engine.n_running(), self.live.len());
        let mut events = Vec::new();
        assert_eq!(self.engine.drain_kv_events(&mut events), self.kv_sequence + 1, "event numbers leave no gap");
        self.kv_sequence += events.len() as u64;
        for event in events {
            match event {
                KvEvent::BlockStored { hash, parent } => {
                    assert!(
                        parent.is_none_or(|parent| self.directory.contains_key(&parent)),
                        "parents are stored first"
                    );
                    assert_eq!(self.directory.insert(hash, parent), None, "a block is stored once");
                }
                KvEvent::BlockRemoved { hash } => {
                    assert!(!self.directory.values().any(|&parent| parent == Some(hash)), "tails are evicted first");
                    assert!(self.directory.remove(&hash).is_some());
                }
                KvEvent::AllBlocksCleared => self.directory.clear(),
            }
        }
        assert_eq!(self.engine.kv_sequence(), self.kv_sequence);
        let snapshot = self.engine.kv_snapshot();
        assert_eq!(snapshot.len(), self.directory.len());
        assert_eq!(snapshot.into_iter().collect::<BTreeMap<_, _>>(), self.directory);
        let mut digest = KvDigest::default();
        self.directory.keys().for_each(|&hash| digest.insert(hash));
        assert_eq!(self.engine.kv_digest(), digest);
    }
}
