//! The real engine over the simulated device: tokens are those of a request alone, and planted faults are found.
#![expect(clippy::print_stdout, reason = "random tests print their seed")]

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

use contract::error::RequestError;
use contract::hash::HashKey;
use contract::ids::{BlockId, RequestId, SlotId};
use contract::model::Fingerprint;
use contract::request::{GenerateRequest, SamplingParams, StopParams};
use engine::{Counters, Engine, EngineConfig, Output, OutputEvent};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use super::*;
use crate::sim::answer;

const VOCAB: u32 = 50;

fn profile(block_size: u32, n_blocks: u32) -> Profile {
    let text = format!(
        "block_size = {block_size}\nn_blocks = {n_blocks}\nmax_running = 4\nprefill_budget = 6\ncontext_length = 80\n\
         eos_probability = 0.05\n[timing]\nstep_base_ms = 1.0"
    );
    Profile::parse(&text, "test").unwrap()
}

/// What a test asks for.
#[derive(Clone, Debug)]
struct Ask {
    /// Requests of one family share their first tokens.
    family: u32,
    n_shared: u32,
    n_own: u32,
    n_resumed: usize,
    max_tokens: u32,
    min_tokens: u32,
    stop: Option<Token>,
    priority: i32,
}

#[derive(Clone, Debug)]
enum Operation {
    Submit(Ask),
    Abort(u64),
    Plan,
    Extend,
    Run,
    ClearCache,
}

fn operations() -> impl Strategy<Value = Vec<Operation>> {
    let prompt = (0..3_u32, 0..24_u32, 0..4_u32, 0..4_usize);
    let rest = (1..20_u32, 0..4_u32, prop::option::of(0..VOCAB), -1..2_i32);
    let asks = (prompt, rest).prop_map(|((family, n_shared, n_own, n_resumed), rest)| {
        let (max_tokens, min_tokens, stop, priority) = rest;
        // Half of the prompts are shared as a whole.
        let n_own = if n_own > 1 && n_shared > 0 { 0 } else { n_own + 1 };
        Ask { family, n_shared, n_own, n_resumed, max_tokens, min_tokens, stop, priority }
    });
    let operation = prop_oneof![
        12 => asks.prop_map(Operation::Submit),
        3 => (0..60_u64).prop_map(Operation::Abort),
        30 => Just(Operation::Plan),
        10 => Just(Operation::Extend),
        30 => Just(Operation::Run),
        1 => Just(Operation::ClearCache),
    ];
    prop::collection::vec(operation, 1..200)
}

struct World {
    engine: Engine,
    device: Device,
    /// Not run yet.
    plans: VecDeque<ForwardPlan>,
    /// What is left of the output of each request that has not ended.
    due: HashMap<RequestId, VecDeque<Token>>,
    n_submitted: u64,
    n_finished: u32,
}

impl World {
    fn new(profile: &Profile) -> Self {
        let config = EngineConfig {
            watermark_blocks: 0,
            max_waiting: 8,
            ..profile.engine_config(HashKey([1; 32]), Fingerprint([2; 16]))
        };
        Self {
            engine: Engine::new(config).unwrap(),
            device: Device::new(profile, VOCAB),
            plans: VecDeque::new(),
            due: HashMap::new(),
            n_submitted: 0,
            n_finished: 0,
        }
    }

    fn submit(&mut self, ask: &Ask) {
        self.n_submitted += 1;
        let number = self.n_submitted;
        let shared = (0..ask.n_shared).map(|i| (ask.family * 7 + i * i) % VOCAB);
        let prompt: Vec<Token> = shared.chain((0..ask.n_own).map(|i| (number as u32 + i) % VOCAB)).collect();
        let spec = SamplingSpec {
            params: SamplingParams { seed: number % 3, ..SamplingParams::default() },
            logprobs: None,
            n_prompt: prompt.len() as u32,
            min_tokens: ask.min_tokens.min(ask.max_tokens),
            stop_token_ids: ask.stop.into_iter().collect(),
            history: Vec::new(),
        };
        let room = (self.engine.config().length_max() as usize).saturating_sub(prompt.len());
        let n = room.min(ask.max_tokens as usize);
        let mut output = answer(&prompt, &spec, VOCAB, self.device.eos_probability, n);
        let is_end = |(i, token): (usize, &Token)| i >= spec.min_tokens as usize && ask.stop == Some(*token);
        let end = output.iter().enumerate().position(is_end);
        output.truncate(end.map_or(n, |end| end + 1));
        let rest = output.split_off(ask.n_resumed.min(output.len().saturating_sub(1)));
        let request = GenerateRequest {
            id: RequestId(number.into()),
            attempt: 0,
            model: "m".into(),
            prompt,
            generated: output,
            tenant: "t".into(),
            cache_salt: String::new(),
            adapter: String::new(),
            priority: ask.priority,
            deadline: None,
            sampling: spec.params,
            stop: StopParams {
                token_ids: spec.stop_token_ids,
                min_tokens: spec.min_tokens,
                max_tokens: ask.max_tokens,
            },
            logprobs: None,
            prompt_logprobs: None,
            prefill_on: Vec::new(),
        };
        match self.engine.submit(request, Duration::ZERO) {
            Ok(_) => drop(self.due.insert(RequestId(number.into()), rest.into())),
            Err(RequestError::PromptTooLong { .. } | RequestError::Overloaded { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }

    fn plan(&mut self) -> bool {
        let plan = self.engine.plan();
        let is_planned = plan.is_some();
        self.plans.extend(plan);
        is_planned
    }

    fn run(&mut self) -> Result<bool, ExecutorError> {
        let Some(plan) = self.plans.pop_front() else { return Ok(false) };
        let (output, took) = self.device.run(&plan)?;
        assert_eq!(took, Duration::from_millis(1));
        let mut outputs = Vec::new();
        self.engine.apply(output, &mut outputs).unwrap();
        self.engine.recycle(plan);
        outputs.into_iter().for_each(|output| self.take(output));
        Ok(true)
    }

    fn take(&mut self, output: Output) {
        let OutputEvent::Tokens { tokens, finish, .. } = output.event else { panic!("{output:?}") };
        let due = self.due.get_mut(&output.request).unwrap();
        for sampled in tokens {
            assert_eq!(Some(sampled.token), due.pop_front(), "{}", output.request);
        }
        assert_eq!(finish.is_some(), due.is_empty(), "{}", output.request);
        if finish.is_some() {
            self.due.remove(&output.request);
            self.n_finished += 1;
        }
    }

    fn operate(&mut self, operation: &Operation) -> Result<(), ExecutorError> {
        match operation {
            Operation::Submit(ask) => self.submit(ask),
            Operation::Abort(number) => {
                let id = RequestId(u128::from(*number));
                assert_eq!(self.engine.abort(id), self.due.remove(&id).is_some());
            }
            Operation::Plan => drop(self.plan()),
            Operation::Extend => {
                let plan = self.plans.pop_back().map(|plan| self.engine.extend(plan));
                self.plans.extend(plan);
            }
            Operation::Run => drop(self.run()?),
            Operation::ClearCache => self.engine.clear_cache(),
        }
        Ok(())
    }

    /// Steps until nothing is left to do.
    fn finish(&mut self) -> Result<(), ExecutorError> {
        while self.plan() || self.run()? {}
        assert!(self.due.is_empty() && self.engine.is_idle());
        Ok(())
    }

    /// The table that a sequence of the next plan will read.
    fn table(&self, sequence: &SequencePlan) -> Vec<u32> {
        let slot = self.device.slots.get(sequence.slot).unwrap();
        let kept = if sequence.start.is_some() { &[] } else { &slot.blocks()[..sequence.blocks.keep as usize] };
        kept.iter().copied().chain(sequence.blocks.append.iter().map(|block| block.0)).collect()
    }
}

/// Runs `test` on random operations over small pools.
fn for_all(test: impl Fn(&Profile, Vec<Operation>, usize) -> Result<(), TestCaseError>) {
    let seed = std::env::var("SEED").map_or_else(|_| RandomState::new().hash_one(0), |seed| seed.parse().unwrap());
    println!("SEED={seed}");
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&u64::to_le_bytes(seed));
    let config = Config { cases: 400, failure_persistence: None, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &bytes));
    let pools = (1..6_u32, 4..28_u32);
    let result = runner.run(&(pools, operations(), 0..1_000_usize), |((block_size, n_blocks), operations, choice)| {
        test(&profile(block_size, n_blocks), operations, choice)
    });
    if let Err(error) = result {
        panic!("SEED={seed} replays this: {error}");
    }
}

#[test]
fn tokens_are_those_of_a_request_alone_whatever_happens() {
    let reached = std::cell::RefCell::new((Counters::default(), 0));
    for_all(|profile, operations, _| {
        let mut world = World::new(profile);
        for operation in &operations {
            world.operate(operation).unwrap();
        }
        world.finish().unwrap();
        let (sum, n_finished) = &mut *reached.borrow_mut();
        sum.preemptions += world.engine.counters().preemptions;
        sum.prefix_hit_tokens += world.engine.counters().prefix_hit_tokens;
        *n_finished += world.n_finished;
        Ok(())
    });
    let (sum, n_finished) = reached.into_inner();
    assert!(sum.preemptions > 100 && sum.prefix_hit_tokens > 1_000 && n_finished > 1_000, "{sum:?}, {n_finished}");
}

#[test]
fn a_block_that_lost_what_it_held_is_found_by_the_step_that_reads_it() {
    let n_planted = std::cell::Cell::new(0);
    for_all(|profile, operations, choice| {
        let mut world = World::new(profile);
        for (i, operation) in operations.iter().enumerate() {
            if i >= choice % operations.len() && matches!(operation, Operation::Run) {
                let reader = world.plans.front().and_then(|plan| plan.sequences.iter().find(|s| s.position > 0));
                if let Some(reader) = reader.cloned() {
                    let last = (reader.position as usize - 1) / profile.block_size as usize;
                    // Blocks that come with a cached prefix are all checked at once.
                    let index = if reader.start.is_some() { choice % (last + 1) } else { last };
                    let block = world.table(&reader)[index];
                    world.device.kv.lose(block);
                    let error = world.run().unwrap_err().to_string();
                    let place = format!("block {block} at position {}:", index * profile.block_size as usize);
                    prop_assert!(error.contains(&place) || error.contains("other tokens"), "{}", error);
                    n_planted.set(n_planted.get() + 1);
                    break;
                }
            }
            world.operate(operation).unwrap();
        }
        Ok(())
    });
    assert!(n_planted.get() > 100, "{} faults were planted", n_planted.get());
}

/// A request that runs alone.
fn ask(n_shared: u32, max_tokens: u32) -> Ask {
    Ask { family: 1, n_shared, n_own: 1, n_resumed: 0, max_tokens, min_tokens: 0, stop: None, priority: 0 }
}

#[test]
fn any_block_of_a_running_request_is_checked_before_long() {
    for index in 0..5 {
        let mut world = World::new(&profile(4, 28));
        world.submit(&ask(20, 20));
        while world.device.slots.get(SlotId(0)).unwrap().blocks().len() < 6 {
            world.plan();
            world.run().unwrap();
        }
        let block = world.device.slots.get(SlotId(0)).unwrap().blocks()[index];
        world.device.kv.lose(block);
        let error = world.finish().unwrap_err().to_string();
        assert!(error.starts_with("slot 0: block "), "{error}");
    }
}

#[test]
fn entries_of_a_table_that_are_swapped_or_anothers_are_found() {
    let hit = |change: fn(&mut Vec<BlockId>, &[u32])| {
        let mut world = World::new(&profile(4, 28));
        world.submit(&Ask { family: 2, ..ask(20, 3) });
        world.finish().unwrap();
        let other = world.device.slots.get(SlotId(0)).unwrap().blocks().to_vec();
        world.submit(&ask(20, 3));
        world.finish().unwrap();
        // Finds the prefix of the second, where the first has left blocks behind.
        world.submit(&ask(20, 3));
        world.plan();
        let sequence = &mut world.plans[0].sequences[0];
        assert_eq!(sequence.position, 20);
        change(&mut sequence.blocks.append, &other);
        world.finish()
    };
    hit(|_, _| {}).unwrap();
    assert!(hit(|table, _| table.swap(1, 2)).is_err());
    assert!(hit(|table, _| table.swap(0, 4)).is_err());
    for index in 0..5 {
        type Change = fn(&mut Vec<BlockId>, &[u32]);
        let changes: [Change; 5] = [
            |table, other| table[0] = BlockId(other[0]),
            |table, other| table[1] = BlockId(other[1]),
            |table, other| table[2] = BlockId(other[2]),
            |table, other| table[3] = BlockId(other[3]),
            |table, other| table[4] = BlockId(other[4]),
        ];
        let error = hit(changes[index]).unwrap_err().to_string();
        assert!(error.contains("slot 0: block"), "{error}");
    }
    assert!(hit(|table, _| table.truncate(4)).is_err());
    assert!(hit(|table, _| table[0] = BlockId(1_000)).unwrap_err().to_string().contains("does not reach"));
}

#[test]
fn log_probabilities_are_told_when_they_are_asked_for() {
    let device = Device::new(&profile(4, 8), VOCAB);
    let mut spec = SamplingSpec {
        params: SamplingParams::default(),
        logprobs: None,
        n_prompt: 1,
        min_tokens: 0,
        stop_token_ids: Vec::new(),
        history: Vec::new(),
    };
    let plain = device.sample(1, 2, &spec);
    assert!(plain.logprob.is_nan() && plain.top.is_empty());
    spec.logprobs = Some(3);
    let told = device.sample(1, 2, &spec);
    assert_eq!((told.token, told.top.len(), told.top[0]), (plain.token, 3, (plain.token, told.logprob)));
}
