//! Random operations on small engines: results equal the naive model, blocks are conserved, KV is what it should be.
//!
//! `SEED=n` replays a run, `TESSERA_FULL=1` tries many more cases.

#![allow(clippy::print_stderr, missing_docs, unreachable_pub, reason = "a test")]
#![allow(dead_code, reason = "the model serves more than one test")]

mod model;

use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

use contract::hash::HashKey;
use contract::model::Fingerprint;
use engine::EngineConfig;
use model::naive::{Ask, Part};
use model::world::World;
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

#[derive(Clone, Debug)]
enum Operation {
    Submit(Ask),
    LendCached(Ask),
    Abort(u64),
    Plan,
    Extend,
    Apply,
    Advance(u64),
    ClearCache,
    FailAll,
    LetGo(usize, f64),
}

fn asks() -> impl Strategy<Value = Ask> {
    let prompt = (0..3_u32, 0..24_usize, 1..6_usize);
    let limits = (1..20_u32, 0..6_u32, prop::option::of(0..11_u32));
    let rest = (-1..2_i32, prop::bool::weighted(0.2), prop::bool::weighted(0.3), 0..5_usize);
    let part = prop_oneof![3 => Just(Part::Whole), 1 => Just(Part::Decode), 1 => Just(Part::Prefill)];
    (prompt, limits, rest, prop::option::weighted(0.1, 1..100_u64), part).prop_map(
        |((family, n_shared, n_own), (max_tokens, min_tokens, stop), rest, deadline_ms, part)| {
            let (priority, salt, has_penalties, n_resumed) = rest;
            // Half of the prompts are shared as a whole.
            let n_own = if n_own > 3 && n_shared > 0 { 0 } else { n_own };
            let (min_tokens, n_resumed) = (min_tokens.saturating_sub(2), n_resumed.saturating_sub(2));
            Ask {
                family,
                n_shared,
                n_own,
                max_tokens,
                min_tokens,
                stop,
                priority,
                salt,
                has_penalties,
                n_resumed,
                deadline_ms,
                part,
            }
        },
    )
}

fn operations() -> impl Strategy<Value = Vec<Operation>> {
    let operation = prop_oneof![
        12 => asks().prop_map(Operation::Submit),
        2 => asks().prop_map(Operation::LendCached),
        4 => (0..60_u64).prop_map(Operation::Abort),
        30 => Just(Operation::Plan),
        10 => Just(Operation::Extend),
        30 => Just(Operation::Apply),
        2 => (1..20_u64).prop_map(Operation::Advance),
        1 => Just(Operation::ClearCache),
        8 => (0..4_usize, prop_oneof![Just(1.0), 0.0..1.0]).prop_map(|(n, share)| Operation::LetGo(n, share)),
        1 => prop::bool::weighted(0.2).prop_map(|all| if all { Operation::FailAll } else { Operation::ClearCache }),
    ];
    prop::collection::vec(operation, 1..200)
}

fn configs() -> impl Strategy<Value = EngineConfig> {
    let pool = (1..6_u32, 2..28_u32, 0..3_u32);
    let batch = (1..7_u32, 0..14_u32, prop::option::of(1..7_u32), 1..10_u32);
    let rest = (4..90_u32, prop::option::of(1..9_u32));
    (pool, batch, rest).prop_map(
        |((block_size, n_blocks, watermark_blocks), batch, (context_length, prefill_budget))| {
            let (max_running, budget, max_prefill_chunk, max_waiting) = batch;
            EngineConfig {
                block_size,
                n_blocks,
                max_running,
                max_waiting,
                token_budget: max_running + budget,
                prefill_budget,
                max_prefill_chunk,
                context_length,
                watermark_blocks: watermark_blocks.min(n_blocks - 1),
                retry_after_ms: 1,
                hash_key: HashKey([1; 32]),
                model: Fingerprint([2; 16]),
            }
        },
    )
}

fn run(config: EngineConfig, depth: usize, operations: Vec<Operation>) -> [bool; 5] {
    let mut world = World::new(config, depth);
    for operation in operations {
        match operation {
            Operation::Submit(ask) => drop(world.submit(&ask)),
            Operation::LendCached(ask) => world.lend_cached(&ask),
            Operation::Abort(number) => world.abort(number),
            Operation::Plan => drop(world.plan()),
            Operation::Extend => drop(world.extend()),
            Operation::Apply => drop(world.apply()),
            Operation::Advance(by_ms) => world.advance(Duration::from_millis(by_ms)),
            Operation::ClearCache => world.clear_cache(),
            Operation::FailAll => world.fail_all(),
            Operation::LetGo(n, share) => world.let_go(n, share),
        }
    }
    world.finish();
    let counters = world.engine.counters();
    let [received, lent] = world.n_moved.map(|n| n > 0);
    [counters.preemptions > 0, counters.prefix_hit_tokens > 0, !world.finished.is_empty(), received, lent]
}

#[test]
fn results_equal_the_naive_model_whatever_happens() {
    let seed = std::env::var("SEED").map_or_else(|_| RandomState::new().hash_one(0), |seed| seed.parse().unwrap());
    eprintln!("SEED={seed}");
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&u64::to_le_bytes(seed));
    let cases = if std::env::var_os("TESSERA_FULL").is_some() { 20_000 } else { 600 };
    let config = Config { cases, failure_persistence: None, max_shrink_iters: 20_000, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &bytes));
    let reached = std::cell::RefCell::new([0_u32; 5]);
    let result = runner.run(&(configs(), 1..3_usize, operations()), |(config, depth, operations)| {
        let happened = run(config, depth, operations);
        reached.borrow_mut().iter_mut().zip(happened).for_each(|(n, happened)| *n += u32::from(happened));
        Ok(())
    });
    if let Err(error) = result {
        panic!("SEED={seed} replays this: {error}");
    }
    let [preempted, hit, finished, received, lent] = reached.into_inner();
    eprintln!("of {cases} cases {preempted} preempted, {hit} hit the prefix cache, {finished} finished requests");
    eprintln!("in {received} a prompt came from elsewhere, in {lent} one was computed for others");
    assert!(preempted > cases / 50 && hit > cases / 10 && finished > cases / 2, "the cases reach too little");
    assert!(received > cases / 10 && lent > cases / 10, "prompts move too seldom");
}
