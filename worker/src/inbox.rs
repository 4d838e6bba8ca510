//! The engine thread's one queue of events: bounded for submissions, never full for whatever takes load away.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use contract::error::RequestError;
use contract::ids::RequestId;
use contract::request::GenerateRequest;
use engine::SequenceKey;
use tokio::sync::{oneshot, watch};

use crate::engine_loop::Stepped;
use crate::kv_events::KvView;
use crate::mailbox::Writer;
use crate::transfer::Progress;

/// Everything that can happen to an engine from outside.
#[derive(Debug)]
pub(crate) enum Event {
    /// The executor has run a step, or failed to.
    Stepped(Stepped),
    /// A request came.
    Submit(Box<Submission>),
    /// A request's reader has gone.
    Abort {
        /// The request.
        id: RequestId,
        /// Which submission of it.
        ticket: u64,
    },
    /// Another worker wants a prompt computed.
    Lend(Box<LendRequest>),
    /// The reader of a prompt that is computed for others has gone.
    EndLending(RequestId),
    /// Blocks are no longer filled from outside.
    Filled {
        /// Whose.
        key: SequenceKey,
        /// Tokens from the first on whose KV is there.
        n_tokens: usize,
    },
    /// Someone wants to follow the prefix cache from now on.
    WatchKv(oneshot::Sender<KvView>),
    /// No request is to be taken any more; those there are go on.
    Drain(RequestError),
    /// No request is to be taken any more, and those there are end with this error; what is cached is lent.
    HandOver(RequestError),
    /// All requests end with this error, then the thread.
    Stop(RequestError),
}

/// A request with the way back to its reader.
#[derive(Debug)]
pub(crate) struct Submission {
    /// Tells this submission from others of the same request.
    pub(crate) ticket: u64,
    /// A valid request.
    pub(crate) request: GenerateRequest,
    /// Where its tokens go.
    pub(crate) writer: Writer,
}

/// A prompt to be computed for another worker.
#[derive(Debug)]
pub(crate) struct LendRequest {
    /// What to compute: its prompt, and nothing after it. Its id is its own.
    pub(crate) request: GenerateRequest,
    /// Shows how far it has come.
    pub(crate) progress: watch::Sender<Progress>,
}

/// The queue; clones are the same one.
///
/// Submissions are bounded here. Steps are bounded by plans in flight, aborts are bounded by submissions, watches and the rest by the server's own bounds.
#[derive(Clone, Debug)]
pub(crate) struct Inbox(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    arrived: Condvar,
    submissions_max: usize,
    retry_after_ms: u64,
}

#[derive(Debug, Default)]
struct State {
    events: VecDeque<Event>,
    n_submissions: usize,
    n_taken: u64,
    closed: Option<RequestError>,
}

impl Event {
    /// Tells whoever asked that it is not done, and why.
    pub(crate) fn refuse(self, error: &RequestError) {
        match self {
            Self::Submit(submission) => submission.writer.fail(error.clone()),
            Self::Lend(lend) => lend.progress.send_modify(|progress| progress.failed = Some(error.clone())),
            _ => {}
        }
    }
}

impl Inbox {
    /// Makes an empty queue.
    pub(crate) fn new(submissions_max: usize, retry_after_ms: u64) -> Self {
        let shared = Shared { state: Mutex::default(), arrived: Condvar::new(), submissions_max, retry_after_ms };
        Self(Arc::new(shared))
    }

    /// Adds an event.
    ///
    /// # Errors
    /// Why nothing is taken any more, or `Overloaded` for a submission beyond the bound.
    pub(crate) fn push(&self, event: Event) -> Result<(), RequestError> {
        let mut state = self.lock();
        if let Some(error) = &state.closed {
            return Err(error.clone());
        }
        if matches!(event, Event::Submit(_) | Event::Lend(_)) {
            if state.n_submissions >= self.0.submissions_max {
                let reason = format!("{} requests wait for the engine", state.n_submissions);
                return Err(RequestError::Overloaded { reason, retry_after_ms: self.0.retry_after_ms });
            }
            state.n_submissions += 1;
        }
        state.events.push_back(event);
        drop(state);
        self.0.arrived.notify_one();
        Ok(())
    }

    /// Moves all events to `events`.
    pub(crate) fn take(&self, events: &mut VecDeque<Event>) {
        let mut state = self.lock();
        state.n_submissions = 0;
        state.n_taken += 1;
        std::mem::swap(&mut state.events, events);
    }

    /// Tells whether events wait, by how often events were taken.
    pub(crate) fn waiting(&self) -> Option<u64> {
        let state = self.lock();
        (!state.events.is_empty()).then_some(state.n_taken)
    }

    /// Parks until there is an event, at most for `timeout`.
    pub(crate) fn wait(&self, timeout: Option<Duration>) {
        let state = self.lock();
        if !state.events.is_empty() {
            return;
        }
        // A wake-up without cause costs the caller one look.
        match timeout {
            None => drop(self.0.arrived.wait(state)),
            Some(timeout) => drop(self.0.arrived.wait_timeout(state, timeout)),
        }
    }

    /// Takes nothing any more and forgets what waits: its writers tell their readers.
    pub(crate) fn close(&self, error: RequestError) {
        let mut state = self.lock();
        let events = std::mem::take(&mut state.events);
        state.n_submissions = 0;
        let error = state.closed.get_or_insert(error).clone();
        drop(state);
        events.into_iter().for_each(|event| event.refuse(&error));
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
