//! The last decisions about requests, so that each can be explained after it was made.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use contract::ids::RequestId;
use contract::ledger::PlacementKey;

use crate::route::placer::Decision;

/// Requests that are remembered.
const N_REQUESTS_MAX: usize = 4_096;
/// Engines of one decision that are remembered, the soonest first: a large cluster has more than anyone reads.
const N_CONSIDERED_MAX: usize = 16;
/// Decisions of one request that are remembered.
const N_DECISIONS_MAX: usize = 16;

/// A decision and what became of it.
#[derive(Clone, Debug)]
pub(crate) struct Remembered {
    pub(crate) key: PlacementKey,
    pub(crate) decision: Decision,
    /// Engines that were considered, also those no longer remembered.
    pub(crate) n_considered: usize,
    pub(crate) placed_at: Instant,
    /// From placement to first token, in milliseconds; none before that.
    pub(crate) first_token_ms: Option<f64>,
    /// Why nothing came of it, and after how many milliseconds.
    pub(crate) failure: Option<(&'static str, f64)>,
}

/// What is remembered of a request.
#[derive(Clone, Debug, Default)]
pub(crate) struct History {
    /// Oldest first.
    pub(crate) decisions: Vec<Remembered>,
    /// Later decisions, which are not remembered.
    pub(crate) n_left_out: usize,
}

/// Decisions by the request's id; the oldest request is forgotten first.
#[derive(Debug, Default)]
pub(crate) struct Decisions(Mutex<Ring>);

#[derive(Debug, Default)]
struct Ring {
    by_request: HashMap<RequestId, History>,
    order: VecDeque<RequestId>,
}

impl Decisions {
    /// Remembers a decision about a request.
    pub(crate) fn put(&self, request: RequestId, key: PlacementKey, decision: Decision, placed_at: Instant) {
        let n_considered = decision.considered.len();
        let mut decision = decision.soonest_first();
        decision.considered.truncate(N_CONSIDERED_MAX);
        let remembered = Remembered { key, decision, n_considered, placed_at, first_token_ms: None, failure: None };
        let mut ring = self.ring();
        let ring = &mut *ring;
        let of_request = ring.by_request.entry(request).or_insert_with(|| {
            ring.order.push_back(request);
            History { decisions: Vec::with_capacity(1), n_left_out: 0 }
        });
        if of_request.decisions.len() < N_DECISIONS_MAX {
            of_request.decisions.push(remembered);
        } else {
            of_request.n_left_out += 1;
        }
        while ring.order.len() > N_REQUESTS_MAX {
            ring.order.pop_front().and_then(|oldest| ring.by_request.remove(&oldest));
        }
    }

    /// Notes when a placement's first token came, and tells how long after the decision, in milliseconds, and what had
    /// been predicted.
    pub(crate) fn first_token(&self, request: RequestId, key: PlacementKey, now: Instant) -> Option<(f64, f64)> {
        let mut ring = self.ring();
        let remembered = ring.find(request, key)?;
        let actual_ms = remembered.elapsed_ms(now);
        remembered.first_token_ms = Some(actual_ms);
        Some((actual_ms, remembered.decision.computes().prediction.first_token_ms))
    }

    /// Notes that nothing came of a placement, by the error's code.
    pub(crate) fn failed(&self, request: RequestId, key: PlacementKey, code: &'static str, now: Instant) {
        if let Some(remembered) = self.ring().find(request, key) {
            remembered.failure = Some((code, remembered.elapsed_ms(now)));
        }
    }

    /// What is remembered of a request.
    pub(crate) fn get(&self, request: RequestId) -> History {
        self.ring().by_request.get(&request).cloned().unwrap_or_default()
    }

    fn ring(&self) -> MutexGuard<'_, Ring> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Ring {
    fn find(&mut self, request: RequestId, key: PlacementKey) -> Option<&mut Remembered> {
        self.by_request.get_mut(&request)?.decisions.iter_mut().find(|remembered| remembered.key == key)
    }
}

impl Remembered {
    fn elapsed_ms(&self, now: Instant) -> f64 {
        now.saturating_duration_since(self.placed_at).as_secs_f64() * 1e3
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use contract::ids::{DataRank, EngineId, Incarnation};

    use super::*;
    use crate::route::placer::Considered;
    use crate::route::{Prediction, Reason};

    fn decision(times_ms: &[f64], chosen: usize) -> Decision {
        let considered = |(index, &first_token_ms): (usize, &f64)| Considered {
            engine: EngineId { worker: "w".into(), incarnation: Incarnation(index as u64), data_rank: DataRank(0) },
            tokens_cached: 0,
            tokens_promised: 0,
            tokens_ahead: 0,
            n_requests: 0,
            prediction: Prediction { first_token_ms, ..Prediction::default() },
        };
        Decision {
            considered: times_ms.iter().enumerate().map(considered).collect(),
            chosen,
            prefill: None,
            instead: None,
            lender: None,
            reason: Reason::Load,
        }
    }

    fn key(number: u64) -> PlacementKey {
        PlacementKey { router: Incarnation(1), number }
    }

    #[test]
    fn the_chosen_engine_comes_first_and_the_others_by_time() {
        let (decisions, now) = (Decisions::default(), daemon::clock::now());
        let times: Vec<f64> = (0..40).map(|n| f64::from((n * 7) % 40)).collect();
        decisions.put(RequestId(1), key(1), decision(&times, 5), now);
        let told = decisions.first_token(RequestId(1), key(1), now + Duration::from_millis(80));
        assert_eq!(told, Some((80.0, 35.0)));
        decisions.put(RequestId(1), key(2), decision(&[1.0], 0), now);
        decisions.failed(RequestId(1), key(2), "worker_lost", now + Duration::from_millis(7));
        let history = decisions.get(RequestId(1));
        let [remembered, failed] = &history.decisions[..] else { panic!("two decisions were made") };
        assert_eq!((failed.failure, failed.first_token_ms), (Some(("worker_lost", 7.0)), None));
        assert_eq!(remembered.failure, None);
        let shown: Vec<f64> =
            remembered.decision.considered.iter().map(|engine| engine.prediction.first_token_ms).collect();
        assert_eq!((shown.len(), shown[0], shown[1], shown[2]), (N_CONSIDERED_MAX, 35.0, 0.0, 1.0));
        assert_eq!((remembered.n_considered, remembered.first_token_ms), (40, Some(80.0)));
    }

    #[test]
    fn old_requests_are_forgotten_and_nothing_grows() {
        let (decisions, now) = (Decisions::default(), daemon::clock::now());
        for n in 0..2 * N_REQUESTS_MAX as u64 {
            decisions.put(RequestId(n.into()), key(n), decision(&[1.0], 0), now);
        }
        assert!(decisions.get(RequestId(0)).decisions.is_empty());
        let ring = decisions.ring();
        assert_eq!((ring.by_request.len(), ring.order.len()), (N_REQUESTS_MAX, N_REQUESTS_MAX));
        drop(ring);
        let last = RequestId(2 * N_REQUESTS_MAX as u128 - 1);
        for n in 0..100 {
            decisions.put(last, key(1_000_000 + n), decision(&[1.0], 0), now);
        }
        let history = decisions.get(last);
        assert_eq!((history.decisions.len(), history.n_left_out), (N_DECISIONS_MAX, 101 - N_DECISIONS_MAX));
        assert_eq!(decisions.first_token(last, key(5), now), None);
    }
}
