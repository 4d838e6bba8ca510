//! What each policy does in small situations, and what all do in any.

use contract::cost::CostCoefficients;
use contract::ids::{DataRank, EngineId, Incarnation};
use contract::ledger::EngineLoad;
use proptest::prelude::*;

use super::*;
use crate::route::{Candidate, Choice, Prediction, Reason, Room, Situation};

/// Prefilling requests, tokens they compute, decoding requests, cached tokens of an engine.
type Row = (u32, u64, u32, u64);

const COST: CostCoefficients = CostCoefficients {
    prefill_base_ms: 1.0,
    prefill_per_token_ms: 0.1,
    prefill_per_token_context_ms: 0.0,
    decode_base_ms: 10.0,
    decode_per_sequence_ms: 1.0,
    decode_per_context_token_ms: 0.0,
};

fn engine(index: usize) -> EngineId {
    EngineId { worker: format!("w{index}").into(), incarnation: Incarnation(1), data_rank: DataRank(0) }
}

fn with_situation<T>(rows: &[Row], change: impl Fn(&mut Situation<'_>), then: impl Fn(&Situation<'_>) -> T) -> T {
    let engines: Vec<EngineId> = (0..rows.len()).map(engine).collect();
    let candidates: Vec<Candidate<'_>> = rows
        .iter()
        .zip(&engines)
        .map(|(&(n_prefilling, tokens_prefilling, n_decoding, tokens_cached), engine)| Candidate {
            engine,
            load: EngineLoad {
                n_prefilling,
                tokens_prefilling,
                wait_ms: COST.prefill_ms(tokens_prefilling, 0),
                n_decoding,
                tokens_decoding: 100 * u64::from(n_decoding),
                answer_ms: 0.0,
            },
            tokens_queued: 0,
            n_reported: 0,
            slots: 0,
            tokens_running: 0,
            blocks: None,
            cost: COST,
            step_tokens: 0,
            transfer_ms_per_token: 0.0,
            n_recent: 0.0,
            backlog_ms: 0.0,
            tokens_cached,
            tokens_promised: 0,
        })
        .collect();
    let mut situation = Situation {
        candidates: &candidates,
        n_prompt_tokens: 1003,
        session: 0,
        decode_ms_goal: f64::INFINITY,
        turn: 0,
        random: 0,
    };
    change(&mut situation);
    then(&situation)
}

fn choose(policy: &dyn RoutePolicy, rows: &[Row], change: impl Fn(&mut Situation<'_>)) -> Choice {
    with_situation(rows, change, |situation| policy.choose(situation))
}

#[test]
fn every_policy_is_found_by_its_name_and_one_is_the_default() {
    for policy in POLICIES {
        assert_eq!(by_name(policy.name()).map(RoutePolicy::name), Some(policy.name()));
    }
    assert!(by_name(DEFAULT).is_some());
    assert!(by_name("best").is_none());
}

#[test]
fn round_robin_takes_each_in_turn() {
    let rows = [(9, 900, 9, 9), (0, 0, 0, 0), (0, 0, 0, 0)];
    let indexes: Vec<usize> =
        (0..6).map(|turn| choose(&RoundRobin, &rows, |situation| situation.turn = turn).index).collect();
    assert_eq!(indexes, [0, 1, 2, 0, 1, 2]);
}

#[test]
fn least_loaded_prefers_idle_engines_and_spreads_over_equal_ones() {
    assert_eq!(choose(&LeastLoaded, &[(0, 0, 1, 0), (0, 0, 0, 0), (1, 50, 3, 0)], |_| {}).index, 1);
    let rows = [(0, 0, 0, 0); 3];
    let chosen: Vec<usize> =
        (0..3).map(|random| choose(&LeastLoaded, &rows, |situation| situation.random = random).index).collect();
    assert_eq!(chosen, [0, 1, 2]);
}

#[test]
fn power_of_two_takes_the_less_loaded_of_any_two() {
    let rows = [(1, 500, 0, 0), (0, 0, 0, 0), (3, 900, 0, 0)];
    let chosen: Vec<usize> = (0..64_u64)
        .map(|seed| choose(&PowerOfTwo, &rows, |situation| situation.random = seed | (seed >> 2) << 32).index)
        .collect();
    assert!(!chosen.contains(&2), "the most loaded one loses against both others");
    assert!(chosen.contains(&0) && chosen.contains(&1));
}

#[test]
fn sessions_stay_where_they_are_when_another_engine_goes() {
    let place = |n: usize, session: u64| {
        choose(&SessionHash, &vec![(0, 0, 0, 0); n], |situation| situation.session = session).index
    };
    let (mut counts, mut moved) = ([0; 5], 0);
    for session in 0..1000 {
        let (five, four) = (place(5, session), place(4, session));
        counts[five] += 1;
        moved += u32::from(five != four);
        assert!(five == four || five == 4, "only sessions of the engine that goes move");
    }
    assert!(counts.iter().all(|&n| n > 120), "{counts:?}");
    assert_eq!(moved, counts[4]);
}

#[test]
fn thresholds_follow_prefixes_until_the_load_is_out_of_balance() {
    let policy = PrefixThreshold::USUAL;
    let long = choose(&policy, &[(0, 0, 0, 0), (1, 100, 4, 992), (0, 0, 0, 0)], |_| {});
    assert_eq!(long, Choice { index: 1, reason: Reason::Prefix });
    let busy = choose(&policy, &[(0, 0, 0, 0), (9, 900, 20, 992)], |_| {});
    assert_eq!(busy, Choice { index: 0, reason: Reason::Balance });
    let short = choose(&policy, &[(0, 0, 0, 0), (0, 0, 1, 16)], |_| {});
    assert_eq!(short, Choice { index: 0, reason: Reason::Load });
}

#[test]
fn the_soonest_first_token_wins() {
    let policy = PrefixLatency;
    let cached = choose(&policy, &[(0, 0, 0, 0), (1, 500, 4, 992)], |_| {});
    assert_eq!(cached, Choice { index: 1, reason: Reason::Prefix }, "half as long to wait as to compute");
    let queued = choose(&policy, &[(0, 0, 0, 0), (5, 5000, 4, 992)], |_| {});
    assert_eq!(queued, Choice { index: 0, reason: Reason::Balance });
}

#[test]
fn full_pools_and_slow_decodes_are_avoided() {
    let policy = PrefixLatency;
    let slow = choose(&policy, &[(0, 0, 60, 900), (0, 0, 10, 0)], |situation| situation.decode_ms_goal = 50.0);
    assert_eq!(slow.index, 1);
    let any = choose(&policy, &[(0, 0, 60, 900), (0, 0, 10, 0)], |_| {});
    assert_eq!(any.index, 0);
    let full = with_situation(
        &[(0, 0, 0, 500), (0, 0, 0, 0)],
        |_| {},
        |situation| {
            let mut candidates = situation.candidates.to_vec();
            candidates[0].blocks = Some(Room { tokens_available: 16, tokens_total: 1600 });
            policy.choose(&Situation { candidates: &candidates, ..*situation })
        },
    );
    assert_eq!(full.index, 1);
}

fn rows() -> impl Strategy<Value = Vec<Row>> {
    proptest::collection::vec((0..20_u32, 0..10_000_u64, 0..100_u32, 0..2_000_u64), 1..9)
}

proptest! {
    #[test]
    fn choices_exist_and_repeat(rows in rows(), n in 1..2_000_u64, turn: u64, random: u64, session: u64) {
        let change = |situation: &mut Situation<'_>| {
            (situation.n_prompt_tokens, situation.turn) = (n, turn);
            (situation.random, situation.session) = (random, session);
        };
        for policy in POLICIES {
            let choice = choose(policy, &rows, change);
            prop_assert!(choice.index < rows.len());
            prop_assert_eq!(choice, choose(policy, &rows, change));
        }
    }

    #[test]
    fn no_other_engine_is_better_in_load_and_prefix(rows in rows(), n in 1..2_000_u64, random: u64) {
        let change = |situation: &mut Situation<'_>| (situation.n_prompt_tokens, situation.random) = (n, random);
        let chosen = choose(&PrefixLatency, &rows, change).index;
        let predictions: Vec<Prediction> = with_situation(&rows, change, |situation| {
            situation.candidates.iter().map(|candidate| situation.predict(candidate)).collect()
        });
        // Those that are closer than a quarter of a decode step count as equally good.
        let equal_ms = 0.25 * predictions.iter().map(|prediction| prediction.decode_ms).fold(0.0, f64::max);
        for (row, prediction) in rows.iter().zip(&predictions) {
            let (row, taken) = (row, &rows[chosen]);
            let better = row.1 < taken.1 && row.2 <= taken.2 && row.3.min(n) > taken.3.min(n);
            let sooner_ms = predictions[chosen].first_token_ms - prediction.first_token_ms;
            prop_assert!(!better || sooner_ms <= equal_ms, "{row:?} is better than {taken:?} by {sooner_ms} ms");
        }
    }

    #[test]
    fn an_idle_engine_is_not_left_idle_for_ever(others in rows(), session: u64, seed: u64) {
        // Everything that is placed stays, so whoever is passed over becomes the better choice.
        for policy in POLICIES.into_iter().filter(|policy| policy.name() != "session_hash") {
            let mut rows = others.clone();
            rows.iter_mut().for_each(|row| row.3 = 0);
            rows.push((0, 0, 0, 0));
            let idle = rows.len() - 1;
            let mut random = seed;
            let found = (0..2_000).any(|turn| {
                random = random.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
                let draw = random ^ random >> 29;
                let chosen = choose(policy, &rows, |situation| {
                    (situation.turn, situation.random, situation.session) = (turn, draw, session);
                }).index;
                rows[chosen].0 += 1;
                rows[chosen].1 += 1003;
                chosen == idle
            });
            prop_assert!(found, "{} never places on an idle engine", policy.name());
        }
    }
}

/// The candidate that `prefix_latency` takes when each got so many requests of late.
fn chosen_after(rows: &[Row], n_recent: &[f64]) -> usize {
    with_situation(
        rows,
        |_| {},
        |situation| {
            let mut candidates = situation.candidates.to_vec();
            candidates.iter_mut().zip(n_recent).for_each(|(candidate, &n)| candidate.n_recent = n);
            PrefixLatency.choose(&Situation { candidates: &candidates, ..*situation }).index
        },
    )
}

#[test]
fn equal_candidates_share_requests_and_a_better_one_is_taken_however_many_it_got() {
    assert_eq!(chosen_after(&[(0, 0, 0, 0); 3], &[5.0, 2.0, 3.0]), 1);
    assert_eq!(chosen_after(&[(0, 0, 0, 0), (0, 0, 0, 800), (0, 0, 0, 0)], &[0.0, 9.0, 1.0]), 1);
}

#[test]
fn a_request_waits_for_a_slot_as_long_as_answers_take() {
    let with_slots = |slots, answer_ms: f64| {
        with_situation(
            &[(2, 0, 8, 1_003), (0, 0, 0, 0)],
            |_| {},
            |situation| {
                let mut candidates = situation.candidates.to_vec();
                candidates.iter_mut().for_each(|one| (one.slots, one.load.answer_ms) = (slots, answer_ms));
                let situation = Situation { candidates: &candidates, ..*situation };
                (situation.predict(&candidates[0]), PrefixLatency.choose(&situation).index)
            },
        )
    };
    let (free, index) = with_slots(11, 800.0);
    assert_eq!((free.wait_ms, index), (COST.prefill_ms(0, 0), 0), "there is a slot, and all of the prompt");
    let (full, index) = with_slots(8, 800.0);
    assert_eq!((full.wait_ms, index), (300.0, 1), "three must end before it, one in 100 ms");
    assert_eq!(full.first_token_ms - free.first_token_ms, 300.0 - free.wait_ms);
    assert!(with_slots(8, 0.0).0.wait_ms > 500.0, "answers are taken to be long before any has ended");
    assert_eq!(with_slots(0, 800.0).1, 0, "slots that are not known are not waited for");
}

#[test]
fn each_step_of_a_prefill_and_of_what_is_ahead_decodes_beside_it() {
    with_situation(
        &[(1, 2_000, 4, 3)],
        |_| {},
        |situation| {
            let [candidate] = situation.candidates else { panic!("there is one") };
            let in_steps = situation.predict(&Candidate { step_tokens: 100, ..*candidate });
            let at_once = situation.predict(candidate);
            let decode_ms = COST.decode_ms(4, 400);
            // Ten steps of its own instead of one, and twenty ahead of it instead of none.
            let beside_ms = in_steps.first_token_ms - at_once.first_token_ms;
            let least_ms = (9.0 + at_once.wait_ms / COST.prefill_ms(100, 0)) * decode_ms;
            assert!((least_ms..1.05 * least_ms + 9.0 * COST.prefill_base_ms).contains(&beside_ms), "{beside_ms}");
        },
    );
}
