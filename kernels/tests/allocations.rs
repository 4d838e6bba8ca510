//! Operators allocate nothing once memory has grown to the largest call.
#![allow(clippy::unwrap_used, missing_docs, reason = "a test")]
#![allow(unsafe_code, reason = "an allocator is unsafe to be")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use kernels::step::SequenceInputs;
use kernels::tensor::as_bytes;
use kernels::{
    Activation, Attention, ComputeDtype, CpuOps, CpuOptions, DType, FeedForward, LayerCache, Linear, Norm, Ops, Qkv,
    RawWeight, Result, RopeStyle, RopeTable, StepInputs, StepLimits, StreamId, Tensor, Weight, WeightFormat,
    WeightRole,
};

const MAIN: StreamId = StreamId::MAIN;
const HIDDEN: usize = 256;
const HEADS: usize = 4;
const DIM: usize = 64;
const BLOCK: usize = 16;
const TOKENS: usize = 40;

/// The system's allocator, which counts while it is told to: this binary has one test, so that all threads that run
/// are its own and those of its devices.
struct Counting;

static COUNTS: AtomicBool = AtomicBool::new(false);
static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: all calls go to the system's allocator as they are.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if COUNTS.load(Ordering::SeqCst) {
            ALLOCATIONS.fetch_add(1, Ordering::SeqCst);
        }
        // SAFETY: the caller's obligation is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        // SAFETY: the caller's obligation is the same.
        unsafe { System.dealloc(start, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A layer, its inputs and its outputs.
struct Layer {
    ops: CpuOps,
    step: StepInputs,
    x: Tensor,
    ids: Tensor,
    out: Tensor,
    heads: [Tensor; 4],
    weight: Weight,
    bias: Weight,
    norms: [Norm; 2],
    rope: RopeTable,
    cache: LayerCache,
}

impl Layer {
    fn new(dtype: ComputeDtype, format: WeightFormat, kv: DType, threads: usize) -> Self {
        let ops = CpuOps::new(&CpuOptions { dtype, threads, isa: None }).unwrap();
        let f32s = |dims: [usize; 3]| ops.alloc(dims.into(), DType::F32).unwrap();
        let bytes = vec![0; HIDDEN * format.row_bytes(HIDDEN).unwrap()];
        let raw = RawWeight { bytes: &bytes, format, shape: [HIDDEN, HIDDEN].into() };
        let weight = ops.load_weight(raw, WeightRole::Matrix).unwrap();
        let vector = |len: usize| {
            let ones = vec![1.0f32; len];
            let raw = RawWeight { bytes: as_bytes(&ones), format: WeightFormat::F32, shape: [len].into() };
            ops.load_weight(raw, WeightRole::Vector { offset: 0.0 }).unwrap()
        };
        let n_blocks = TOKENS.div_ceil(BLOCK);
        let extra = if kv == DType::I8 { 4 } else { 0 };
        let region = || ops.alloc([n_blocks, HEADS, BLOCK, DIM + extra].into(), kv).unwrap();
        let limits =
            StepLimits { tokens: TOKENS, sequences: 1, block_entries: n_blocks, logits_rows: 1, block_size: BLOCK };
        Self {
            step: StepInputs::new(&ops, limits).unwrap(),
            x: ops.alloc([TOKENS, HIDDEN].into(), DType::F32).unwrap(),
            ids: ops.alloc([TOKENS].into(), DType::U32).unwrap(),
            out: ops.alloc([TOKENS, HIDDEN].into(), DType::F32).unwrap(),
            heads: [(); 4].map(|()| f32s([TOKENS, HEADS, DIM])),
            weight,
            bias: vector(HIDDEN),
            norms: [HIDDEN, DIM].map(|len| Norm { weight: vector(len), epsilon: 1e-5 }),
            rope: RopeTable::build(&ops, &[0.5; DIM / 2], 1.0, TOKENS, RopeStyle::HalfSplit).unwrap(),
            cache: LayerCache { keys: region(), values: region() },
            ops,
        }
    }

    /// Every operator of a step.
    fn run(&mut self) -> Result<()> {
        let Self { ops, step, x, ids, out, heads: [query, key, value, attended], .. } = self;
        let (weight, norms, cache, rope) = (&self.weight, &self.norms, &self.cache, &self.rope);
        let linear = Linear { weight, bias: Some(&self.bias) };
        step.clear();
        let (tokens, block_table) = ([1; TOKENS], [2, 0, 1]);
        step.push(&SequenceInputs { tokens: &tokens, position: 0, block_table: &block_table, logits_rows: (39, 40) })?;
        step.upload(ops, MAIN)?;
        let positions = step.positions()?;
        ops.embed(MAIN, &step.token_ids()?, weight, 1.0, x)?;
        ops.rms_norm(MAIN, x, &norms[0], out)?;
        ops.add_rms_norm(MAIN, x, &out.view([TOKENS, HIDDEN])?, &norms[0], &attended.view([TOKENS, HIDDEN])?)?;
        let args = Qkv {
            query: linear,
            key: linear,
            value: linear,
            query_norm: Some(&norms[1]),
            key_norm: Some(&norms[1]),
            rope,
            positions: &positions,
            cache,
            query_out: query,
            key_scratch: key,
            value_scratch: value,
        };
        ops.qkv(MAIN, step, x, &args)?;
        let args = Attention { query, cache, scale: 0.125, window: None, soft_cap: Some(30.0), out: attended };
        ops.paged_attention(MAIN, step, &args)?;
        ops.head_rms_norm(MAIN, key, &norms[1])?;
        ops.rope(MAIN, key, &positions, rope)?;
        ops.write_kv(MAIN, step, key, value, cache)?;
        ops.matmul(MAIN, &attended.view([TOKENS, HIDDEN])?, weight, None, out)?;
        let (activation, gated) = (Activation::Silu, &attended.view([TOKENS, HIDDEN])?);
        let args = FeedForward { gate: linear, up: linear, down: linear, activation, gated };
        ops.feed_forward(MAIN, x, &args, out)?;
        ops.gated_activation(MAIN, Activation::GeluTanh, key, value, query)?;
        ops.add(MAIN, x, out)?;
        ops.scale(MAIN, x, 0.5)?;
        ops.soft_cap(MAIN, x, 30.0)?;
        ops.gather_rows(MAIN, x, &ids.rows(0..TOKENS)?, out)?;
        ops.copy(MAIN, x, out)?;
        ops.for_each_row(x, &|_, _, _| {})
    }
}

/// Allocations of all threads during `body`.
fn count(body: impl FnOnce()) -> usize {
    ALLOCATIONS.store(0, Ordering::SeqCst);
    COUNTS.store(true, Ordering::SeqCst);
    body();
    COUNTS.store(false, Ordering::SeqCst);
    ALLOCATIONS.load(Ordering::SeqCst)
}

#[test]
fn a_second_step_of_the_same_size_allocates_nothing() {
    assert_eq!(count(|| drop(std::hint::black_box(Box::new(1)))), 1, "allocations are counted");
    let cases = [
        (ComputeDtype::Stored, WeightFormat::Q4_1, DType::Bf16),
        (ComputeDtype::Stored, WeightFormat::F16, DType::F16),
        (ComputeDtype::F32, WeightFormat::F32, DType::F32),
        (ComputeDtype::Bf16, WeightFormat::Q6K, DType::I8),
        (ComputeDtype::Int8, WeightFormat::Bf16, DType::I8),
    ];
    for (dtype, format, kv) in cases {
        for threads in [1, 3] {
            let mut layer = Layer::new(dtype, format, kv, threads);
            layer.run().unwrap();
            assert_eq!(count(|| layer.run().unwrap()), 0, "{dtype:?} {format:?}, cache {kv:?}, {threads} threads");
        }
    }
}
