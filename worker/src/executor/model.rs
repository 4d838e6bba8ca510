//! The executor over a loaded model on the CPU. Hot path: no lock, no log.

use std::sync::Arc;
use std::time::Duration;

use contract::ids::Token;
use contract::plan::{ForwardPlan, SequenceOutput, SequencePlan, StepOutput};
use daemon::clock;
use engine::EngineConfig;
use kernels::step::SequenceInputs;
use kernels::{CpuOps, StepInputs, StepLimits, StreamId, Tensor};
use models::{KvCache, Model};

use super::{Executor, ExecutorError, SlotTable};
use crate::sampler::Sampler;

/// Most block-table entries of a step, whatever the bounds of the engine: 64 MB on the host.
const BLOCK_ENTRIES_MAX: usize = 1 << 24;

/// How large a step of an engine with these bounds may be.
#[must_use]
pub fn limits(config: &EngineConfig) -> StepLimits {
    let per_sequence = config.length_max().div_ceil(config.block_size) as usize + 1;
    StepLimits {
        tokens: config.token_budget as usize,
        sequences: config.max_running as usize,
        block_entries: per_sequence.saturating_mul(config.max_running as usize).min(BLOCK_ENTRIES_MAX),
        logits_rows: config.max_running as usize,
        block_size: config.block_size as usize,
    }
}

/// A model, its cache and all buffers of a step.
pub struct ModelExecutor {
    ops: Arc<CpuOps>,
    model: Box<dyn Model>,
    kv: KvCache,
    inputs: StepInputs,
    slots: SlotTable,
    sampler: Sampler,
    tokens: Vec<Token>,
    computed: Duration,
}

impl ModelExecutor {
    /// Puts a loaded model and its cache together.
    ///
    /// # Errors
    /// What the device says about the buffers of a step.
    pub fn new(
        ops: Arc<CpuOps>,
        model: Box<dyn Model>,
        kv: KvCache,
        limits: StepLimits,
    ) -> Result<Self, ExecutorError> {
        let inputs = StepInputs::new(ops.as_ref(), limits)?;
        let sampler = Sampler::new(model.config().vocab_size);
        let slots = SlotTable::new(limits.sequences);
        let tokens = Vec::with_capacity(limits.tokens);
        Ok(Self { ops, model, kv, inputs, slots, sampler, tokens, computed: Duration::ZERO })
    }

    fn fill(&mut self, plan: &ForwardPlan) -> Result<(), ExecutorError> {
        self.inputs.clear();
        for sequence in &plan.sequences {
            let slot = self.slots.advance(sequence, &mut self.tokens)?;
            self.inputs.push(&SequenceInputs {
                tokens: &self.tokens,
                position: sequence.position,
                block_table: slot.blocks(),
                logits_rows: (sequence.logits_rows.start, sequence.logits_rows.end),
            })?;
        }
        self.inputs.upload(self.ops.as_ref(), StreamId::MAIN)?;
        Ok(())
    }

    fn sample(&mut self, plan: &ForwardPlan, logits: &Tensor) -> Result<Vec<SequenceOutput>, ExecutorError> {
        let vocab_size = self.model.config().vocab_size;
        let (slots, sampler) = (&mut self.slots, &mut self.sampler);
        self.ops.with_f32(logits, |logits| {
            let mut rows = logits.chunks_exact(vocab_size);
            let with_rows = plan.sequences.iter().filter(|sequence| !sequence.logits_rows.is_empty());
            with_rows.map(|sequence| sample_sequence(plan, sequence, &mut rows, slots, sampler)).collect()
        })?
    }
}

impl Executor for ModelExecutor {
    fn run(&mut self, plan: &ForwardPlan) -> Result<StepOutput, ExecutorError> {
        self.fill(plan)?;
        let began = clock::now();
        let logits = self.model.forward(&self.inputs, &self.kv)?;
        let sequences = if self.inputs.n_logits_rows() == 0 { Vec::new() } else { self.sample(plan, &logits)? };
        self.computed = clock::now().duration_since(began);
        Ok(StepOutput { step: plan.step, sequences })
    }

    fn computed(&self) -> Duration {
        self.computed
    }
}

fn sample_sequence<'a>(
    plan: &ForwardPlan,
    sequence: &SequencePlan,
    rows: &mut impl Iterator<Item = &'a [f32]>,
    slots: &mut SlotTable,
    sampler: &mut Sampler,
) -> Result<SequenceOutput, ExecutorError> {
    let mut tokens = Vec::with_capacity(sequence.logits_rows.len());
    for row in sequence.logits_rows.clone() {
        let logits = rows.next().ok_or_else(|| ExecutorError::Other("the model returned too few rows".to_owned()))?;
        let slot = slots.slot(sequence)?;
        let spec = slot.spec().ok_or(ExecutorError::NotStarted { slot: sequence.slot })?;
        // The token after the query row's.
        let position = sequence.position.saturating_add(row).saturating_add(1);
        let sampled = sampler.sample(logits, spec, slot.counts(), position);
        slots.note(plan.step, sequence, sampled.token)?;
        tokens.push(sampled);
    }
    Ok(SequenceOutput { slot: sequence.slot, tokens })
}
