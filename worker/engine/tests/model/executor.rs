//! An executor without a model: each place of a block holds the state that its KV stands for, checked on every read.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use contract::ids::{BlockId, SlotId, StepId, Token};
use contract::plan::{ForwardPlan, QueryToken, SampledToken, SamplingSpec, SequenceOutput, SequencePlan, StepOutput};

use super::naive::{self, Expected};

/// Plans received and not run, and what blocks hold.
pub struct Executor {
    block_size: usize,
    kv: Vec<Vec<Option<u64>>>,
    slots: HashMap<SlotId, Slot>,
    sampled: HashMap<(StepId, SlotId), Vec<Token>>,
    queue: VecDeque<Received>,
}

struct Slot {
    spec: Arc<SamplingSpec>,
    /// As of the last plan received.
    table: Vec<BlockId>,
    /// As of the last plan run.
    history: Vec<Token>,
}

struct Received {
    plan: ForwardPlan,
    tables: Vec<Vec<BlockId>>,
}

impl Executor {
    pub fn new(block_size: usize, n_blocks: usize) -> Self {
        Self {
            block_size,
            kv: vec![vec![None; block_size]; n_blocks],
            slots: HashMap::new(),
            sampled: HashMap::new(),
            queue: VecDeque::new(),
        }
    }

    /// Takes a plan, which waits for `run`, and checks that it leaves alone what plans before it still use.
    pub fn receive(&mut self, plan: ForwardPlan) {
        let mut tables = Vec::new();
        let mut named = HashSet::new();
        for sequence in &plan.sequences {
            assert!(named.insert(sequence.slot), "slot {:?} is named twice", sequence.slot);
            if let Some(spec) = &sequence.start {
                let is_busy = self.queue.iter().any(|r| r.plan.sequences.iter().any(|s| s.slot == sequence.slot));
                assert!(!is_busy, "slot {:?} is reused while a plan in flight names it", sequence.slot);
                let slot = Slot { spec: Arc::clone(spec), table: Vec::new(), history: spec.history.clone() };
                self.slots.insert(sequence.slot, slot);
            }
            let slot = self.slots.get_mut(&sequence.slot).expect("a slot starts before it goes on");
            assert!(sequence.blocks.keep as usize <= slot.table.len(), "keeps no more than there is");
            slot.table.truncate(sequence.blocks.keep as usize);
            slot.table.extend_from_slice(&sequence.blocks.append);
            tables.push(slot.table.clone());
        }
        let received = Received { plan, tables };
        for earlier in &self.queue {
            self.check_disjoint(earlier, &received);
        }
        self.check_disjoint(&received, &received);
        self.queue.push_back(received);
    }

    /// Runs the oldest plan; requests are known by their seeds.
    pub fn run(&mut self, expected: &HashMap<u64, Expected>) -> Option<(ForwardPlan, StepOutput)> {
        let Received { plan, tables } = self.queue.pop_front()?;
        let mut sequences = Vec::new();
        for (sequence, table) in plan.sequences.iter().zip(&tables) {
            let seed = self.slots[&sequence.slot].spec.params.seed;
            self.write(sequence, table, &expected[&seed]);
            if !sequence.logits_rows.is_empty() {
                let tokens = self.sample(plan.step, sequence, table, &expected[&seed]);
                sequences.push(SequenceOutput { slot: sequence.slot, tokens });
            }
        }
        let output = StepOutput { step: plan.step, sequences };
        Some((plan, output))
    }

    /// Blocks that the plan received last writes, with the slot.
    pub fn written(&self) -> Vec<(SlotId, BlockId)> {
        let Some(received) = self.queue.back() else { return Vec::new() };
        let sequences = received.plan.sequences.iter().zip(&received.tables);
        let blocks = |(sequence, table): (&SequencePlan, &Vec<BlockId>)| {
            let first = sequence.position as usize / self.block_size;
            let last = (sequence.position as usize + sequence.query.len() - 1) / self.block_size;
            table[first..=last].iter().map(|&block| (sequence.slot, block)).collect::<Vec<_>>()
        };
        sequences.flat_map(blocks).collect()
    }

    /// Writes KV from outside: the states of the first tokens, and nonsense after them.
    pub fn fill(&mut self, table: &[BlockId], positions: std::ops::Range<usize>, states: &[u64]) {
        for position in positions {
            let block = table[position / self.block_size].0 as usize;
            self.kv[block][position % self.block_size] = states.get(position).copied().or(Some(0));
        }
    }

    /// Checks what others would read of lent blocks.
    pub fn check_kv(&self, table: &[BlockId], states: &[u64]) {
        for (position, &state) in states.iter().enumerate() {
            assert_eq!(self.read(table, position), Some(state), "KV of position {position} for others");
        }
    }

    pub fn n_queued(&self) -> usize {
        self.queue.len()
    }

    /// Gives the plan received last back, not run; `receive` takes it again, with more in it.
    pub fn give_back(&mut self) -> Option<ForwardPlan> {
        self.queue.pop_back().map(|received| received.plan)
    }

    /// Forgets plans not run.
    pub fn forget_plans(&mut self) {
        self.queue.clear();
    }

    fn write(&mut self, sequence: &SequencePlan, table: &[BlockId], expected: &Expected) {
        let position = sequence.position as usize;
        for (before, &state) in expected.states[..position].iter().enumerate() {
            assert_eq!(self.read(table, before), Some(state), "KV of position {before} of {:?}", expected.request.id);
        }
        for (row, query) in sequence.query.iter().enumerate() {
            let token = match *query {
                QueryToken::Value(token) => token,
                QueryToken::Sampled { step, row } => self.sampled[&(step, sequence.slot)][row as usize],
            };
            let at = position + row;
            assert_eq!(token, expected.tokens[at], "query token at position {at} of {:?}", expected.request.id);
            let state = match at.checked_sub(1) {
                Some(before) => self.read(table, before).expect("KV before is computed"),
                None => naive::initial_state(&expected.request.cache_salt),
            };
            let block = table[at / self.block_size].0 as usize;
            self.kv[block][at % self.block_size] = Some(naive::mix(state, token.into()));
        }
    }

    fn sample(
        &mut self,
        step: StepId,
        sequence: &SequencePlan,
        table: &[BlockId],
        expected: &Expected,
    ) -> Vec<SampledToken> {
        let n_query = sequence.query.len() as u32;
        assert_eq!(sequence.logits_rows, n_query - 1..n_query);
        let last = (sequence.position + n_query - 1) as usize;
        let state = self.read(table, last).expect("KV of the query is computed");
        let slot = self.slots.get_mut(&sequence.slot).expect("a slot starts before it samples");
        let spec = &slot.spec;
        assert_eq!(spec.n_prompt as usize, expected.request.prompt.len());
        if spec.params.has_penalties() {
            assert_eq!(slot.history, expected.tokens[..last + 1], "history of {:?}", expected.request.id);
        } else {
            assert_eq!(spec.history, [], "no history without penalties");
        }
        let index = last + 1 - spec.n_prompt as usize;
        let forbidden = if index < spec.min_tokens as usize { &spec.stop_token_ids[..] } else { &[] };
        let history = if spec.params.has_penalties() { &slot.history[..] } else { &[] };
        let token = naive::sample(state, spec.params.seed, history, forbidden);
        slot.history.push(token);
        self.sampled.insert((step, sequence.slot), vec![token]);
        vec![SampledToken { token, logprob: f32::NAN, top: Vec::new() }]
    }

    fn read(&self, table: &[BlockId], position: usize) -> Option<u64> {
        self.kv[table[position / self.block_size].0 as usize][position % self.block_size]
    }

    /// Checks that no block which `later` writes is used by another sequence of `earlier`.
    fn check_disjoint(&self, earlier: &Received, later: &Received) {
        for (writer, table) in later.plan.sequences.iter().zip(&later.tables) {
            let first = writer.position as usize / self.block_size;
            let last = (writer.position as usize + writer.query.len() - 1) / self.block_size;
            let written = &table[first..=last];
            for (reader, used) in earlier.plan.sequences.iter().zip(&earlier.tables) {
                let is_shared = written.iter().any(|block| used.contains(block));
                assert!(reader.slot == writer.slot || !is_shared, "{:?} writes {:?}'s block", writer.slot, reader.slot);
            }
        }
    }
}
