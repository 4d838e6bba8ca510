//! `POST /v1/completions`.

use std::fmt;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use contract::error::RequestError;
use http::HeaderMap;
use serde::de::{self, MapAccess, SeqAccess, Unexpected, Visitor};
use serde::{Deserialize, Deserializer};

use super::body::{Fields, parse, value};
use super::error::ApiError;
use super::format::{Form, Logprobs};
use super::sampling::Shared;
use super::{Reply, read, reply};
use crate::admission::Tenant;
use crate::generate::{Input, Operation, Prompt, Question, Service};

/// Tokens that OpenAI's API generates unless told.
const DEFAULT_MAX_TOKENS: u32 = 16;

#[derive(Default)]
struct Completion {
    shared: Shared,
    prompt: Option<Prompts>,
}

enum Prompts {
    Text(String),
    Tokens(Vec<u32>),
    Texts(Vec<String>),
    TokenLists(Vec<Vec<u32>>),
}

/// One entry of a list of prompts.
enum Entry {
    Token(u32),
    Text(String),
    Tokens(Vec<u32>),
}

const PROMPTS: &str = "a string, a list of strings, a list of token ids, or a list of such lists";

/// Long lists of tokens are the common case, so nothing is buffered: the first entry tells what the others must be.
impl<'de> Deserialize<'de> for Prompts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reads;
        impl<'de> Visitor<'de> for Reads {
            type Value = Prompts;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(PROMPTS)
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Prompts, E> {
                Ok(Prompts::Text(text.to_owned()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut entries: A) -> Result<Prompts, A::Error> {
                Ok(match entries.next_element()? {
                    None => Prompts::Tokens(Vec::new()),
                    Some(Entry::Token(first)) => Prompts::Tokens(rest(first, entries)?),
                    Some(Entry::Text(first)) => Prompts::Texts(rest(first, entries)?),
                    Some(Entry::Tokens(first)) => Prompts::TokenLists(rest(first, entries)?),
                })
            }
        }
        deserializer.deserialize_any(Reads)
    }
}

impl<'de> Deserialize<'de> for Entry {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reads;
        impl<'de> Visitor<'de> for Reads {
            type Value = Entry;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(PROMPTS)
            }

            fn visit_u64<E: de::Error>(self, token: u64) -> Result<Entry, E> {
                u32::try_from(token).map(Entry::Token).map_err(|_| E::invalid_value(Unexpected::Unsigned(token), &self))
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Entry, E> {
                Ok(Entry::Text(text.to_owned()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut tokens: A) -> Result<Entry, A::Error> {
                let mut all = Vec::new();
                while let Some(token) = tokens.next_element()? {
                    all.push(token);
                }
                Ok(Entry::Tokens(all))
            }
        }
        deserializer.deserialize_any(Reads)
    }
}

fn rest<'de, T: Deserialize<'de>, A: SeqAccess<'de>>(first: T, mut entries: A) -> Result<Vec<T>, A::Error> {
    let mut all = vec![first];
    while let Some(entry) = entries.next_element()? {
        all.push(entry);
    }
    Ok(all)
}

impl Fields for Completion {
    fn set<'de, A: MapAccess<'de>>(&mut self, key: &str, map: &mut A) -> Result<bool, A::Error> {
        match key {
            "prompt" => self.prompt = value(key, map)?,
            "logprobs" => self.shared.options.logprobs = value(key, map)?,
            _ => return self.shared.set(key, map),
        }
        Ok(true)
    }
}

pub(super) async fn serve(
    State(service): State<Arc<Service>>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let body = read(&service, &headers, body).await?;
    let tenant = service.admission.tenant(&headers);
    let (question, form, include_usage) =
        question(&body, tenant).inspect_err(|error| service.metrics.refused(error))?;
    drop(body);
    let told = Reply {
        prefix: "cmpl",
        object: "text_completion",
        chunk_object: "text_completion",
        created_unix_s: daemon::clock::unix_ms() / 1000,
        form,
        include_usage,
    };
    reply(service, &headers, question, told).await
}

fn question(body: &[u8], tenant: Arc<Tenant>) -> Result<(Question, Form, bool), RequestError> {
    let mut request: Completion = parse(body)?;
    let mut options = request.shared.options()?;
    options.max_tokens.get_or_insert(DEFAULT_MAX_TOKENS.max(options.min_tokens));
    let prompts = match request.prompt {
        Some(Prompts::Text(text)) => vec![Prompt::Text(text)],
        Some(Prompts::Tokens(tokens)) => vec![Prompt::Tokens(tokens)],
        Some(Prompts::Texts(texts)) => texts.into_iter().map(Prompt::Text).collect(),
        Some(Prompts::TokenLists(lists)) => lists.into_iter().map(Prompt::Tokens).collect(),
        None => return Err(RequestError::invalid("prompt", "is missing")),
    };
    let logprobs = options.logprobs.map(|n| Logprobs { n_top: n as usize });
    let form = Form { is_chat: false, logprobs, token_ids: request.shared.return_token_ids };
    let question = Question {
        operation: Operation::Completion,
        tenant,
        model: request.shared.model.unwrap_or_default(),
        input: Input::Prompts(prompts),
        options,
        is_stream: request.shared.is_stream,
    };
    Ok((question, form, request.shared.stream_options.include_usage))
}
