//! How a call is cut into jobs: query tiles times groups of heads, and long ones of these at partitions too.

use std::ops::Range;

use crate::cpu::PARALLEL_WORK;
use crate::op::attention::PARTITION;
use crate::op::attention::unit::{Dims, Unit};
use crate::step::HostInputs;

/// Jobs a thread should find to do, so that threads end together; each begins with tiles that nothing has prefetched.
const JOBS_PER_THREAD: usize = 6;
/// Most numbers that partitions' states take; what would need more is not split.
const PARTIALS_MAX: usize = 8 << 20;

/// One unit, or some partitions of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Job {
    pub(crate) sequence: u32,
    /// First query row, as the call counts them.
    pub(crate) first_row: u32,
    /// Which group of heads.
    pub(crate) heads: u32,
    /// Partitions: first and end.
    partitions: (u32, u32),
    /// Where the partitions' states go; whole units need no such place.
    pub(crate) partials: Option<usize>,
}

impl Job {
    pub(crate) fn partitions(&self) -> Range<usize> {
        self.partitions.0 as usize..self.partitions.1 as usize
    }

    /// Numbers that the states of its partitions take.
    pub(crate) fn partials_len(&self, unit: &Unit<'_>) -> usize {
        self.partitions().len() * unit.partial_len()
    }
}

/// The jobs of a call.
#[derive(Default)]
pub(crate) struct Plan {
    pub(crate) jobs: Vec<Job>,
    /// Units whose jobs are several: what is merged when all jobs are done.
    pub(crate) merges: Vec<Job>,
    /// Numbers that partitions' states take until they are merged.
    pub(crate) partials: usize,
    /// Multiplications of the jobs, about.
    pub(crate) work: usize,
    /// Multiplications of the merges, about.
    pub(crate) merge_work: usize,
}

/// Query tokens of one sequence that make a unit with each group of heads.
struct QueryTile {
    first_row: usize,
    n_queries: usize,
    /// Positions that any of them sees.
    span: Range<usize>,
}

impl Plan {
    /// Makes the jobs of a step.
    pub(crate) fn make(&mut self, dims: &Dims, host: &HostInputs, window: Option<u32>, threads: usize) {
        self.jobs.clear();
        self.merges.clear();
        (self.partials, self.merge_work) = (0, 0);
        let groups = dims.heads / dims.unit_heads;
        let cost =
            |tile: &QueryTile| tile.n_queries * dims.unit_heads * tile.span.len() * (dims.key_dim + dims.value_dim);
        let tiles = |sequence| tiles(dims, host, window, sequence);
        self.work = groups * (0..host.n_sequences()).flat_map(tiles).map(|tile| cost(&tile)).sum::<usize>();
        let splits = threads > 1 && self.work >= PARALLEL_WORK;
        let cost_max = self.work / (threads * JOBS_PER_THREAD);
        for sequence in 0..host.n_sequences() {
            for tile in tiles(sequence) {
                let partitions = tile.span.start / PARTITION..tile.span.end.div_ceil(PARTITION);
                let needed = groups * partitions.len() * dims.partial_len(tile.n_queries);
                let n = match splits && self.partials + needed <= PARTIALS_MAX {
                    true => (partitions.len() * cost_max / cost(&tile).max(1)).clamp(1, partitions.len()),
                    false => partitions.len(),
                };
                (0..groups).for_each(|heads| self.push(dims, (sequence, heads), &tile, &partitions, n));
            }
        }
    }

    /// Adds a unit as jobs of `n` partitions.
    fn push(
        &mut self,
        dims: &Dims,
        (sequence, heads): (usize, usize),
        tile: &QueryTile,
        partitions: &Range<usize>,
        n: usize,
    ) {
        let job = |partitions: Range<usize>, partials| Job {
            sequence: sequence as u32,
            first_row: tile.first_row as u32,
            heads: heads as u32,
            partitions: (partitions.start as u32, partitions.end as u32),
            partials,
        };
        if n == partitions.len() {
            self.jobs.push(job(partitions.clone(), None));
            return;
        }
        let len = dims.partial_len(tile.n_queries);
        self.merges.push(job(partitions.clone(), Some(self.partials)));
        self.merge_work += len * partitions.len();
        for first in partitions.clone().step_by(n) {
            let these = first..partitions.end.min(first + n);
            self.jobs.push(job(these.clone(), Some(self.partials)));
            self.partials += len * these.len();
        }
    }
}

/// A sequence's query tiles, last (and longest) first, so that threads end together.
fn tiles(
    dims: &Dims,
    host: &HostInputs,
    window: Option<u32>,
    sequence: usize,
) -> impl Iterator<Item = QueryTile> + use<> {
    let (rows, context, queries) =
        (host.query_rows(sequence), host.context_lens[sequence] as usize, dims.unit_queries());
    let window = window.map_or(usize::MAX, |window| window as usize);
    rows.clone().step_by(queries).rev().map(move |first_row| {
        let n_queries = queries.min(rows.end - first_row);
        let position = context - (rows.end - first_row);
        let span = (position + 1).saturating_sub(window)..position + n_queries;
        QueryTile { first_row, n_queries, span }
    })
}
