//! What this router tells others through schedulers: a snapshot of its placements, then each event, and what it is asked
//! for.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use contract::demand::{RouterDemand, TenantDemand};
use contract::ids::Incarnation;
use contract::ledger::LedgerEvent;
use contract::placements::{LedgerBatch, LedgerNews, Placements};
use daemon::clock;
use tokio::sync::broadcast::error::{RecvError, TryRecvError};
use tokio::sync::{broadcast, watch};

/// Events that a slow reader may be behind; beyond it the reader begins again with a snapshot.
const N_EVENTS_MAX: usize = 8_192;
/// Events that travel together when they have piled up.
const N_BATCH_MAX: usize = 1_024;
/// Shortest time between two batches: what is alone goes at once, and many events share the cost of a message.
const PACE: Duration = Duration::from_millis(1);
/// Without news what it is asked for is told again after this long, as a sign of life.
const SIGN_OF_LIFE: Duration = Duration::from_secs(1);

/// Keeps what this router runs, and wakes whoever tells of it.
pub(super) struct Outbox {
    router: Incarnation,
    own: Mutex<Placements>,
    events: broadcast::Sender<(u64, LedgerEvent)>,
    demand: watch::Sender<RouterDemand>,
}

impl Outbox {
    pub(super) fn new(router: Incarnation) -> Self {
        let (events, demand) = (broadcast::Sender::new(N_EVENTS_MAX), watch::Sender::default());
        Self { router, own: Mutex::default(), events, demand }
    }

    pub(super) fn put(&self, event: LedgerEvent) {
        let mut own = self.own();
        let sequence = own.put(&event);
        // Fails when nobody reads; whoever comes begins with a snapshot.
        let _ = self.events.send((sequence, event));
    }

    /// Replaces what the router is asked for.
    pub(super) fn put_demand(&self, tenants: Vec<TenantDemand>) {
        self.demand.send_modify(|demand| *demand = RouterDemand { number: demand.number + 1, tenants });
    }

    /// What the router was last asked for.
    pub(super) fn demand(&self) -> RouterDemand {
        self.demand.borrow().clone()
    }

    fn begin(&self) -> (LedgerNews, broadcast::Receiver<(u64, LedgerEvent)>) {
        let own = self.own();
        (own.snapshot(), self.events.subscribe())
    }

    fn own(&self) -> MutexGuard<'_, Placements> {
        self.own.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reads an outbox for one scheduler.
pub(super) struct Reader {
    outbox: Arc<Outbox>,
    events: Option<broadcast::Receiver<(u64, LedgerEvent)>>,
    demand: watch::Receiver<RouterDemand>,
    /// When the last batch was given.
    given_at: Option<Instant>,
}

impl Reader {
    pub(super) fn new(outbox: &Arc<Outbox>) -> Self {
        Self { outbox: Arc::clone(outbox), events: None, demand: outbox.demand.subscribe(), given_at: None }
    }

    /// Gives a snapshot first, then waits for news and gives what there is; a snapshot again when it came too late.
    pub(super) async fn next(&mut self) -> LedgerBatch {
        let news = match &mut self.events {
            Some(events) => {
                tokio::select! {
                    // Events first: who was placed is heard of before it is heard that nobody waits any more.
                    biased;
                    first = events.recv() => match first {
                        Ok(first) => {
                            // The request itself goes first.
                            tokio::task::yield_now().await;
                            if let Some(given_at) = self.given_at {
                                tokio::time::sleep_until((given_at + PACE).into()).await;
                            }
                            self.given_at = Some(clock::now());
                            let (news, is_behind) = drain(first, events);
                            if is_behind {
                                self.events = None;
                            }
                            news
                        }
                        Err(RecvError::Lagged(_) | RecvError::Closed) => self.begin(),
                    },
                    Ok(()) = self.demand.changed() => LedgerNews::Demand(self.demand.borrow_and_update().clone()),
                    () = tokio::time::sleep(SIGN_OF_LIFE) => LedgerNews::Demand(self.demand.borrow().clone()),
                }
            }
            None => self.begin(),
        };
        LedgerBatch { router: self.outbox.router, news }
    }

    fn begin(&mut self) -> LedgerNews {
        let (snapshot, events) = self.outbox.begin();
        self.events = Some(events);
        if self.demand.borrow().number > 0 {
            self.demand.mark_changed();
        }
        snapshot
    }
}

/// Takes what has piled up behind the first event, and whether some of it is lost.
fn drain(first: (u64, LedgerEvent), events: &mut broadcast::Receiver<(u64, LedgerEvent)>) -> (LedgerNews, bool) {
    let (mut sequence, first) = first;
    let mut batch = vec![first];
    while batch.len() < N_BATCH_MAX {
        match events.try_recv() {
            Ok((number, event)) => {
                sequence = number;
                batch.push(event);
            }
            Err(TryRecvError::Lagged(_)) => return (LedgerNews::Events { sequence, events: batch }, true),
            Err(TryRecvError::Empty | TryRecvError::Closed) => break,
        }
    }
    (LedgerNews::Events { sequence, events: batch }, false)
}

#[cfg(test)]
mod tests {
    use contract::ids::{DataRank, EngineId};
    use contract::ledger::{PlacedWork, PlacementKey};

    use super::*;

    const ROUTER: Incarnation = Incarnation(3);

    fn placed(number: u64) -> LedgerEvent {
        let engine = EngineId { worker: "w".into(), incarnation: Incarnation(1), data_rank: DataRank(0) };
        let work = PlacedWork { engine, tenant: "t".into(), tokens_new: 1, tokens_prompt: 2, prefill_us: 3 };
        LedgerEvent::Placed(PlacementKey { router: ROUTER, number }, work)
    }

    /// Puts events, reads after some of them, and follows what is read.
    async fn followed(n_events: u64, reads_after: impl Fn(u64) -> bool) -> (usize, Placements, Placements) {
        let outbox = Arc::new(Outbox::new(ROUTER));
        let mut reader = Reader::new(&outbox);
        let (mut follower, mut n_batches) = (Placements::default(), 0);
        let mut read = async |reader: &mut Reader| {
            follower.take(&reader.next().await.news).expect("no event is missed");
            n_batches += 1;
        };
        read(&mut reader).await;
        for number in 0..n_events {
            outbox.put(placed(number));
            if reads_after(number) {
                read(&mut reader).await;
            }
        }
        while reader.events.as_ref().is_none_or(|events| !events.is_empty()) {
            read(&mut reader).await;
        }
        let own = outbox.own().clone();
        (n_batches, follower, own)
    }

    #[tokio::test]
    async fn every_event_goes_at_once_and_what_piled_up_goes_together() {
        let (n_batches, follower, own) = followed(100, |_| true).await;
        assert_eq!((n_batches, follower), (101, own));
        let (n_batches, follower, own) = followed(100, |number| number == 9).await;
        assert_eq!((n_batches, follower), (3, own));
    }

    #[tokio::test]
    async fn a_reader_that_is_too_slow_begins_again_with_a_snapshot() {
        let n_events = 2 * N_EVENTS_MAX as u64;
        let (n_batches, follower, own) = followed(n_events, |_| false).await;
        assert_eq!((n_batches, follower.len()), (2, usize::try_from(n_events).unwrap()));
        assert_eq!(follower, own);
    }

    #[tokio::test]
    async fn the_last_demand_comes_after_events_and_again_after_a_snapshot() {
        let outbox = Arc::new(Outbox::new(ROUTER));
        let asked = |tenant: &str| vec![TenantDemand::none(tenant.into())];
        outbox.put_demand(asked("a"));
        let mut reader = Reader::new(&outbox);
        let demand = |number, tenant: &str| LedgerNews::Demand(RouterDemand { number, tenants: asked(tenant) });
        for _ in 0..2 {
            assert!(matches!(reader.next().await.news, LedgerNews::Snapshot { .. }));
            assert_eq!(reader.next().await.news, demand(1, "a"));
            reader.events = None;
        }
        reader.next().await;
        for tenant in ["b", "c"] {
            outbox.put_demand(asked(tenant));
        }
        outbox.put(placed(0));
        assert!(matches!(reader.next().await.news, LedgerNews::Events { .. }), "who was placed is told first");
        assert_eq!(reader.next().await.news, demand(3, "c"));
        assert_eq!(outbox.demand().number, 3);
    }
}
