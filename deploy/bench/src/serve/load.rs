//! Sends the requests of one point of load and collects what was seen of them.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use daemon::clock;
use daemon::shutdown::Shutdown;
use daemon::task::Tasks;
use tokio::sync::Semaphore;

use super::client::{Client, Live};
use super::options::{Amount, Load};
use super::record::{Failure, Record, Timeline};
use super::workload::Workload;

/// Time that tasks have to end once their requests are over.
const JOIN: Duration = Duration::from_secs(5);
/// First and longest pause of a slot that cannot reach the server; each is twice the one before.
const PAUSE: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));
/// Requests in a row that do not reach the server after which a slot sends no more: about ten seconds.
const UNREACHED_MAX: usize = 16;

/// What all requests of a point share.
pub(crate) struct Point {
    pub(crate) client: Arc<Client>,
    pub(crate) workload: Arc<Workload>,
    pub(crate) live: Arc<Live>,
    /// Requests at once at most.
    pub(crate) connections: Semaphore,
    pub(crate) timeout: Duration,
    pub(crate) shutdown: Shutdown,
    /// Number of this point: its prompts differ from those of others.
    pub(crate) number: u32,
    pub(crate) began: Instant,
    records: Mutex<Vec<Record>>,
}

impl Point {
    pub(crate) fn new(
        client: &Arc<Client>,
        workload: &Arc<Workload>,
        shutdown: &Shutdown,
        (connections_max, timeout): (usize, Duration),
        number: u32,
    ) -> Arc<Self> {
        Arc::new(Self {
            client: Arc::clone(client),
            workload: Arc::clone(workload),
            live: Arc::default(),
            connections: Semaphore::new(connections_max.clamp(1, Semaphore::MAX_PERMITS)),
            timeout,
            shutdown: shutdown.clone(),
            number,
            began: clock::now(),
            records: Mutex::default(),
        })
    }

    /// Sends all requests of `load` and returns what was seen, in the order of their ends, and the end of the time in
    /// which others could have arrived, if they arrive by themselves.
    pub(crate) async fn run(self: &Arc<Self>, load: &Load, amount: Amount) -> (Vec<Record>, Option<f64>) {
        let n_requests = self.workload.n_requests(load, amount);
        let until = match amount {
            Amount::For(time) => self.began.checked_add(time),
            Amount::Requests(_) | Amount::PerSlot(_) => None,
        };
        let tasks = Tasks::new();
        let mut window = match load {
            Load::Closed { concurrency } => {
                self.closed(&tasks, (*concurrency).min(n_requests), n_requests, until).await;
                None
            }
            Load::Open { .. } | Load::Replayed { .. } => Some(self.open(&tasks, load, n_requests, until).await),
        };
        // Every request has a deadline of its own; one that outlives it is not in the records.
        drop(tasks.join(self.timeout.saturating_add(JOIN)).await);
        if self.shutdown.is_triggered() {
            window = window.map(|end| end.min(clock::now()));
        }
        let records = std::mem::take(&mut *self.records.lock().unwrap_or_else(PoisonError::into_inner));
        (records, window.map(|end| end.saturating_duration_since(self.began).as_secs_f64()))
    }

    async fn closed(self: &Arc<Self>, tasks: &Tasks, slots: usize, n_requests: usize, until: Option<Instant>) {
        let next = Arc::new(AtomicUsize::new(0));
        let slots: Vec<_> = (0..slots)
            .map(|_| {
                let (point, next) = (Arc::clone(self), Arc::clone(&next));
                tasks.spawn("slot", async move {
                    let (mut pause, mut n_unreached) = (PAUSE.0, 0);
                    while n_unreached < UNREACHED_MAX {
                        let index = next.fetch_add(1, Ordering::Relaxed);
                        if index >= n_requests || point.is_over(until) {
                            return;
                        }
                        if point.request(index).await {
                            (pause, n_unreached) = (PAUSE.0, 0);
                            continue;
                        }
                        n_unreached += 1;
                        tokio::select! {
                            () = tokio::time::sleep(pause) => {}
                            () = point.shutdown.triggered() => return,
                        }
                        pause = (2 * pause).min(PAUSE.1);
                    }
                })
            })
            .collect();
        for slot in slots {
            // A slot that panicked has been logged; the others go on.
            drop(slot.await);
        }
    }

    /// Sends requests as they arrive and returns when arrivals are over.
    async fn open(self: &Arc<Self>, tasks: &Tasks, load: &Load, n_requests: usize, until: Option<Instant>) -> Instant {
        for (index, after) in self.workload.arrivals(self.number, load).take(n_requests).enumerate() {
            let due = self.began.checked_add(after);
            if let Some(until) = until.filter(|until| due.is_none_or(|due| due >= *until)) {
                return until;
            }
            let Some(due) = due else { break };
            tokio::select! {
                () = tokio::time::sleep_until(due.into()) => {}
                () = self.shutdown.triggered() => break,
            }
            let point = Arc::clone(self);
            tasks.spawn("request", async move { point.request(index).await });
        }
        clock::now()
    }

    fn is_over(&self, until: Option<Instant>) -> bool {
        self.shutdown.is_triggered() || until.is_some_and(|until| clock::now() >= until)
    }

    /// Sends one request, within its deadline, and records it; tells whether the server could be reached.
    async fn request(&self, index: usize) -> bool {
        let ask = self.workload.ask(self.number, index);
        let lengths = (ask.input_len, ask.output_len);
        let n_parts = ask.output_len as usize;
        let written = self.client.write(ask);
        let mut timeline = Timeline::new(clock::now(), n_parts);
        let asking = async {
            let Ok(_permit) = self.connections.acquire().await else { return Err(Failure::Interrupted) };
            self.client.run(written, &mut timeline, &self.live).await
        };
        let result = tokio::select! {
            result = tokio::time::timeout(self.timeout, asking) => result.unwrap_or(Err(Failure::Timeout(self.timeout))),
            () = self.shutdown.triggered() => Err(Failure::Interrupted),
        };
        self.live.over(result.is_err());
        let is_reached = !matches!(result, Err(Failure::Connect(_) | Failure::Disconnected(_)));
        let record = Record::new(timeline, lengths, result.err(), self.began, clock::now());
        self.records.lock().unwrap_or_else(PoisonError::into_inner).push(record);
        is_reached
    }
}
