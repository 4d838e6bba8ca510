//! What has become of each request.

use std::time::Duration;

use contract::ids::{EngineId, Token};
use router::resume::Course;

use crate::event::RequestIdx;

/// One request's life so far.
#[derive(Clone, Debug, Default)]
pub(crate) struct Progress {
    /// When the client asked.
    pub(crate) arrived: Duration,
    /// When it was last placed.
    pub(crate) placed: Duration,
    /// When the client saw the first token, and the last.
    pub(crate) first_token: Option<Duration>,
    pub(crate) finished: Option<Duration>,
    /// It ended badly.
    pub(crate) has_failed: bool,
    /// What the last worker that refused it said.
    pub(crate) refusal: Option<&'static str>,
    /// Tokens that the client has.
    pub(crate) n_tokens: u32,
    /// Prompt tokens that its first engine had cached.
    pub(crate) n_cached: u32,
    /// From placement to first token, as predicted for the first placement.
    pub(crate) predicted_ms: f64,
    /// From the first placement to the first token.
    pub(crate) waited_ms: f64,
    /// Where it was placed last.
    pub(crate) worker: Option<usize>,
    /// Placements.
    pub(crate) course: Course,
    /// Engines that failed it.
    pub(crate) tried: Vec<EngineId>,
    /// Kept where they are checked.
    pub(crate) tokens: Vec<Token>,
}

/// All of them.
#[derive(Debug)]
pub(crate) struct Book {
    pub(crate) progress: Vec<Progress>,
    /// Requests that have not ended.
    pub(crate) n_open: usize,
    /// Whether tokens are kept.
    pub(crate) keeps_tokens: bool,
}

impl Book {
    pub(crate) fn new(n: usize, keeps_tokens: bool) -> Self {
        Self { progress: vec![Progress::default(); n], n_open: n, keeps_tokens }
    }

    pub(crate) fn of(&mut self, request: RequestIdx) -> &mut Progress {
        &mut self.progress[request as usize]
    }

    pub(crate) fn end(&mut self, request: RequestIdx, now: Duration, has_failed: bool) {
        let progress = &mut self.progress[request as usize];
        assert!(progress.finished.is_none() && !progress.has_failed, "request {request} ends twice");
        progress.has_failed = has_failed;
        progress.finished = (!has_failed).then_some(now);
        self.n_open -= 1;
    }
}
