//! Where a request goes: a pure choice over a snapshot of what the router knows.

pub mod directory;
pub mod placer;
pub mod policy;
mod predict;
mod recent;
mod split;

use contract::cost::CostCoefficients;
use contract::ids::EngineId;
use contract::ledger::EngineLoad;

pub use predict::Prediction;

/// One engine that could take the request.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<'a> {
    /// Which engine.
    pub engine: &'a EngineId,
    /// What all routers placed there, as far as this one was told.
    pub load: EngineLoad,
    /// Prompt tokens that the engine itself reported as not yet computed.
    pub tokens_queued: u64,
    /// Requests that the engine itself reported as waiting or running.
    pub n_reported: u32,
    /// Requests that run there at once at most; 0 is not known, or they are too short there to wait for each other.
    pub slots: u32,
    /// Tokens in context of the requests that it reported as running.
    pub tokens_running: u64,
    /// Blocks that are free or cached, as reported, and the pool's size; none without a report.
    pub blocks: Option<Room>,
    /// What its steps cost; a guess before it reported.
    pub cost: CostCoefficients,
    /// Prompt tokens that a step of it computes at most; 0 is not known.
    pub step_tokens: u64,
    /// What moving a token from or to it took of late, in milliseconds; 0 is not known.
    pub transfer_ms_per_token: f64,
    /// Requests that were placed there of late, those of long ago less.
    pub n_recent: f64,
    /// Predicted prefill of what waits at the router for it and goes before the request, in milliseconds.
    pub backlog_ms: f64,
    /// Tokens of the prompt that are cached there or promised to be.
    pub tokens_cached: u64,
    /// Of these, tokens that are only promised.
    pub tokens_promised: u64,
}

/// Room in a block pool, in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Tokens that blocks without an owner hold.
    pub tokens_available: u64,
    /// Tokens that the whole pool holds.
    pub tokens_total: u64,
}

/// All that a policy may look at.
#[derive(Clone, Copy, Debug)]
pub struct Situation<'a> {
    /// Engines that are ready and take work; never empty.
    pub candidates: &'a [Candidate<'a>],
    /// Length of the prompt.
    pub n_prompt_tokens: u64,
    /// Stands for the conversation or user that the request belongs to.
    pub session: u64,
    /// Longest time between two tokens that running requests should see, in milliseconds; infinite without a goal.
    pub decode_ms_goal: f64,
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
    /// Its session goes there.
    Session,
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
    /// Every reason, in the order of their values.
    pub const ALL: [Self; 6] = [Self::Only, Self::Turn, Self::Load, Self::Prefix, Self::Balance, Self::Session];

    /// Lower-case name for metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Only => "only",
            Self::Turn => "turn",
            Self::Load => "load",
            Self::Prefix => "prefix",
            Self::Balance => "balance",
            Self::Session => "session",
        }
    }
}

impl Candidate<'_> {
    /// Prompt tokens ahead of a new request.
    ///
    /// The engine's report lags and a router's own ledger may be younger than the engine, so the larger of both counts.
    pub fn tokens_ahead(&self) -> u64 {
        self.load.tokens_prefilling.max(self.tokens_queued)
    }

    /// Requests that wait or run there.
    pub fn n_requests(&self) -> u32 {
        (self.load.n_prefilling + self.load.n_decoding).max(self.n_reported)
    }
}
