//! The executor over a loaded model on the CPU. Hot path: no contended lock, no log.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use contract::ids::{BlockId, SlotId, StepId, Token};
use contract::plan::{
    BlockTableDelta, ForwardPlan, QueryToken, SampledToken, SamplingSpec, SequenceOutput, SequencePlan, StepOutput,
};
use contract::request::SamplingParams;
use daemon::clock;
use engine::EngineConfig;
use kernels::step::SequenceInputs;
use kernels::{CpuOps, StepInputs, StepLimits, StreamId, Tensor};
use models::{KvCache, Model};

use super::{Executor, ExecutorError, SlotTable};
use crate::lent::Layers;
use crate::sampler::Sampler;

/// Most block-table entries of a step, whatever the bounds of the engine: 64 MB on the host.
const BLOCK_ENTRIES_MAX: usize = 1 << 24;

/// Tokens of the prompt that warms an executor up: enough for the kernels of many rows.
const WARM_UP_TOKENS: usize = 64;

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
    /// One for each compute thread.
    samplers: Vec<Mutex<Sampler>>,
    /// One for each row of logits in a step; its thread alone locks it.
    rows: Vec<Mutex<Row>>,
    tokens: Vec<Token>,
    computed: Duration,
}

/// A row of logits and what is drawn from it.
#[derive(Default)]
struct Row {
    /// Sequence of the plan.
    place: usize,
    /// Of the token to draw.
    position: u32,
    drawn: Option<SampledToken>,
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
        let vocab_size = model.config().vocab_size;
        Ok(Self {
            model,
            kv,
            inputs,
            slots: SlotTable::new(limits.sequences),
            samplers: (0..ops.threads()).map(|_| Mutex::new(Sampler::new(vocab_size))).collect(),
            rows: (0..limits.logits_rows).map(|_| Mutex::default()).collect(),
            tokens: Vec::with_capacity(limits.tokens),
            computed: Duration::ZERO,
            ops,
        })
    }

    /// Runs a short prompt and a token after it, so that the first request finds memory and code in place.
    ///
    /// To be called before the first plan: what it leaves in slot 0 and in the first blocks means nothing.
    ///
    /// # Errors
    /// What the device says.
    pub fn warm_up(&mut self) -> Result<(), ExecutorError> {
        let limits = self.inputs.limits();
        let capacity = (self.kv.n_blocks() * limits.block_size).min(self.model.positions_max());
        let n_prompt = WARM_UP_TOKENS.min(limits.tokens).min(capacity.saturating_sub(1));
        if n_prompt == 0 {
            return Ok(());
        }
        let spec = SamplingSpec {
            params: SamplingParams { temperature: 0.0, ..SamplingParams::default() },
            logprobs: None,
            n_prompt: n_prompt as u32,
            min_tokens: 0,
            stop_token_ids: Vec::new(),
            history: Vec::new(),
        };
        let n_blocks = (n_prompt + 1).div_ceil(limits.block_size) as u32;
        let prompt = SequencePlan {
            slot: SlotId(0),
            query: vec![QueryToken::Value(0); n_prompt],
            position: 0,
            blocks: BlockTableDelta { keep: 0, append: (0..n_blocks).map(BlockId).collect() },
            logits_rows: n_prompt as u32 - 1..n_prompt as u32,
            start: Some(Arc::new(spec)),
            adapter: None,
            mask: None,
        };
        let next = SequencePlan {
            query: vec![QueryToken::Sampled { step: StepId(0), row: 0 }],
            position: n_prompt as u32,
            blocks: BlockTableDelta { keep: n_blocks, append: Vec::new() },
            logits_rows: 0..1,
            start: None,
            ..prompt.clone()
        };
        for sequence in [prompt, next] {
            let padded_tokens = sequence.query.len() as u32;
            self.run(&ForwardPlan { step: StepId(0), padded_tokens, sequences: vec![sequence] })?;
        }
        Ok(())
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

    /// Draws a token from each row, rows shared among threads; penalties count the tokens before this step.
    fn sample(&mut self, plan: &ForwardPlan, logits: &Tensor) -> Result<Vec<SequenceOutput>, ExecutorError> {
        let mut rows = self.rows.iter_mut();
        for (place, sequence) in plan.sequences.iter().enumerate() {
            for query in sequence.logits_rows.clone() {
                // The token after the query row's.
                let position = sequence.position.saturating_add(query).saturating_add(1);
                let row =
                    rows.next().ok_or_else(|| ExecutorError::Other("more rows of logits than slots".to_owned()))?;
                *unlocked(row) = Row { place, position, drawn: None };
            }
        }
        let (slots, samplers, rows) = (&self.slots, &self.samplers, &self.rows);
        self.ops.for_each_row(logits, &|thread, row, logits| {
            let mut row = lock(&rows[row]);
            let slot = slots.get(plan.sequences[row.place].slot);
            if let Some((slot, spec)) = slot.and_then(|slot| Some((slot, slot.spec()?))) {
                let drawn = lock(&samplers[thread]).sample(logits, spec, slot.counts(), row.position);
                row.drawn = Some(drawn);
            }
        })?;
        let mut rows = self.rows.iter_mut();
        let mut outputs = Vec::with_capacity(plan.sequences.len());
        for sequence in plan.sequences.iter().filter(|sequence| !sequence.logits_rows.is_empty()) {
            let mut tokens = Vec::with_capacity(sequence.logits_rows.len());
            for row in rows.by_ref().take(sequence.logits_rows.len()) {
                let drawn = unlocked(row).drawn.take();
                let drawn = drawn.ok_or_else(|| ExecutorError::Other("the model returned too few rows".to_owned()))?;
                self.slots.note(plan.step, sequence, drawn.token)?;
                tokens.push(drawn);
            }
            outputs.push(SequenceOutput { slot: sequence.slot, tokens });
        }
        Ok(outputs)
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

    fn n_layers(&self) -> usize {
        self.kv.layout().n_layers as usize
    }

    fn tell(&mut self, layers: Arc<Layers>) {
        self.kv.observe(move |layer| layers.written(layer));
    }
}

/// A step that panicked has failed for good; what it left is read by nobody.
fn lock<T>(value: &Mutex<T>) -> MutexGuard<'_, T> {
    value.lock().unwrap_or_else(PoisonError::into_inner)
}

fn unlocked<T>(value: &mut Mutex<T>) -> &mut T {
    value.get_mut().unwrap_or_else(PoisonError::into_inner)
}
