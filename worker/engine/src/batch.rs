//! Makes the next plan: decodes first, then prefills, then newcomers, under one budget of query tokens.
//!
//! Nobody starves for blocks. With no plan in flight the first running request either finds a block, or takes it from
//! later ones, or is alone with a pool that `EngineConfig::length_max` makes large enough.

use contract::ids::StepId;
use contract::plan::{BlockTableDelta, ForwardPlan, QueryToken, SequencePlan};

use crate::engine::{Engine, PLANS_IN_FLIGHT_MAX};
use crate::in_flight::{PlanInFlight, PlannedSequence};
use crate::sequence::{Purpose, SequenceIdx, State};

/// A plan being made.
struct Draft {
    step: StepId,
    /// Query tokens left.
    budget: usize,
    /// Those that prompts may take.
    prefill_budget: usize,
    sequences: Vec<SequencePlan>,
    record: PlanInFlight,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Decode,
    Prefill,
}

impl Draft {
    /// Query tokens left for `phase`.
    fn left(&self, phase: Phase) -> usize {
        match phase {
            Phase::Decode => self.budget,
            Phase::Prefill => self.budget.min(self.prefill_budget),
        }
    }

    fn take(&mut self, n_tokens: usize, phase: Phase) {
        self.budget -= n_tokens;
        if phase == Phase::Prefill {
            self.prefill_budget -= n_tokens;
        }
    }
}

impl Engine {
    /// Plans the next step; none when there is nothing to do or two plans are in flight.
    pub fn plan(&mut self) -> Option<ForwardPlan> {
        if self.in_flight.len() == PLANS_IN_FLIGHT_MAX {
            return None;
        }
        let step = StepId(self.counters.steps + 1);
        let mut draft = Draft {
            step,
            budget: self.config.token_budget as usize,
            prefill_budget: self.prefill_budget(),
            sequences: self.spare.plans.pop().unwrap_or_default(),
            record: PlanInFlight { step, ..self.spare.records.pop().unwrap_or_default() },
        };
        self.plan_running(&mut draft, Phase::Decode);
        self.plan_running(&mut draft, Phase::Prefill);
        self.admit(&mut draft);
        if draft.sequences.is_empty() {
            self.spare.plans.push(draft.sequences);
            self.spare.records.push(draft.record);
            return None;
        }
        self.counters.steps += 1;
        Some(self.seal(draft))
    }

    /// Adds waiting requests to the plan made last, as far as its budget goes; no executor may have begun it.
    ///
    /// So a request that comes while one step runs is in the next, though that was planned before.
    ///
    /// # Panics
    /// When `plan` is not the plan made last or has been applied.
    pub fn extend(&mut self, plan: ForwardPlan) -> ForwardPlan {
        let record = self.in_flight.pop_back().filter(|record| record.step == plan.step);
        let record = record.expect("only the plan made last is extended, before it is applied");
        let budget = self.config.token_budget - plan.padded_tokens;
        let ForwardPlan { step, sequences, .. } = plan;
        let n_prefill: usize = sequences.iter().filter(|s| !s.is_decode()).map(|s| s.query.len()).sum();
        let prefill_budget = self.prefill_budget().saturating_sub(n_prefill);
        let mut draft = Draft { step, budget: budget as usize, prefill_budget, sequences, record };
        self.admit(&mut draft);
        self.seal(draft)
    }

    /// Takes a plan back after its step, to reuse its buffers; optional.
    pub fn recycle(&mut self, mut plan: ForwardPlan) {
        if self.spare.plans.len() > PLANS_IN_FLIGHT_MAX {
            return;
        }
        for mut sequence in plan.sequences.drain(..) {
            if self.spare.queries.len() < self.config.max_running as usize {
                sequence.query.clear();
                self.spare.queries.push(sequence.query);
            }
        }
        self.spare.plans.push(plan.sequences);
    }

    fn prefill_budget(&self) -> usize {
        self.config.prefill_budget.map_or(usize::MAX, |budget| budget as usize)
    }

    /// Makes a plan in flight of a draft.
    fn seal(&mut self, draft: Draft) -> ForwardPlan {
        self.in_flight.push_back(draft.record);
        let padded_tokens = (self.config.token_budget as usize - draft.budget) as u32;
        ForwardPlan { step: draft.step, padded_tokens, sequences: draft.sequences }
    }

    fn plan_running(&mut self, draft: &mut Draft, phase: Phase) {
        let mut place = 0;
        // Preemption shortens the list behind `place`.
        while place < self.running.len() && draft.left(phase) > 0 {
            let (_, idx) = self.running[place];
            let sequence = &self.sequences[idx];
            let is_due = match sequence.n_remaining() {
                0 => false,
                1 if sequence.purpose != Purpose::Prefill => phase == Phase::Decode,
                _ => phase == Phase::Prefill,
            };
            if is_due && !sequence.ends_when_applied() {
                self.plan_sequence(draft, place, phase);
            }
            place += 1;
        }
    }

    /// Plans as much of a running request as budget and blocks allow, maybe nothing.
    fn plan_sequence(&mut self, draft: &mut Draft, place: usize, phase: Phase) {
        let (_, idx) = self.running[place];
        let sequence = &self.sequences[idx];
        let chunk_max = self.config.max_prefill_chunk.map_or(usize::MAX, |chunk| chunk as usize);
        let wanted = sequence.n_remaining().min(draft.left(phase)).min(chunk_max);
        let n_planned = sequence.n_planned;
        self.grow_table(place, n_planned + wanted);
        let capacity = self.sequences[idx].table.len() * self.block_size();
        let chunk = wanted.min(capacity - n_planned);
        if chunk > 0 {
            self.write_plan(draft, idx, chunk);
            draft.take(chunk, phase);
        }
    }

    /// Gives a running request blocks for `n_tokens` tokens, or as many as there are.
    fn grow_table(&mut self, place: usize, n_tokens: usize) {
        let (_, idx) = self.running[place];
        let needed = n_tokens.div_ceil(self.block_size()).saturating_sub(self.sequences[idx].table.len());
        // Blocks of a request that a plan in flight names come back when that plan is applied: wait for them,
        // rather than take more.
        while self.pool.n_available() < needed && self.n_draining == 0 {
            let Some(victim) = self.last_unheld(place + 1) else { break };
            let (_, victim) = self.running.remove(victim);
            self.preempt(victim);
        }
        for _ in 0..needed {
            match self.pool.allocate() {
                Some(block) => self.sequences[idx].table.push(block),
                None => break,
            }
        }
    }

    /// The last running request from `place` on whose blocks nobody else uses.
    fn last_unheld(&self, place: usize) -> Option<usize> {
        (place..self.running.len()).rev().find(|&place| !self.sequences[self.running[place].1].is_held)
    }

    fn preempt(&mut self, idx: SequenceIdx) {
        self.counters.preemptions += 1;
        self.sequences[idx].state = State::Preempted;
        self.n_draining += 1;
        self.retire_if_drained(idx);
    }

    fn write_plan(&mut self, draft: &mut Draft, idx: SequenceIdx, chunk: usize) {
        let mut query = self.spare.queries.pop().unwrap_or_default();
        let sequence = &mut self.sequences[idx];
        let position = sequence.n_planned;
        let end = position + chunk;
        let n_known = sequence.tokens.len();
        debug_assert!(end <= n_known + 1, "at most one query token is not sampled yet");
        query.extend(sequence.tokens[position.min(n_known)..end.min(n_known)].iter().copied().map(QueryToken::Value));
        if end > n_known {
            query.push(QueryToken::Sampled { step: sequence.sample_step, row: 0 });
        }
        let samples = sequence.samples_at(end);
        let start = (!sequence.has_started).then(|| sequence.spec_at_start());
        draft.sequences.push(SequencePlan {
            slot: sequence.slot.expect("running requests hold a slot"),
            query,
            position: position as u32,
            blocks: BlockTableDelta {
                keep: sequence.n_sent as u32,
                append: sequence.table[sequence.n_sent..].to_vec(),
            },
            logits_rows: if samples { chunk as u32 - 1..chunk as u32 } else { 0..0 },
            start,
            adapter: None,
            mask: None,
        });
        sequence.has_started = true;
        sequence.n_sent = sequence.table.len();
        sequence.n_planned = end;
        sequence.n_in_flight += 1;
        if samples {
            sequence.n_pending += 1;
            sequence.sample_step = draft.step;
        }
        let slot = sequence.slot.expect("running requests hold a slot");
        draft.record.sequences.push(PlannedSequence { idx, slot, n_computed: end, samples });
    }

    /// Starts waiting requests in order while slots, budget and blocks last; the first that does not fit holds up the rest.
    fn admit(&mut self, draft: &mut Draft) {
        while draft.left(Phase::Prefill) > 0
            && let Some(idx) = self.waiting.first()
            && let Some(&slot) = self.free_slots.last()
            && let Some(n_matched) = self.fits(idx)
        {
            self.free_slots.pop();
            let rank = self.sequences[idx].rank;
            self.waiting.remove(rank);
            self.start(idx, n_matched);
            self.sequences[idx].slot = Some(slot);
            if self.hold(idx) {
                continue;
            }
            let place = self.insert_running(idx);
            self.plan_sequence(draft, place, Phase::Prefill);
        }
    }

    /// Lets a request that has its slot and its first blocks run; yields its place among those that do.
    pub(crate) fn insert_running(&mut self, idx: SequenceIdx) -> usize {
        let sequence = &mut self.sequences[idx];
        sequence.state = State::Running;
        let rank = sequence.rank;
        let place = self.running.partition_point(|&(other, _)| other < rank);
        self.running.insert(place, (rank, idx));
        place
    }

    /// Cached blocks at the start of a waiting request, if there is room for all the rest of its known tokens.
    fn fits(&mut self, idx: SequenceIdx) -> Option<usize> {
        let block_size = self.block_size();
        let n_tokens = self.sequences[idx].tokens.len();
        let n_hashed = self.n_hashed(n_tokens);
        let sequence = &mut self.sequences[idx];
        let (n_matched, n_unused) = self.pool.n_matched(sequence.hashes(&self.config.hash_key, block_size, n_hashed));
        let needed = n_tokens.div_ceil(block_size) - n_matched + n_unused;
        let reserved =
            if self.running.is_empty() { 0 } else { self.n_blocks_promised() + self.config.watermark_blocks as usize };
        (needed + reserved <= self.pool.n_available()).then_some(n_matched)
    }

    /// Blocks that running requests will still take for tokens they have.
    fn n_blocks_promised(&self) -> usize {
        let block_size = self.block_size();
        let promised = |&(_, idx)| {
            let sequence = &self.sequences[idx];
            sequence.tokens.len().div_ceil(block_size).saturating_sub(sequence.table.len())
        };
        self.running.iter().map(promised).sum()
    }

    fn start(&mut self, idx: SequenceIdx, n_matched: usize) {
        let block_size = self.block_size();
        let sequence = &mut self.sequences[idx];
        for hash in sequence.hashes(&self.config.hash_key, block_size, n_matched).to_vec() {
            let block = self.pool.lookup(hash).expect("matched blocks are indexed");
            self.pool.retain(block);
            sequence.table.push(block);
        }
        let n_cached = n_matched * block_size;
        sequence.epoch = self.epoch;
        sequence.n_committed = n_matched;
        sequence.n_prefill = sequence.tokens.len();
        (sequence.n_planned, sequence.n_computed) = (n_cached, n_cached);
        if sequence.cached_tokens.is_none() {
            let n_hit = n_cached.min(sequence.n_prompt);
            sequence.cached_tokens = Some(n_hit as u32);
            self.counters.prefix_hit_tokens += n_hit as u64;
            self.counters.prefix_miss_tokens += (sequence.n_prompt - n_hit) as u64;
        }
    }
}
