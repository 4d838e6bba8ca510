//! What an engine does in the cases that its documentation names.

#![allow(clippy::unwrap_used, missing_docs, unreachable_pub, reason = "a test")]
#![allow(dead_code, reason = "the model serves more than one test")]

mod model;

use std::time::Duration;

use contract::error::RequestError;
use contract::hash::HashKey;
use contract::ids::{RequestId, SlotId, StepId};
use contract::model::Fingerprint;
use contract::plan::{ForwardPlan, QueryToken, SampledToken, SequenceOutput, StepOutput};
use contract::request::GenerateRequest;
use contract::stream::FinishReason;
use engine::{ApplyError, Engine, EngineConfig, Output, OutputEvent};
use model::naive::{self, Ask};
use model::world::World;

fn config() -> EngineConfig {
    EngineConfig {
        block_size: 4,
        n_blocks: 16,
        max_running: 4,
        max_waiting: 4,
        token_budget: 16,
        prefill_budget: None,
        max_prefill_chunk: None,
        context_length: 100,
        watermark_blocks: 0,
        retry_after_ms: 7,
        hash_key: HashKey([1; 32]),
        model: Fingerprint([2; 16]),
    }
}

fn ask(n_shared: usize, max_tokens: u32) -> Ask {
    Ask {
        family: 1,
        n_shared,
        n_own: 0,
        max_tokens,
        min_tokens: 0,
        stop: None,
        priority: 0,
        salt: false,
        has_penalties: false,
        n_resumed: 0,
        deadline_ms: None,
        part: naive::Part::Whole,
    }
}

fn request(id: u64, n_prompt: usize, max_tokens: u32) -> GenerateRequest {
    naive::expect(&ask(n_prompt, max_tokens), id, 1000).request
}

fn engine(config: EngineConfig, requests: impl IntoIterator<Item = GenerateRequest>) -> Engine {
    let mut engine = Engine::new(config).unwrap();
    for request in requests {
        engine.submit(request, Duration::ZERO).unwrap();
    }
    engine
}

fn output(plan: &ForwardPlan, token: u32) -> StepOutput {
    let sampled = || vec![SampledToken { token, logprob: f32::NAN, top: Vec::new() }];
    let rows = plan.sequences.iter().filter(|sequence| !sequence.logits_rows.is_empty());
    let sequences = rows.map(|sequence| SequenceOutput { slot: sequence.slot, tokens: sampled() }).collect();
    StepOutput { step: plan.step, sequences }
}

fn apply(engine: &mut Engine, plan: &ForwardPlan, token: u32) -> Vec<Output> {
    let mut outputs = Vec::new();
    engine.apply(output(plan, token), &mut outputs).unwrap();
    engine.check_invariants();
    outputs
}

fn slots(plan: &ForwardPlan) -> Vec<u32> {
    plan.sequences.iter().map(|sequence| sequence.slot.0).collect()
}

#[test]
fn decodes_a_token_that_is_still_being_sampled() {
    let mut engine = engine(config(), [request(1, 3, 9)]);
    let prefill = engine.plan().unwrap();
    let decode = engine.plan().unwrap();
    assert_eq!(engine.plan(), None, "two plans are in flight");
    assert_eq!(prefill.sequences[0].logits_rows, 2..3);
    assert!(prefill.sequences[0].start.is_some() && decode.sequences[0].start.is_none());
    assert_eq!(decode.sequences[0].query, [QueryToken::Sampled { step: StepId(1), row: 0 }]);
    assert_eq!(decode.sequences[0].position, 3);
}

#[test]
fn a_plan_that_waits_takes_newcomers_up_to_its_budget() {
    let mut engine = engine(EngineConfig { token_budget: 8, ..config() }, [request(1, 3, 9)]);
    let prefill = engine.plan().unwrap();
    let decode = engine.plan().unwrap();
    engine.submit(request(2, 20, 9), Duration::ZERO).unwrap();
    engine.submit(request(3, 3, 9), Duration::ZERO).unwrap();
    assert_eq!(engine.plan(), None, "two plans are in flight");
    let extended = engine.extend(decode.clone());
    engine.check_invariants();
    assert_eq!((extended.step, extended.padded_tokens, engine.n_waiting()), (decode.step, 8, 1));
    assert_eq!(extended.sequences[0], decode.sequences[0]);
    assert_eq!(extended.sequences[1].query.len(), 7, "the rest of the budget");
    assert_eq!(engine.extend(extended.clone()), extended, "nothing more fits");
    apply(&mut engine, &prefill, 1);
    assert_eq!(apply(&mut engine, &extended, 2).len(), 1, "the newcomer's prompt is incomplete");
}

#[test]
fn prompts_keep_to_their_budget_and_decodes_come_on_top() {
    let config = EngineConfig { prefill_budget: Some(5), ..config() };
    let mut engine = engine(config, [request(1, 3, 9), request(2, 1, 9), request(3, 9, 9)]);
    let n_query = |plan: &ForwardPlan| plan.sequences.iter().map(|s| s.query.len()).collect::<Vec<_>>();
    let first = engine.plan().unwrap();
    assert_eq!(n_query(&first), [3, 1, 1]);
    let second = engine.plan().unwrap();
    assert_eq!(n_query(&second), [1, 1, 5], "the budget of prompts is whole again");
    engine.submit(request(4, 4, 9), Duration::ZERO).unwrap();
    assert_eq!(engine.extend(second.clone()), second, "nothing is left for a newcomer");
}

#[test]
fn a_late_stop_discards_the_next_token_and_returns_blocks_after_it() {
    let mut request = request(1, 4, 9);
    request.stop.token_ids = vec![3];
    let mut engine = engine(config(), [request]);
    let (first, second) = (engine.plan().unwrap(), engine.plan().unwrap());
    let outputs = apply(&mut engine, &first, 3);
    assert!(matches!(
        &outputs[..],
        [Output { event: OutputEvent::Tokens { finish: Some(FinishReason::Stop), .. }, .. }]
    ));
    assert_eq!((engine.blocks().allocated, engine.n_running(), engine.is_idle()), (2, 0, false));
    assert_eq!(apply(&mut engine, &second, 5), []);
    assert_eq!((engine.blocks().allocated, engine.is_idle()), (0, true));
}

#[test]
fn does_not_plan_beyond_a_known_end() {
    let mut engine = engine(config(), [request(1, 3, 1)]);
    let plan = engine.plan().unwrap();
    assert_eq!(engine.plan(), None);
    let outputs = apply(&mut engine, &plan, 3);
    assert!(matches!(outputs[0].event, OutputEvent::Tokens { finish: Some(FinishReason::Length), .. }));
}

#[test]
fn an_aborted_request_keeps_slot_and_blocks_until_its_plans_are_applied() {
    let mut engine = engine(EngineConfig { max_running: 1, ..config() }, [request(1, 3, 9), request(2, 3, 9)]);
    let plan = engine.plan().unwrap();
    assert!(engine.abort(RequestId(1)) && !engine.abort(RequestId(1)));
    assert_eq!(engine.plan(), None, "the only slot is named by a plan in flight");
    assert_eq!(engine.blocks().allocated, 1);
    assert_eq!(apply(&mut engine, &plan, 3), []);
    assert_eq!(engine.blocks().allocated, 0);
    assert_eq!(slots(&engine.plan().unwrap()), [0]);
    engine.submit(request(1, 3, 9), Duration::ZERO).expect("the id is free again");
}

#[test]
fn a_fully_cached_prompt_still_computes_its_last_block() {
    let mut world = World::new(config(), 1);
    let first = world.submit(&ask(8, 2)).unwrap();
    world.finish();
    let second = world.submit(&ask(8, 2)).unwrap();
    let third = world.submit(&Ask { salt: true, ..ask(8, 2) }).unwrap();
    world.finish();
    assert_eq!([first, second, third].map(|id| world.cached[&id]), [0, 4, 0], "salts do not share");
    let counters = world.engine.counters();
    assert_eq!((counters.prefix_hit_tokens, counters.prefix_miss_tokens), (4, 20));
}

#[test]
fn lends_what_is_cached_of_a_prompt_and_computes_nothing() {
    let mut engine = engine(config(), [request(1, 10, 1)]);
    let plan = engine.plan().unwrap();
    apply(&mut engine, &plan, 1);
    assert_eq!(engine.lend_cached(request(2, 3, 1)), None, "it has no full block");
    let lent = engine.lend_cached(request(3, 12, 1)).unwrap();
    engine.check_invariants();
    assert_eq!((lent.n_tokens, lent.table.len(), engine.blocks().allocated), (8, 2, 2));
    assert_eq!((engine.n_running(), engine.n_waiting(), engine.plan()), (0, 0, None));
    assert!(engine.let_go(lent.key, 0));
    engine.check_invariants();
    assert_eq!((engine.n_held(), engine.blocks().cached), (0, 2));
}

#[test]
fn equal_prompts_computed_at_once_are_kept_once() {
    let mut world = World::new(config(), 2);
    for _ in 0..2 {
        world.submit(&ask(8, 4)).unwrap();
    }
    world.plan();
    assert_eq!(world.engine.blocks().allocated, 4);
    world.plan();
    world.apply();
    assert_eq!(world.engine.blocks().allocated, 6, "the plan in flight still names the second copy");
    world.apply();
    assert_eq!(world.engine.blocks().allocated, 4, "two shared blocks and one each for the output");
    world.finish();
}

#[test]
fn decodes_come_before_prefills_which_share_the_rest_of_the_budget() {
    let mut engine = engine(EngineConfig { token_budget: 8, ..config() }, [request(1, 3, 9)]);
    let plan = engine.plan().unwrap();
    apply(&mut engine, &plan, 1);
    engine.submit(request(2, 20, 9), Duration::ZERO).unwrap();
    let plan = engine.plan().unwrap();
    assert_eq!(plan.sequences.iter().map(|s| s.query.len()).collect::<Vec<_>>(), [1, 7]);
    assert!(plan.sequences[1].logits_rows.is_empty(), "the prompt is incomplete");
}

#[test]
fn admits_by_priority_then_arrival() {
    let urgent = GenerateRequest { priority: -1, ..request(3, 3, 1) };
    let mut engine = engine(EngineConfig { max_running: 1, ..config() }, [request(1, 3, 1), request(2, 3, 1), urgent]);
    let mut order = Vec::new();
    while let Some(plan) = engine.plan() {
        order.extend(apply(&mut engine, &plan, 1).iter().map(|output| output.request.0));
    }
    assert_eq!(order, [3, 1, 2]);
}

#[test]
fn preempts_the_latest_and_computes_it_again_with_its_history() {
    let mut world = World::new(EngineConfig { n_blocks: 6, ..config() }, 2);
    let penalised = Ask { has_penalties: true, ..ask(6, 14) };
    let first = world.submit(&penalised).unwrap();
    let second = world.submit(&Ask { family: 2, ..penalised }).unwrap();
    world.finish();
    assert!(world.engine.counters().preemptions > 0);
    assert_eq!(world.finished, [first, second]);
}

#[test]
fn a_request_that_outgrows_the_pool_ends_with_length() {
    let mut world = World::new(EngineConfig { n_blocks: 2, ..config() }, 2);
    world.submit(&ask(6, 50)).unwrap();
    world.finish();
    assert_eq!(world.engine.counters().tokens_generated, 3, "eight tokens have blocks, the ninth needs none");
}

#[test]
fn refuses_what_can_never_fit_and_what_is_too_much_now() {
    let mut engine = engine(EngineConfig { n_blocks: 2, ..config() }, (1..5).map(|id| request(id, 8, 9)));
    assert_eq!(
        engine.submit(request(9, 9, 1), Duration::ZERO),
        Err(RequestError::PromptTooLong { n_tokens: 9, at_least: false, limit: 8 })
    );
    let error = engine.submit(request(5, 8, 9), Duration::ZERO).unwrap_err();
    assert!(matches!(error, RequestError::Overloaded { retry_after_ms: 7, .. }), "{error}");
    let error = engine.submit(request(4, 8, 9), Duration::ZERO).unwrap_err();
    assert!(error.to_string().starts_with("request_id: "), "{error}");
}

#[test]
fn deadlines_end_waiting_and_running_requests() {
    let timed = |id, ms| GenerateRequest { deadline: Some(Duration::from_millis(ms)), ..request(id, 3, 9) };
    let mut engine =
        engine(EngineConfig { max_running: 1, ..config() }, [timed(1, 20), timed(2, 10), request(3, 3, 9)]);
    let plan = engine.plan().unwrap();
    assert_eq!(apply(&mut engine, &plan, 1).len(), 1);
    let mut outputs = Vec::new();
    engine.expire(Duration::from_millis(9), &mut outputs);
    assert_eq!(outputs, []);
    engine.expire(Duration::from_millis(20), &mut outputs);
    let failed = |output: &Output| (output.request.0, output.event.clone());
    let late = |n_tokens| OutputEvent::Failed(RequestError::DeadlineExceeded { n_tokens });
    assert_eq!(outputs.iter().map(failed).collect::<Vec<_>>(), [(2, late(0)), (1, late(1))]);
    assert_eq!(engine.next_deadline(), None);
}

#[test]
fn an_output_that_no_plan_asked_for_changes_nothing() {
    let mut engine = engine(config(), [request(1, 3, 9)]);
    let plan = engine.plan().unwrap();
    let mut outputs = Vec::new();
    let wrong_step = StepOutput { step: StepId(9), ..output(&plan, 1) };
    let error = engine.apply(wrong_step, &mut outputs).unwrap_err();
    assert_eq!(error, ApplyError::WrongStep { expected: Some(StepId(1)), got: StepId(9) });
    let mut wrong_slot = output(&plan, 1);
    wrong_slot.sequences[0].slot = SlotId(2);
    assert!(matches!(engine.apply(wrong_slot, &mut outputs), Err(ApplyError::WrongSequence { index: 0, .. })));
    let missing = StepOutput { sequences: Vec::new(), ..output(&plan, 1) };
    assert!(matches!(engine.apply(missing, &mut outputs), Err(ApplyError::WrongSequence { got: None, .. })));
    assert_eq!(apply(&mut engine, &plan, 1).len(), 1);
}

#[test]
fn bounds_that_cannot_work_are_named() {
    let error = |config: EngineConfig| Engine::new(config).unwrap_err().to_string();
    assert_eq!(error(EngineConfig { n_blocks: 0, ..config() }), "n_blocks is 0; give at least 1");
    assert_eq!(error(EngineConfig { token_budget: 3, ..config() }), "token_budget is 3; give at least 4");
    assert_eq!(error(EngineConfig { watermark_blocks: 16, ..config() }), "watermark_blocks is 16; give at most 15");
}
