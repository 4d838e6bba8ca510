//! The simulated device: computes states of a hash instead of keys and values, and says how long that would have taken.
//!
//! The state before a query is read from the block table, never remembered, so KV that is lost, stale or another's
//! shows: as an error where a block does not continue the one before it, else as other tokens.
//! A step checks each block that is new in a table, the last, and one more in turn: work is in proportion to the query.
//! Hot path: no lock, no log, and no allocation beside the output's.

use std::time::Duration;

use contract::cost::StepLoad;
use contract::ids::{BlockId, Token};
use contract::kv::KvLayout;
use contract::plan::{ForwardPlan, SampledToken, SamplingSpec, SequenceOutput, SequencePlan, StepOutput};

use kernels::memory::blocks::BlockMemory;

use super::draw::{EMPTY, draw};
use super::kv::{Kv, WrongKv};
use super::profile::{Profile, Timing};
use crate::executor::{ExecutorError, SlotTable};

/// A device of one engine.
#[derive(Debug)]
pub struct Device {
    timing: Timing,
    eos_probability: f64,
    vocab_size: u32,
    kv: Kv,
    slots: SlotTable,
    /// By slot.
    checked: Vec<Checked>,
    /// Of the sequence at hand.
    tokens: Vec<Token>,
    /// Of the sequence at hand: the states after its query tokens with logits.
    states: Vec<u64>,
}

/// How far a slot's table has been checked.
#[derive(Clone, Copy, Debug, Default)]
struct Checked {
    /// Entries from the first on.
    n: usize,
    /// Entry to check again next.
    turn: usize,
}

impl Device {
    /// Makes a device with an empty cache for a model of `vocab_size` tokens, at least one.
    #[must_use]
    pub fn new(profile: &Profile, vocab_size: u32) -> Self {
        Self::over(profile, vocab_size, Kv::new(profile.block_size as usize, profile.n_blocks as usize))
    }

    /// The same with a cache that transfers between workers reach, and how it lies in memory.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn shared(profile: &Profile, vocab_size: u32) -> Result<(Self, KvLayout, BlockMemory), kernels::Error> {
        let (kv, layout, memory) = Kv::shared(profile.block_size as usize, profile.n_blocks as usize)?;
        Ok((Self::over(profile, vocab_size, kv), layout, memory))
    }

    /// Takes over what blocks of another device hold, each `(there, here)`, as a transfer would.
    ///
    /// # Errors
    /// When there is no such block.
    pub fn copy(
        &mut self,
        from: &Self,
        blocks: impl IntoIterator<Item = (BlockId, BlockId)>,
    ) -> Result<(), ExecutorError> {
        let copied = blocks.into_iter().try_for_each(|(there, here)| self.kv.copy(&from.kv, there.0, here.0));
        copied.map_err(|wrong| ExecutorError::Other(wrong.to_string()))
    }

    fn over(profile: &Profile, vocab_size: u32, kv: Kv) -> Self {
        let n_slots = profile.max_running as usize;
        Self {
            timing: profile.timing,
            eos_probability: profile.eos_probability,
            vocab_size: vocab_size.max(1),
            kv,
            slots: SlotTable::new(n_slots),
            checked: vec![Checked::default(); n_slots],
            tokens: Vec::new(),
            states: Vec::new(),
        }
    }

    /// Computes a step and says how long it takes.
    ///
    /// # Errors
    /// When the plan does not follow from the plans before it, or a block does not hold what it should; nothing that was
    /// planned can be trusted then.
    pub fn run(&mut self, plan: &ForwardPlan) -> Result<(StepOutput, Duration), ExecutorError> {
        let mut sequences = Vec::with_capacity(plan.sequences.len());
        for sequence in &plan.sequences {
            self.compute(sequence)?;
            if sequence.logits_rows.is_empty() {
                continue;
            }
            let slot = self.slots.get(sequence.slot).and_then(|slot| slot.spec());
            let spec = slot.ok_or(ExecutorError::NotStarted { slot: sequence.slot })?;
            let rows = sequence.logits_rows.clone().zip(&self.states);
            let tokens: Vec<_> =
                rows.map(|(row, &state)| self.sample(state, sequence.position + row + 1, spec)).collect();
            for sampled in &tokens {
                self.slots.note(plan.step, sequence, sampled.token)?;
            }
            sequences.push(SequenceOutput { slot: sequence.slot, tokens });
        }
        Ok((StepOutput { step: plan.step, sequences }, self.timing.step(&StepLoad::of(plan))))
    }

    /// Reads what is cached of a sequence and writes its query.
    fn compute(&mut self, plan: &SequencePlan) -> Result<(), ExecutorError> {
        let Self { kv, slots, checked, tokens, states, .. } = self;
        let table = slots.advance(plan, tokens)?.blocks();
        let checked = &mut checked[plan.slot.0 as usize];
        let keep = if plan.start.is_some() { 0 } else { plan.blocks.keep as usize };
        checked.n = checked.n.min(keep);
        states.clear();
        let (mut row, rows) = (0, &plan.logits_rows);
        let show = |state| {
            if rows.contains(&row) {
                states.push(state);
            }
            row += 1;
        };
        let position = plan.position as usize;
        read(kv, table, position, checked)
            .and_then(|state| kv.write(table, position, state, tokens, show))
            .map_err(|wrong| ExecutorError::Other(format!("slot {}: {wrong}", plan.slot.0)))
    }

    fn sample(&self, state: u64, position: u32, spec: &SamplingSpec) -> SampledToken {
        let token = draw(state, position, spec, self.vocab_size, self.eos_probability);
        let Some(n_top) = spec.logprobs else { return SampledToken { token, logprob: f32::NAN, top: Vec::new() } };
        // All tokens are equally likely.
        let logprob = -(self.vocab_size as f32).ln();
        let top = (0..n_top.min(self.vocab_size)).map(|i| (token.wrapping_add(i) % self.vocab_size, logprob)).collect();
        SampledToken { token, logprob, top }
    }
}

/// Checks blocks of a table that come before `position` and yields the state of the model there.
fn read(kv: &Kv, table: &[u32], position: usize, checked: &mut Checked) -> Result<u64, WrongKv> {
    let Some(last) = position.checked_sub(1).map(|last| last / kv.block_size()) else { return Ok(EMPTY) };
    for index in checked.n..last {
        kv.read(table, index, kv.block_size())?;
    }
    checked.n = last;
    if last > 0 {
        checked.turn = (checked.turn + 1) % last;
        kv.read(table, checked.turn, kv.block_size())?;
    }
    kv.read(table, last, position - last * kv.block_size())
}

#[cfg(test)]
mod tests;
