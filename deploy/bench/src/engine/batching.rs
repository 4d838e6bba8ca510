//! Runs decode through the engine, the executor and the sampler, one after the other on one thread: what a step costs
//! outside model and sampler. A worker plans and applies on another thread while a step runs, and waits for less.

use std::time::Duration;

use contract::hash::HashKey;
use contract::ids::{ModelName, RequestId, TenantId};
use contract::request::{GenerateRequest, SamplingParams, StopParams};
use daemon::clock;
use engine::{Engine, EngineConfig, Output, OutputEvent};
use models::ModelFiles;
use worker::executor::{Executor as _, ModelExecutor};

use super::direct::Parts;
use super::{BLOCK_SIZE, EngineError, EngineOptions, Repetition};
use crate::random::Random;

/// An engine over a loaded model.
pub(crate) struct Batching {
    engine: Engine,
    executor: ModelExecutor,
    /// Time in the model and the sampler.
    computed: Duration,
    outputs: Vec<Output>,
    random: Random,
    vocab_size: u32,
    n_requests: u128,
}

impl Batching {
    /// Puts an engine around what was loaded.
    pub(crate) fn new(files: &ModelFiles, parts: Parts, options: &EngineOptions) -> Result<Self, EngineError> {
        let Parts { ops, model, kv, limits } = parts;
        let vocab_size = model.config().vocab_size as u32;
        let engine = Engine::new(EngineConfig {
            block_size: BLOCK_SIZE,
            n_blocks: kv.n_blocks() as u32,
            max_running: limits.sequences as u32,
            max_waiting: limits.sequences as u32,
            token_budget: limits.tokens as u32,
            prefill_budget: None,
            max_prefill_chunk: None,
            context_length: (options.context + options.decode_steps + options.slack()) as u32,
            watermark_blocks: 0,
            retry_after_ms: 0,
            hash_key: HashKey([0; 32]),
            model: files.model_fingerprint(),
        })?;
        let executor = ModelExecutor::new(ops, model, kv, limits)?;
        let random = Random::new(0, 1);
        Ok(Self { engine, executor, computed: Duration::ZERO, outputs: Vec::new(), random, vocab_size, n_requests: 0 })
    }

    /// Times `n_steps` steps of `batch` requests, all of which decode after prompts of `context` random tokens.
    pub(crate) fn decode(&mut self, batch: usize, context: usize, n_steps: usize) -> Result<Repetition, EngineError> {
        for _ in 0..batch {
            let request = self.request(context);
            self.engine.submit(request, Duration::ZERO).map_err(EngineError::Request)?;
        }
        let mut n_begun = 0;
        while n_begun < batch && self.step()? {
            let first = |output: &&Output| matches!(output.event, OutputEvent::Tokens { first_position: 0, .. });
            n_begun += self.outputs.iter().filter(first).count();
            self.told()?;
        }
        self.computed = Duration::ZERO;
        let mut n_tokens = 0;
        let began = clock::now();
        for _ in 0..n_steps {
            self.step()?;
            n_tokens += self.told()?;
        }
        let seconds = clock::now().duration_since(began).as_secs_f64();
        for id in self.n_requests + 1 - batch as u128..=self.n_requests {
            self.engine.abort(RequestId(id));
        }
        Ok(Repetition { seconds, n_steps, n_tokens, outside: Some(seconds - self.computed.as_secs_f64()) })
    }

    /// One step; false when there is nothing to compute.
    fn step(&mut self) -> Result<bool, EngineError> {
        let Some(plan) = self.engine.plan() else { return Ok(false) };
        let output = self.executor.run(&plan)?;
        self.computed += self.executor.computed();
        self.engine.apply(output, &mut self.outputs)?;
        self.engine.recycle(plan);
        Ok(true)
    }

    /// Forgets what the engine told and counts its tokens.
    fn told(&mut self) -> Result<usize, EngineError> {
        let mut n_tokens = 0;
        for output in self.outputs.drain(..) {
            match output.event {
                OutputEvent::Tokens { tokens, .. } => n_tokens += tokens.len(),
                OutputEvent::Prefilled => {}
                OutputEvent::Failed(error) => return Err(EngineError::Request(error)),
            }
        }
        Ok(n_tokens)
    }

    fn request(&mut self, n_prompt: usize) -> GenerateRequest {
        self.n_requests += 1;
        let prompt = (0..n_prompt).map(|_| self.random.below(self.vocab_size)).collect();
        GenerateRequest {
            id: RequestId(self.n_requests),
            attempt: 0,
            model: ModelName::from("bench"),
            prompt,
            generated: Vec::new(),
            tenant: TenantId::from(""),
            cache_salt: String::new(),
            adapter: String::new(),
            priority: 0,
            deadline: None,
            sampling: SamplingParams { temperature: 0.0, ..SamplingParams::default() },
            stop: StopParams { token_ids: Vec::new(), min_tokens: 0, max_tokens: u32::MAX },
            logprobs: None,
            prompt_logprobs: None,
            prefill_on: Vec::new(),
        }
    }
}
