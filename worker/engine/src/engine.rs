//! The engine: who runs, which blocks, what the executor computes next.

use std::time::Duration;

use contract::cost::CostCoefficients;
use contract::error::RequestError;
use contract::hash::BlockHash;
use contract::ids::{EngineId, RequestId, StepId};
use contract::kv::{KvDigest, KvEvent};
use contract::occupancy::{BlockCounts, Occupancy};
use contract::plan::{ForwardPlan, StepOutput};
use contract::request::GenerateRequest;

use crate::config::{ConfigError, EngineConfig};
use crate::output::{ApplyError, Counters, Output, SequenceKey};

/// Continuous batching over a paged KV cache; owned by one thread.
#[derive(Debug)]
pub struct Engine {
    config: EngineConfig,
}

impl Engine {
    /// Makes an engine with an empty cache.
    ///
    /// # Errors
    /// A bound of `config` that cannot work.
    pub fn new(config: EngineConfig) -> Result<Self, ConfigError> {
        config.validate()?;
        Ok(Self { config })
    }

    /// Queues a request that `GenerateRequest::validate` accepted; its deadline counts from `now`.
    ///
    /// # Errors
    /// `PromptTooLong` when prompt and earlier output can never fit, `Overloaded` when the queue is full,
    /// `InvalidArgument` when a request with this id has not ended.
    pub fn submit(&mut self, _request: GenerateRequest, _now: Duration) -> Result<SequenceKey, RequestError> {
        Err(RequestError::Internal(format!("{:?}", self.config)))
    }

    /// Forgets a request, whatever its state; nothing more is told of it. False when there is none of this id.
    pub fn abort(&mut self, _id: RequestId) -> bool {
        false
    }

    /// Plans the next step; none when there is nothing to do or two plans are in flight.
    pub fn plan(&mut self) -> Option<ForwardPlan> {
        None
    }

    /// Takes a plan back after its step, to reuse its buffers; optional.
    pub fn recycle(&mut self, _plan: ForwardPlan) {}

    /// Takes the output of the oldest plan in flight and appends what it means for requests to `outputs`.
    ///
    /// # Errors
    /// When `output` is not what that plan asked for; nothing has changed then.
    pub fn apply(&mut self, output: StepOutput, _outputs: &mut Vec<Output>) -> Result<(), ApplyError> {
        Err(ApplyError::WrongStep { expected: None, got: output.step })
    }

    /// Ends requests whose deadline is not after `now` with `DeadlineExceeded`.
    pub fn expire(&mut self, _now: Duration, _outputs: &mut Vec<Output>) {}

    /// The earliest deadline.
    pub fn next_deadline(&self) -> Option<Duration> {
        None
    }

    /// Ends all requests with `error` and forgets the plans in flight, which no executor may still run.
    pub fn fail_all(&mut self, _error: &RequestError, _outputs: &mut Vec<Output>) {}

    /// Forgets all cached blocks; running requests go on, but what they hold is not reused by others.
    pub fn clear_cache(&mut self) {}

    /// Moves KV events to `events` and returns the number of the first; numbers start at 1.
    pub fn drain_kv_events(&mut self, _events: &mut Vec<KvEvent>) -> u64 {
        1
    }

    /// Number of the last KV event, drained or not; 0 before the first.
    pub fn kv_sequence(&self) -> u64 {
        0
    }

    /// Cached blocks with their parents, parents first, as of `kv_sequence`.
    pub fn kv_snapshot(&self) -> Vec<(BlockHash, Option<BlockHash>)> {
        Vec::new()
    }

    /// Digest of the cached blocks as of `kv_sequence`.
    pub fn kv_digest(&self) -> KvDigest {
        KvDigest::default()
    }

    /// Blocks by state.
    pub fn blocks(&self) -> BlockCounts {
        BlockCounts::default()
    }

    /// How full the engine is, for the scheduler.
    pub fn occupancy(&self, engine: EngineId, cost: CostCoefficients) -> Occupancy {
        Occupancy {
            engine,
            step: 0,
            blocks: self.blocks(),
            requests_waiting: 0,
            requests_running: 0,
            tokens_queued: 0,
            tokens_running: 0,
            cost,
        }
    }

    /// Sums over the engine's life.
    pub fn counters(&self) -> Counters {
        Counters::default()
    }

    /// Plans made and not applied: 0, 1 or 2.
    pub fn n_in_flight(&self) -> usize {
        0
    }

    /// The step that `apply` expects next.
    pub fn oldest_in_flight(&self) -> Option<StepId> {
        None
    }

    /// Whether no request waits or runs and no plan is in flight.
    pub fn is_idle(&self) -> bool {
        true
    }

    /// The bounds it was built with.
    pub fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// Checks that no block, slot or request is lost or counted twice; for tests.
    ///
    /// # Panics
    /// When one is.
    pub fn check_invariants(&self) {}
}
