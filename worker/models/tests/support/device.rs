//! A loaded model with a paged cache, on any operators: runs steps and reads the logits.

use std::ops::Range;
use std::sync::Arc;

use contract::kv::{BlockOrder, KvDtype};
use kernels::step::SequenceInputs;
use kernels::tensor::as_bytes_mut;
use kernels::{Ops, StepInputs, StepLimits, StreamId};
use models::{KvCache, LoadOptions, Model, ModelFiles, load};

/// Sizes of a device's cache and of its steps.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Tokens of the largest step, and rows of logits.
    pub tokens: usize,
    /// Sequences of the largest step.
    pub sequences: usize,
    /// Longest sequence.
    pub positions: usize,
    /// Blocks of the cache.
    pub n_blocks: usize,
    /// Tokens of a block.
    pub block_size: usize,
}

/// One sequence's part of a step.
#[derive(Clone, Debug)]
pub struct Part<'a> {
    /// Tokens to compute.
    pub tokens: &'a [u32],
    /// Position of the first.
    pub position: usize,
    /// Blocks of the sequence from position 0 on.
    pub blocks: &'a [u32],
    /// Which of the tokens' logits are wanted.
    pub rows: Range<usize>,
}

/// The model, its cache and its step.
pub struct Device {
    ops: Arc<dyn Ops>,
    model: Box<dyn Model>,
    kv: KvCache,
    step: StepInputs,
    sizes: Sizes,
}

impl Device {
    /// Loads the model.
    pub fn new(files: &ModelFiles, ops: Arc<dyn Ops>, kv_dtype: KvDtype, sizes: Sizes) -> Self {
        let limits = StepLimits {
            tokens: sizes.tokens,
            sequences: sizes.sequences,
            block_entries: sizes.sequences * (sizes.positions.div_ceil(sizes.block_size) + 1),
            logits_rows: sizes.tokens,
            block_size: sizes.block_size,
        };
        let options = LoadOptions { limits, positions_max: Some(sizes.positions) };
        let model = load(files, Arc::clone(&ops), options).expect("the model loads");
        let layout = model.kv_spec().layout(BlockOrder::HeadsFirst, sizes.block_size as u32, kv_dtype);
        let kv = KvCache::allocate(ops.as_ref(), layout, sizes.n_blocks).expect("a small cache");
        let step = StepInputs::new(ops.as_ref(), limits).expect("small buffers");
        Self { ops, model, kv, step, sizes }
    }

    /// What the cache and steps were made for.
    pub fn sizes(&self) -> Sizes {
        self.sizes
    }

    /// Device, instruction set and formats.
    pub fn numerics(&self) -> String {
        self.ops.numerics()
    }

    /// Fills the cache with the largest numbers it can hold, so that whoever weighs a slot that nobody wrote is found.
    pub fn poison(&self) {
        // Bytes that are a large finite number in each format, and with a scale of them; writes let nothing else in.
        let byte = match self.kv.layout().dtype {
            KvDtype::F32 | KvDtype::Bf16 => 0x7f,
            KvDtype::F16 | KvDtype::Int8 => 0x7b,
        };
        for layer in 0..self.model.config().n_layers() {
            let layer = self.kv.layer(layer);
            for region in [&layer.keys, &layer.values] {
                let bytes = vec![byte; region.n_bytes()];
                self.ops.upload(StreamId::MAIN, &bytes, region).expect("as many bytes as it has");
            }
        }
    }

    /// Runs one step; returns the logits asked for, row after row.
    pub fn run(&mut self, parts: &[Part<'_>]) -> Vec<Vec<f32>> {
        self.step.clear();
        for part in parts {
            let needed = (part.position + part.tokens.len()).div_ceil(self.sizes.block_size);
            let sequence = SequenceInputs {
                tokens: part.tokens,
                position: part.position as u32,
                block_table: &part.blocks[..needed],
                logits_rows: (part.rows.start as u32, part.rows.end as u32),
            };
            self.step.push(&sequence).expect("within the limits");
        }
        self.step.upload(self.ops.as_ref(), StreamId::MAIN).expect("upload");
        let logits = self.model.forward(&self.step, &self.kv).expect("forward");
        let n_rows = parts.iter().map(|part| part.rows.len()).sum();
        let vocab = self.model.config().vocab_size;
        assert_eq!(logits.dims(), [n_rows, vocab]);
        let mut values = vec![0.0f32; n_rows * vocab];
        self.ops.read_back(StreamId::MAIN, &logits, as_bytes_mut(&mut values)).expect("read back");
        values.chunks_exact(vocab).map(<[f32]>::to_vec).collect()
    }
}
