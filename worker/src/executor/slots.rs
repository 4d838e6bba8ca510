//! What an executor keeps of each running sequence: block table, sampling spec, token counts and its last output.

use std::sync::Arc;

use contract::ids::{SlotId, StepId, Token};
use contract::plan::{QueryToken, SamplingSpec, SequencePlan};

use super::ExecutorError;
use crate::sampler::TokenCounts;

/// One sequence.
#[derive(Debug, Default)]
pub struct Slot {
    spec: Option<Arc<SamplingSpec>>,
    blocks: Vec<u32>,
    counts: TokenCounts,
    last_step: StepId,
    last_tokens: Vec<Token>,
}

/// All sequences, by slot.
#[derive(Debug)]
pub struct SlotTable {
    slots: Vec<Slot>,
}

impl SlotTable {
    /// Makes a table of empty slots.
    #[must_use]
    pub fn new(n_slots: usize) -> Self {
        Self { slots: (0..n_slots).map(|_| Slot::default()).collect() }
    }

    /// Brings a slot to where `plan` wants it and puts the plan's tokens into `tokens`.
    ///
    /// # Errors
    /// When the plan does not follow from what the slot holds.
    pub fn advance(&mut self, plan: &SequencePlan, tokens: &mut Vec<Token>) -> Result<&Slot, ExecutorError> {
        let slot = self.get_mut(plan)?;
        if let Some(spec) = &plan.start {
            slot.start(spec);
        }
        if slot.spec.is_none() {
            return Err(ExecutorError::NotStarted { slot: plan.slot });
        }
        let keep = plan.blocks.keep;
        if keep as usize > slot.blocks.len() {
            return Err(ExecutorError::BlockTable { slot: plan.slot, keep, n_blocks: slot.blocks.len() });
        }
        slot.blocks.truncate(keep as usize);
        slot.blocks.extend(plan.blocks.append.iter().map(|block| block.0));
        tokens.clear();
        for token in &plan.query {
            tokens.push(match *token {
                QueryToken::Value(token) => token,
                QueryToken::Sampled { step, row } => {
                    slot.sampled(step, row).ok_or(ExecutorError::NotSampled { slot: plan.slot, step, row })?
                }
            });
        }
        Ok(slot)
    }

    /// Notes that `token` was sampled for the plan's slot in `step`.
    ///
    /// # Errors
    /// When there is no such slot.
    pub fn note(&mut self, step: StepId, plan: &SequencePlan, token: Token) -> Result<(), ExecutorError> {
        let slot = self.get_mut(plan)?;
        if slot.last_step != step {
            slot.last_step = step;
            slot.last_tokens.clear();
        }
        slot.last_tokens.push(token);
        if slot.spec.as_ref().is_some_and(|spec| spec.params.has_penalties()) {
            slot.counts.add_output(token);
        }
        Ok(())
    }

    /// What a slot holds; none beyond the table.
    #[must_use]
    pub fn get(&self, slot: SlotId) -> Option<&Slot> {
        self.slots.get(slot.0 as usize)
    }

    fn get_mut(&mut self, plan: &SequencePlan) -> Result<&mut Slot, ExecutorError> {
        let n_slots = self.slots.len();
        self.slots.get_mut(plan.slot.0 as usize).ok_or(ExecutorError::NoSuchSlot { slot: plan.slot, n_slots })
    }
}

impl Slot {
    /// How tokens are sampled; none before a request has taken the slot.
    #[must_use]
    pub fn spec(&self) -> Option<&SamplingSpec> {
        self.spec.as_deref()
    }

    /// Blocks from position 0 on.
    #[must_use]
    pub fn blocks(&self) -> &[u32] {
        &self.blocks
    }

    /// Earlier tokens, where the request has penalties.
    #[must_use]
    pub fn counts(&self) -> &TokenCounts {
        &self.counts
    }

    fn start(&mut self, spec: &Arc<SamplingSpec>) {
        self.spec = Some(Arc::clone(spec));
        self.blocks.clear();
        self.counts.clear();
        self.last_tokens.clear();
        self.last_step = StepId::default();
        let (prompt, output) = spec.history.split_at(spec.history.len().min(spec.n_prompt as usize));
        prompt.iter().for_each(|&token| self.counts.add_prompt(token));
        output.iter().for_each(|&token| self.counts.add_output(token));
    }

    fn sampled(&self, step: StepId, row: u32) -> Option<Token> {
        let tokens = (self.last_step == step).then_some(&self.last_tokens)?;
        tokens.get(row as usize).copied()
    }
}

#[cfg(test)]
mod tests {
    use contract::ids::BlockId;
    use contract::plan::BlockTableDelta;
    use contract::request::SamplingParams;

    use super::*;

    fn plan(query: Vec<QueryToken>, keep: u32, append: &[u32], start: bool) -> SequencePlan {
        let spec = SamplingSpec {
            params: SamplingParams::default(),
            logprobs: None,
            n_prompt: 1,
            min_tokens: 0,
            stop_token_ids: vec![],
            history: vec![],
        };
        let logits_rows = 0..query.len() as u32;
        SequencePlan {
            slot: SlotId(0),
            query,
            position: 0,
            blocks: BlockTableDelta { keep, append: append.iter().copied().map(BlockId).collect() },
            logits_rows,
            start: start.then(|| Arc::new(spec)),
            adapter: None,
            mask: None,
        }
    }

    #[test]
    fn follows_deltas_and_resolves_sampled_tokens() {
        let mut table = SlotTable::new(1);
        let mut tokens = Vec::new();
        let first = plan(vec![QueryToken::Value(7)], 0, &[3, 4], true);
        assert_eq!(table.advance(&first, &mut tokens).unwrap().blocks(), [3, 4]);
        table.note(StepId(1), &first, 42).unwrap();
        let sampled = QueryToken::Sampled { step: StepId(1), row: 0 };
        let second = plan(vec![sampled, QueryToken::Value(9)], 1, &[8], false);
        assert_eq!(table.advance(&second, &mut tokens).unwrap().blocks(), [3, 8]);
        assert_eq!(tokens, [42, 9]);
    }

    #[test]
    fn plans_that_do_not_follow_are_typed_errors() {
        let mut table = SlotTable::new(1);
        let mut tokens = Vec::new();
        let value = || vec![QueryToken::Value(1)];
        let not_started = table.advance(&plan(value(), 0, &[], false), &mut tokens);
        assert!(matches!(not_started, Err(ExecutorError::NotStarted { .. })));
        let keeps = table.advance(&plan(value(), 2, &[], true), &mut tokens);
        assert!(matches!(keeps, Err(ExecutorError::BlockTable { keep: 2, n_blocks: 0, .. })));
        let sampled = vec![QueryToken::Sampled { step: StepId(5), row: 0 }];
        let unsampled = table.advance(&plan(sampled, 0, &[], true), &mut tokens);
        assert!(matches!(unsampled, Err(ExecutorError::NotSampled { .. })));
        let beyond = SequencePlan { slot: SlotId(1), ..plan(value(), 0, &[], true) };
        assert!(matches!(table.advance(&beyond, &mut tokens), Err(ExecutorError::NoSuchSlot { .. })));
    }
}
