//! Lengths, block tables and slots of one step, on the host and on the device.

use std::ops::Range;

use crate::error::{Error, Result};
use crate::ops::Ops;
use crate::stream::StreamId;
use crate::tensor::{DType, Shape, Tensor, as_bytes};

/// How large a step may be; its buffers and the scratch arena are made for this once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepLimits {
    /// Query tokens over all sequences.
    pub tokens: usize,
    /// Sequences.
    pub sequences: usize,
    /// Block-table entries over all sequences.
    pub block_entries: usize,
    /// Rows that need logits.
    pub logits_rows: usize,
    /// Tokens in a KV block.
    pub block_size: usize,
}

/// One sequence's part of a step.
#[derive(Clone, Copy, Debug)]
pub struct SequenceInputs<'a> {
    /// Query tokens.
    pub tokens: &'a [u32],
    /// Absolute position of the first; KV of all earlier ones is in the cache.
    pub position: u32,
    /// Blocks of the sequence from position 0 on, enough for the last query token.
    pub block_table: &'a [u32],
    /// Indices into `tokens` that need logits.
    pub logits_rows: (u32, u32),
}

/// The host copy. Sequence `s` has query tokens `query_starts[s]..query_starts[s + 1]`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostInputs {
    /// Token of each query row.
    pub token_ids: Vec<u32>,
    /// Absolute position of each query row.
    pub positions: Vec<u32>,
    /// Where each query row's keys and values go: `block * block_size + offset`.
    pub slot_mapping: Vec<u32>,
    /// First query row of each sequence, and the number of rows.
    pub query_starts: Vec<u32>,
    /// Tokens of each sequence that are in the cache once this step's are.
    pub context_lens: Vec<u32>,
    /// Block tables, one after the other.
    pub block_tables: Vec<u32>,
    /// First entry of each sequence's table, and the number of entries.
    pub block_table_starts: Vec<u32>,
    /// Query rows that need logits, ascending.
    pub logits_rows: Vec<u32>,
}

impl HostInputs {
    /// Number of sequences.
    pub fn n_sequences(&self) -> usize {
        self.context_lens.len()
    }

    /// Query rows of a sequence.
    pub fn query_rows(&self, sequence: usize) -> Range<usize> {
        self.query_starts[sequence] as usize..self.query_starts[sequence + 1] as usize
    }

    /// Block table of a sequence.
    pub fn block_table(&self, sequence: usize) -> &[u32] {
        let starts = &self.block_table_starts;
        &self.block_tables[starts[sequence] as usize..starts[sequence + 1] as usize]
    }
}

/// The inputs of a step in buffers that are made once and filled anew for each step.
pub struct StepInputs {
    limits: StepLimits,
    host: HostInputs,
    device: [Tensor; 8],
}

impl StepInputs {
    /// Allocates host and device buffers for steps within `limits`.
    ///
    /// # Errors
    /// What the device says about the allocations.
    pub fn new(ops: &dyn Ops, limits: StepLimits) -> Result<Self> {
        let StepLimits { tokens, sequences, block_entries, logits_rows, .. } = limits;
        let sizes = [tokens, tokens, tokens, sequences + 1, sequences, block_entries, sequences + 1, logits_rows];
        let tensor = |n: usize| {
            let shape = Shape::new(&[n]).ok_or(Error::OutOfMemory { bytes: n })?;
            ops.alloc(shape, DType::U32)
        };
        let [a, b, c, d, e, f, g, h] = sizes;
        let device = [tensor(a)?, tensor(b)?, tensor(c)?, tensor(d)?, tensor(e)?, tensor(f)?, tensor(g)?, tensor(h)?];
        let host = HostInputs {
            token_ids: Vec::with_capacity(a),
            positions: Vec::with_capacity(b),
            slot_mapping: Vec::with_capacity(c),
            query_starts: Vec::with_capacity(d),
            context_lens: Vec::with_capacity(e),
            block_tables: Vec::with_capacity(f),
            block_table_starts: Vec::with_capacity(g),
            logits_rows: Vec::with_capacity(h),
        };
        let mut step = Self { limits, host, device };
        step.clear();
        Ok(step)
    }

    /// Empties the step; capacity stays.
    pub fn clear(&mut self) {
        let host = &mut self.host;
        let fields = [
            &mut host.token_ids,
            &mut host.positions,
            &mut host.slot_mapping,
            &mut host.context_lens,
            &mut host.block_tables,
            &mut host.logits_rows,
            &mut host.query_starts,
            &mut host.block_table_starts,
        ];
        fields.into_iter().for_each(Vec::clear);
        host.query_starts.push(0);
        host.block_table_starts.push(0);
    }

    /// Adds a sequence; allocates nothing within the limits.
    ///
    /// # Errors
    /// [`Error::StepTooLarge`] beyond the limits, [`Error::Index`] when the block table is too short for the tokens or
    /// a logits row is not one of them. The step is unchanged then.
    pub fn push(&mut self, sequence: &SequenceInputs<'_>) -> Result<()> {
        let n_tokens = sequence.tokens.len();
        let context = u32::try_from(n_tokens).ok().and_then(|n| sequence.position.checked_add(n));
        let capacity = sequence.block_table.len().saturating_mul(self.limits.block_size);
        let Some(context) = context.filter(|&n| n as usize <= capacity) else {
            let value = u64::from(sequence.position) + n_tokens as u64;
            return Err(Error::Index { op: "step", what: "context length", value, bound: capacity as u64 + 1 });
        };
        let (first_row, end_row) = sequence.logits_rows;
        if first_row > end_row || end_row as usize > n_tokens {
            let value = u64::from(first_row.max(end_row));
            return Err(Error::Index { op: "step", what: "logits row", value, bound: n_tokens as u64 + 1 });
        }
        self.check_room(sequence, (end_row - first_row) as usize)?;
        let (block_size, host) = (self.limits.block_size, &mut self.host);
        let row = host.token_ids.len() as u32;
        host.token_ids.extend_from_slice(sequence.tokens);
        for position in sequence.position..context {
            let block = sequence.block_table[position as usize / block_size];
            host.positions.push(position);
            host.slot_mapping
                .push(block.saturating_mul(block_size as u32).saturating_add(position % block_size as u32));
        }
        host.query_starts.push(host.token_ids.len() as u32);
        host.context_lens.push(context);
        host.block_tables.extend_from_slice(sequence.block_table);
        host.block_table_starts.push(host.block_tables.len() as u32);
        host.logits_rows.extend(row + first_row..row + end_row);
        Ok(())
    }

    /// Copies the host's side to the device; operators see it from then on.
    ///
    /// # Errors
    /// What the device says about the copies.
    pub fn upload(&self, ops: &dyn Ops, stream: StreamId) -> Result<()> {
        for (values, tensor) in self.host_fields().into_iter().zip(&self.device) {
            if !values.is_empty() {
                ops.upload(stream, as_bytes(values), &tensor.rows(0..values.len())?)?;
            }
        }
        Ok(())
    }

    /// Fills the host's side to its limits, for a dry run that measures scratch memory.
    pub fn fill_to_limits(&mut self) {
        self.clear();
        let (limits, host) = (self.limits, &mut self.host);
        host.token_ids.resize(limits.tokens, 0);
        host.positions.resize(limits.tokens, 0);
        host.slot_mapping.resize(limits.tokens, 0);
        host.query_starts.resize(limits.sequences + 1, 0);
        host.context_lens.resize(limits.sequences, 0);
        host.block_tables.resize(limits.block_entries, 0);
        host.block_table_starts.resize(limits.sequences + 1, 0);
        host.logits_rows.resize(limits.logits_rows, 0);
    }

    /// The limits that the buffers were made for.
    pub fn limits(&self) -> StepLimits {
        self.limits
    }

    /// The host copy.
    pub fn host(&self) -> &HostInputs {
        &self.host
    }

    /// Query tokens in the step.
    pub fn n_tokens(&self) -> usize {
        self.host.token_ids.len()
    }

    /// Rows that need logits.
    pub fn n_logits_rows(&self) -> usize {
        self.host.logits_rows.len()
    }

    /// `[tokens]` u32 on the device.
    pub fn token_ids(&self) -> Result<Tensor> {
        self.device[0].rows(0..self.host.token_ids.len())
    }

    /// `[tokens]` u32 on the device.
    pub fn positions(&self) -> Result<Tensor> {
        self.device[1].rows(0..self.host.positions.len())
    }

    /// `[tokens]` u32 on the device: `block * block_size + offset`.
    pub fn slot_mapping(&self) -> Result<Tensor> {
        self.device[2].rows(0..self.host.slot_mapping.len())
    }

    /// `[sequences + 1]` u32 on the device: first query row of each sequence.
    pub fn query_starts(&self) -> Result<Tensor> {
        self.device[3].rows(0..self.host.query_starts.len())
    }

    /// `[sequences]` u32 on the device.
    pub fn context_lens(&self) -> Result<Tensor> {
        self.device[4].rows(0..self.host.context_lens.len())
    }

    /// Flat block tables on the device, u32.
    pub fn block_tables(&self) -> Result<Tensor> {
        self.device[5].rows(0..self.host.block_tables.len())
    }

    /// `[sequences + 1]` u32 on the device: first entry of each sequence's block table.
    pub fn block_table_starts(&self) -> Result<Tensor> {
        self.device[6].rows(0..self.host.block_table_starts.len())
    }

    /// `[n]` u32 on the device: query rows that need logits.
    pub fn logits_rows(&self) -> Result<Tensor> {
        self.device[7].rows(0..self.host.logits_rows.len())
    }

    fn check_room(&self, sequence: &SequenceInputs<'_>, n_logits_rows: usize) -> Result<()> {
        let (host, limits) = (&self.host, &self.limits);
        let rows = [
            ("tokens", host.token_ids.len() + sequence.tokens.len(), limits.tokens),
            ("sequences", host.n_sequences() + 1, limits.sequences),
            ("block-table entries", host.block_tables.len() + sequence.block_table.len(), limits.block_entries),
            ("logits rows", host.logits_rows.len() + n_logits_rows, limits.logits_rows),
        ];
        match rows.into_iter().find(|(_, value, bound)| value > bound) {
            Some((what, value, bound)) => Err(Error::StepTooLarge { what, value, bound }),
            None => Ok(()),
        }
    }

    fn host_fields(&self) -> [&[u32]; 8] {
        let host = &self.host;
        [
            &host.token_ids,
            &host.positions,
            &host.slot_mapping,
            &host.query_starts,
            &host.context_lens,
            &host.block_tables,
            &host.block_table_starts,
            &host.logits_rows,
        ]
    }
}
