//! Causal grouped-query attention over the paged cache, prefill chunks and decode rows alike.
//! Hot path: no allocation after the first call of its size, no lock, no log.
//!
//! # Shapes
//! `query: [tokens, heads, key_dim]` f32, `cache.keys: [n_blocks, kv_heads, block, key_dim]`,
//! `cache.values: [n_blocks, kv_heads, block, value_dim]` f32, bf16, f16, or i8 with four more bytes a row for its
//! scale, `out: [tokens, heads, value_dim]` f32. How a block lies inside: see [`cache`].
//!
//! # Formula
//! `s_j = cap(scale * q . k_j)`, `out = sum_j exp(s_j - max s) v_j / sum_j exp(s_j - max s)` over the positions `j` that
//! the query sees. For bf16 and int8 caches, `q` and the factors of `v` are rounded to bf16 first.
//!
//! # Order
//! Positions are cut at multiples of [`PARTITION`]. In a partition, an online softmax (Milakov and Gimelshein 2018; Dao
//! et al., FlashAttention, 2022) takes stripes of [`STRIPE`] positions in ascending order, from a fresh start;
//! partitions are merged in ascending order (Dao et al., Flash-Decoding, 2023). A row's result depends on its query,
//! its position and the cache alone: not on the rows, chunks or sequences it shares a call with, nor on which thread
//! computes which partition.

pub(crate) mod cache;
mod plan;
pub(crate) mod reference;
pub(crate) mod softmax;
pub(crate) mod unit;

use std::ops::Range;

use crate::cpu::Machine;
use crate::cpu::access::{Access, Shared};
use crate::error::{Error, Result};
use crate::op::attention::cache::{Layout, Region, TILE};
use crate::op::attention::plan::{Job, Plan};
use crate::op::attention::softmax::Softmax;
use crate::op::attention::unit::{Dims, Line, Scratch, Unit};
use crate::ops::Attention;
use crate::step::StepInputs;
use crate::tensor::DType;

/// Positions after which a softmax starts afresh: the unit in which one row is split over threads.
pub(crate) const PARTITION: usize = 512;
/// Positions that are scored at once.
pub(crate) const STRIPE: usize = 64;
/// Most (query, head) rows of a unit of work.
pub(crate) const UNIT_ROWS: usize = 48;

/// Computes partitions of a unit: into `partials`, one after the other, or merged into the scratch's total.
pub(crate) type Attend = unsafe fn(&Unit<'_>, Range<usize>, Option<&mut [f32]>, &mut Scratch<'_>);

/// Memory that calls use in turn, grown to the largest and kept.
#[derive(Default)]
pub(crate) struct Memory {
    plan: Plan,
    /// Scratch of every thread.
    scratch: Vec<Line>,
    /// Partitions of rows that are split over threads, until they are merged.
    partials: Vec<Line>,
}

/// Checks the contract and computes.
pub(crate) fn run(machine: &mut Machine, access: &Access, step: &StepInputs, args: &Attention<'_>) -> Result<()> {
    let (dims, [keys, values]) = check(access, step, args)?;
    let query = access.read::<f32>("query", args.query, DType::F32)?;
    let keys = Region::new(access, "keys", &args.cache.keys, keys)?;
    let values = Region::new(access, "values", &args.cache.values, values)?;
    let others = [args.query, &args.cache.keys, &args.cache.values];
    // SAFETY: the other tensors of this call are named.
    let out = unsafe { access.write::<f32>("out", args.out, DType::F32, &others)? };
    let mut memory = std::mem::take(&mut machine.attention);
    let Memory { plan, scratch, partials } = &mut memory;
    plan.make(&dims, step.host(), args.window, machine.threads());
    let lines = dims.scratch_lines();
    scratch.resize(scratch.len().max(machine.threads() * lines), Line::default());
    partials.resize(partials.len().max(plan.partials / TILE), Line::default());
    let (scratch, partials, out) = (Shared::new(scratch), Shared::new(unit::flat(partials)), Shared::new(out));
    let call = Call { dims, keys, values, query, step, args, out };
    let attend = machine.kv.attend;
    share(machine, plan.work, &plan.jobs, &|thread, job, next| {
        let next = next.map(|job| (call.unit(job, None), job.partitions().start));
        let following = next.as_ref().map(|(unit, partition)| (unit, unit.span(*partition).start));
        let unit = call.unit(job, following);
        // SAFETY: each thread has its own part.
        let mut scratch = Scratch::new(unsafe { scratch.part(thread * lines, lines) }, &unit);
        // SAFETY: each job that is a part has its own part of the partials.
        let own = job.partials.map(|at| unsafe { partials.part(at, job.partials_len(&unit)) });
        let whole = own.is_none();
        // SAFETY: the kernel is that of an instruction set that `Table::of` checked.
        unsafe { attend(&unit, job.partitions(), own, &mut scratch) };
        if whole {
            call.write(&unit, &scratch.total);
        }
    });
    share(machine, plan.merge_work, &plan.merges, &|thread, job, _| {
        let unit = call.unit(job, None);
        // SAFETY: each thread has its own part.
        let mut scratch = Scratch::new(unsafe { scratch.part(thread * lines, lines) }, &unit);
        let at = job.partials.unwrap_or_default();
        // SAFETY: no other merge has these partials, and the jobs that wrote them are done.
        let partials = unsafe { partials.part(at, job.partials_len(&unit)) };
        scratch.total.clear();
        for memory in partials.chunks_exact_mut(unit.partial_len()) {
            scratch.total.merge(&unit.state(memory));
        }
        call.write(&unit, &scratch.total);
    });
    machine.attention = memory;
    Ok(())
}

/// What all jobs of a call share.
struct Call<'a> {
    dims: Dims,
    keys: Region<'a>,
    values: Region<'a>,
    query: &'a [f32],
    step: &'a StepInputs,
    args: &'a Attention<'a>,
    out: Shared<'a, f32>,
}

impl Call<'_> {
    fn unit<'u>(&'u self, job: &Job, following: Option<(&'u Unit<'u>, usize)>) -> Unit<'u> {
        let (host, dims) = (self.step.host(), self.dims);
        let (sequence, first_row) = (job.sequence as usize, job.first_row as usize);
        let rest = host.query_rows(sequence).end - first_row;
        let head = job.heads as usize * dims.unit_heads;
        Unit {
            dims,
            keys: self.keys,
            values: self.values,
            query: self.query,
            blocks: host.block_table(sequence),
            first_row,
            n_queries: dims.unit_queries().min(rest),
            position: host.context_lens[sequence] as usize - rest,
            heads: head..head + dims.unit_heads,
            scale: self.args.scale,
            window: self.args.window.map_or(usize::MAX, |window| window as usize),
            soft_cap: self.args.soft_cap,
            following,
        }
    }

    /// Divides by the sums; every row sees at least its own position.
    fn write(&self, unit: &Unit<'_>, total: &Softmax<'_>) {
        let Dims { heads, value_dim, .. } = self.dims;
        for row in 0..unit.n_rows() {
            let (token, head) = unit.token_and_head(row);
            // SAFETY: no other unit has this query and head.
            let target = unsafe { self.out.part((token * heads + head) * value_dim, value_dim) };
            total.result(row, target);
        }
    }
}

/// Calls `body(thread, job, next job)` for each job; a thread goes through its jobs in order.
fn share(machine: &mut Machine, work: usize, jobs: &[Job], body: &(dyn Fn(usize, &Job, Option<&Job>) + Sync)) {
    machine.split(work, jobs.len(), &|_, thread, index| body(thread, &jobs[index], jobs.get(index + 1)));
}

fn check(access: &Access, step: &StepInputs, args: &Attention<'_>) -> Result<(Dims, [Layout; 2])> {
    let &[n_tokens, heads, key_dim] = args.query.dims() else {
        let expected = "[tokens, heads, key_dim]".to_owned();
        return Err(Error::Shape { op: access.op, tensor: "query", expected, actual: args.query.shape() });
    };
    let value_dim = args.out.shape().columns();
    let (layouts, n_blocks) = cache::layouts(access, args.cache, [key_dim, value_dim])?;
    let Layout { kv_heads, block_size, .. } = layouts[0];
    let fits = n_tokens == step.n_tokens() && heads > 0 && heads.is_multiple_of(kv_heads);
    let expected = format_args!("[{}, multiple of {kv_heads}, {key_dim}]", step.n_tokens());
    access.shape("query", args.query, fits, expected)?;
    let fits = args.out.dims() == [n_tokens, heads, value_dim];
    access.shape("out", args.out, fits, format_args!("[{n_tokens}, {heads}, {value_dim}]"))?;
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
    Ok((Dims::new(heads, kv_heads, key_dim, value_dim), layouts))
}
