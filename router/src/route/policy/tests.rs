//! What each policy does in small situations, and what all do in any.

use contract::ids::{DataRank, EngineId, Incarnation};
use proptest::prelude::*;

use super::*;
use crate::route::{Candidate, Choice, Reason, Situation};

/// In flight, pending and cached tokens of an engine.
type Row = (u32, u64, u64);

fn choose(policy: &dyn RoutePolicy, rows: &[Row], n_prompt_tokens: u64, turn: u64, random: u64) -> Choice {
    let engine = |index: usize| EngineId {
        worker: format!("w{index}").into(),
        incarnation: Incarnation(1),
        data_rank: DataRank(0),
    };
    let engines: Vec<EngineId> = (0..rows.len()).map(engine).collect();
    let candidates: Vec<Candidate<'_>> = rows
        .iter()
        .zip(&engines)
        .map(|(&(n_in_flight, tokens_pending, tokens_cached), engine)| Candidate {
            engine,
            occupancy: None,
            n_in_flight,
            tokens_pending,
            tokens_cached,
        })
        .collect();
    policy.choose(&Situation { candidates: &candidates, n_prompt_tokens, turn, random })
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
    let indexes: Vec<usize> =
        (0..6).map(|turn| choose(&RoundRobin, &[(9, 9, 9), (0, 0, 0), (0, 0, 0)], 10, turn, 7).index).collect();
    assert_eq!(indexes, [0, 1, 2, 0, 1, 2]);
}

#[test]
fn least_loaded_prefers_idle_engines_and_spreads_over_equal_ones() {
    assert_eq!(choose(&LeastLoaded, &[(1, 0, 0), (0, 0, 0), (3, 50, 0)], 10, 0, 0).index, 1);
    let chosen: Vec<usize> = (0..3).map(|random| choose(&LeastLoaded, &[(0, 0, 0); 3], 10, 0, random).index).collect();
    assert_eq!(chosen, [0, 1, 2]);
}

#[test]
fn a_long_prefix_wins_over_an_idle_engine() {
    let choice = choose(&PrefixThreshold, &[(0, 0, 0), (4, 100, 992), (0, 0, 0)], 1003, 0, 0);
    assert_eq!(choice, Choice { index: 1, reason: Reason::Prefix });
}

#[test]
fn a_queue_longer_than_the_prefix_sends_the_request_elsewhere() {
    let choice = choose(&PrefixThreshold, &[(0, 0, 0), (4, 5000, 992)], 1003, 0, 0);
    assert_eq!(choice, Choice { index: 0, reason: Reason::Balance });
}

#[test]
fn a_short_common_beginning_does_not_herd_requests() {
    let choice = choose(&PrefixThreshold, &[(0, 0, 0), (1, 0, 16)], 1003, 0, 1);
    assert_eq!(choice, Choice { index: 0, reason: Reason::Load });
}

proptest! {
    #[test]
    fn choices_exist_and_repeat(
        rows in proptest::collection::vec((0..100_u32, 0..10_000_u64, 0..2_000_u64), 1..9),
        n_prompt_tokens in 1..2_000_u64,
        turn: u64,
        random: u64,
    ) {
        for policy in POLICIES {
            let choice = choose(policy, &rows, n_prompt_tokens, turn, random);
            prop_assert!(choice.index < rows.len());
            prop_assert_eq!(choice, choose(policy, &rows, n_prompt_tokens, turn, random));
        }
    }

    #[test]
    fn no_other_engine_is_better_in_load_and_prefix(
        rows in proptest::collection::vec((0..100_u32, 0..10_000_u64, 0..2_000_u64), 2..9),
        n_prompt_tokens in 1..2_000_u64,
        random: u64,
    ) {
        let chosen = rows[choose(&PrefixThreshold, &rows, n_prompt_tokens, 0, random).index];
        for row in rows {
            let better = row.0 < chosen.0 && row.1 < chosen.1 && row.2 > chosen.2;
            prop_assert!(!better, "{row:?} is better than {chosen:?}");
        }
    }
}
