//! Copies of a router's placements, told once, twice, late and with gaps.

use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::*;
use crate::ids::{DataRank, EngineId};
use crate::ledger::Ledger;

#[expect(clippy::disallowed_methods, reason = "tests need some instant to count from")]
fn some_instant() -> Instant {
    Instant::now()
}

fn key(number: u64) -> PlacementKey {
    PlacementKey { router: Incarnation(1), number }
}

fn placed(number: u64) -> LedgerEvent {
    let engine = EngineId { worker: "w".into(), incarnation: Incarnation(number % 3), data_rank: DataRank(0) };
    let tokens = 10 + u32::try_from(number).unwrap();
    LedgerEvent::Placed(
        key(number),
        PlacedWork { engine, tenant: "t".into(), tokens_new: tokens, tokens_prompt: tokens, prefill_us: 1_000 },
    )
}

/// Events as a router makes them: each placement begins once, may show a first token, and may end.
fn history(steps: &[(u8, prop::sample::Index)]) -> Vec<LedgerEvent> {
    let (mut running, mut n_placed) = (Vec::new(), 0);
    let mut events = Vec::new();
    for (what, which) in steps {
        if *what < 2 || running.is_empty() {
            running.push(n_placed);
            events.push(placed(n_placed));
            n_placed += 1;
        } else if *what == 2 {
            events.push(LedgerEvent::FirstToken(key(running[which.index(running.len())])));
        } else {
            events.push(LedgerEvent::Finished(key(running.swap_remove(which.index(running.len())))));
        }
    }
    events
}

/// One scheduler's copy of the history: a snapshot of its beginning, then batches, some of which are snapshots again.
fn copy(events: &[LedgerEvent], cuts: &[(prop::sample::Index, bool)]) -> Vec<LedgerNews> {
    let mut ends: Vec<(usize, bool)> = cuts.iter().map(|(cut, again)| (cut.index(events.len() + 1), *again)).collect();
    ends.push((events.len(), false));
    ends.sort_unstable();
    let (mut told, mut from) = (Placements::default(), 0);
    let mut news = Vec::new();
    for (end, again) in ends {
        events[from..end].iter().for_each(|event| {
            told.put(event);
        });
        let is_snapshot = news.is_empty() || again;
        let batch = LedgerNews::Events { sequence: end as u64, events: events[from..end].to_vec() };
        news.push(if is_snapshot { told.snapshot() } else { batch });
        from = end;
    }
    news
}

fn steps() -> impl Strategy<Value = Vec<(u8, prop::sample::Index)>> {
    proptest::collection::vec((0..5_u8, any::<prop::sample::Index>()), 0..60)
}

fn cuts() -> impl Strategy<Value = Vec<(prop::sample::Index, bool)>> {
    proptest::collection::vec((any::<prop::sample::Index>(), any::<bool>()), 0..12)
}

proptest! {
    #[test]
    fn two_copies_in_any_interleaving_make_the_ledger_of_the_router_itself(
        steps in steps(), one in cuts(), two in cuts(), turns in proptest::collection::vec(any::<bool>(), 0..30),
    ) {
        let events = history(&steps);
        let mut own = Placements::default();
        events.iter().for_each(|event| { own.put(event); });
        let (one, two) = (copy(&events, &one), copy(&events, &two));
        let (mut one, mut two) = (one.iter(), two.iter());
        let (mut follower, mut ledger, now) = (Placements::default(), Ledger::default(), some_instant());
        let mut turns = turns.into_iter();
        loop {
            let first = turns.next().unwrap_or(true);
            let next = if first { one.next().or_else(|| two.next()) } else { two.next().or_else(|| one.next()) };
            let Some(news) = next else { break };
            for event in follower.take(news).unwrap() {
                ledger.apply(event, now);
            }
            prop_assert_eq!(follower.len(), ledger.len());
        }
        prop_assert_eq!(&follower, &own);
        let mut expected = Ledger::default();
        events.into_iter().for_each(|event| expected.apply(event, now));
        prop_assert_eq!(ledger.len(), expected.len());
        let later = now + Duration::from_secs(9);
        for n in 0..3 {
            let engine = EngineId { worker: "w".into(), incarnation: Incarnation(n), data_rank: DataRank(0) };
            prop_assert_eq!(ledger.load(&engine, later), expected.load(&engine, later));
        }
    }

    #[test]
    fn a_batch_after_missed_events_is_refused_and_changes_nothing(steps in steps(), at in any::<prop::sample::Index>()) {
        let events = history(&steps);
        prop_assume!(events.len() > 1);
        let n_known = at.index(events.len() - 1);
        let mut follower = Placements::default();
        events[..n_known].iter().for_each(|event| { follower.put(event); });
        let before = follower.clone();
        let late = LedgerNews::Events { sequence: events.len() as u64, events: events[n_known + 1..].to_vec() };
        let missed = MissedEvents { expected: n_known as u64 + 1, found: n_known as u64 + 2 };
        prop_assert_eq!(follower.take(&late), Err(missed));
        prop_assert_eq!(follower, before);
    }
}

#[test]
fn a_placement_that_ended_does_not_come_back_with_a_late_copy() {
    let mut follower = Placements::default();
    let events = |sequence, events: &[LedgerEvent]| LedgerNews::Events { sequence, events: events.to_vec() };
    follower.take(&events(2, &[placed(0), LedgerEvent::Finished(key(0))])).unwrap();
    assert_eq!(follower.take(&events(1, &[placed(0)])), Ok(vec![]));
    assert!(follower.is_empty());
}

#[test]
fn a_snapshot_tells_only_what_differs() {
    let mut router = Placements::default();
    for event in [placed(0), placed(1), placed(2), LedgerEvent::FirstToken(key(1))] {
        router.put(&event);
    }
    let mut follower = router.clone();
    for event in [LedgerEvent::Finished(key(0)), LedgerEvent::FirstToken(key(2)), placed(3)] {
        router.put(&event);
    }
    let changes = follower.take(&router.snapshot()).unwrap();
    assert_eq!(changes, [LedgerEvent::Finished(key(0)), LedgerEvent::FirstToken(key(2)), placed(3)]);
    assert_eq!(follower.take(&LedgerNews::Gone).unwrap().len(), 3);
    assert_eq!(follower, Placements::default());
}
