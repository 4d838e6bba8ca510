//! The engine's state and its doors: requests in, requests out, what it reports.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::time::Duration;

use contract::cost::CostCoefficients;
use contract::error::RequestError;
use contract::hash::BlockHash;
use contract::ids::{EngineId, RequestId, SlotId, StepId};
use contract::kv::{KvDigest, KvEvent};
use contract::occupancy::{BlockCounts, Occupancy};
use contract::request::GenerateRequest;

use crate::block_pool::BlockPool;
use crate::config::{ConfigError, EngineConfig};
use crate::hold::Hold;
use crate::in_flight::{PlanInFlight, Spare};
use crate::output::{Counters, Output, OutputEvent, SequenceKey};
use crate::queue::WaitingQueue;
use crate::sequence::{Purpose, Rank, Sequence, SequenceIdx, SequenceTable, State};

/// Plans that may be made before the oldest is applied.
pub const PLANS_IN_FLIGHT_MAX: usize = 2;

/// Continuous batching over a paged KV cache; owned by one thread.
#[derive(Debug)]
pub struct Engine {
    pub(crate) config: EngineConfig,
    pub(crate) pool: BlockPool,
    pub(crate) sequences: SequenceTable,
    /// Requests that have not ended.
    pub(crate) by_id: HashMap<RequestId, SequenceIdx>,
    pub(crate) deadlines: BTreeSet<(Duration, SequenceKey, SequenceIdx)>,
    pub(crate) waiting: WaitingQueue,
    /// By rank.
    pub(crate) running: Vec<(Rank, SequenceIdx)>,
    /// Preempted and ended requests that plans in flight name.
    pub(crate) n_draining: usize,
    /// Requests whose blocks others use.
    pub(crate) held: HashMap<SequenceKey, SequenceIdx>,
    /// Holds that nobody has been told of.
    pub(crate) new_holds: Vec<Hold>,
    pub(crate) free_slots: Vec<SlotId>,
    /// Oldest first.
    pub(crate) in_flight: VecDeque<PlanInFlight>,
    pub(crate) spare: Spare,
    /// Counts how often the cache was cleared.
    pub(crate) epoch: u64,
    pub(crate) counters: Counters,
    n_submitted: u64,
}

impl Engine {
    /// Makes an engine with an empty cache.
    ///
    /// # Errors
    /// A bound of `config` that cannot work.
    pub fn new(config: EngineConfig) -> Result<Self, ConfigError> {
        config.validate()?;
        Ok(Self {
            pool: BlockPool::new(config.n_blocks),
            sequences: SequenceTable::default(),
            by_id: HashMap::new(),
            deadlines: BTreeSet::new(),
            waiting: WaitingQueue::new(config.max_waiting as usize),
            running: Vec::with_capacity(config.max_running as usize),
            n_draining: 0,
            held: HashMap::new(),
            new_holds: Vec::new(),
            free_slots: (0..config.max_running).rev().map(SlotId).collect(),
            in_flight: VecDeque::with_capacity(PLANS_IN_FLIGHT_MAX),
            spare: Spare::default(),
            epoch: 0,
            counters: Counters::default(),
            n_submitted: 0,
            config,
        })
    }

    /// Queues a request that `GenerateRequest::validate` accepted; its deadline counts from `now`.
    ///
    /// A request whose output outgrows the pool ends with `FinishReason::Length`, as at the end of the context.
    ///
    /// # Errors
    /// `PromptTooLong` when prompt and earlier output leave no room in context or pool, `Overloaded` when the queue is full,
    /// `InvalidArgument` when the prompt is empty, nothing is left of `max_tokens` or a request with this id has not ended.
    pub fn submit(&mut self, request: GenerateRequest, now: Duration) -> Result<SequenceKey, RequestError> {
        let purpose = if request.prefill_on.is_empty() { Purpose::Generate } else { Purpose::Receive };
        self.submit_as(request, purpose, now)
    }

    /// Queues a request for a purpose.
    pub(crate) fn submit_as(
        &mut self,
        request: GenerateRequest,
        purpose: Purpose,
        now: Duration,
    ) -> Result<SequenceKey, RequestError> {
        self.check_submission(&request)?;
        let key = self.next_key();
        let deadline = request.deadline.map(|left| now.saturating_add(left));
        let mut sequence = Sequence::new(request, key, self.config.length_max() as usize, self.config.model);
        sequence.deadline = deadline;
        sequence.purpose = purpose;
        let (id, rank, n_tokens) = (sequence.id, sequence.rank, sequence.tokens.len());
        // Long prompts take their time here, not when a plan is being made that an executor waits for.
        sequence.hashes(&self.config.hash_key, self.config.block_size as usize, self.n_hashed(n_tokens));
        let idx = self.sequences.insert(sequence);
        self.by_id.insert(id, idx);
        self.waiting.push(rank, idx, n_tokens);
        if let Some(deadline) = deadline {
            self.deadlines.insert((deadline, key, idx));
        }
        Ok(key)
    }

    /// Forgets a request, whatever its state; nothing more is told of it. False when there is none of this id.
    pub fn abort(&mut self, id: RequestId) -> bool {
        let Some(&idx) = self.by_id.get(&id) else { return false };
        self.end(idx);
        self.retire_if_drained(idx);
        true
    }

    /// Ends requests whose deadline is not after `now` with `DeadlineExceeded`.
    pub fn expire(&mut self, now: Duration, outputs: &mut Vec<Output>) {
        while let Some(&(deadline, _, idx)) = self.deadlines.first()
            && deadline <= now
        {
            let n_tokens = self.sequences[idx].n_generated() as u32;
            self.fail(idx, RequestError::DeadlineExceeded { n_tokens }, outputs);
        }
    }

    /// The earliest deadline.
    pub fn next_deadline(&self) -> Option<Duration> {
        self.deadlines.first().map(|&(deadline, ..)| deadline)
    }

    /// Ends all requests with `error` and forgets the plans in flight.
    ///
    /// An executor may still run one when no plan is made afterwards: its blocks are given to nobody then.
    pub fn fail_all(&mut self, error: &RequestError, outputs: &mut Vec<Output>) {
        for record in self.in_flight.drain(..) {
            for planned in record.sequences {
                self.sequences[planned.idx].n_in_flight -= 1;
            }
            for block in record.releases {
                self.pool.release(block);
            }
        }
        let mut all: Vec<_> = self.sequences.iter().map(|(idx, sequence)| (sequence.key(), idx)).collect();
        all.sort_unstable();
        for (_, idx) in all {
            match self.sequences[idx].state {
                State::Ended => self.retire_if_drained(idx),
                State::Lent => {}
                State::Waiting | State::Running | State::Receiving | State::Preempted => {
                    self.fail(idx, error.clone(), outputs);
                }
            }
        }
    }

    /// Forgets all cached blocks; running requests go on, but what they hold is not reused by others.
    pub fn clear_cache(&mut self) {
        self.epoch += 1;
        self.pool.clear_cache();
    }

    /// Moves KV events to `events` and returns the number of the first; numbers start at 1 and leave no gap.
    ///
    /// Events that nobody drains for very long are dropped, which the next number shows.
    pub fn drain_kv_events(&mut self, events: &mut Vec<KvEvent>) -> u64 {
        self.pool.prefix_mut().drain_events(events)
    }

    /// Number of the last KV event, drained or not; 0 before the first.
    pub fn kv_sequence(&self) -> u64 {
        self.pool.prefix().sequence()
    }

    /// Cached blocks with their parents, parents first, as of `kv_sequence`.
    pub fn kv_snapshot(&self) -> Vec<(BlockHash, Option<BlockHash>)> {
        self.pool.snapshot()
    }

    /// Digest of the cached blocks as of `kv_sequence`.
    pub fn kv_digest(&self) -> KvDigest {
        self.pool.prefix().digest()
    }

    /// Blocks by state.
    pub fn blocks(&self) -> BlockCounts {
        self.pool.counts()
    }

    /// How full the engine is, for the scheduler.
    pub fn occupancy(&self, engine: EngineId, cost: CostCoefficients) -> Occupancy {
        let running = || self.running.iter().map(|&(_, idx)| &self.sequences[idx]);
        let mut queued = self.waiting.load();
        for sequence in running() {
            let n_left = sequence.n_prefill.saturating_sub(sequence.n_computed);
            queued.add_prefill(n_left as u64, sequence.n_computed as u64);
        }
        let n_context: usize = running().map(|sequence| sequence.tokens.len()).sum();
        Occupancy {
            engine,
            step: self.counters.steps,
            blocks: self.blocks(),
            requests_waiting: self.n_waiting() as u32,
            requests_running: self.n_running() as u32,
            tokens_queued: queued.prefill_tokens,
            pairs_queued: queued.prefill_pairs,
            slots: self.config.max_running,
            tokens_running: n_context as u64,
            cost,
            step_tokens: self.config.prefill_budget.unwrap_or(self.config.token_budget),
            computed: self.counters.computed,
            requests_begun: self.counters.requests_begun,
            prompt_tokens_begun: self.counters.prompt_tokens_begun,
            is_stalled: false,
            transfer_ms_per_token: 0.0,
        }
    }

    /// Requests that hold no slot yet.
    pub fn n_waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Requests that hold a slot and have not ended, those included whose prompt comes from elsewhere.
    pub fn n_running(&self) -> usize {
        self.by_id.len() - self.waiting.len()
    }

    /// Sums over the engine's life.
    pub fn counters(&self) -> Counters {
        Counters { kv_events_dropped: self.pool.prefix().n_dropped(), ..self.counters }
    }

    /// Plans made and not applied: 0, 1 or 2.
    pub fn n_in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// The step that `apply` expects next.
    pub fn oldest_in_flight(&self) -> Option<StepId> {
        self.in_flight.front().map(|record| record.step)
    }

    /// Whether no request waits or runs and no plan is in flight.
    pub fn is_idle(&self) -> bool {
        self.by_id.is_empty() && self.in_flight.is_empty()
    }

    /// The bounds it was built with.
    pub fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// Blocks of so many tokens that the cache may be asked for: at least the last token is computed, for its logits.
    pub(crate) fn n_hashed(&self, n_tokens: usize) -> usize {
        (n_tokens - 1) / self.block_size()
    }

    pub(crate) fn block_size(&self) -> usize {
        self.config.block_size as usize
    }

    pub(crate) fn next_key(&mut self) -> SequenceKey {
        let key = SequenceKey(self.n_submitted);
        self.n_submitted += 1;
        key
    }

    /// Takes a request out of everything but the plans in flight; `retire_if_drained` follows.
    pub(crate) fn end(&mut self, idx: SequenceIdx) {
        let sequence = &mut self.sequences[idx];
        let rank = sequence.rank;
        match std::mem::replace(&mut sequence.state, State::Ended) {
            State::Waiting => {
                self.waiting.remove(rank);
                self.n_draining += 1;
            }
            State::Running => {
                let place = self.running.partition_point(|&(other, _)| other < rank);
                let (_, removed) = self.running.remove(place);
                debug_assert_eq!(removed, idx);
                self.n_draining += 1;
            }
            State::Receiving => self.n_draining += 1,
            State::Preempted => {}
            State::Ended | State::Lent => debug_assert!(false, "{rank:?} ended twice"),
        }
        self.by_id.remove(&sequence.id);
        if let Some(deadline) = sequence.deadline {
            self.deadlines.remove(&(deadline, rank.arrival, idx));
        }
    }

    /// Returns slot and blocks of a preempted or ended request that no plan in flight names; tails are released first.
    pub(crate) fn retire_if_drained(&mut self, idx: SequenceIdx) {
        let sequence = &mut self.sequences[idx];
        if sequence.n_in_flight > 0 || !matches!(sequence.state, State::Preempted | State::Ended) {
            return;
        }
        self.n_draining -= 1;
        if sequence.is_held {
            sequence.state = State::Lent;
            self.free_slots.extend(sequence.slot.take());
            return;
        }
        self.return_blocks(idx);
        let sequence = &mut self.sequences[idx];
        if sequence.state == State::Ended {
            self.sequences.remove(idx);
        } else {
            sequence.state = State::Waiting;
            self.waiting.push(sequence.rank, idx, sequence.tokens.len());
        }
    }

    /// Takes slot and blocks from a request that neither plans nor others use.
    pub(crate) fn return_blocks(&mut self, idx: SequenceIdx) {
        let (slot, table) = self.sequences[idx].reset();
        self.free_slots.extend(slot);
        for block in table.into_iter().rev() {
            self.pool.release(block);
        }
    }

    fn fail(&mut self, idx: SequenceIdx, error: RequestError, outputs: &mut Vec<Output>) {
        let Sequence { rank, id: request, attempt, .. } = self.sequences[idx];
        outputs.push(Output { key: rank.arrival, request, attempt, event: OutputEvent::Failed(error) });
        self.end(idx);
        self.retire_if_drained(idx);
    }

    fn check_submission(&self, request: &GenerateRequest) -> Result<(), RequestError> {
        if self.by_id.contains_key(&request.id) {
            return Err(RequestError::invalid("request_id", format!("{} has not ended", request.id)));
        }
        if request.prompt.is_empty() {
            return Err(RequestError::invalid("prompt", "has no tokens; give at least one"));
        }
        if request.generated.len() >= request.stop.max_tokens as usize {
            return Err(RequestError::invalid("max_tokens", format!("{} are used up", request.stop.max_tokens)));
        }
        let n_tokens = request.prompt.len() as u64 + request.generated.len() as u64;
        let limit = u64::from(self.config.length_max()) - 1;
        if n_tokens > limit {
            return Err(RequestError::PromptTooLong { n_tokens, at_least: false, limit });
        }
        if self.waiting.is_full() {
            return Err(RequestError::Overloaded {
                reason: format!("{} requests wait, {} may", self.waiting.len(), self.config.max_waiting),
                retry_after_ms: self.config.retry_after_ms,
            });
        }
        Ok(())
    }
}
