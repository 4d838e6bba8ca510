//! Causal grouped-query attention over the paged cache, prefill chunks and decode rows alike.
//!
//! # Shapes
//! `query: [tokens, heads, key_dim]` f32, `cache.keys: [n_blocks, kv_heads, block, key_dim]`,
//! `cache.values: [n_blocks, kv_heads, block, value_dim]` f32, bf16 or f16, `out: [tokens, heads, value_dim]` f32.
//!
//! # Formula
//! `s_j = cap(scale * q . k_j)`, `out = sum_j exp(s_j - max s) v_j / sum_j exp(s_j - max s)` over the positions `j` that
//! the query sees. Computed with an online softmax (Milakov and Gimelshein 2018; Dao et al., FlashAttention, 2022)
//! over tiles of 16 positions that start at multiples of 16, in ascending order. A row's result depends on its query,
//! its position and the cache alone: not on the rows, chunks or sequences it shares a call with.

use std::ops::Range;

use crate::cpu::access::{Access, Shared};
use crate::cpu::{Machine, PARALLEL_WORK};
use crate::error::{Error, Result};
use crate::ops::{Attention, LayerCache};
use crate::step::StepInputs;
use crate::tensor::{DType, Tensor};

/// Positions of a tile.
pub(crate) const TILE: usize = 16;
/// Most (query, head) rows of a unit of work.
pub(crate) const UNIT_ROWS: usize = 32;

/// Cache elements.
pub(crate) enum CacheData<'a> {
    F32(&'a [f32]),
    Bf16(&'a [u16]),
    F16(&'a [u16]),
}

/// A layer's keys and values.
pub(crate) struct Cache<'a> {
    pub(crate) keys: CacheData<'a>,
    pub(crate) values: CacheData<'a>,
}

/// Sizes that all units of a call share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Dims {
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) block_size: usize,
    pub(crate) key_dim: usize,
    pub(crate) value_dim: usize,
}

impl Dims {
    /// Elements from one key to the next in scratch: padded with zeros to whole vectors.
    pub(crate) fn key_stride(&self) -> usize {
        self.key_dim.next_multiple_of(16)
    }

    /// Elements from one value to the next in scratch.
    pub(crate) fn value_stride(&self) -> usize {
        self.value_dim.next_multiple_of(16)
    }

    fn scratch_len(&self) -> usize {
        (UNIT_ROWS + TILE) * (self.key_stride() + self.value_stride())
    }
}

/// Work of one thread: some query tokens of one sequence, some heads that share a kv head.
pub(crate) struct Unit<'a> {
    pub(crate) dims: Dims,
    pub(crate) cache: &'a Cache<'a>,
    /// `[tokens, heads, key_dim]`, of all sequences.
    query: &'a [f32],
    /// The sequence's blocks.
    blocks: &'a [u32],
    /// First query row in `query`.
    first_row: usize,
    n_queries: usize,
    /// Absolute position of the first query.
    position: usize,
    heads: Range<usize>,
    scale: f32,
    window: usize,
    soft_cap: Option<f32>,
}

impl Unit<'_> {
    /// (query, head) pairs: row `r` is query `r / heads`, head `r % heads` of this unit.
    pub(crate) fn n_rows(&self) -> usize {
        self.n_queries * self.heads.len()
    }

    /// Positions that any row sees.
    pub(crate) fn span(&self) -> Range<usize> {
        self.visible(0).start..self.position + self.n_queries
    }

    /// Positions of a tile, counted from its start, that a row sees.
    pub(crate) fn visible_in_tile(&self, row: usize, tile: usize) -> Range<usize> {
        let (visible, start) = (self.visible(row), tile * TILE);
        visible.start.saturating_sub(start).min(TILE)..visible.end.saturating_sub(start).min(TILE)
    }

    /// First cache element of a position's key.
    pub(crate) fn key_start(&self, position: usize) -> usize {
        self.line(position) * self.dims.key_dim
    }

    /// First cache element of a position's value.
    pub(crate) fn value_start(&self, position: usize) -> usize {
        self.line(position) * self.dims.value_dim
    }

    /// From dot products to masked scores.
    #[inline(always)]
    pub(crate) fn adjust(&self, scores: &mut [f32; TILE], visible: &Range<usize>) {
        scores.iter_mut().for_each(|score| *score *= self.scale);
        if let Some(cap) = self.soft_cap {
            scores.iter_mut().for_each(|score| *score = cap * (*score / cap).tanh());
        }
        for (j, score) in scores.iter_mut().enumerate() {
            *score = if visible.contains(&j) { *score } else { f32::NEG_INFINITY };
        }
    }

    fn visible(&self, row: usize) -> Range<usize> {
        let end = self.position + row / self.heads.len() + 1;
        end.saturating_sub(self.window)..end
    }

    fn line(&self, position: usize) -> usize {
        let Dims { heads, kv_heads, block_size, .. } = self.dims;
        let kv_head = self.heads.start * kv_heads / heads;
        let block = self.blocks[position / block_size] as usize;
        (block * kv_heads + kv_head) * block_size + position % block_size
    }
}

/// A thread's memory for one unit; strides are those of [`Dims`].
pub(crate) struct Scratch<'a> {
    /// `[rows, key_stride]`
    pub(crate) query: &'a mut [f32],
    /// `[TILE, key_stride]`
    pub(crate) keys: &'a mut [f32],
    /// `[TILE, value_stride]`
    pub(crate) values: &'a mut [f32],
    /// `[rows, value_stride]`: weighted values so far, in the end the result.
    pub(crate) acc: &'a mut [f32],
    /// Largest score so far.
    pub(crate) largest: [f32; UNIT_ROWS],
    /// Sum of weights so far.
    pub(crate) sum: [f32; UNIT_ROWS],
}

impl<'a> Scratch<'a> {
    fn new(memory: &'a mut [f32], dims: &Dims) -> Self {
        let (query, rest) = memory.split_at_mut(UNIT_ROWS * dims.key_stride());
        let (keys, rest) = rest.split_at_mut(TILE * dims.key_stride());
        let (values, acc) = rest.split_at_mut(TILE * dims.value_stride());
        Self { query, keys, values, acc, largest: [0.0; UNIT_ROWS], sum: [0.0; UNIT_ROWS] }
    }

    /// Copies the queries, padded with zeros, and starts the softmax.
    pub(crate) fn begin(&mut self, unit: &Unit<'_>) {
        let Dims { heads, key_dim, .. } = unit.dims;
        for (row, target) in self.query.chunks_exact_mut(unit.dims.key_stride()).take(unit.n_rows()).enumerate() {
            let (token, head) = (unit.first_row + row / unit.heads.len(), unit.heads.start + row % unit.heads.len());
            let source = &unit.query[(token * heads + head) * key_dim..][..key_dim];
            target[..key_dim].copy_from_slice(source);
            target[key_dim..].fill(0.0);
        }
        self.acc.fill(0.0);
        // Padding must be 0; positions that a tile does not load are masked, whatever they hold.
        self.keys.fill(0.0);
        self.values.fill(0.0);
        self.largest = [f32::NEG_INFINITY; UNIT_ROWS];
        self.sum = [0.0; UNIT_ROWS];
    }

    /// Divides by the sums; every row sees at least its own position.
    pub(crate) fn finish(&mut self, unit: &Unit<'_>) {
        for (row, sum) in self.acc.chunks_exact_mut(unit.dims.value_stride()).zip(&self.sum).take(unit.n_rows()) {
            row.iter_mut().for_each(|value| *value /= sum);
        }
    }
}

/// How a call is cut into units: for each sequence, tiles of queries times groups of heads.
struct Partition {
    /// Query heads of a unit; divides the heads of a kv head.
    heads: usize,
    /// Query tokens of a unit.
    queries: usize,
}

impl Partition {
    fn new(dims: &Dims, n_tokens: usize, threads: usize) -> Self {
        let group = dims.heads / dims.kv_heads;
        // Whole groups share loads of keys; few rows are cut finer so that every thread has some.
        let mut heads = (1..=group.min(UNIT_ROWS)).rev().find(|&n| group.is_multiple_of(n)).unwrap_or(1);
        while heads > 1 && n_tokens * (dims.heads / heads) < threads {
            heads = (1..heads).rev().find(|&n| group.is_multiple_of(n)).unwrap_or(1);
        }
        Self { heads, queries: UNIT_ROWS / heads }
    }
}

/// Checks the contract and computes.
pub(crate) fn run(machine: &mut Machine, access: &Access, step: &StepInputs, args: &Attention<'_>) -> Result<()> {
    let dims = check(access, step, args)?;
    let query = access.read::<f32>("query", args.query, DType::F32)?;
    let cache =
        Cache { keys: data(access, "keys", &args.cache.keys)?, values: data(access, "values", &args.cache.values)? };
    let others = [args.query, &args.cache.keys, &args.cache.values];
    // SAFETY: the other tensors of this call are named.
    let out = unsafe { access.write::<f32>("out", args.out, DType::F32, &others)? };
    let (host, attend) = (step.host(), machine.attend);
    let partition = Partition::new(&dims, host.token_ids.len(), machine.threads());
    let head_groups = dims.heads / partition.heads;
    let (scratch_len, mut tiles, mut work) = (dims.scratch_len(), 0, 0);
    machine.tiles.clear();
    for sequence in 0..host.n_sequences() {
        let rows = host.query_rows(sequence);
        work += rows.len() * host.context_lens[sequence] as usize * dims.heads * (dims.key_dim + dims.value_dim);
        for first in rows.clone().step_by(partition.queries) {
            machine.tiles.push((sequence, first));
            tiles += 1;
        }
    }
    let threads = if work < PARALLEL_WORK { 1 } else { machine.threads() };
    machine.scratch.resize((threads * scratch_len).max(machine.scratch.len()), 0.0);
    let (out, memory) = (Shared::new(out), std::mem::take(&mut machine.scratch));
    let mut memory = memory;
    let shared = Shared::new(&mut memory);
    let units = std::mem::take(&mut machine.tiles);
    machine.run(work, tiles * head_groups, &|thread, chunk| {
        // Long contexts come last in a chunk's rows; start with them, so that threads end together.
        let (sequence, first_row) = units[units.len() - 1 - chunk / head_groups];
        let rows = host.query_rows(sequence);
        let head = chunk % head_groups * partition.heads;
        let unit = Unit {
            dims,
            cache: &cache,
            query,
            blocks: host.block_table(sequence),
            first_row,
            n_queries: partition.queries.min(rows.end - first_row),
            position: host.context_lens[sequence] as usize - (rows.end - first_row),
            heads: head..head + partition.heads,
            scale: args.scale,
            window: args.window.map_or(usize::MAX, |window| window as usize),
            soft_cap: args.soft_cap,
        };
        // SAFETY: each thread has its own part.
        let mut scratch = Scratch::new(unsafe { shared.part(thread * scratch_len, scratch_len) }, &dims);
        // SAFETY: the kernel is that of an instruction set that `Table::of` checked.
        unsafe { attend(&unit, &mut scratch) };
        for (row, result) in scratch.acc.chunks_exact(dims.value_stride()).take(unit.n_rows()).enumerate() {
            let (token, head) = (first_row + row / partition.heads, head + row % partition.heads);
            // SAFETY: no other unit has this query and head.
            let target = unsafe { out.part((token * dims.heads + head) * dims.value_dim, dims.value_dim) };
            target.copy_from_slice(&result[..dims.value_dim]);
        }
    });
    (machine.scratch, machine.tiles) = (memory, units);
    Ok(())
}

/// The elements of a cache region.
pub(crate) fn data<'a>(access: &'a Access, name: &'static str, tensor: &Tensor) -> Result<CacheData<'a>> {
    Ok(match tensor.dtype() {
        DType::F32 => CacheData::F32(access.read(name, tensor, DType::F32)?),
        DType::Bf16 => CacheData::Bf16(bits(access.read::<half::bf16>(name, tensor, DType::Bf16)?)),
        DType::F16 => CacheData::F16(bits(access.read::<half::f16>(name, tensor, DType::F16)?)),
        actual => return Err(Error::Dtype { op: access.op, tensor: name, actual }),
    })
}

fn bits<T>(values: &[T]) -> &[u16]
where
    [T]: half::slice::HalfFloatSliceExt,
{
    half::slice::HalfFloatSliceExt::reinterpret_cast(values)
}

/// `[n_blocks, kv_heads, block, key_dim]` and `value_dim` of a layer's cache.
pub(crate) fn cache_dims(access: &Access, cache: &LayerCache) -> Result<([usize; 4], usize)> {
    let keys: [usize; 4] = cache.keys.dims().try_into().unwrap_or_default();
    let values: [usize; 4] = cache.values.dims().try_into().unwrap_or_default();
    access.shape("keys", &cache.keys, !keys.contains(&0), "[n_blocks, kv_heads, block, dim]")?;
    let same = values[..3] == keys[..3] && values[3] > 0;
    access.shape("values", &cache.values, same, "[n_blocks, kv_heads, block, dim] like keys")?;
    Ok((keys, values[3]))
}

fn check(access: &Access, step: &StepInputs, args: &Attention<'_>) -> Result<Dims> {
    let ([n_blocks, kv_heads, block_size, key_dim], value_dim) = cache_dims(access, args.cache)?;
    let n_tokens = step.n_tokens();
    let heads = args.query.dims().get(1).copied().unwrap_or_default();
    let grouped = heads > 0 && heads.is_multiple_of(kv_heads);
    let fits = args.query.dims() == [n_tokens, heads, key_dim] && grouped;
    access.shape("query", args.query, fits, &format!("[{n_tokens}, multiple of {kv_heads}, {key_dim}]"))?;
    let fits = args.out.dims() == [n_tokens, heads, value_dim];
    access.shape("out", args.out, fits, &format!("[{n_tokens}, {heads}, {value_dim}]"))?;
    if args.window == Some(0) {
        return Err(Error::Unsupported { op: access.op, what: "a window of 0 positions".to_owned() });
    }
    access.index("block size of the step", step.limits().block_size, block_size + 1)?;
    access.index("block size of the cache", block_size, step.limits().block_size + 1)?;
    let host = step.host();
    for sequence in 0..host.n_sequences() {
        let (rows, context) = (host.query_rows(sequence), host.context_lens[sequence] as usize);
        let blocks = host.block_table(sequence);
        access.index("query length", rows.len(), context + 1)?;
        access.index("context length", context, blocks.len() * block_size + 1)?;
        let used = &blocks[..context.div_ceil(block_size)];
        used.iter().try_for_each(|&block| access.index("block", block as usize, n_blocks))?;
    }
    Ok(Dims { heads, kv_heads, block_size, key_dim, value_dim })
}

/// The plain form, in the same tiles.
pub(crate) fn reference(unit: &Unit<'_>, scratch: &mut Scratch<'_>) {
    scratch.begin(unit);
    let span = unit.span();
    let (key_stride, value_stride) = (unit.dims.key_stride(), unit.dims.value_stride());
    for tile in span.start / TILE..span.end.div_ceil(TILE) {
        for row in 0..unit.n_rows() {
            let visible = unit.visible_in_tile(row, tile);
            if visible.is_empty() {
                continue;
            }
            let query = &scratch.query[row * key_stride..][..unit.dims.key_dim];
            let mut weights = [0.0f32; TILE];
            for j in visible.clone() {
                let start = unit.key_start(tile * TILE + j);
                weights[j] = query.iter().enumerate().map(|(d, q)| q * element(&unit.cache.keys, start + d)).sum();
            }
            unit.adjust(&mut weights, &visible);
            let largest = weights.iter().copied().fold(scratch.largest[row], f32::max);
            let alpha = (scratch.largest[row] - largest).exp();
            weights.iter_mut().for_each(|weight| *weight = (*weight - largest).exp());
            scratch.largest[row] = largest;
            scratch.sum[row] = scratch.sum[row] * alpha + weights.iter().sum::<f32>();
            let acc = &mut scratch.acc[row * value_stride..][..unit.dims.value_dim];
            acc.iter_mut().for_each(|acc| *acc *= alpha);
            for j in visible {
                let start = unit.value_start(tile * TILE + j);
                let values = (start..).map(|i| element(&unit.cache.values, i));
                acc.iter_mut().zip(values).for_each(|(acc, value)| *acc += weights[j] * value);
            }
        }
    }
    scratch.finish(unit);
}

fn element(data: &CacheData<'_>, index: usize) -> f32 {
    match data {
        CacheData::F32(values) => values[index],
        CacheData::Bf16(values) => half::bf16::from_bits(values[index]).to_f32(),
        CacheData::F16(values) => half::f16::from_bits(values[index]).to_f32(),
    }
}
