//! Paged attention with SmolLM2's heads: prefill of whole prompts, and decode behind contexts of many lengths.

use contract::kv::BlockOrder;
use kernels::step::SequenceInputs;
use kernels::{Attention, Error, Ops, StepInputs, StepLimits, StreamId};
use models::{KvCache, KvSpec};

use super::matmul::{random, zeros};
use super::{Bench, Cost, OperatorResult};
use crate::roofline::attention_arithmetic;

const HEADS: usize = 9;
const KV_HEADS: usize = 3;
const DIM: usize = 64;
const BLOCK: usize = 16;
/// Prompts that are computed in one step, or one of the longest context if that is shorter.
const PROMPTS: [usize; 2] = [512, 2048];
/// Tokens of a context, or the longest context if that is shorter.
const CONTEXTS: [usize; 5] = [512, 1024, 2048, 4096, 8192];
/// Sequences that decode together.
const BATCHES: [usize; 2] = [1, 32];
/// Multiplications and additions of one query with one key and value.
const PAIR_FLOPS: f64 = 4.0 * (HEADS * DIM) as f64;

pub(super) fn run(bench: &mut Bench<'_>) -> Result<(), Error> {
    let context_max = bench.options.context_max;
    let spec = KvSpec { n_layers: 1, kv_heads: KV_HEADS as u32, key_dim: DIM as u32, value_dim: DIM as u32 };
    let layout = spec.layout(BlockOrder::HeadsFirst, BLOCK as u32, bench.options.kv_dtype);
    let block_bytes = layout.block_bytes_total();
    let n_blocks = bench.options.spread_bytes.div_ceil(block_bytes).max(2 * context_max.div_ceil(BLOCK));
    let kv = KvCache::allocate(bench.ops, layout, n_blocks)?;
    let limits = StepLimits {
        tokens: PROMPTS[1],
        sequences: BATCHES[1],
        block_entries: n_blocks,
        logits_rows: BATCHES[1],
        block_size: BLOCK,
    };
    let mut step = StepInputs::new(bench.ops, limits)?;
    fill(bench, &mut step, &kv)?;
    let arithmetic = attention_arithmetic(bench.options.kv_dtype);
    let token_bytes = block_bytes as f64 / BLOCK as f64;
    for n in up_to(&PROMPTS, context_max) {
        let pairs = (n * (n + 1)) as f64 / 2.0;
        let cost = Cost { bytes: token_bytes * n as f64, flops: PAIR_FLOPS * pairs, arithmetic };
        measure(bench, &mut step, &kv, ("attention_prefill", n, 1, n), cost)?;
    }
    for context in up_to(&CONTEXTS, context_max) {
        for batch in BATCHES.into_iter().filter(|batch| batch * context.div_ceil(BLOCK) <= n_blocks) {
            let pairs = (batch * context) as f64;
            let cost = Cost { bytes: token_bytes * pairs, flops: PAIR_FLOPS * pairs, arithmetic };
            measure(bench, &mut step, &kv, ("attention_decode", context, batch, 1), cost)?;
        }
    }
    Ok(())
}

/// The sizes that are no larger than `max`; `max` when none is.
fn up_to(sizes: &[usize], max: usize) -> Vec<usize> {
    let fitting: Vec<usize> = sizes.iter().copied().filter(|&size| size <= max).collect();
    if fitting.is_empty() { vec![max] } else { fitting }
}

/// Writes random keys and values into every block.
fn fill(bench: &mut Bench<'_>, step: &mut StepInputs, kv: &KvCache) -> Result<(), Error> {
    (bench.progress)("attention: filling the cache");
    let (ops, n) = (bench.ops, PROMPTS[1]);
    let (keys, values) = (random(ops, [n, KV_HEADS, DIM])?, random(ops, [n, KV_HEADS, DIM])?);
    let blocks: Vec<u32> = (0..kv.n_blocks() as u32).collect();
    for table in blocks.chunks(n / BLOCK) {
        let tokens = vec![0; table.len() * BLOCK];
        step.clear();
        step.push(&SequenceInputs { tokens: &tokens, position: 0, block_table: table, logits_rows: (0, 0) })?;
        step.upload(ops, StreamId::MAIN)?;
        let rows = 0..tokens.len();
        ops.write_kv(StreamId::MAIN, step, &keys.rows(rows.clone())?, &values.rows(rows)?, kv.layer(0))?;
    }
    Ok(())
}

/// Times attention of `batch` sequences with `n_query` tokens each at the end of `context`; each call takes other blocks.
fn measure(
    bench: &mut Bench<'_>,
    step: &mut StepInputs,
    kv: &KvCache,
    (kernel, context, batch, n_query): (&'static str, usize, usize, usize),
    cost: Cost,
) -> Result<(), Error> {
    (bench.progress)(&format!("{kernel} {batch} at {context}"));
    let ops = bench.ops;
    let n_tokens = batch * n_query;
    let (query, out) = (random(ops, [n_tokens, HEADS, DIM])?, zeros(ops, [n_tokens, HEADS, DIM])?);
    let scale = 1.0 / (DIM as f32).sqrt();
    let args = Attention { query: &query, cache: kv.layer(0), scale, window: None, soft_cap: None, out: &out };
    let per_sequence = context.div_ceil(BLOCK);
    let n_sequences = kv.n_blocks() / per_sequence;
    let tokens = vec![0; n_query];
    let step = std::cell::RefCell::new(step);
    let prepare = |number: usize| {
        let mut step = step.borrow_mut();
        step.clear();
        for sequence in 0..batch {
            let first = (number * batch + sequence) % n_sequences * per_sequence;
            let table: Vec<u32> = (first as u32..(first + per_sequence) as u32).collect();
            let position = (context - n_query) as u32;
            step.push(&SequenceInputs { tokens: &tokens, position, block_table: &table, logits_rows: (0, 0) })?;
        }
        step.upload(ops, StreamId::MAIN)
    };
    let call = |_| ops.paged_attention(StreamId::MAIN, &step.borrow(), &args);
    let what = OperatorResult { kernel, m: n_tokens, context: Some(context), ..OperatorResult::default() };
    bench.note(what, cost, prepare, call).map(drop)
}
