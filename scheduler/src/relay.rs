//! The load ledger's relay at work: a bounded queue to each router, filled while the state is locked, never waited for.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use contract::placements::LedgerBatch;
use daemon::clock;
use daemon::shutdown::Shutdown;
use proto::WireError;
use thiserror::Error;
use tokio::sync::{Notify, mpsc};

use crate::publish::sleep_or_never;
use crate::state::StreamId;
use crate::state::ledger::{Delivery, LedgerRelay, Refused};
use crate::telemetry::LedgerTelemetry;

/// Why the scheduler ends a router's stream.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub(crate) enum Ended {
    /// The router reads too slowly.
    #[error("{n_batches} batches of the ledger wait for this router: read faster, and begin again")]
    Lagging {
        /// What waited for it.
        n_batches: usize,
    },
    /// The router says nothing, as one that hangs.
    #[error("the router said nothing for {} ms: begin again", silence.as_millis())]
    Silent {
        /// For how long.
        silence: Duration,
    },
    /// What it told cannot be taken.
    #[error(transparent)]
    Refused(#[from] Refused),
    /// What it told cannot be read.
    #[error(transparent)]
    Malformed(#[from] WireError),
    /// The scheduler stops.
    #[error("the scheduler is shutting down")]
    ShuttingDown,
}

/// Passes on what routers tell.
#[derive(Debug)]
pub(crate) struct Relay {
    n_batches_max: usize,
    telemetry: LedgerTelemetry,
    shared: Mutex<Shared>,
    /// Some router's grace began.
    lost: Notify,
}

#[derive(Debug)]
struct Shared {
    state: LedgerRelay,
    queues: HashMap<StreamId, Queue>,
}

#[derive(Debug)]
struct Queue {
    batches: mpsc::Sender<Arc<LedgerBatch>>,
    ended: Arc<OnceLock<Ended>>,
}

/// What waits for one router.
#[derive(Debug)]
pub(crate) struct Waiting {
    batches: mpsc::Receiver<Arc<LedgerBatch>>,
    ended: Arc<OnceLock<Ended>>,
}

impl Waiting {
    /// Waits for the next batch; `None` when the router itself ended its stream.
    ///
    /// # Errors
    /// Why the scheduler ended it; batches that still wait are then worth nothing.
    pub(crate) async fn next(&mut self) -> Result<Option<Arc<LedgerBatch>>, Ended> {
        let batch = self.batches.recv().await;
        match self.ended.get() {
            Some(ended) => Err(ended.clone()),
            None => Ok(batch),
        }
    }
}

impl Relay {
    pub(crate) fn new(state: LedgerRelay, n_batches_max: usize, telemetry: LedgerTelemetry) -> Self {
        let shared = Mutex::new(Shared { state, queues: HashMap::new() });
        Self { n_batches_max, telemetry, shared, lost: Notify::new() }
    }

    /// Opens the queue of a stream.
    pub(crate) fn open(&self, stream: StreamId) -> Waiting {
        let (sender, batches) = mpsc::channel(self.n_batches_max);
        let ended = Arc::new(OnceLock::new());
        let queue = Queue { batches: sender, ended: Arc::clone(&ended) };
        self.shared().queues.insert(stream, queue);
        Waiting { batches, ended }
    }

    /// Takes a batch from a stream and puts it into the queues of all others.
    ///
    /// # Errors
    /// Why the stream must end.
    pub(crate) fn take(&self, stream: StreamId, batch: LedgerBatch) -> Result<(), Refused> {
        let mut shared = self.shared();
        let deliveries = shared.state.take(stream, batch)?;
        self.deliver(&mut shared, deliveries);
        Ok(())
    }

    /// Ends a stream: with a reason when the scheduler ends it, without when the router did.
    pub(crate) fn end(&self, stream: StreamId, why: Option<Ended>) {
        let mut shared = self.shared();
        self.drop_queue(&mut shared, stream, why);
        self.telemetry.observe(&shared.state);
    }

    /// Forgets routers whose grace is over, until `shutdown`.
    pub(crate) async fn forget_lost(&self, shutdown: Shutdown) {
        loop {
            let lost = self.lost.notified();
            let next = self.shared().state.next_tick();
            tokio::select! {
                () = shutdown.triggered() => return,
                () = lost => {}
                () = sleep_or_never(next.map(|at| at.saturating_duration_since(clock::now()))) => {
                    let mut shared = self.shared();
                    let deliveries = shared.state.tick(clock::now());
                    self.deliver(&mut shared, deliveries);
                }
            }
        }
    }

    fn deliver(&self, shared: &mut Shared, deliveries: Vec<Delivery>) {
        for Delivery { to, batch } in deliveries {
            let Some(queue) = shared.queues.get(&to) else { continue };
            if queue.batches.try_send(batch).is_err() {
                // Closed when the router has gone and its stream is about to say so.
                let why = (!queue.batches.is_closed()).then_some(Ended::Lagging { n_batches: self.n_batches_max });
                self.drop_queue(shared, to, why);
            }
        }
        self.telemetry.observe(&shared.state);
    }

    fn drop_queue(&self, shared: &mut Shared, stream: StreamId, why: Option<Ended>) {
        if let Some(queue) = shared.queues.remove(&stream)
            && let Some(why) = why
        {
            let _ = queue.ended.set(why);
        }
        shared.state.ended(stream, clock::now());
        self.lost.notify_one();
    }

    fn shared(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
