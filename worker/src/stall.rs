//! Whether an engine stands still: a step, or its answer to an event, takes longer than it can.
//!
//! A device or a thread that hangs leaves the rest of the worker alive, which goes on to say so, and nobody else knows what
//! its step has to compute. So the worker decides, and all else follows from that until the engine steps again: calls end,
//! and routers place them elsewhere; so do prompts that are computed for others; new ones are refused; and schedulers are
//! told, who wish the engine to be left alone.

use std::sync::Arc;
use std::time::Duration;

use contract::cost::{CostCoefficients, StepLoad};
use daemon::clock;
use daemon::telemetry::metrics::scope;
use daemon::telemetry::names;
use tokio::sync::watch;
use tokio::time::sleep;

use crate::engine_loop::EngineHandle;

/// A step that takes so many times what is predicted does not run any more: costs that were fitted to few steps are wrong
/// by less, and so is a machine that does other things too.
const TIMES_PREDICTED: f64 = 20.0;
/// Longest and shortest time between two looks.
const LOOK_MAX: Duration = Duration::from_millis(250);
const LOOK_MIN: Duration = Duration::from_millis(10);

/// How long a step may take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// However short it is predicted to be; also for the answer to an event, which takes no time worth mentioning.
    pub(crate) least: Duration,
    /// However long, and where nothing is predicted yet.
    pub(crate) most: Duration,
}

/// Why the engine stands still, while it does; clones are the same one.
#[derive(Clone, Debug, Default)]
pub(crate) struct Stall(Arc<watch::Sender<Option<Arc<str>>>>);

/// What an engine owes at a moment, each with a number that changes when it is done.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Owed {
    /// The step that runs.
    pub(crate) step: Option<(u64, StepLoad)>,
    /// Events that wait.
    pub(crate) events: Option<u64>,
}

/// Looks at what is owed time and again.
#[derive(Debug)]
struct Watch {
    limits: Limits,
    step: Standing,
    events: Standing,
}

/// For how long the same has been owed.
#[derive(Debug, Default)]
struct Standing {
    number: Option<u64>,
    lasts: Duration,
}

impl Stall {
    /// Why the engine stands still now, if it does.
    pub(crate) fn reason(&self) -> Option<Arc<str>> {
        self.0.borrow().clone()
    }

    /// Returns why, once the engine stands still.
    pub(crate) async fn begun(&self) -> Arc<str> {
        let mut reasons = self.follow();
        // The sender lives as long as this.
        let reason = reasons.wait_for(Option::is_some).await.ok().and_then(|reason| reason.clone());
        reason.unwrap_or_else(|| Arc::from("it stands still"))
    }

    /// Follows whether it does.
    pub(crate) fn follow(&self) -> watch::Receiver<Option<Arc<str>>> {
        self.0.subscribe()
    }
}

/// Watches an engine for ever, and tells whoever follows its [`Stall`].
pub(crate) async fn watch(engine: EngineHandle, limits: Limits) {
    let occupancy = engine.occupancy();
    let id = occupancy.borrow().engine.clone();
    let stalls = scope("worker", id.worker.as_str()).counter(&names::ENGINE_STALLS, &[]);
    let look = (limits.least / 8).clamp(LOOK_MIN, LOOK_MAX);
    let mut watch = Watch { limits, step: Standing::default(), events: Standing::default() };
    let mut looked_at = clock::now();
    loop {
        sleep(look).await;
        let now = clock::now();
        // When all of the process stood still, that was not the engine's doing.
        let passed = now.duration_since(looked_at).min(2 * look);
        looked_at = now;
        let cost = occupancy.borrow().cost;
        let reason = watch.look(&engine.owed(), &cost, passed);
        let stall = &engine.stall().0;
        let is_known = stall.borrow().is_some();
        match reason {
            Some(reason) if !is_known => {
                tracing::error!(engine = %id, "the engine stands still: {reason}");
                stalls.inc();
                stall.send_replace(Some(Arc::from(reason)));
            }
            None if is_known => {
                tracing::warn!(engine = %id, "the engine goes on");
                stall.send_replace(None);
            }
            _ => {}
        }
    }
}

impl Limits {
    /// Longest time that a step can take.
    fn of_step(&self, load: &StepLoad, cost: &CostCoefficients) -> Duration {
        let is_known = (load.prefill_tokens == 0 || cost.prefill_ms(1, 1) > 0.0)
            && (load.decode_sequences == 0 || cost.decode_ms(1, 1) > 0.0);
        let seconds = TIMES_PREDICTED * cost.step_ms(load) / 1e3;
        let predicted = Duration::try_from_secs_f64(seconds).ok().filter(|_| is_known);
        predicted.map_or(self.most, |predicted| predicted.clamp(self.least, self.most))
    }
}

impl Watch {
    /// Looks at what is owed when `passed` has passed since the last look, and tells why the engine stands still, if so.
    fn look(&mut self, owed: &Owed, cost: &CostCoefficients, passed: Duration) -> Option<String> {
        let step_lasts = self.step.look(owed.step.map(|(number, _)| number), passed);
        let events_last = self.events.look(owed.events, passed);
        let load = owed.step.map(|(_, load)| load);
        let limit = load.map_or(self.limits.most, |load| self.limits.of_step(&load, cost));
        if step_lasts >= limit {
            let predicted_ms = load.map_or(0.0, |load| cost.step_ms(&load));
            return Some(format!("a step has run for {step_lasts:.1?}, {predicted_ms:.0} ms were predicted"));
        }
        (events_last >= self.limits.least).then(|| format!("it has not looked at events for {events_last:.1?}"))
    }
}

impl Standing {
    fn look(&mut self, number: Option<u64>, passed: Duration) -> Duration {
        let is_same = number.is_some() && number == self.number;
        self.lasts = if is_same { self.lasts + passed } else { Duration::ZERO };
        self.number = number;
        self.lasts
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LOOK: u64 = 10;
    const COST: CostCoefficients = CostCoefficients {
        prefill_base_ms: 0.0,
        prefill_per_token_ms: 2.0,
        prefill_per_token_context_ms: 0.0,
        decode_base_ms: 3.0,
        decode_per_sequence_ms: 0.0,
        decode_per_context_token_ms: 0.0,
    };

    fn limits(least_ms: u64, most_ms: u64) -> Limits {
        Limits { least: Duration::from_millis(least_ms), most: Duration::from_millis(most_ms) }
    }

    fn load(prefill_tokens: u64, decode_sequences: u64) -> StepLoad {
        StepLoad { prefill_tokens, decode_sequences, ..StepLoad::default() }
    }

    #[test]
    fn a_step_may_take_many_times_what_is_predicted_within_both_bounds() {
        let ms = |load, cost| limits(5_000, 60_000).of_step(&load, cost).as_millis();
        assert_eq!(ms(load(0, 8), &COST), 5_000, "3 ms are predicted");
        assert_eq!(ms(load(512, 8), &COST), 20 * 1_027);
        assert_eq!(ms(load(4_096, 0), &COST), 60_000);
        let decoded = CostCoefficients { decode_base_ms: 3.0, ..CostCoefficients::default() };
        assert_eq!(ms(load(512, 8), &decoded), 60_000, "nobody knows yet what a prompt costs");
        assert_eq!(ms(load(0, 8), &decoded), 5_000);
        assert_eq!(ms(load(1, 0), &CostCoefficients { prefill_per_token_ms: f64::MAX, ..COST }), 60_000);
    }

    /// Where something is owed, from when to when.
    fn spans() -> impl Strategy<Value = Vec<(u64, u64)>> {
        prop::collection::vec((0..100_u64, 1..400_u64), 1..8)
    }

    /// What is owed at a moment by number, and since when.
    fn owed_at(spans: &[(u64, u64)], at: u64) -> Option<(u64, u64)> {
        let mut end = 0;
        for (number, &(gap, length)) in spans.iter().enumerate() {
            let begin = end + gap;
            end = begin + length;
            if (begin..end).contains(&at) {
                return Some((number as u64, begin));
            }
        }
        None
    }

    proptest! {
        #[test]
        fn an_engine_stands_still_exactly_while_something_is_owed_for_too_long(
            steps in spans(), events in spans(), least in 50..300_u64, n_prefill in 0..10_u64,
        ) {
            let limits = limits(least, 1_000);
            let load = load(n_prefill, 1);
            let limit = u64::try_from(limits.of_step(&load, &COST).as_millis()).unwrap();
            let mut watch = Watch { limits, step: Standing::default(), events: Standing::default() };
            for at in (0..4_000).step_by(LOOK as usize) {
                let (step, event) = (owed_at(&steps, at), owed_at(&events, at));
                let owed = Owed { step: step.map(|(number, _)| (number, load)), events: event.map(|(number, _)| number) };
                let is_stalled = watch.look(&owed, &COST, Duration::from_millis(LOOK)).is_some();
                let lasts = |since: Option<(u64, u64)>, than: u64| since.is_some_and(|(_, since)| at - since >= than);
                let (may, must) = (
                    lasts(step, limit) || lasts(event, least),
                    lasts(step, limit + LOOK) || lasts(event, least + LOOK),
                );
                prop_assert!(may || !is_stalled, "too early at {}", at);
                prop_assert!(is_stalled || !must, "too late at {}", at);
            }
        }
    }
}
