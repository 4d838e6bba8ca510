//! One request inside the engine: its tokens, its block table, and how far it is planned and computed.

use std::ops::{Index, IndexMut};
use std::sync::Arc;
use std::time::Duration;

use contract::hash::{BlockHash, HashKey, PrefixScope};
use contract::ids::{BlockId, RequestId, SlotId, StepId, Token};
use contract::model::Fingerprint;
use contract::plan::SamplingSpec;
use contract::request::GenerateRequest;

use crate::output::SequenceKey;

/// Lower goes first: priority, then arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rank {
    pub(crate) priority: i32,
    pub(crate) arrival: SequenceKey,
}

/// Where a request is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// In the queue, without slot and blocks.
    Waiting,
    /// Holds a slot, may be planned.
    Running,
    /// Lost its place; goes back to the queue when no plan in flight names it.
    Preempted,
    /// Holds slot and blocks; others write the KV of its prompt into them.
    Receiving,
    /// Has no reader; goes away when no plan in flight names it.
    Ended,
    /// Has ended, but others use its blocks; goes away when they let go.
    Lent,
}

/// What a request is computed for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Tokens.
    Generate,
    /// Tokens; the KV of the prompt's beginning comes from elsewhere.
    Receive,
    /// The KV of its tokens, which others read; nothing is sampled.
    Prefill,
}

/// A request and what the engine knows of it.
#[derive(Debug)]
pub(crate) struct Sequence {
    pub(crate) rank: Rank,
    pub(crate) id: RequestId,
    pub(crate) attempt: u32,
    pub(crate) deadline: Option<Duration>,
    pub(crate) state: State,
    pub(crate) purpose: Purpose,
    /// Others use its blocks: none returns before they let go.
    pub(crate) is_held: bool,
    /// Blocks that others use though the table names equal ones instead.
    pub(crate) shadows: Vec<BlockId>,
    /// Prompt and output, tokens of steps in flight excluded.
    pub(crate) tokens: Vec<Token>,
    pub(crate) n_prompt: usize,
    /// Tokens with which it ends, whatever they are.
    pub(crate) length_max: usize,
    /// Without history.
    spec: Arc<SamplingSpec>,
    scope: PrefixScope,
    hashes: Vec<BlockHash>,
    pub(crate) slot: Option<SlotId>,
    pub(crate) has_started: bool,
    pub(crate) table: Vec<BlockId>,
    /// Entries of the table that the executor knows.
    pub(crate) n_sent: usize,
    /// Blocks at the table's start that are indexed, or were before the cache was cleared.
    pub(crate) n_committed: usize,
    /// The cache's epoch at admission: blocks of an older one are not indexed.
    pub(crate) epoch: u64,
    /// Tokens whose KV is computed, or will be by plans in flight.
    pub(crate) n_planned: usize,
    /// Tokens whose KV is computed.
    pub(crate) n_computed: usize,
    /// Tokens known at admission.
    pub(crate) n_prefill: usize,
    /// Tokens being sampled by plans in flight.
    pub(crate) n_pending: usize,
    /// The last step that samples for it.
    pub(crate) sample_step: StepId,
    /// Plans in flight that name it.
    pub(crate) n_in_flight: u32,
    /// Prompt tokens cached at the first admission.
    pub(crate) cached_tokens: Option<u32>,
    pub(crate) has_reported: bool,
}

impl Sequence {
    pub(crate) fn new(request: GenerateRequest, key: SequenceKey, length_max: usize, model: Fingerprint) -> Self {
        let n_prompt = request.prompt.len();
        let mut tokens = request.prompt;
        tokens.extend_from_slice(&request.generated);
        let spec = SamplingSpec {
            params: request.sampling,
            logprobs: request.logprobs,
            n_prompt: n_prompt as u32,
            min_tokens: request.stop.min_tokens,
            stop_token_ids: request.stop.token_ids,
            history: Vec::new(),
        };
        Self {
            rank: Rank { priority: request.priority, arrival: key },
            id: request.id,
            attempt: request.attempt,
            deadline: None,
            state: State::Waiting,
            purpose: Purpose::Generate,
            is_held: false,
            shadows: Vec::new(),
            tokens,
            n_prompt,
            length_max: length_max.min(n_prompt.saturating_add(request.stop.max_tokens as usize)),
            spec: Arc::new(spec),
            scope: PrefixScope::new(model, &request.adapter, &request.cache_salt),
            hashes: Vec::new(),
            slot: None,
            has_started: false,
            table: Vec::new(),
            n_sent: 0,
            n_committed: 0,
            epoch: 0,
            n_planned: 0,
            n_computed: 0,
            n_prefill: 0,
            n_pending: 0,
            sample_step: StepId(0),
            n_in_flight: 0,
            cached_tokens: None,
            has_reported: false,
        }
    }

    pub(crate) fn key(&self) -> SequenceKey {
        self.rank.arrival
    }

    /// Output tokens so far.
    pub(crate) fn n_generated(&self) -> usize {
        self.tokens.len() - self.n_prompt
    }

    /// Tokens that a plan may compute next; exactly one while it decodes.
    pub(crate) fn n_remaining(&self) -> usize {
        self.tokens.len() + self.n_pending - self.n_planned
    }

    /// Whether it ends with the tokens being sampled now.
    pub(crate) fn ends_when_applied(&self) -> bool {
        self.tokens.len() + self.n_pending >= self.length_max
    }

    /// Whether this token, about to be the last, ends it.
    pub(crate) fn is_stop(&self, token: Token) -> bool {
        self.n_generated() >= self.spec.min_tokens as usize && self.spec.stop_token_ids.contains(&token)
    }

    /// What the sampler must know when the request takes a slot now.
    pub(crate) fn spec_at_start(&self) -> Arc<SamplingSpec> {
        if !self.spec.params.has_penalties() {
            return Arc::clone(&self.spec);
        }
        Arc::new(SamplingSpec { history: self.tokens.clone(), ..SamplingSpec::clone(&self.spec) })
    }

    /// Hashes of the first `n_blocks` blocks, all full.
    pub(crate) fn hashes(&mut self, key: &HashKey, block_size: usize, n_blocks: usize) -> &[BlockHash] {
        for i in self.hashes.len()..n_blocks {
            let block = &self.tokens[i * block_size..(i + 1) * block_size];
            self.hashes.push(self.scope.hash_next(key, self.hashes.last().copied(), block));
        }
        &self.hashes[..n_blocks]
    }

    /// Whether a plan that computes up to `end` samples its next token.
    pub(crate) fn samples_at(&self, end: usize) -> bool {
        self.purpose != Purpose::Prefill && end == self.tokens.len() + self.n_pending
    }

    /// Takes slot and table away; all tokens are to be computed again.
    pub(crate) fn reset(&mut self) -> (Option<SlotId>, Vec<BlockId>) {
        debug_assert_eq!((self.n_in_flight, self.state == State::Running), (0, false));
        self.has_started = false;
        (self.n_sent, self.n_committed) = (0, 0);
        (self.n_planned, self.n_computed, self.n_prefill, self.n_pending) = (0, 0, 0, 0);
        let mut table = std::mem::take(&mut self.table);
        table.append(&mut self.shadows);
        (self.slot.take(), table)
    }
}

/// A place in the table of requests, reused after the request is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SequenceIdx(u32);

/// All requests by index.
#[derive(Debug, Default)]
pub(crate) struct SequenceTable {
    entries: Vec<Option<Sequence>>,
    free: Vec<SequenceIdx>,
}

impl SequenceTable {
    pub(crate) fn insert(&mut self, sequence: Sequence) -> SequenceIdx {
        let idx = self.free.pop().unwrap_or_else(|| {
            self.entries.push(None);
            SequenceIdx(self.entries.len() as u32 - 1)
        });
        self.entries[idx.0 as usize] = Some(sequence);
        idx
    }

    pub(crate) fn remove(&mut self, idx: SequenceIdx) -> Sequence {
        self.free.push(idx);
        self.entries[idx.0 as usize].take().expect(LIVE)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (SequenceIdx, &Sequence)> {
        self.entries.iter().enumerate().filter_map(|(i, entry)| Some((SequenceIdx(i as u32), entry.as_ref()?)))
    }
}

const LIVE: &str = "an index lives as long as its sequence";

impl Index<SequenceIdx> for SequenceTable {
    type Output = Sequence;

    fn index(&self, idx: SequenceIdx) -> &Sequence {
        self.entries[idx.0 as usize].as_ref().expect(LIVE)
    }
}

impl IndexMut<SequenceIdx> for SequenceTable {
    fn index_mut(&mut self, idx: SequenceIdx) -> &mut Sequence {
        self.entries[idx.0 as usize].as_mut().expect(LIVE)
    }
}
