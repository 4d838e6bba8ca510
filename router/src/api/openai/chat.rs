//! `POST /v1/chat/completions`.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use contract::error::RequestError;
use contract::request::LOGPROBS_MAX;
use http::HeaderMap;
use serde::Deserialize;
use serde::de::{IgnoredAny, MapAccess};
use serde_json::{Map, Value};

use super::body::{Fields, Object, parse, value};
use super::error::ApiError;
use super::format::{Form, Logprobs};
use super::sampling::{Shared, flag, or};
use super::{Reply, read, reply};
use crate::admission::Tenant;
use crate::generate::{Input, Operation, Question, Service};
use crate::text::{ChatMessage, ChatOptions};

struct Chat {
    shared: Shared,
    messages: Vec<Object<Message>>,
    max_completion_tokens: Option<u32>,
    logprobs: bool,
    top_logprobs: Option<u32>,
    add_generation_prompt: bool,
    variables: Map<String, Value>,
}

impl Default for Chat {
    fn default() -> Self {
        Self {
            shared: Shared::default(),
            messages: Vec::new(),
            max_completion_tokens: None,
            logprobs: false,
            top_logprobs: None,
            add_generation_prompt: true,
            variables: Map::new(),
        }
    }
}

#[derive(Default)]
struct Message {
    role: Option<String>,
    content: Option<Content>,
    name: Option<String>,
    unsupported: Option<&'static str>,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a string or a list of parts")]
enum Content {
    Text(String),
    Parts(Vec<Part>),
}

#[derive(Deserialize)]
struct Part {
    r#type: String,
    text: Option<String>,
}

impl Fields for Chat {
    fn set<'de, A: MapAccess<'de>>(&mut self, key: &str, map: &mut A) -> Result<bool, A::Error> {
        match key {
            "messages" => self.messages = value(key, map)?,
            "max_completion_tokens" => self.max_completion_tokens = value(key, map)?,
            "logprobs" => self.logprobs = flag(key, map, false)?,
            "top_logprobs" => self.top_logprobs = value(key, map)?,
            "add_generation_prompt" => self.add_generation_prompt = flag(key, map, true)?,
            "chat_template_kwargs" => self.variables = or(key, map, Map::new())?,
            _ => return self.shared.set(key, map),
        }
        Ok(true)
    }
}

impl Fields for Message {
    fn set<'de, A: MapAccess<'de>>(&mut self, key: &str, map: &mut A) -> Result<bool, A::Error> {
        let served_later = ["tool_calls", "function_call", "audio", "tool_call_id"];
        match key {
            "role" => self.role = value(key, map)?,
            "content" => self.content = value(key, map)?,
            "name" => self.name = value(key, map)?,
            "refusal" | "annotations" | "reasoning_content" => drop(value::<IgnoredAny, A>(key, map)?),
            _ => {
                let Some(&field) = served_later.iter().find(|&&field| field == key) else { return Ok(false) };
                if value::<Option<IgnoredAny>, A>(key, map)?.is_some() {
                    self.unsupported = Some(field);
                }
            }
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
        prefix: "chatcmpl",
        object: "chat.completion",
        chunk_object: "chat.completion.chunk",
        created_unix_s: daemon::clock::unix_ms() / 1000,
        form,
        include_usage,
    };
    reply(service, &headers, question, told).await
}

fn question(body: &[u8], tenant: Arc<Tenant>) -> Result<(Question, Form, bool), RequestError> {
    let mut request: Chat = parse(body)?;
    let mut options = request.shared.options()?;
    if let Some(max_tokens) = request.max_completion_tokens {
        options.max_tokens = Some(max_tokens);
        options.max_tokens_field = "max_completion_tokens";
    }
    options.logprobs_field = "top_logprobs";
    options.logprobs = match (request.logprobs, request.top_logprobs) {
        (true, n) => Some(n.unwrap_or(0)),
        (false, None | Some(0)) => None,
        (false, Some(_)) => return Err(RequestError::invalid("top_logprobs", "needs logprobs = true")),
    };
    if let Some(n) = options.logprobs.filter(|&n| n > LOGPROBS_MAX) {
        return Err(RequestError::invalid("top_logprobs", format!("{n} is more than {LOGPROBS_MAX}")));
    }
    let messages = request.messages.into_iter().enumerate();
    let messages = messages.map(|(index, Object(given))| message(index, given)).collect::<Result<_, _>>()?;
    let chat = ChatOptions {
        add_generation_prompt: request.add_generation_prompt,
        now_unix_ms: daemon::clock::unix_ms(),
        tools: None,
        variables: request.variables,
    };
    let logprobs = options.logprobs.map(|n| Logprobs { n_top: n as usize });
    let form = Form { is_chat: true, logprobs, token_ids: request.shared.return_token_ids };
    let question = Question {
        operation: Operation::Chat,
        tenant,
        model: request.shared.model.unwrap_or_default(),
        input: Input::Chat(messages, Box::new(chat)),
        options,
        is_stream: request.shared.is_stream,
    };
    Ok((question, form, request.shared.stream_options.include_usage))
}

fn message(index: usize, message: Message) -> Result<ChatMessage, RequestError> {
    if let Some(field) = message.unsupported {
        return Err(RequestError::Unsupported(format!("messages[{index}].{field}")));
    }
    let field = |name: &str| format!("messages[{index}].{name}");
    let role = message.role.ok_or_else(|| RequestError::invalid(field("role"), "is missing"))?;
    let content = match message.content {
        Some(Content::Text(text)) => text,
        Some(Content::Parts(parts)) => join(index, parts)?,
        None => return Err(RequestError::invalid(field("content"), "is missing")),
    };
    Ok(ChatMessage { name: message.name, ..ChatMessage::new(role, content) })
}

/// Text parts, one below the other as vLLM joins them.
fn join(index: usize, parts: Vec<Part>) -> Result<String, RequestError> {
    let mut texts = Vec::with_capacity(parts.len());
    for (part_index, part) in parts.into_iter().enumerate() {
        match (part.r#type.as_str(), part.text) {
            ("text" | "input_text", Some(text)) => texts.push(text),
            ("text" | "input_text", None) => {
                let field = format!("messages[{index}].content[{part_index}].text");
                return Err(RequestError::invalid(field, "is missing"));
            }
            (kind, _) => {
                let kind: String = kind.chars().take(64).collect();
                let message = format!("messages[{index}].content[{part_index}] of type {kind:?}");
                return Err(RequestError::Unsupported(message));
            }
        }
    }
    Ok(texts.join("\n"))
}
