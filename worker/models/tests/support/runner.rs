//! Feeds sequences through a model over the paged cache, with their blocks in random order.

use std::ops::Range;
use std::sync::Arc;

use contract::kv::{BlockOrder, KvDtype};
use kernels::cpu::{ComputeDtype, CpuOps, CpuOptions};
use kernels::step::SequenceInputs;
use kernels::{Ops, StepInputs, StepLimits, StreamId, tensor::as_bytes_mut};
use models::{KvCache, LoadOptions, Model, ModelFiles, load};

use super::Random;

const BLOCK_SIZE: usize = 16;

/// Sequences that one step can hold.
const SEQUENCES: usize = 3;

/// A loaded model and a few sequences; methods that name none work on the first.
pub struct Runner {
    ops: Arc<CpuOps>,
    model: Box<dyn Model>,
    kv: KvCache,
    step: StepInputs,
    sequences: [Sequence; SEQUENCES],
}

#[derive(Default)]
struct Sequence {
    blocks: Vec<u32>,
    /// Tokens in the cache.
    position: usize,
}

impl Runner {
    /// Loads for sequences and steps of `tokens_max` tokens; `seed` orders the blocks.
    pub fn new(files: &ModelFiles, f32_mode: bool, tokens_max: usize, seed: u64) -> Self {
        let (dtype, kv_dtype) = match f32_mode {
            true => (ComputeDtype::F32, KvDtype::F32),
            false => (ComputeDtype::Bf16, KvDtype::Bf16),
        };
        let ops = Arc::new(CpuOps::new(&CpuOptions { dtype, threads: 2, isa: None }).expect("a CPU"));
        let n_blocks = SEQUENCES * (tokens_max.div_ceil(BLOCK_SIZE) + 1);
        let limits = StepLimits {
            tokens: tokens_max,
            sequences: SEQUENCES,
            block_entries: n_blocks,
            logits_rows: tokens_max,
            block_size: BLOCK_SIZE,
        };
        let device: Arc<dyn Ops> = Arc::clone(&ops) as Arc<dyn Ops>;
        let options = LoadOptions { limits, positions_max: Some(tokens_max) };
        let model = load(files, device, options).expect("the model loads");
        let layout = model.kv_spec().layout(BlockOrder::HeadsFirst, BLOCK_SIZE as u32, kv_dtype);
        let kv = KvCache::allocate(ops.as_ref(), layout, n_blocks).expect("a small cache");
        let step = StepInputs::new(ops.as_ref(), limits).expect("small buffers");
        let mut blocks: Vec<u32> = (0..n_blocks as u32).collect();
        let mut random = Random(seed);
        for index in (1..blocks.len()).rev() {
            blocks.swap(index, random.below(index + 1));
        }
        let mut chunks = blocks.chunks(n_blocks / SEQUENCES);
        let sequences = std::array::from_fn(|_| {
            let blocks = chunks.next().expect("as many chunks as sequences").to_vec();
            Sequence { blocks, position: 0 }
        });
        Self { ops, model, kv, step, sequences }
    }

    /// Forgets all sequences; their blocks are handed out from the other end.
    pub fn restart(&mut self) {
        for sequence in &mut self.sequences {
            sequence.position = 0;
            sequence.blocks.reverse();
        }
    }

    /// Runs the next tokens of the first sequence; returns logits of the rows in `rows`.
    pub fn run(&mut self, tokens: &[u32], rows: Range<usize>) -> Vec<Vec<f32>> {
        self.run_together(&[(0, tokens, rows)])
    }

    /// Runs the next tokens of several sequences in one step; returns logits of the rows asked for.
    pub fn run_together(&mut self, parts: &[(usize, &[u32], Range<usize>)]) -> Vec<Vec<f32>> {
        self.step.clear();
        for (index, tokens, rows) in parts {
            let Sequence { blocks, position } = &mut self.sequences[*index];
            let needed = (*position + tokens.len()).div_ceil(BLOCK_SIZE);
            let sequence = SequenceInputs {
                tokens,
                position: *position as u32,
                block_table: &blocks[..needed],
                logits_rows: (rows.start as u32, rows.end as u32),
            };
            self.step.push(&sequence).expect("within the limits");
            *position += tokens.len();
        }
        self.step.upload(self.ops.as_ref(), StreamId::MAIN).expect("upload");
        let logits = self.model.forward(&self.step, &self.kv).expect("forward");
        let n_rows = parts.iter().map(|part| part.2.len()).sum();
        let vocab = self.model.config().vocab_size;
        assert_eq!(logits.dims(), [n_rows, vocab]);
        let mut values = vec![0.0f32; n_rows * vocab];
        self.ops.read_back(StreamId::MAIN, &logits, as_bytes_mut(&mut values)).expect("read back");
        values.chunks_exact(vocab).map(<[f32]>::to_vec).collect()
    }

    /// Runs tokens in chunks; returns logits of the last.
    pub fn run_in_chunks(&mut self, tokens: &[u32], chunk: usize) -> Vec<f32> {
        let mut last = Vec::new();
        for part in tokens.chunks(chunk) {
            let done = self.sequences[0].position + part.len() == tokens.len();
            let rows = if done { part.len() - 1..part.len() } else { 0..0 };
            last = self.run(part, rows).pop().unwrap_or(last);
        }
        last
    }

    /// Decodes greedily from logits.
    pub fn greedy(&mut self, mut logits: Vec<f32>, n: usize) -> Vec<u32> {
        let mut out = Vec::with_capacity(n);
        for _ in 0..n {
            let token = best(&logits);
            out.push(token);
            logits = self.run(&[token], 0..1).remove(0);
        }
        out
    }
}

/// Index of the largest logit.
pub fn best(logits: &[f32]) -> u32 {
    let (index, _) = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).expect("there are logits");
    index as u32
}
