//! What the async side holds of an engine thread.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;

use contract::cost::CostCoefficients;
use contract::error::RequestError;
use contract::ids::EngineId;
use contract::occupancy::Occupancy;
use contract::request::GenerateRequest;
use daemon::clock;
use engine::{CostFit, Engine};
use tokio::sync::{oneshot, watch};

use super::desk::Desk;
use super::lending::Lendings;
use super::metrics::Metrics;
use super::{EngineFailure, EngineLoop, ExecutorThread};
use crate::executor::Executor;
use crate::inbox::{Event, Inbox, LendRequest, Submission};
use crate::kv_events::{KvPublisher, KvView};
use crate::lent::{Fetch, Lending, LendingGuard, Readers};
use crate::mailbox::{Reader, mailbox};
use crate::stall::{Owed, Stall};
use crate::transfer::Progress;

/// Bounds between an engine thread and those who use it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    /// Tokens that may wait for a request's reader.
    pub(crate) reader_tokens_max: usize,
    /// Batches of KV events that a watcher may lag behind.
    pub(crate) kv_batches_max: usize,
}

/// Sends events to an engine thread; clones reach the same one.
#[derive(Clone, Debug)]
pub(crate) struct EngineHandle {
    inbox: Inbox,
    desk: Desk,
    stall: Stall,
    readers: Readers,
    occupancy: watch::Receiver<Occupancy>,
    bounds: Bounds,
    n_layers: usize,
    next_ticket: Arc<AtomicU64>,
}

/// The thread itself.
#[derive(Debug)]
pub(crate) struct EngineThread {
    thread: JoinHandle<()>,
    ended: oneshot::Receiver<Result<(), EngineFailure>>,
}

/// Starts the threads of an engine and of its executor.
///
/// # Errors
/// When the system refuses a thread.
pub(crate) fn start(
    id: EngineId,
    engine: Engine,
    executor: Box<dyn Executor>,
    bounds: Bounds,
    fetch: Option<Arc<dyn Fetch>>,
) -> std::io::Result<(EngineHandle, EngineThread)> {
    let (handle, engine_loop) = assemble(id, engine, executor, bounds, fetch)?;
    let (ended_sender, ended) = oneshot::channel();
    let thread = std::thread::Builder::new().name("engine".to_owned()).spawn(move || {
        // Nobody waits for the end when the process is torn down.
        let _ = ended_sender.send(engine_loop.run());
    })?;
    Ok((handle, EngineThread { thread, ended }))
}

/// Puts together what [`start`] runs, and starts the executor's thread.
///
/// # Errors
/// When the system refuses a thread.
pub(crate) fn assemble(
    id: EngineId,
    engine: Engine,
    executor: Box<dyn Executor>,
    bounds: Bounds,
    fetch: Option<Arc<dyn Fetch>>,
) -> std::io::Result<(EngineHandle, EngineLoop)> {
    let n_layers = executor.n_layers();
    let config = engine.config();
    let inbox = Inbox::new(config.max_waiting as usize, config.retry_after_ms);
    let (occupancy, occupancy_reader) = watch::channel(engine.occupancy(id.clone(), CostCoefficients::default()));
    let metrics = Metrics::new(id.worker.as_str());
    let executor = ExecutorThread::start(executor, inbox.clone())?;
    let desk = executor.desk();
    let engine_loop = EngineLoop {
        id,
        engine,
        executor,
        inbox: inbox.clone(),
        live: HashMap::new(),
        lendings: Lendings::default(),
        fetch,
        kv: KvPublisher::new(bounds.kv_batches_max),
        occupancy,
        metrics,
        cost: CostFit::default(),
        started: clock::now(),
        draining: None,
        events: VecDeque::new(),
        outputs: Vec::new(),
    };
    let handle = EngineHandle {
        inbox,
        desk,
        stall: Stall::default(),
        readers: Readers::default(),
        occupancy: occupancy_reader,
        bounds,
        n_layers,
        next_ticket: Arc::new(AtomicU64::new(0)),
    };
    Ok((handle, engine_loop))
}

impl EngineHandle {
    /// Queues a valid request and returns its stream; dropping the stream aborts it.
    ///
    /// # Errors
    /// `Overloaded` when too many requests wait, or why none is taken any more or for now.
    pub(crate) fn submit(&self, request: GenerateRequest) -> Result<Reader, RequestError> {
        self.check_stall()?;
        let (id, ticket) = (request.id, self.next_ticket.fetch_add(1, Ordering::Relaxed));
        let inbox = self.inbox.clone();
        let (writer, reader) = mailbox(self.bounds.reader_tokens_max, move || {
            // A closed inbox has ended the request already.
            let _ = inbox.push(Event::Abort { id, ticket });
        });
        self.inbox.push(Event::Submit(Box::new(Submission { ticket, request, writer })))?;
        Ok(reader)
    }

    /// Queues the prompt of a valid request, whose KV another worker reads as it is computed; once the engine is to take
    /// none any more, what is cached of it is lent and nothing computed.
    ///
    /// # Errors
    /// As of [`Self::submit`]; what the engine says later is in the progress.
    pub(crate) fn lend(&self, request: GenerateRequest) -> Result<Lending, RequestError> {
        self.check_stall()?;
        let (inbox, reading) = (self.inbox.clone(), self.readers.enter());
        let guard = LendingGuard { inbox, request: request.id, reading };
        let (sender, progress) = Progress::channel(self.n_layers);
        self.inbox.push(Event::Lend(Box::new(LendRequest { request, progress: sender })))?;
        Ok(Lending { progress, guard })
    }

    /// Asks for the prefix cache and the events after it.
    ///
    /// # Errors
    /// Why the engine answers no more.
    pub(crate) async fn watch_kv(&self) -> Result<KvView, RequestError> {
        let (reply, view) = oneshot::channel();
        self.inbox.push(Event::WatchKv(reply))?;
        view.await.map_err(|_| RequestError::Internal("the engine has stopped".to_owned()))
    }

    /// Follows the engine's occupancy.
    pub(crate) fn occupancy(&self) -> watch::Receiver<Occupancy> {
        self.occupancy.clone()
    }

    /// Whether it stands still; whoever waits for its engine waits for that as well.
    pub(crate) fn stall(&self) -> &Stall {
        &self.stall
    }

    /// Who reads what is lent.
    pub(crate) fn readers(&self) -> &Readers {
        &self.readers
    }

    /// What the engine owes now.
    pub(crate) fn owed(&self) -> Owed {
        Owed { step: self.desk.running(), events: self.inbox.waiting() }
    }

    /// The error of a request that has `n_tokens` of an engine that stands still.
    pub(crate) fn lost(&self, reason: &str, n_tokens: u32) -> RequestError {
        let worker = self.occupancy.borrow().engine.worker.to_string();
        RequestError::WorkerLost { worker, n_tokens, reason: reason.to_owned() }
    }

    fn check_stall(&self) -> Result<(), RequestError> {
        self.stall.reason().map_or(Ok(()), |reason| Err(self.lost(&reason, 0)))
    }

    /// Lets running requests go on and refuses new ones with `error`.
    pub(crate) fn drain(&self, error: RequestError) {
        // A closed inbox refuses everything already.
        let _ = self.inbox.push(Event::Drain(error));
    }

    /// Ends what runs with `error` and refuses new requests with it; what is cached is lent until the engine stops.
    pub(crate) fn hand_over(&self, error: RequestError) {
        // As above.
        let _ = self.inbox.push(Event::HandOver(error));
    }

    /// Ends everything with `error`.
    pub(crate) fn stop(&self, error: RequestError) {
        // As above.
        let _ = self.inbox.push(Event::Stop(error));
    }
}

impl EngineThread {
    /// Waits until the thread has ended and tells how; may be dropped and called again before that.
    pub(crate) async fn ended(&mut self) -> Result<(), EngineFailure> {
        (&mut self.ended).await.unwrap_or_else(|_| Err(EngineFailure("the engine thread vanished".to_owned())))
    }

    /// Joins a thread that has ended.
    pub(crate) fn join(self) {
        // What it ended with was told by `ended`.
        let _ = self.thread.join();
    }
}
