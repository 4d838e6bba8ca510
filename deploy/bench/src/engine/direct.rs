//! Runs steps on a model directly, without engine or sampler: what the kernels and the model cost.

use std::sync::Arc;

use contract::kv::BlockOrder;
use daemon::clock;
use kernels::step::SequenceInputs;
use kernels::{CpuOps, Ops, StepInputs, StepLimits, StreamId};
use models::{KvCache, LoadOptions, Model, ModelFiles, load};

use super::{BLOCK_SIZE, EngineError, EngineOptions, Repetition};
use crate::random::Random;

/// A loaded model with a cache for the largest test.
pub(crate) struct Direct {
    parts: Parts,
    inputs: StepInputs,
    /// Blocks of all sequences, those of one after those of the other.
    blocks: Vec<u32>,
    blocks_per_sequence: usize,
    random: Random,
}

/// What an executor is made of.
pub(crate) struct Parts {
    pub(crate) ops: Arc<CpuOps>,
    pub(crate) model: Box<dyn Model>,
    pub(crate) kv: KvCache,
    pub(crate) limits: StepLimits,
}

impl Direct {
    /// Loads the model and makes room for all tests.
    pub(crate) fn load(files: &ModelFiles, ops: &Arc<CpuOps>, options: &EngineOptions) -> Result<Self, EngineError> {
        let prompt_max = options.prompts.iter().copied().max().unwrap_or(0);
        let batch_max = options.batches.iter().copied().max().unwrap_or(0);
        let decoded = if batch_max > 0 { options.context + options.decode_steps + options.slack() } else { 0 };
        let context_length = files.config().context_length;
        for (what, n_tokens) in [("a prompt", prompt_max), ("context and decoded tokens", decoded)] {
            if n_tokens > context_length {
                return Err(EngineError::TooLong { what, n_tokens, context_length });
            }
        }
        let block_size = BLOCK_SIZE as usize;
        let blocks_per_sequence = decoded.div_ceil(block_size) + 1;
        let n_blocks = (batch_max * blocks_per_sequence).max(prompt_max.div_ceil(block_size) + 1);
        let limits = StepLimits {
            tokens: options.chunk.min(prompt_max.max(options.context)).max(batch_max).max(1),
            sequences: batch_max.max(1),
            block_entries: n_blocks,
            logits_rows: batch_max.max(1),
            block_size,
        };
        let positions_max = Some(prompt_max.max(decoded).max(1));
        let device: Arc<dyn Ops> = Arc::<CpuOps>::clone(ops);
        let model = load(files, device, LoadOptions { limits, positions_max })?;
        let layout = model.kv_spec().layout(BlockOrder::HeadsFirst, BLOCK_SIZE, options.kv_dtype);
        check_memory(n_blocks, layout.block_bytes_total(), model.weight_bytes())?;
        let kv = KvCache::allocate(ops.as_ref(), layout, n_blocks)?;
        let inputs = StepInputs::new(ops.as_ref(), limits)?;
        let parts = Parts { ops: Arc::clone(ops), model, kv, limits };
        let random = Random::new(0, 0);
        Ok(Self { parts, inputs, blocks: (0..n_blocks as u32).collect(), blocks_per_sequence, random })
    }

    pub(crate) fn weight_bytes(&self) -> usize {
        self.parts.model.weight_bytes()
    }

    pub(crate) fn kv_bytes_per_token(&self) -> usize {
        self.parts.kv.layout().block_bytes_total() / BLOCK_SIZE as usize
    }

    pub(crate) fn into_parts(self) -> Parts {
        self.parts
    }

    /// Computes a prompt of random tokens in chunks, with logits of its last token.
    pub(crate) fn prefill(&mut self, n_tokens: usize, chunk: usize) -> Result<Repetition, EngineError> {
        let tokens = self.tokens(n_tokens);
        let began = clock::now();
        let n_steps = self.sequence(&tokens, chunk, 0..self.blocks.len(), true)?;
        let seconds = clock::now().duration_since(began).as_secs_f64();
        Ok(Repetition { seconds, n_steps, n_tokens, outside: None })
    }

    /// Fills the caches of the first `batch` sequences with `context` tokens each.
    pub(crate) fn fill(&mut self, batch: usize, context: usize, chunk: usize) -> Result<(), EngineError> {
        for sequence in 0..batch {
            let tokens = self.tokens(context);
            self.sequence(&tokens, chunk, self.table(sequence), false)?;
        }
        Ok(())
    }

    /// Decodes random tokens in `n_steps` steps after `context`, which `fill` has made.
    pub(crate) fn decode(&mut self, batch: usize, context: usize, n_steps: usize) -> Result<Repetition, EngineError> {
        let tokens = self.tokens(batch * n_steps);
        let began = clock::now();
        for (step, tokens) in tokens.chunks_exact(batch).enumerate() {
            self.inputs.clear();
            for (sequence, token) in tokens.iter().enumerate() {
                let table = self.table(sequence);
                self.inputs.push(&SequenceInputs {
                    tokens: std::slice::from_ref(token),
                    position: (context + step) as u32,
                    block_table: &self.blocks[table],
                    logits_rows: (0, 1),
                })?;
            }
            self.forward()?;
        }
        let seconds = clock::now().duration_since(began).as_secs_f64();
        Ok(Repetition { seconds, n_steps, n_tokens: batch * n_steps, outside: None })
    }

    /// Computes one sequence from its beginning and returns the number of steps.
    fn sequence(
        &mut self,
        tokens: &[u32],
        chunk: usize,
        table: std::ops::Range<usize>,
        with_logits: bool,
    ) -> Result<usize, EngineError> {
        let chunks = tokens.chunks(chunk.min(self.parts.limits.tokens));
        let n_steps = chunks.len();
        let mut position = 0;
        for chunk in chunks {
            let n = chunk.len() as u32;
            let is_last = position as usize + chunk.len() == tokens.len();
            let logits_rows = if with_logits && is_last { (n - 1, n) } else { (0, 0) };
            self.inputs.clear();
            let block_table = &self.blocks[table.clone()];
            self.inputs.push(&SequenceInputs { tokens: chunk, position, block_table, logits_rows })?;
            self.forward()?;
            position += n;
        }
        Ok(n_steps)
    }

    fn forward(&mut self) -> Result<(), EngineError> {
        self.inputs.upload(self.parts.ops.as_ref(), StreamId::MAIN)?;
        self.parts.model.forward(&self.inputs, &self.parts.kv)?;
        Ok(())
    }

    fn table(&self, sequence: usize) -> std::ops::Range<usize> {
        sequence * self.blocks_per_sequence..(sequence + 1) * self.blocks_per_sequence
    }

    fn tokens(&mut self, n: usize) -> Vec<u32> {
        let vocab = self.parts.model.config().vocab_size as u32;
        (0..n).map(|_| self.random.below(vocab)).collect()
    }
}

/// Refuses a cache that is larger than what the system can give; weights have taken theirs.
fn check_memory(n_blocks: usize, block_bytes: usize, weight_bytes: usize) -> Result<(), EngineError> {
    let Some(available) = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| available_bytes(&text)) else {
        return Ok(());
    };
    let cache = n_blocks.saturating_mul(block_bytes);
    if cache <= available {
        return Ok(());
    }
    let [cache_mb, weight_mb, available_mb] = [cache, weight_bytes, available].map(|bytes| bytes / 1_000_000);
    Err(EngineError::Memory { n_tokens: n_blocks * BLOCK_SIZE as usize, cache_mb, weight_mb, available_mb })
}

/// `MemAvailable` of Linux.
fn available_bytes(meminfo: &str) -> Option<usize> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix(" kB")?.parse::<usize>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cache_that_no_machine_can_hold_is_refused() {
        assert_eq!(available_bytes("MemTotal: 9 kB\nMemAvailable:    3 kB\n"), Some(3072));
        let refused = check_memory(1 << 40, 1 << 20, 1 << 20).unwrap_err();
        assert!(refused.to_string().contains("--batch"), "{refused}");
        assert!(check_memory(1, 1, 1 << 20).is_ok());
    }
}
