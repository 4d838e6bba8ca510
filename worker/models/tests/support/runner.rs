//! Feeds sequences through a model over the paged cache, with their blocks in random order.

use std::ops::Range;

use contract::kv::KvDtype;
use kernels::ComputeDtype;
use models::ModelFiles;

use super::Random;
use super::device::{Device, Part, Sizes};
use super::mode::cpu;

const BLOCK_SIZE: usize = 16;

/// Sequences that one step can hold.
const SEQUENCES: usize = 3;

/// A loaded model and a few sequences; methods that name none work on the first.
pub struct Runner {
    device: Device,
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
        Self::with(files, dtype, kv_dtype, tokens_max, seed)
    }

    /// The same with formats of weights and cache.
    pub fn with(files: &ModelFiles, dtype: ComputeDtype, kv_dtype: KvDtype, tokens_max: usize, seed: u64) -> Self {
        let n_blocks = SEQUENCES * (tokens_max.div_ceil(BLOCK_SIZE) + 1);
        let sizes =
            Sizes { tokens: tokens_max, sequences: SEQUENCES, positions: tokens_max, n_blocks, block_size: BLOCK_SIZE };
        let device = Device::new(files, cpu(dtype, 2), kv_dtype, sizes);
        let mut blocks: Vec<u32> = (0..n_blocks as u32).collect();
        Random(seed).shuffle(&mut blocks);
        let mut chunks = blocks.chunks(n_blocks / SEQUENCES);
        let sequences = std::array::from_fn(|_| {
            let blocks = chunks.next().expect("as many chunks as sequences").to_vec();
            Sequence { blocks, position: 0 }
        });
        Self { device, sequences }
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
        let in_step: Vec<Part<'_>> = parts
            .iter()
            .map(|(index, tokens, rows)| {
                let Sequence { blocks, position } = &self.sequences[*index];
                Part { tokens, position: *position, blocks, rows: rows.clone() }
            })
            .collect();
        let logits = self.device.run(&in_step);
        parts.iter().for_each(|(index, tokens, _)| self.sequences[*index].position += tokens.len());
        logits
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
