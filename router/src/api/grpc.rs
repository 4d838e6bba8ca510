//! Service `tessera.inference.v1.Inference`.

use std::sync::Arc;
use std::time::Duration;

use contract::error::RequestError;
use contract::plan::SampledToken;
use futures::stream::{BoxStream, StreamExt as _, iter};
use proto::inference::v1 as wire;
use proto::inference::v1::inference_server::{Inference, InferenceServer};
use proto::status::to_status;
use tonic::metadata::MetadataMap;
use tonic::{Request, Response, Status};

use super::span::trace;
use crate::decisions::Remembered;
use crate::generate::{Event, Input, Operation, Options, Permit, Prompt, Question, Service};
use crate::route::placer::{Considered, Decision};
use crate::text::{ChatMessage, ChatOptions};

/// Makes the service.
pub(crate) fn server(service: Arc<Service>) -> InferenceServer<Grpc> {
    let bytes_max = service.limits.body_bytes_max;
    InferenceServer::new(Grpc(service)).max_decoding_message_size(bytes_max)
}

/// The service over what both APIs share.
pub(crate) struct Grpc(Arc<Service>);

type Responses = BoxStream<'static, Result<wire::GenerateResponse, Status>>;

#[tonic::async_trait]
impl Inference for Grpc {
    type GenerateStream = Responses;
    type ChatStream = Responses;

    async fn generate(&self, request: Request<wire::GenerateRequest>) -> Result<Response<Responses>, Status> {
        let (metadata, _, request) = request.into_parts();
        let question = self.completion(request, &metadata).map_err(|error| self.refuse(&error))?;
        self.answer(question, &metadata).await
    }

    async fn chat(&self, request: Request<wire::ChatRequest>) -> Result<Response<Responses>, Status> {
        let (metadata, _, request) = request.into_parts();
        let messages = request.messages.into_iter().map(message).collect();
        let chat = ChatOptions {
            add_generation_prompt: request.add_generation_prompt.unwrap_or(true),
            now_unix_ms: daemon::clock::unix_ms(),
            ..ChatOptions::default()
        };
        let question = Question {
            operation: Operation::Chat,
            tenant: self.0.admission.tenant(metadata.as_ref()),
            model: request.model,
            input: Input::Chat(messages, Box::new(chat)),
            options: options(request.options.unwrap_or_default(), &metadata),
            is_stream: true,
        };
        self.answer(question, &metadata).await
    }

    async fn tokenize(
        &self,
        request: Request<wire::TokenizeRequest>,
    ) -> Result<Response<wire::TokenizeResponse>, Status> {
        let (metadata, _, request) = request.into_parts();
        self.check(&request.model)?;
        let _permit = self.admit(&metadata)?;
        let tokens = self.0.encode("text", request.text, request.add_special_tokens).await;
        Ok(Response::new(wire::TokenizeResponse { tokens: tokens.map_err(|error| self.refuse(&error))? }))
    }

    async fn detokenize(
        &self,
        request: Request<wire::DetokenizeRequest>,
    ) -> Result<Response<wire::DetokenizeResponse>, Status> {
        /// More take longer than an async task may block.
        const LONG_TOKENS: usize = 4_096;
        let (metadata, _, request) = request.into_parts();
        self.check(&request.model)?;
        let _permit = self.admit(&metadata)?;
        let vocab_size = self.0.model.vocab_size();
        if let Some(token) = request.tokens.iter().find(|&&token| token >= vocab_size) {
            let message = format!("token id {token} is not in the vocabulary of {vocab_size}");
            return Err(self.refuse(&RequestError::invalid("tokens", message)));
        }
        let is_long = request.tokens.len() > LONG_TOKENS;
        let skip_special = request.skip_special_tokens.unwrap_or(true);
        let decode = move |model: &crate::model::ServedModel| model.text.decode(&request.tokens, skip_special);
        let text = self.0.compute(is_long, decode).await.map_err(|error| self.refuse(&error))?;
        Ok(Response::new(wire::DetokenizeResponse { text }))
    }

    async fn list_models(
        &self,
        _: Request<wire::ListModelsRequest>,
    ) -> Result<Response<wire::ListModelsResponse>, Status> {
        let model = wire::Model {
            name: self.0.model.name().to_owned(),
            context_length: self.0.cluster.context_length(),
            n_workers: u32::try_from(self.0.cluster.n_workers()).unwrap_or(u32::MAX),
        };
        Ok(Response::new(wire::ListModelsResponse { models: vec![model] }))
    }

    async fn explain(&self, request: Request<wire::ExplainRequest>) -> Result<Response<wire::ExplainResponse>, Status> {
        use wire::explain_request::Subject;
        let (metadata, _, request) = request.into_parts();
        let (decisions, n_left_out) = match request.subject {
            Some(Subject::Prompt(prompt)) => {
                let question = self.completion(prompt, &metadata).map_err(|error| self.refuse(&error))?;
                let decisions = self.0.foresee(question).await.map_err(|error| self.refuse(&error))?;
                (decisions.into_iter().map(foreseen).collect(), 0)
            }
            Some(Subject::RequestId(id)) => {
                let history = self.0.recall(&id).map_err(|error| self.refuse(&error))?;
                (history.decisions.into_iter().map(recalled).collect(), history.n_left_out)
            }
            None => {
                let error = RequestError::invalid("subject", "is missing; give a prompt or a request_id");
                return Err(self.refuse(&error));
            }
        };
        let n_left_out = u32::try_from(n_left_out).unwrap_or(u32::MAX);
        Ok(Response::new(wire::ExplainResponse { policy: self.0.cluster.policy().to_owned(), decisions, n_left_out }))
    }
}

fn recalled(one: Remembered) -> wire::PlacementDecision {
    let (failure, failed_after_ms) =
        one.failure.map_or((String::new(), None), |(code, ms)| (code.to_owned(), Some(ms)));
    wire::PlacementDecision {
        n_candidates: u32::try_from(one.n_considered).unwrap_or(u32::MAX),
        actual_first_token_ms: one.first_token_ms,
        failure,
        failed_after_ms,
        ..foreseen(one.decision)
    }
}

fn foreseen(decision: Decision) -> wire::PlacementDecision {
    let Decision { considered, prefill, lender, reason, .. } = decision.soonest_first();
    let (lending_engine, lent_tokens) =
        lender.map_or((String::new(), 0), |lender| (lender.engine.to_string(), lender.tokens_cached));
    let prefill_engine = prefill.map(|index| considered[index].engine.to_string()).unwrap_or_default();
    let n_considered = considered.len();
    let candidate = |one: Considered| wire::PlacementCandidate {
        engine: one.engine.to_string(),
        cached_tokens: one.tokens_cached,
        promised_tokens: one.tokens_promised,
        queued_tokens: one.tokens_ahead,
        n_requests: one.n_requests,
        wait_ms: one.prediction.wait_ms,
        prefill_ms: one.prediction.prefill_ms,
        first_token_ms: one.prediction.first_token_ms,
        decode_ms: one.prediction.decode_ms,
    };
    wire::PlacementDecision {
        reason: reason.name().to_owned(),
        candidates: considered.into_iter().map(candidate).collect(),
        n_candidates: u32::try_from(n_considered).unwrap_or(u32::MAX),
        prefill_engine,
        lending_engine,
        lent_tokens,
        ..wire::PlacementDecision::default()
    }
}

impl Grpc {
    fn check(&self, model: &str) -> Result<(), Status> {
        self.0.check_model(model).map_err(|error| self.refuse(&error))
    }

    fn completion(&self, request: wire::GenerateRequest, metadata: &MetadataMap) -> Result<Question, RequestError> {
        use wire::generate_request::Prompt as Given;
        let prompt = match request.prompt {
            Some(Given::Text(text)) => Prompt::Text(text),
            Some(Given::Tokens(tokens)) => Prompt::Tokens(tokens.ids),
            None => return Err(RequestError::invalid("prompt", "is missing; give text or tokens")),
        };
        Ok(Question {
            operation: Operation::Completion,
            tenant: self.0.admission.tenant(metadata.as_ref()),
            model: request.model,
            input: Input::Prompts(vec![prompt]),
            options: options(request.options.unwrap_or_default(), metadata),
            is_stream: true,
        })
    }

    fn admit(&self, metadata: &MetadataMap) -> Result<Permit, Status> {
        let admission = &self.0.admission;
        admission.admit(&admission.tenant(metadata.as_ref())).map_err(|error| self.refuse(&error))
    }

    fn refuse(&self, error: &RequestError) -> Status {
        self.0.metrics.refused(error);
        to_status(error)
    }

    async fn answer(&self, question: Question, metadata: &MetadataMap) -> Result<Response<Responses>, Status> {
        let trace = trace(&question, self.0.model.name(), metadata.as_ref());
        let mut answer = self.0.ask(question, trace).await.map_err(|error| to_status(&error))?;
        let (id, model) = (answer.id.to_string(), self.0.model.name().to_owned());
        // Headers alone would wake the client for nothing, while the worker is still to be told.
        let first = answer.events.next().await;
        let events = iter(first).chain(answer.events).map(move |event| match event {
            Ok(Event::Delta(delta)) => Ok(wire::GenerateResponse {
                index: delta.index,
                text: delta.text,
                tokens: delta.tokens.iter().map(|sampled| sampled.token).collect(),
                logprobs: delta.tokens.iter().filter_map(logprobs).collect(),
                stop_reason: delta.finish.as_ref().map_or_else(String::new, stop_reason),
                finish_reason: delta.finish.map_or_else(String::new, |finish| finish.reason.to_owned()),
                request_id: id.clone(),
                model: model.clone(),
                usage: None,
            }),
            Ok(Event::End(usage)) => Ok(wire::GenerateResponse {
                usage: Some(wire::Usage {
                    prompt_tokens: usage.prompt_tokens,
                    completion_tokens: usage.completion_tokens,
                    cached_tokens: usage.cached_tokens,
                }),
                request_id: id.clone(),
                model: model.clone(),
                ..wire::GenerateResponse::default()
            }),
            Err(error) => Err(to_status(&error)),
        });
        Ok(Response::new(events.boxed()))
    }
}

fn message(message: wire::Message) -> ChatMessage {
    let name = Some(message.name).filter(|name| !name.is_empty());
    ChatMessage { name, ..ChatMessage::new(message.role, message.content) }
}

fn options(options: wire::Options, metadata: &MetadataMap) -> Options {
    let default = Options::default();
    Options {
        max_tokens: options.max_tokens,
        min_tokens: options.min_tokens.unwrap_or(0),
        temperature: options.temperature,
        top_p: options.top_p,
        top_k: options.top_k,
        min_p: options.min_p,
        repetition_penalty: options.repetition_penalty,
        presence_penalty: options.presence_penalty.unwrap_or(0.0),
        frequency_penalty: options.frequency_penalty.unwrap_or(0.0),
        logit_bias: options.logit_bias.into_iter().collect(),
        seed: options.seed,
        stop: options.stop,
        stop_token_ids: options.stop_token_ids,
        ignore_eos: options.ignore_eos,
        logprobs: options.logprobs,
        n: options.n.unwrap_or(default.n),
        priority: options.priority,
        cache_salt: options.cache_salt,
        adapter: options.adapter,
        skip_special: options.skip_special_tokens.unwrap_or(default.skip_special),
        add_special: options.add_special_tokens,
        timeout: metadata.get("grpc-timeout").and_then(|value| timeout(value.to_str().ok()?)),
        ..default
    }
}

fn logprobs(sampled: &SampledToken) -> Option<wire::TokenLogprobs> {
    let top = |&(token, logprob): &(u32, f32)| wire::TokenLogprob { token, logprob };
    (!sampled.logprob.is_nan()).then(|| wire::TokenLogprobs {
        token: sampled.token,
        logprob: sampled.logprob,
        top: sampled.top.iter().map(top).collect(),
    })
}

fn stop_reason(finish: &crate::generate::Finish) -> String {
    match &finish.stopped_by {
        Some(crate::generate::StoppedBy::Text(text)) => text.clone(),
        Some(crate::generate::StoppedBy::Token(token)) => token.to_string(),
        None => String::new(),
    }
}

/// Reads gRPC's timeout: at most eight digits and a unit.
fn timeout(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let value: u64 = digits.parse().ok().filter(|_| digits.len() <= 8)?;
    Some(match unit {
        "H" => Duration::from_secs(value * 3600),
        "M" => Duration::from_secs(value * 60),
        "S" => Duration::from_secs(value),
        "m" => Duration::from_millis(value),
        "u" => Duration::from_micros(value),
        "n" => Duration::from_nanos(value),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clients_deadline_is_read_in_every_unit() {
        assert_eq!(timeout("5S"), Some(Duration::from_secs(5)));
        assert_eq!(timeout("100m"), Some(Duration::from_millis(100)));
        assert_eq!(timeout("99999999H"), Some(Duration::from_secs(99_999_999 * 3600)));
        for wrong in ["", "S", "5", "123456789S", "é", "-1S"] {
            assert_eq!(timeout(wrong), None, "{wrong}");
        }
    }
}
