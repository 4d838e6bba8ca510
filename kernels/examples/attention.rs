//! Times attention by hand: decode at a long context in bytes of cache a second, prefill in operations a second.
//!
//! `cargo run -p kernels --example attention [threads] [isa]`; figures are the best of several runs.
#![allow(clippy::unwrap_used, clippy::print_stdout, unsafe_code, reason = "a timing tool for people")]

use kernels::step::SequenceInputs;
use kernels::tensor::as_bytes;
use kernels::{Attention, CpuOps, CpuOptions, DType, LayerCache, Ops, Shape, StepInputs, StepLimits, StreamId, Tensor};

const MAIN: StreamId = StreamId::MAIN;
const BLOCK: usize = 16;
const HEADS: usize = 9;
const KV_HEADS: usize = 3;
const DIM: usize = 64;

struct Bench {
    ops: CpuOps,
    dtype: DType,
    threads: usize,
}

/// Processor time on one thread, which neighbours disturb less; else time.
fn seconds(threads: usize) -> f64 {
    let clock = if threads == 1 { libc::CLOCK_PROCESS_CPUTIME_ID } else { libc::CLOCK_MONOTONIC };
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a place for the result.
    assert_eq!(unsafe { libc::clock_gettime(clock, &raw mut time) }, 0);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

impl Bench {
    fn f32(&self, shape: [usize; 3]) -> Tensor {
        let tensor = self.ops.alloc(Shape::from(shape), DType::F32).unwrap();
        let mut state = 1u64;
        let mut value = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        let values: Vec<f32> = (0..shape.iter().product()).map(|_| value()).collect();
        self.ops.upload(MAIN, as_bytes(&values), &tensor).unwrap();
        tensor
    }

    /// Seconds of attention over `n` sequences with `new` tokens after `old`, and of writing the new ones.
    fn run(&self, n: usize, old: usize, new: usize) -> (f64, f64) {
        let blocks = (old + new).div_ceil(BLOCK);
        let extra = if self.dtype == DType::I8 { 4 } else { 0 };
        let region = || {
            let shape = Shape::from([n * blocks, KV_HEADS, BLOCK, DIM + extra]);
            self.ops.alloc(shape, self.dtype).unwrap()
        };
        let cache = LayerCache { keys: region(), values: region() };
        for sequence in 0..n {
            self.write(&cache, &self.step(blocks, sequence..sequence + 1, 0, old.max(1)));
        }
        let step = self.step(blocks, 0..n, old, new);
        let write = self.write(&cache, &step);
        let (query, out) = (self.f32([n * new, HEADS, DIM]), self.f32([n * new, HEADS, DIM]));
        let args = Attention { query: &query, cache: &cache, scale: 0.125, window: None, soft_cap: None, out: &out };
        (self.best(|| self.ops.paged_attention(MAIN, &step, &args).unwrap()), write)
    }

    /// A step of `new` tokens after `old` in each sequence.
    fn step(&self, blocks: usize, sequences: std::ops::Range<usize>, old: usize, new: usize) -> StepInputs {
        let n = sequences.len();
        let limits =
            StepLimits { tokens: n * new, sequences: n, block_entries: n * blocks, logits_rows: 0, block_size: BLOCK };
        let mut step = StepInputs::new(&self.ops, limits).unwrap();
        for sequence in sequences {
            // Blocks that follow each other in a sequence lie apart, as in a pool that is in use.
            let stride = if blocks.is_power_of_two() { 7 } else { 1 };
            let table: Vec<u32> = (0..blocks).map(|i| (sequence * blocks + i * stride % blocks) as u32).collect();
            let tokens = vec![0; new];
            let position = old as u32;
            step.push(&SequenceInputs { tokens: &tokens, position, block_table: &table, logits_rows: (0, 0) }).unwrap();
        }
        step
    }

    fn write(&self, cache: &LayerCache, step: &StepInputs) -> f64 {
        let rows = || self.f32([step.n_tokens(), KV_HEADS, DIM]);
        let (k, v) = (rows(), rows());
        self.best(|| self.ops.write_kv(MAIN, step, &k, &v, cache).unwrap())
    }

    fn best(&self, f: impl Fn()) -> f64 {
        let time = |_| {
            let start = seconds(self.threads);
            f();
            seconds(self.threads) - start
        };
        (0..30).map(time).fold(f64::INFINITY, f64::min)
    }
}

fn main() {
    let mut args = std::env::args().skip(1);
    let threads = args.next().map_or(1, |n| n.parse().unwrap());
    let isa = args.next().map(|isa| isa.parse().unwrap());
    for dtype in [DType::Bf16, DType::I8, DType::F16, DType::F32] {
        let ops = CpuOps::new(&CpuOptions { threads, isa, ..CpuOptions::default() }).unwrap();
        let bench = Bench { ops, dtype, threads };
        let row = DIM * dtype.bytes() + if dtype == DType::I8 { 4 } else { 0 };
        println!("{} {dtype:?} on {threads} threads", bench.ops.numerics());
        for (n, context) in [(1, 512), (1, 8192), (8, 2048), (32, 256), (256, 256)] {
            let (attend, write) = bench.run(n, context - 1, 1);
            let bytes = (n * context * KV_HEADS * 2 * row) as f64;
            println!(
                "  decode {n:3} x {context:5}: {:8.1} us, {:5.1} GB/s; write {:6.1} us",
                attend * 1e6,
                bytes / attend / 1e9,
                write * 1e6
            );
        }
        for tokens in [128, 512, 2048] {
            let (attend, write) = bench.run(1, 0, tokens);
            let operations = (2 * HEADS * tokens * (tokens + 1) * DIM) as f64;
            println!(
                "  prefill {tokens:5}: {:8.1} us, {:6.1} GFLOP/s; write {:6.1} us",
                attend * 1e6,
                operations / attend / 1e9,
                write * 1e6
            );
        }
    }
}
