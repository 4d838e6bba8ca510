//! An executor without a model: each token is a hash of the one before it, its position and the seed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use contract::ids::Token;
use contract::plan::{ForwardPlan, SampledToken, SequenceOutput, StepOutput};

use super::harness::Gate;
use crate::executor::{Executor, ExecutorError, SlotTable};
use crate::sampler::philox::philox;

/// Entries of the fake vocabulary.
pub(super) const VOCAB: u32 = 1000;

/// What the fake does beside answering.
#[derive(Clone, Default)]
pub(super) struct Behaviour {
    /// Every step takes a permit when there is a gate.
    pub(super) gate: Option<Gate>,
    /// Fails the next step.
    pub(super) fails: Arc<AtomicBool>,
    /// Panics in the next step.
    pub(super) panics: Arc<AtomicBool>,
}

pub(super) struct Fake {
    slots: SlotTable,
    tokens: Vec<Token>,
    behaviour: Behaviour,
}

impl Fake {
    pub(super) fn new(n_slots: usize, behaviour: Behaviour) -> Self {
        Self { slots: SlotTable::new(n_slots), tokens: Vec::new(), behaviour }
    }
}

impl Executor for Fake {
    fn run(&mut self, plan: &ForwardPlan) -> Result<StepOutput, ExecutorError> {
        if let Some(gate) = &self.behaviour.gate {
            gate.pass();
        }
        assert!(!self.behaviour.panics.load(Ordering::Relaxed), "planted panic");
        if self.behaviour.fails.load(Ordering::Relaxed) {
            return Err(ExecutorError::Other("planted failure".to_owned()));
        }
        let mut sequences = Vec::new();
        for sequence in &plan.sequences {
            let slot = self.slots.advance(sequence, &mut self.tokens)?;
            let spec = slot.spec().unwrap();
            let (seed, logprobs) = (spec.params.seed, spec.logprobs);
            let rows = sequence.logits_rows.clone();
            let tokens: Vec<_> = rows
                .map(|row| {
                    let token = next(self.tokens[row as usize], sequence.position + row + 1, seed);
                    let top = (0..logprobs.unwrap_or(0)).map(|i| (i, -1.0)).collect();
                    SampledToken { token, logprob: -1.0, top }
                })
                .collect();
            for sampled in &tokens {
                self.slots.note(plan.step, sequence, sampled.token)?;
            }
            if !tokens.is_empty() {
                sequences.push(SequenceOutput { slot: sequence.slot, tokens });
            }
        }
        Ok(StepOutput { step: plan.step, sequences })
    }

    fn computed(&self) -> Duration {
        Duration::ZERO
    }
}

/// The token at `position` after `last`.
fn next(last: Token, position: u32, seed: u64) -> Token {
    philox([last, position, 0, 0], [seed as u32, (seed >> 32) as u32])[0] % VOCAB
}

/// What the fake answers to a prompt.
pub(super) fn answer(prompt: &[Token], seed: u64, n: usize) -> Vec<Token> {
    let mut tokens = prompt.to_vec();
    for _ in 0..n {
        tokens.push(next(*tokens.last().unwrap(), tokens.len() as u32, seed));
    }
    tokens.split_off(prompt.len())
}
