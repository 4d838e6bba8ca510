//! A question, checked once, as the requests that workers take.

use std::sync::Arc;

use contract::error::RequestError;
use contract::ids::{RequestId, TenantId, Token};
use contract::request::GenerateRequest;

use super::options::{Options, seed_of};
use super::service::{Service, text_error};
use super::{Input, Prompt, Question};
use crate::model::{PromptBlocks, ServedModel};

/// Prompts from here on take longer to hash than an async task may block.
const LONG_PROMPT_TOKENS: usize = 16_384;

/// A prompt with a request for each of its choices.
pub(crate) struct Prepared {
    pub(crate) requests: Vec<GenerateRequest>,
    pub(crate) blocks: Arc<PromptBlocks>,
}

impl Service {
    /// Checks what needs no work: the model's name, options, and that there is something to answer.
    ///
    /// # Errors
    /// The first thing that is wrong, by the client's own field name.
    pub(crate) fn check(&self, question: &Question) -> Result<(), RequestError> {
        self.check_model(&question.model)?;
        let n_prompts = match &question.input {
            Input::Prompts(prompts) => prompts.len(),
            Input::Chat(..) => 1,
        };
        question.options.check(&self.limits, n_prompts)?;
        question.options.sampling(&self.model.defaults, 0).validate()?;
        match &question.input {
            Input::Prompts(prompts) if prompts.is_empty() || prompts.iter().any(is_empty) => Err(empty()),
            Input::Chat(messages, _) if messages.is_empty() => {
                Err(RequestError::invalid("messages", "is empty; give at least one message"))
            }
            Input::Prompts(_) | Input::Chat(..) => Ok(()),
        }
    }

    /// Turns a question that was checked into valid requests.
    ///
    /// # Errors
    /// The first thing that is wrong, by the client's own field name.
    pub(crate) async fn prepare(&self, question: &mut Question) -> Result<Vec<Prepared>, RequestError> {
        let options = &question.options;
        let input = std::mem::replace(&mut question.input, Input::Prompts(Vec::new()));
        let prompts = match input {
            Input::Prompts(prompts) => self.encode_prompts(prompts, options).await?,
            Input::Chat(messages, chat) => {
                let context_length = self.cluster.context_length();
                let encode = move |model: &ServedModel| {
                    let text =
                        model.text.render_chat(&messages, &chat).map_err(|error| text_error("messages", &error))?;
                    check_length(model, &text, context_length)?;
                    model.text.encode(&text, Some(false)).map_err(|error| text_error("messages", &error))
                };
                // Templates are programs: even a short conversation may take a while.
                let prompt = self.compute(true, encode).await??;
                if prompt.is_empty() {
                    return Err(RequestError::invalid("messages", "they render to no token"));
                }
                vec![prompt]
            }
        };
        let mut prepared = Vec::with_capacity(prompts.len());
        let seed = options.seed.unwrap_or_else(daemon::random::u64);
        for prompt in prompts {
            let request = self.prepare_prompt(prompt, options, &question.tenant.name, seed).await;
            prepared.push(request.map_err(|error| options.rename(error))?);
        }
        Ok(prepared)
    }

    async fn encode_prompts(&self, prompts: Vec<Prompt>, options: &Options) -> Result<Vec<Vec<Token>>, RequestError> {
        let mut encoded = Vec::with_capacity(prompts.len());
        for prompt in prompts {
            let tokens = match prompt {
                Prompt::Tokens(tokens) => tokens,
                Prompt::Text(text) => {
                    check_length(&self.model, &text, self.cluster.context_length())?;
                    self.encode("prompt", text, options.add_special).await?
                }
            };
            if tokens.is_empty() {
                return Err(empty());
            }
            encoded.push(tokens);
        }
        Ok(encoded)
    }

    async fn prepare_prompt(
        &self,
        prompt: Vec<Token>,
        options: &Options,
        tenant: &TenantId,
        seed: u64,
    ) -> Result<Prepared, RequestError> {
        let context_length = self.cluster.context_length();
        let first = GenerateRequest {
            id: RequestId(daemon::random::u128()),
            attempt: 0,
            model: self.model.name().into(),
            generated: Vec::new(),
            tenant: tenant.clone(),
            cache_salt: options.cache_salt.clone(),
            adapter: options.adapter.clone(),
            priority: options.priority,
            deadline: None,
            sampling: options.sampling(&self.model.defaults, seed),
            stop: options.stops(&self.model.stop_token_ids, prompt.len(), context_length),
            logprobs: options.logprobs,
            prompt_logprobs: None,
            prefill_on: Vec::new(),
            prompt,
        };
        first.validate(self.model.vocab_size(), context_length)?;
        let is_long = first.prompt.len() >= LONG_PROMPT_TOKENS;
        let salt = options.cache_salt.clone();
        let adapter = options.adapter.clone();
        let hash = move |model: &ServedModel| {
            let blocks = model.hash_blocks(&first.prompt, &adapter, &salt);
            (first, blocks)
        };
        let (first, blocks) = self.compute(is_long, hash).await?;
        let mut requests = Vec::with_capacity(options.n as usize);
        for choice in 1..options.n {
            let mut request = first.clone();
            request.id = RequestId(daemon::random::u128());
            request.sampling.seed = seed_of(seed, choice);
            requests.push(request);
        }
        requests.insert(0, first);
        Ok(Prepared { requests, blocks: Arc::new(blocks) })
    }
}

/// Refuses a text that cannot fit the context whatever its tokens are, before any time is spent on it.
fn check_length(model: &ServedModel, text: &str, context_length: u32) -> Result<(), RequestError> {
    let n_tokens = model.text.n_tokens_min(text) as u64;
    let limit = u64::from(context_length.saturating_sub(1));
    if n_tokens > limit { Err(RequestError::PromptTooLong { n_tokens, at_least: true, limit }) } else { Ok(()) }
}

fn is_empty(prompt: &Prompt) -> bool {
    match prompt {
        Prompt::Text(text) => text.is_empty(),
        Prompt::Tokens(tokens) => tokens.is_empty(),
    }
}

fn empty() -> RequestError {
    RequestError::invalid("prompt", "is empty; give text or at least one token id")
}
