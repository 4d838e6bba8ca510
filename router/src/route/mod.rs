//! Where a request goes: a pure choice over a snapshot of what the router knows.

pub mod directory;
pub mod policy;

use contract::ids::EngineId;
use contract::occupancy::Occupancy;

/// One engine that could take the request.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<'a> {
    /// Which engine.
    pub engine: &'a EngineId,
    /// Its last report through the scheduler, none when there is none.
    pub occupancy: Option<&'a Occupancy>,
    /// Streams of this router that run there.
    pub n_in_flight: u32,
    /// Uncached prompt tokens that this router sent there and whose first token is still out.
    pub tokens_pending: u64,
    /// Tokens of the prompt that are cached there or promised to be.
    pub tokens_cached: u64,
}

/// All that a policy may look at.
#[derive(Clone, Copy, Debug)]
pub struct Situation<'a> {
    /// Engines that are ready; never empty.
    pub candidates: &'a [Candidate<'a>],
    /// Length of the prompt.
    pub n_prompt_tokens: u64,
    /// Counts the decisions of this router.
    pub turn: u64,
    /// Fresh for each decision.
    pub random: u64,
}

/// Why an engine was chosen: a bounded set, for metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// It is the only one.
    Only,
    /// It is its turn.
    Turn,
    /// It has the least to do.
    Load,
    /// It holds enough of the prompt.
    Prefix,
    /// Another holds more of the prompt, but has too much to do.
    Balance,
}

/// A decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Index into the candidates.
    pub index: usize,
    /// Why.
    pub reason: Reason,
}

/// Decides where requests go; holds no state.
pub trait RoutePolicy: Send + Sync {
    /// Its name in the configuration and in metrics.
    fn name(&self) -> &'static str;

    /// Chooses one of the candidates.
    fn choose(&self, situation: &Situation<'_>) -> Choice;
}

impl Reason {
    /// Lower-case name for metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Only => "only",
            Self::Turn => "turn",
            Self::Load => "load",
            Self::Prefix => "prefix",
            Self::Balance => "balance",
        }
    }
}

impl Candidate<'_> {
    /// Work ahead of a new request, in tokens: prompts to be computed, and a share for each running stream.
    ///
    /// The scheduler's report lags and this router's own count does not see other routers, so the larger of both counts.
    pub fn load_tokens(&self) -> u64 {
        /// What a running stream costs a prompt that waits behind its decode steps.
        const TOKENS_PER_STREAM: u64 = 16;
        let (queued, n_streams) = self.occupancy.map_or((0, 0), |occupancy| {
            (occupancy.tokens_queued, u64::from(occupancy.requests_running) + u64::from(occupancy.requests_waiting))
        });
        let n_streams = n_streams.max(u64::from(self.n_in_flight));
        queued.max(self.tokens_pending).saturating_add(n_streams.saturating_mul(TOKENS_PER_STREAM))
    }
}
