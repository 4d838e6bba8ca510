//! The thread that owns an engine: events in, plans out to the executor's thread, tokens out to readers.
//!
//! The next plan is made and lies ready while a step runs, so the executor goes from one to the next; a request that
//! comes meanwhile is added to the plan that waits. A step's tokens are delivered while the next step runs.
//! Hot path: no lock held over a step, no log.

mod desk;
mod handle;
mod lending;
mod metrics;

use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use contract::error::RequestError;
use contract::ids::{EngineId, RequestId};
use contract::occupancy::Occupancy;
use contract::request::GenerateRequest;
use contract::stream::GenerateFrame;
use daemon::clock;
use engine::{CostFit, Engine, Hold, Output, OutputEvent, PLANS_IN_FLIGHT_MAX, SequenceKey};
use thiserror::Error;
use tokio::sync::{oneshot, watch};

pub(crate) use desk::Stepped;
use desk::{ExecutorThread, panic_text};
#[cfg(test)]
pub(crate) use handle::assemble;
pub(crate) use handle::{Bounds, EngineHandle, EngineThread, start};
pub use lending::Lendings;
use metrics::Metrics;

use crate::inbox::{Event, Inbox, LendRequest, Submission};
use crate::kv_events::KvPublisher;
use crate::lent::{Fetch, Filled, Filling};
use crate::mailbox::{Delivery, Writer};

/// Why an engine thread ended before it was told to.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("the engine failed: {0}")]
pub struct EngineFailure(pub(crate) String);

/// A request that the engine knows.
struct Live {
    ticket: u64,
    key: SequenceKey,
    attempt: u32,
    writer: Writer,
    /// What its prompt is fetched for; gone once it is being fetched.
    split: Option<GenerateRequest>,
    /// Dropping it ends the fetching of its prompt.
    fetching: Option<oneshot::Sender<()>>,
}

/// Everything mutable of one engine.
pub(crate) struct EngineLoop {
    id: EngineId,
    engine: Engine,
    executor: ExecutorThread,
    inbox: Inbox,
    live: HashMap<RequestId, Live>,
    lendings: Lendings,
    /// None where prompts cannot move: they are computed here.
    fetch: Option<Arc<dyn Fetch>>,
    kv: KvPublisher,
    occupancy: watch::Sender<Occupancy>,
    metrics: Metrics,
    cost: CostFit,
    started: Instant,
    draining: Option<RequestError>,
    /// Reused from turn to turn.
    events: VecDeque<Event>,
    outputs: Vec<Output>,
}

/// Whether the thread goes on.
#[derive(PartialEq, Eq)]
enum Turn {
    GoOn,
    Stop,
}

impl EngineLoop {
    /// Runs until it is stopped or fails; every request is told how it ended.
    pub(crate) fn run(mut self) -> Result<(), EngineFailure> {
        let ended = catch_unwind(AssertUnwindSafe(|| self.turns()));
        let failure = match ended {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(failure)) => failure,
            Err(panic) => EngineFailure(format!("the engine thread panicked: {}", panic_text(panic.as_ref()))),
        };
        tracing::error!(engine = %self.id, error = %failure, "engine failed");
        // After a panic the engine is not to be trusted: its requests are ended by their writers.
        let error = RequestError::Internal(failure.to_string());
        // What comes now, until the worker has gone, was never begun: it goes elsewhere.
        let (worker, reason) = (self.id.worker.to_string(), failure.to_string());
        let lost = RequestError::WorkerLost { worker, n_tokens: 0, reason };
        self.inbox.close(lost.clone());
        self.events.drain(..).for_each(|event| event.refuse(&lost));
        self.live.drain().for_each(|(_, live)| live.writer.fail(error.clone()));
        Err(failure)
    }

    fn turns(&mut self) -> Result<(), EngineFailure> {
        loop {
            if self.take_events()? == Turn::Stop {
                return Ok(());
            }
            self.engine.expire(self.now(), &mut self.outputs);
            self.deliver();
            self.plan();
            self.publish();
            let timeout = self.engine.next_deadline().map(|deadline| deadline.saturating_sub(self.now()));
            self.inbox.wait(timeout);
        }
    }

    fn take_events(&mut self) -> Result<Turn, EngineFailure> {
        self.inbox.take(&mut self.events);
        let mut turn = Turn::GoOn;
        while let Some(event) = self.events.pop_front() {
            match event {
                // Its requests have ended.
                Event::Stepped(_) if turn == Turn::Stop => {}
                Event::Stepped(stepped) => self.retire(stepped)?,
                Event::Submit(submission) => self.submit(*submission),
                Event::Abort { id, ticket } => self.abort(id, ticket),
                Event::Lend(lend) => self.lend(*lend),
                Event::EndLending(request) => self.lendings.end(request, &mut self.engine),
                Event::Filled { key, n_tokens } => drop(self.engine.let_go(key, n_tokens)),
                Event::WatchKv(reply) => {
                    // Who asked may have gone.
                    let _ = reply.send(self.kv.view(&mut self.engine));
                }
                Event::Drain(error) => self.draining = Some(error),
                Event::HandOver(error) => self.hand_over(error),
                // What came after it is told why, too.
                Event::Stop(error) => {
                    self.inbox.close(error.clone());
                    self.fail_all(&error);
                    self.draining = Some(error);
                    turn = Turn::Stop;
                }
            }
        }
        Ok(turn)
    }

    fn submit(&mut self, submission: Submission) {
        let Submission { ticket, mut request, writer } = submission;
        if let Some(error) = &self.draining {
            return writer.fail(error.clone());
        }
        let (id, attempt) = (request.id, request.attempt);
        request.prefill_on.retain(|peer| self.fetch.is_some() && peer.engine != self.id);
        let split = (!request.prefill_on.is_empty()).then(|| request.clone());
        // A later attempt replaces one whose end has not been noticed yet.
        if let Some(earlier) = self.live.get(&id).filter(|live| live.attempt < attempt) {
            let ticket = earlier.ticket;
            self.abort(id, ticket);
        }
        match self.engine.submit(request, self.now()) {
            Ok(key) => {
                let live = Live { ticket, key, attempt, writer, split, fetching: None };
                self.live.insert(id, live);
            }
            Err(error) => {
                self.metrics.aborted(&error);
                writer.fail(error);
            }
        }
    }

    /// Queues a prompt for another worker; an engine that leaves lends what is cached of it.
    fn lend(&mut self, lend: LendRequest) {
        let LendRequest { request, progress } = lend;
        let id = request.id;
        let error = match &self.draining {
            Some(error) => match self.engine.lend_cached(request) {
                Some(hold) => return self.lendings.begin_cached(id, hold, progress, error),
                None => error.clone(),
            },
            None => match self.engine.submit_prefill(request, self.now()) {
                Ok(key) => return self.lendings.begin(id, key, progress),
                Err(error) => error,
            },
        };
        progress.send_modify(|progress| progress.failed = Some(error));
    }

    /// Ends all requests, and all that is computed for others; what is cached of both is lent.
    fn hand_over(&mut self, error: RequestError) {
        for (id, live) in self.live.drain() {
            self.engine.abort(id);
            self.metrics.aborted(&error);
            live.writer.fail(error.clone());
        }
        self.lendings.cut(&mut self.engine, &error);
        self.draining = Some(error);
    }

    /// Has blocks filled whose prompt is computed elsewhere.
    fn fill(&mut self, hold: Hold) {
        let filled = Filled { inbox: self.inbox.clone(), key: hold.key, n_tokens: hold.n_cached };
        let Some(fetch) = &self.fetch else { return };
        // Who asked may have gone, or asked again: dropping `filled` lets the blocks go.
        let live = self.live.get_mut(&hold.request).filter(|live| live.key == hold.key);
        let Some(live) = live else { return };
        let Some(request) = live.split.take() else { return };
        let (fetching, cancelled) = oneshot::channel();
        live.fetching = Some(fetching);
        fetch.fetch(Filling { request, hold, cancelled, filled });
    }

    fn abort(&mut self, id: RequestId, ticket: u64) {
        if self.live.get(&id).is_none_or(|live| live.ticket != ticket) {
            return;
        }
        if let Some(live) = self.live.remove(&id) {
            self.engine.abort(id);
            self.metrics.aborted(&RequestError::Cancelled);
            live.writer.fail(RequestError::Cancelled);
        }
    }

    /// Keeps the executor supplied: one plan runs, one waits, and newcomers join the one that waits.
    fn plan(&mut self) {
        if self.engine.n_waiting() > 0 && self.engine.n_in_flight() == PLANS_IN_FLIGHT_MAX {
            let (engine, lendings) = (&mut self.engine, &mut self.lendings);
            let mut to_fill = Vec::new();
            self.executor.amend(|plan| {
                let plan = engine.extend(plan);
                to_fill = lendings.take_holds(engine);
                let watched = lendings.watched(&plan);
                (plan, watched)
            });
            to_fill.into_iter().for_each(|hold| self.fill(hold));
        }
        loop {
            let follows = self.engine.n_in_flight() > 0;
            let plan = self.engine.plan();
            // Whoever moves may have been admitted although there is nothing to compute yet.
            let to_fill = self.lendings.take_holds(&mut self.engine);
            to_fill.into_iter().for_each(|hold| self.fill(hold));
            let Some(plan) = plan else { return };
            let watched = self.lendings.watched(&plan);
            self.executor.put(plan, follows, watched);
        }
    }

    /// Takes a step's output and hands its tokens on.
    fn retire(&mut self, stepped: Stepped) -> Result<(), EngineFailure> {
        let Stepped { plan, load, result, took, overhead } = stepped;
        let applied = result.and_then(|output| {
            self.engine.apply(output, &mut self.outputs).map_err(|error| EngineFailure(error.to_string()))
        });
        if let Err(failure) = applied {
            self.fail_all(&RequestError::Internal(failure.to_string()));
            return Err(failure);
        }
        self.deliver();
        self.metrics.stepped(&load, took, overhead);
        self.cost.observe(&load, took);
        self.engine.recycle(plan);
        Ok(())
    }

    fn fail_all(&mut self, error: &RequestError) {
        self.engine.fail_all(error, &mut self.outputs);
        self.deliver();
        self.publish();
    }

    /// Hands what the engine said to the requests' readers.
    fn deliver(&mut self) {
        let mut outputs = std::mem::take(&mut self.outputs);
        for Output { request, attempt, event, .. } in outputs.drain(..) {
            match event {
                OutputEvent::Prefilled => drop(self.lendings.over(request, None)),
                OutputEvent::Failed(error) => {
                    self.metrics.aborted(&error);
                    if self.lendings.over(request, Some(&error)) {
                        continue;
                    }
                    if let Some(live) = self.live.remove(&request) {
                        live.writer.fail(error);
                    }
                }
                OutputEvent::Tokens { first_position, tokens, finish, cached_tokens } => {
                    let frame = GenerateFrame { attempt, first_position, tokens, finish, cached_tokens };
                    self.deliver_frame(request, frame);
                }
            }
        }
        self.outputs = outputs;
    }

    fn deliver_frame(&mut self, request: RequestId, frame: GenerateFrame) {
        let Some(live) = self.live.get(&request) else { return };
        let finished = frame.finish.is_some();
        let delivery = live.writer.push(frame);
        if let Delivery::TooSlow(n_tokens) = delivery {
            self.metrics.aborted(&RequestError::SlowReader(n_tokens));
            if !finished {
                self.engine.abort(request);
            }
        }
        if finished || delivery != Delivery::Queued {
            self.live.remove(&request);
        }
    }

    fn publish(&mut self) {
        self.kv.publish(&mut self.engine);
        let occupancy = self.engine.occupancy(self.id.clone(), self.cost.coefficients());
        self.metrics.observe(&occupancy, self.engine.counters());
        self.occupancy.send_if_modified(|last| {
            let changed = *last != occupancy;
            *last = occupancy;
            changed
        });
    }

    fn now(&self) -> Duration {
        clock::now().duration_since(self.started)
    }
}
