//! Takes a step's output: indexes the blocks it filled, hands on its tokens, ends requests, returns blocks.

use contract::plan::{SampledToken, StepOutput};
use contract::stream::FinishReason;

use crate::block_pool::CachedBlock;
use crate::engine::Engine;
use crate::in_flight::PlanInFlight;
use crate::output::{ApplyError, Output, OutputEvent};
use crate::sequence::{Purpose, SequenceIdx, State};

impl Engine {
    /// Takes the output of the oldest plan in flight and appends what it means for requests to `outputs`.
    ///
    /// # Errors
    /// When `output` is not what that plan asked for; nothing has changed then.
    pub fn apply(&mut self, output: StepOutput, outputs: &mut Vec<Output>) -> Result<(), ApplyError> {
        let due = self.in_flight.front().filter(|due| due.step == output.step);
        let due = due.ok_or(ApplyError::WrongStep { expected: self.oldest_in_flight(), got: output.step })?;
        check_output(due, &output)?;
        let mut record = self.in_flight.pop_front().expect("a step is due");
        let mut sampled = output.sequences.into_iter();
        for planned in record.sequences.drain(..) {
            let tokens = if planned.samples { sampled.next().map(|output| output.tokens) } else { None };
            let sequence = &mut self.sequences[planned.idx];
            sequence.n_in_flight -= 1;
            let n_new = planned.n_computed - sequence.n_computed;
            let context = sequence.n_computed as u64;
            // The step that yields the first token is the prompt's, even where all of it but a token came from elsewhere.
            if n_new > 1 || !planned.samples || !sequence.has_reported {
                self.counters.computed.add_prefill(n_new as u64, context);
            } else {
                self.counters.computed.add_decode(1, context);
            }
            sequence.n_computed = planned.n_computed;
            sequence.n_pending -= usize::from(planned.samples);
            if sequence.state != State::Ended {
                self.commit_blocks(planned.idx);
                if let Some(tokens) = tokens {
                    self.emit_tokens(planned.idx, tokens, outputs);
                } else {
                    self.end_prefill(planned.idx, outputs);
                }
            }
            self.retire_if_drained(planned.idx);
        }
        for block in record.releases.drain(..) {
            self.pool.release(block);
        }
        self.spare.records.push(record);
        Ok(())
    }

    /// Indexes the full blocks of a request whose KV is computed.
    pub(crate) fn commit_blocks(&mut self, idx: SequenceIdx) {
        let block_size = self.block_size();
        let sequence = &mut self.sequences[idx];
        let n_full = sequence.n_computed / block_size;
        if sequence.epoch != self.epoch {
            return;
        }
        for i in sequence.n_committed..n_full {
            let hashes = sequence.hashes(&self.config.hash_key, block_size, i + 1);
            let parent = i.checked_sub(1).map(|before| hashes[before]);
            let cached = CachedBlock { hash: hashes[i], parent, depth: i as u32 };
            let block = sequence.table[i];
            let kept = self.pool.commit(block, cached);
            if kept != block {
                // The executor hears of it with the next plan; one in flight may still name the old block.
                sequence.table[i] = kept;
                sequence.n_sent = sequence.n_sent.min(i);
                match self.in_flight.back_mut().filter(|_| sequence.n_in_flight > 0) {
                    _ if sequence.is_held => sequence.shadows.push(block),
                    Some(last) => last.releases.push(block),
                    None => self.pool.release(block),
                }
            }
            sequence.n_committed = i + 1;
        }
    }

    /// Ends a request that was computed for others, if all of it is.
    fn end_prefill(&mut self, idx: SequenceIdx, outputs: &mut Vec<Output>) {
        let sequence = &self.sequences[idx];
        if sequence.purpose == Purpose::Prefill && sequence.n_computed == sequence.tokens.len() {
            let (key, request, attempt) = (sequence.key(), sequence.id, sequence.attempt);
            outputs.push(Output { key, request, attempt, event: OutputEvent::Prefilled });
            self.end(idx);
        }
    }

    fn emit_tokens(&mut self, idx: SequenceIdx, tokens: Vec<SampledToken>, outputs: &mut Vec<Output>) {
        let sequence = &mut self.sequences[idx];
        let first_position = sequence.n_generated() as u32;
        let mut finish = None;
        for sampled in &tokens {
            let is_stop = sequence.is_stop(sampled.token);
            sequence.tokens.push(sampled.token);
            self.counters.tokens_generated += 1;
            if is_stop {
                finish = Some(FinishReason::Stop);
            } else if sequence.tokens.len() >= sequence.length_max {
                finish = Some(FinishReason::Length);
            }
        }
        let cached_tokens = sequence.cached_tokens.filter(|_| !sequence.has_reported);
        // What goes on with tokens from elsewhere has begun there.
        if !std::mem::replace(&mut sequence.has_reported, true) && first_position == 0 {
            self.counters.requests_begun += 1;
            self.counters.prompt_tokens_begun += sequence.n_prompt as u64;
        }
        let event = OutputEvent::Tokens { first_position, tokens, finish, cached_tokens };
        outputs.push(Output { key: sequence.key(), request: sequence.id, attempt: sequence.attempt, event });
        if finish.is_some() {
            self.end(idx);
        }
    }
}

/// Compares an output with what its plan asked for.
fn check_output(due: &PlanInFlight, output: &StepOutput) -> Result<(), ApplyError> {
    let mut expected = due.sequences.iter().filter(|planned| planned.samples).map(|planned| (planned.slot, 1));
    let mut got = output.sequences.iter().map(|sequence| (sequence.slot, sequence.tokens.len()));
    for index in 0.. {
        let (expected, got) = (expected.next(), got.next());
        if expected != got {
            return Err(ApplyError::WrongSequence { step: due.step, index, expected, got });
        }
        if expected.is_none() {
            break;
        }
    }
    Ok(())
}
