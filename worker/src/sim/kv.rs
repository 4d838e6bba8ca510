//! The simulated KV cache: each block holds the fingerprint of the tokens that it should stand for.
//! Hot path: no allocation, no lock, no log.

use std::fmt;

use contract::ids::Token;
use contract::kv::{BlockOrder, KvDtype, KvLayout};
use kernels::memory::blocks::{BlockMemory, Region};

use super::draw::{EMPTY, extend};

/// Layers of a pool that others reach into; each holds all that is known of a block, so that one that is lost shows.
const N_LAYERS: u32 = 4;
/// Bytes of a block's record.
const RECORD_BYTES: usize = 24;

/// What was written into a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Block {
    /// Of its first token.
    position: u32,
    /// Written, from the first on.
    n_tokens: u32,
    /// State of the model before its first token.
    before: u64,
    /// State of the model after its last token.
    after: u64,
}

/// All blocks.
#[derive(Clone, Debug)]
pub(super) struct Kv {
    block_size: usize,
    store: Store,
}

/// Where blocks are kept.
#[derive(Clone, Debug)]
enum Store {
    Own(Vec<Block>),
    /// Where transfers reach them.
    Shared(BlockMemory),
}

/// A block that does not hold what a table says it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WrongKv {
    /// First position of the table's entry.
    position: usize,
    /// The entry; none beyond the table.
    block: Option<u32>,
    fault: Fault,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Missing,
    Torn,
    Elsewhere { position: u32 },
    Length { n_tokens: u32, expected: usize },
    OtherPrefix,
}

impl fmt::Display for WrongKv {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.block {
            Some(block) => write!(f, "block {block} at position {}: ", self.position)?,
            None => write!(f, "no block at position {}: ", self.position)?,
        }
        match self.fault {
            Fault::Torn => write!(f, "its layers hold different things"),
            Fault::Missing => write!(f, "the pool or the table does not reach it"),
            Fault::Elsewhere { position } => write!(f, "it was written for position {position}"),
            Fault::Length { n_tokens, expected } => write!(f, "{n_tokens} tokens are written, {expected} are read"),
            Fault::OtherPrefix => write!(f, "other tokens come before it than when it was written"),
        }
    }
}

impl Kv {
    pub(super) fn new(block_size: usize, n_blocks: usize) -> Self {
        Self { block_size, store: Store::Own(vec![Block::default(); n_blocks]) }
    }

    /// Keeps blocks where transfers reach them.
    pub(super) fn shared(block_size: usize, n_blocks: usize) -> Result<(Self, KvLayout, BlockMemory), kernels::Error> {
        let dim = RECORD_BYTES.div_ceil(block_size * size_of::<f32>());
        let layout = KvLayout {
            order: BlockOrder::HeadsFirst,
            n_layers: N_LAYERS,
            kv_heads: 1,
            block_size: block_size as u32,
            key_dim: dim as u32,
            value_dim: 0,
            dtype: KvDtype::F32,
        };
        let block_bytes = block_size * dim * size_of::<f32>();
        let memory = BlockMemory::zeroed(N_LAYERS as usize, n_blocks, [block_bytes, 0])?;
        Ok((Self { block_size, store: Store::Shared(memory.clone()) }, layout, memory))
    }

    /// Takes over what `block` of another cache holds.
    pub(super) fn copy(&mut self, from: &Self, block: u32, to: u32) -> Result<(), WrongKv> {
        let held = from.get(&[block], 0)?;
        self.put(to, held);
        Ok(())
    }

    pub(super) fn block_size(&self) -> usize {
        self.block_size
    }

    /// Checks that entry `index` of a table holds its first `n_tokens` and continues the entry before it; yields the
    /// state after them.
    pub(super) fn read(&self, table: &[u32], index: usize, n_tokens: usize) -> Result<u64, WrongKv> {
        let block = self.get(table, index)?;
        let before = match index.checked_sub(1) {
            None => EMPTY,
            Some(earlier) => self.get(table, earlier)?.after,
        };
        let position = index * self.block_size;
        let fault = if block.n_tokens as usize != n_tokens {
            Fault::Length { n_tokens: block.n_tokens, expected: n_tokens }
        } else if block.position as usize != position {
            Fault::Elsewhere { position: block.position }
        } else if block.before != before {
            Fault::OtherPrefix
        } else {
            return Ok(block.after);
        };
        Err(WrongKv { position, block: Some(table[index]), fault })
    }

    /// Writes `tokens` from `position` on, after a state that was read there, and shows the state after each.
    pub(super) fn write(
        &mut self,
        table: &[u32],
        position: usize,
        mut state: u64,
        tokens: &[Token],
        mut show: impl FnMut(u64),
    ) -> Result<(), WrongKv> {
        let (mut position, mut rest) = (position, tokens);
        while !rest.is_empty() {
            let (index, offset) = (position / self.block_size, position % self.block_size);
            let (now, later) = rest.split_at(rest.len().min(self.block_size - offset));
            // A block that is begun may hold anything, such as a part of what did not come as a whole.
            let mut block = match (offset, self.get(table, index)) {
                (0, Ok(_) | Err(WrongKv { fault: Fault::Torn, .. })) => {
                    Block { position: position as u32, n_tokens: 0, before: state, after: state }
                }
                (_, held) => held?,
            };
            for &token in now {
                state = extend(state, token);
                show(state);
            }
            block.n_tokens += now.len() as u32;
            block.after = state;
            self.put(table[index], block);
            (position, rest) = (position + now.len(), later);
        }
        Ok(())
    }

    /// Forgets what a block holds.
    #[cfg(test)]
    pub(super) fn lose(&mut self, block: u32) {
        self.put(block, Block::default());
    }

    fn get(&self, table: &[u32], index: usize) -> Result<Block, WrongKv> {
        let block = table.get(index).copied();
        let wrong = |fault| WrongKv { position: index * self.block_size, block, fault };
        let number = block.ok_or(wrong(Fault::Missing))? as usize;
        match &self.store {
            Store::Own(blocks) => blocks.get(number).copied().ok_or(wrong(Fault::Missing)),
            Store::Shared(memory) => {
                let of_layer = |layer| {
                    let mut record = [0; RECORD_BYTES];
                    let read = memory.read(layer, Region::Key, number * memory.block_bytes(Region::Key), &mut record);
                    read.map(|()| Block::of(&record)).map_err(|_| wrong(Fault::Missing))
                };
                let first = of_layer(0)?;
                for layer in 1..memory.n_layers() {
                    if of_layer(layer)? != first {
                        return Err(wrong(Fault::Torn));
                    }
                }
                Ok(first)
            }
        }
    }

    /// Replaces what a block holds; one that was read is there.
    fn put(&mut self, block: u32, held: Block) {
        match &mut self.store {
            Store::Own(blocks) => blocks[block as usize] = held,
            Store::Shared(memory) => {
                let offset = block as usize * memory.block_bytes(Region::Key);
                for layer in 0..memory.n_layers() {
                    let written = memory.write(layer, Region::Key, offset, &held.record());
                    debug_assert!(written.is_ok(), "a block that was read can be written");
                }
            }
        }
    }
}

impl Block {
    fn record(self) -> [u8; RECORD_BYTES] {
        let mut record = [0; RECORD_BYTES];
        record[..4].copy_from_slice(&self.position.to_le_bytes());
        record[4..8].copy_from_slice(&self.n_tokens.to_le_bytes());
        record[8..16].copy_from_slice(&self.before.to_le_bytes());
        record[16..].copy_from_slice(&self.after.to_le_bytes());
        record
    }

    fn of(record: &[u8; RECORD_BYTES]) -> Self {
        let four = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| record[at + i]));
        let eight = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| record[at + i]));
        Self { position: four(0), n_tokens: four(4), before: eight(8), after: eight(16) }
    }
}
