//! Blocks that others use while a prompt moves between engines: each hold is told once and ends when they let go.
//!
//! A request whose prompt is computed elsewhere is given all its blocks at once, and others fill them; a prompt that is
//! computed for others keeps its blocks until they have been read; so do cached blocks that are lent as they are. Until
//! then no block of these returns to the pool, whatever becomes of the request, so that what is late can harm nobody.

use std::time::Duration;

use contract::error::RequestError;
use contract::ids::{BlockId, RequestId, SlotId};
use contract::request::GenerateRequest;

use crate::engine::Engine;
use crate::output::SequenceKey;
use crate::sequence::{Purpose, Sequence, SequenceIdx, State};

/// Blocks that are lent to others, until [`Engine::let_go`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hold {
    /// The submission.
    pub key: SequenceKey,
    /// The request's id.
    pub request: RequestId,
    /// Where plans name the request; another may take it once it has ended.
    pub slot: SlotId,
    /// What others do with the blocks.
    pub usage: HoldUsage,
    /// Tokens whose KV the blocks are for.
    pub n_tokens: usize,
    /// Tokens at the start whose KV is there already; whole blocks.
    pub n_cached: usize,
    /// Blocks from the first token on.
    pub table: Vec<BlockId>,
}

impl Hold {
    /// Tokens whose KV is there once others have filled `n_blocks` after the cached ones.
    pub fn n_filled(&self, n_blocks: usize, block_size: usize) -> usize {
        (self.n_cached + n_blocks * block_size).min(self.n_tokens)
    }
}

/// Cached blocks that are lent to readers as they are, until [`Engine::let_go`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CachedHold {
    /// Names the hold.
    pub key: SequenceKey,
    /// Tokens whose KV the blocks hold.
    pub n_tokens: usize,
    /// Full blocks from the first token on.
    pub table: Vec<BlockId>,
}

/// What others do with lent blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HoldUsage {
    /// They write the KV of all tokens that are not cached.
    Fill,
    /// They read the KV of all tokens as it is computed.
    Read,
}

impl Engine {
    /// Queues the computation of a prompt's KV for others; nothing is sampled, and [`OutputEvent::Prefilled`] ends it.
    ///
    /// [`OutputEvent::Prefilled`]: crate::OutputEvent::Prefilled
    ///
    /// # Errors
    /// As of [`Engine::submit`].
    pub fn submit_prefill(&mut self, request: GenerateRequest, now: Duration) -> Result<SequenceKey, RequestError> {
        self.submit_as(request, Purpose::Prefill, now)
    }

    /// Lends what is cached of a prompt, and computes nothing; none when nothing is.
    pub fn lend_cached(&mut self, request: GenerateRequest) -> Option<CachedHold> {
        let (key, block_size) = (self.next_key(), self.block_size());
        let mut sequence = Sequence::new(request, key, self.config.length_max() as usize, self.config.model);
        let n_full = sequence.tokens.len() / block_size;
        let chain = sequence.hashes(&self.config.hash_key, block_size, n_full);
        let (n_matched, _) = self.pool.n_matched(chain);
        let block = |&hash| self.pool.lookup(hash).expect("matched blocks are indexed");
        let table: Vec<BlockId> = chain[..n_matched].iter().map(block).collect();
        if table.is_empty() {
            return None;
        }
        table.iter().for_each(|&block| self.pool.retain(block));
        sequence.table.clone_from(&table);
        (sequence.state, sequence.is_held) = (State::Lent, true);
        let idx = self.sequences.insert(sequence);
        self.held.insert(key, idx);
        Some(CachedHold { key, n_tokens: n_matched * block_size, table })
    }

    /// Moves holds that began since the last call to `holds`.
    pub fn drain_holds(&mut self, holds: &mut Vec<Hold>) {
        holds.append(&mut self.new_holds);
    }

    /// Ends a hold: others use its blocks no more. Of blocks that were to be filled, the KV of the first `n_filled` tokens
    /// is there, those that were cached included; the engine computes the rest.
    ///
    /// False when there is no such hold.
    pub fn let_go(&mut self, key: SequenceKey, n_filled: usize) -> bool {
        let Some(idx) = self.held.remove(&key) else { return false };
        let sequence = &mut self.sequences[idx];
        sequence.is_held = false;
        match sequence.state {
            State::Receiving => self.receive(idx, n_filled),
            State::Lent => {
                self.return_blocks(idx);
                self.sequences.remove(idx);
            }
            // Nobody wants it any more.
            State::Running if sequence.purpose == Purpose::Prefill => {
                self.end(idx);
                self.retire_if_drained(idx);
            }
            State::Waiting | State::Running | State::Preempted | State::Ended => {}
        }
        true
    }

    /// Holds that have begun and not ended.
    pub fn n_held(&self) -> usize {
        self.held.len()
    }

    /// Lends the blocks of a request that has just been given its cached ones, if it is to move between engines.
    ///
    /// Returns whether others fill them, so that there is nothing to plan yet.
    pub(crate) fn hold(&mut self, idx: SequenceIdx) -> bool {
        let block_size = self.block_size();
        let sequence = &mut self.sequences[idx];
        let n_tokens = sequence.tokens.len();
        // The last token is computed here, for its logits.
        let (usage, n_held) = match sequence.purpose {
            Purpose::Generate => return false,
            Purpose::Receive => (HoldUsage::Fill, n_tokens - 1),
            Purpose::Prefill => (HoldUsage::Read, n_tokens),
        };
        let n_cached = sequence.n_computed;
        if usage == HoldUsage::Fill && n_cached >= n_held {
            sequence.purpose = Purpose::Generate;
            return false;
        }
        while sequence.table.len() < n_tokens.div_ceil(block_size) {
            sequence.table.push(self.pool.allocate().expect("admission found room for all of its tokens"));
        }
        sequence.is_held = true;
        self.held.insert(sequence.key(), idx);
        self.new_holds.push(Hold {
            key: sequence.key(),
            request: sequence.id,
            slot: sequence.slot.expect("running requests hold a slot"),
            usage,
            n_tokens: n_held,
            n_cached,
            table: sequence.table[..n_held.div_ceil(block_size)].to_vec(),
        });
        let is_filled = usage == HoldUsage::Fill;
        if is_filled {
            sequence.state = State::Receiving;
        }
        is_filled
    }

    /// Lets a request run whose first `n_filled` tokens have KV.
    fn receive(&mut self, idx: SequenceIdx, n_filled: usize) {
        let sequence = &mut self.sequences[idx];
        let n_filled = n_filled.clamp(sequence.n_computed, sequence.tokens.len() - 1);
        (sequence.n_planned, sequence.n_computed) = (n_filled, n_filled);
        // Should it lose its blocks, it computes all of it here.
        sequence.purpose = Purpose::Generate;
        self.insert_running(idx);
        self.commit_blocks(idx);
    }
}
