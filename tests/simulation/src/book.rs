//! What has become of each request.

use std::time::Duration;

use contract::ids::{EngineId, Token};
use contract::plan::SampledToken;
use router::resume::Course;

use crate::distribution::Gaps;
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
    /// Its client went away.
    pub(crate) is_aborted: bool,
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
    /// When the last tokens came.
    pub(crate) last_token: Duration,
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
    /// Times between tokens.
    pub(crate) gaps: Gaps,
    /// Placements of which another worker computes the prompt.
    pub(crate) n_split: usize,
    /// Placements with tokens of earlier ones.
    pub(crate) n_migrated: usize,
    /// Longest life of a request.
    pub(crate) longest: Duration,
}

/// How a request ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Well,
    Badly,
    Aborted,
}

impl Book {
    pub(crate) fn new(n: usize, keeps_tokens: bool) -> Self {
        Self {
            progress: vec![Progress::default(); n],
            n_open: n,
            keeps_tokens,
            gaps: Gaps::default(),
            n_split: 0,
            n_migrated: 0,
            longest: Duration::ZERO,
        }
    }

    pub(crate) fn of(&mut self, request: RequestIdx) -> &mut Progress {
        &mut self.progress[request as usize]
    }

    /// Takes tokens that came at `now`.
    pub(crate) fn take_tokens(&mut self, request: RequestIdx, tokens: &[SampledToken], now: Duration) {
        let progress = &mut self.progress[request as usize];
        progress.n_tokens += tokens.len() as u32;
        if self.keeps_tokens {
            progress.tokens.extend(tokens.iter().map(|sampled| sampled.token));
        }
        if progress.first_token.is_none() {
            progress.first_token = Some(now);
            progress.waited_ms = (now - progress.placed).as_secs_f64() * 1e3;
        } else {
            self.gaps.add((now - progress.last_token).as_secs_f64());
        }
        progress.last_token = now;
    }

    /// Whether a request has ended.
    pub(crate) fn has_ended(&self, request: RequestIdx) -> bool {
        let progress = &self.progress[request as usize];
        progress.finished.is_some() || progress.has_failed || progress.is_aborted
    }

    pub(crate) fn end(&mut self, request: RequestIdx, now: Duration, end: End) {
        assert!(!self.has_ended(request), "request {request} ends twice");
        let progress = &mut self.progress[request as usize];
        progress.has_failed = end == End::Badly;
        progress.is_aborted = end == End::Aborted;
        progress.finished = (end == End::Well).then_some(now);
        self.longest = self.longest.max(now - progress.arrived);
        self.n_open -= 1;
    }
}
