//! The simulated KV cache: each block holds the fingerprint of the tokens that it should stand for.
//! Hot path: no allocation, no lock, no log.

use std::fmt;

use contract::ids::Token;

use super::draw::{EMPTY, extend};

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
    blocks: Vec<Block>,
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
            Fault::Missing => write!(f, "the pool or the table does not reach it"),
            Fault::Elsewhere { position } => write!(f, "it was written for position {position}"),
            Fault::Length { n_tokens, expected } => write!(f, "{n_tokens} tokens are written, {expected} are read"),
            Fault::OtherPrefix => write!(f, "other tokens come before it than when it was written"),
        }
    }
}

impl Kv {
    pub(super) fn new(block_size: usize, n_blocks: usize) -> Self {
        Self { block_size, blocks: vec![Block::default(); n_blocks] }
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
            let mut block = self.get(table, index)?;
            if offset == 0 {
                block = Block { position: position as u32, n_tokens: 0, before: state, after: state };
            }
            for &token in now {
                state = extend(state, token);
                show(state);
            }
            block.n_tokens += now.len() as u32;
            block.after = state;
            self.blocks[table[index] as usize] = block;
            (position, rest) = (position + now.len(), later);
        }
        Ok(())
    }

    /// Forgets what a block holds.
    #[cfg(test)]
    pub(super) fn lose(&mut self, block: u32) {
        self.blocks[block as usize] = Block::default();
    }

    fn get(&self, table: &[u32], index: usize) -> Result<Block, WrongKv> {
        let block = table.get(index).copied();
        let held = block.and_then(|block| self.blocks.get(block as usize));
        held.copied().ok_or(WrongKv { position: index * self.block_size, block, fault: Fault::Missing })
    }
}
