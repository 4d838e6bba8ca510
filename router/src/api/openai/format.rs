//! Answers and their parts as JSON.

use std::sync::Arc;

use contract::error::RequestError;
use contract::ids::RequestId;
use contract::plan::SampledToken;
use futures::stream::{BoxStream, StreamExt as _};
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::Reply;
use crate::generate::{Delta, Event, Finish, Service, StoppedBy, Usage};
use crate::text::TextModel;

/// What OpenAI's API says where a probability is 0.
const LOGPROB_MIN: f32 = -9999.0;

/// What the client wants to see.
#[derive(Clone, Copy, Debug)]
pub(super) struct Form {
    pub(super) is_chat: bool,
    pub(super) logprobs: Option<Logprobs>,
    pub(super) token_ids: bool,
}

/// How many alternatives are shown.
#[derive(Clone, Copy, Debug)]
pub(super) struct Logprobs {
    pub(super) n_top: usize,
}

/// Writes the parts of one answer.
pub(super) struct Format {
    text: Arc<TextModel>,
    id: String,
    model: String,
    system_fingerprint: String,
    pub(super) reply: Reply,
}

/// A whole answer, or a part of a stream.
#[derive(Serialize)]
pub(super) struct Object<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    system_fingerprint: &'a str,
    choices: Vec<Choice<'a>>,
    /// Null on parts of a stream that ends with usage.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<UsageObject>>,
}

/// What is said of one choice.
#[derive(Serialize)]
struct Choice<'a> {
    index: u32,
    #[serde(flatten)]
    body: Body<'a>,
    logprobs: Option<Value>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_reason: Option<Option<StopReason<'a>>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
}

/// The text of a choice, under the key and in the form that its endpoint has for it.
#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum Body<'a> {
    Text(&'a str),
    Delta {
        #[serde(skip_serializing_if = "Option::is_none")]
        role: Option<&'static str>,
        content: &'a str,
    },
    Message {
        role: &'static str,
        content: &'a str,
        refusal: Option<&'static str>,
    },
}

#[derive(Serialize)]
#[serde(untagged)]
enum StopReason<'a> {
    Text(&'a str),
    Token(u32),
}

#[derive(Serialize)]
struct UsageObject {
    prompt_tokens: u32,
    completion_tokens: u32,
    total_tokens: u64,
    prompt_tokens_details: PromptTokens,
}

#[derive(Serialize)]
struct PromptTokens {
    cached_tokens: u32,
}

impl Format {
    pub(super) fn new(service: &Service, id: RequestId, reply: Reply) -> Self {
        Self {
            text: Arc::clone(&service.model.text),
            id: format!("{}-{id}", reply.prefix),
            model: service.model.name().to_owned(),
            system_fingerprint: service.model.system_fingerprint().to_owned(),
            reply,
        }
    }

    /// The end of a stream.
    pub(super) fn end(&self, usage: Usage) -> Object<'_> {
        self.object(true, Vec::new(), Some(usage))
    }

    /// The part of a chat that opens a choice.
    pub(super) fn opening(&self, index: u32) -> Object<'_> {
        let body = Body::Delta { role: Some("assistant"), content: "" };
        let choice = Choice { index, body, logprobs: None, finish_reason: None, stop_reason: None, token_ids: None };
        self.object(true, vec![choice], None)
    }

    /// A part of a stream; `n_chars` counts the characters that its choice's tokens have begun so far.
    pub(super) fn part<'a>(&'a self, delta: &'a Delta, n_chars: &mut usize) -> Object<'a> {
        let content = delta.text.as_str();
        let body = if self.reply.form.is_chat { Body::Delta { role: None, content } } else { Body::Text(content) };
        self.object(true, vec![self.choice(delta, body, n_chars)], None)
    }

    fn whole<'a>(&'a self, choices: &'a [Delta], usage: Usage) -> Object<'a> {
        let choice = |delta: &'a Delta| {
            let content = delta.text.as_str();
            let body = match self.reply.form.is_chat {
                true => Body::Message { role: "assistant", content, refusal: None },
                false => Body::Text(content),
            };
            self.choice(delta, body, &mut 0)
        };
        self.object(false, choices.iter().map(choice).collect(), Some(usage))
    }

    fn object<'a>(&'a self, is_chunk: bool, choices: Vec<Choice<'a>>, usage: Option<Usage>) -> Object<'a> {
        let is_told = usage.is_some() || is_chunk && self.reply.include_usage;
        Object {
            id: &self.id,
            object: if is_chunk { self.reply.chunk_object } else { self.reply.object },
            created: self.reply.created_unix_s,
            model: &self.model,
            system_fingerprint: &self.system_fingerprint,
            choices,
            usage: is_told.then(|| usage.map(UsageObject::from)),
        }
    }

    fn choice<'a>(&self, delta: &'a Delta, body: Body<'a>, n_chars: &mut usize) -> Choice<'a> {
        let Form { is_chat, logprobs, token_ids } = self.reply.form;
        let logprobs = logprobs.map(|Logprobs { n_top }| {
            if is_chat {
                self.chat_logprobs(&delta.tokens, n_top)
            } else {
                self.logprobs(&delta.tokens, n_top, n_chars)
            }
        });
        Choice {
            index: delta.index,
            body,
            logprobs,
            finish_reason: delta.finish.as_ref().map(|finish| finish.reason),
            stop_reason: Some(delta.finish.as_ref().and_then(stop_reason)),
            token_ids: token_ids.then(|| delta.tokens.iter().map(|sampled| sampled.token).collect()),
        }
    }

    fn chat_logprobs(&self, tokens: &[SampledToken], n_top: usize) -> Value {
        let entry = |token: u32, logprob: f32| {
            let (text, bytes) = self.text.token_text(token);
            json!({"token": text, "logprob": finite(logprob), "bytes": bytes})
        };
        let content: Vec<Value> = tokens
            .iter()
            .map(|sampled| {
                let mut shown = entry(sampled.token, sampled.logprob);
                let top: Vec<Value> = sampled.top.iter().take(n_top).map(|&(token, p)| entry(token, p)).collect();
                shown["top_logprobs"] = top.into();
                shown
            })
            .collect();
        json!({"content": content, "refusal": null})
    }

    fn token_name(&self, token: u32) -> String {
        let (text, bytes) = self.text.token_text(token);
        if std::str::from_utf8(&bytes).is_ok() {
            return text;
        }
        bytes.iter().fold("bytes:".to_owned(), |name, byte| format!("{name}\\x{byte:02x}"))
    }

    /// Log-probabilities of completions. Tokens that are not text by themselves are named by their bytes, so that two
    /// parts of characters never share a name.
    fn logprobs(&self, tokens: &[SampledToken], n_top: usize, n_chars: &mut usize) -> Value {
        let mut texts = Vec::with_capacity(tokens.len());
        let mut offsets = Vec::with_capacity(tokens.len());
        let mut tops = Vec::with_capacity(tokens.len());
        for sampled in tokens {
            let bytes = self.text.token_text(sampled.token).1;
            let text = self.token_name(sampled.token);
            let mut top = Map::new();
            for &(token, logprob) in sampled.top.iter().take(n_top) {
                // Likeliest first: of tokens that read alike the likeliest stays.
                top.entry(self.token_name(token)).or_insert_with(|| finite(logprob).into());
            }
            top.entry(text.clone()).or_insert_with(|| finite(sampled.logprob).into());
            let continues = bytes.first().is_some_and(|byte| !begins_char(*byte));
            offsets.push(n_chars.saturating_sub(usize::from(continues)));
            if !self.text.is_special(sampled.token) {
                *n_chars += bytes.iter().filter(|byte| begins_char(**byte)).count();
            }
            texts.push(text);
            tops.push(Value::from(top));
        }
        let logprobs: Vec<f32> = tokens.iter().map(|sampled| finite(sampled.logprob)).collect();
        json!({"tokens": texts, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets})
    }
}

/// Whether a byte of UTF-8 is the first of a character.
fn begins_char(byte: u8) -> bool {
    byte & 0xc0 != 0x80
}

/// Waits for a whole answer and writes it.
///
/// # Errors
/// What ended it early.
pub(super) async fn collect(
    format: Format,
    mut events: BoxStream<'static, Result<Event, RequestError>>,
    n_choices: usize,
) -> Result<Vec<u8>, RequestError> {
    let empty = |index| Delta { index, text: String::new(), tokens: Vec::new(), finish: None };
    let mut choices: Vec<Delta> = (0..).take(n_choices).map(empty).collect();
    while let Some(event) = events.next().await {
        match event? {
            Event::Delta(delta) => {
                if let Some(choice) = choices.get_mut(delta.index as usize) {
                    choice.text.push_str(&delta.text);
                    choice.tokens.extend(delta.tokens);
                    choice.finish = choice.finish.take().or(delta.finish);
                }
            }
            Event::End(usage) => {
                let written = serde_json::to_vec(&format.whole(&choices, usage));
                return written
                    .map_err(|error| RequestError::Internal(format!("an answer cannot be written: {error}")));
            }
        }
    }
    Err(RequestError::Internal("an answer ended without its end".to_owned()))
}

impl From<Usage> for UsageObject {
    fn from(usage: Usage) -> Self {
        Self {
            prompt_tokens: usage.prompt_tokens,
            completion_tokens: usage.completion_tokens,
            total_tokens: u64::from(usage.prompt_tokens) + u64::from(usage.completion_tokens),
            prompt_tokens_details: PromptTokens { cached_tokens: usage.cached_tokens },
        }
    }
}

fn stop_reason(finish: &Finish) -> Option<StopReason<'_>> {
    finish.stopped_by.as_ref().map(|stopped_by| match stopped_by {
        StoppedBy::Text(text) => StopReason::Text(text),
        StoppedBy::Token(token) => StopReason::Token(*token),
    })
}

fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob.max(LOGPROB_MIN) } else { LOGPROB_MIN }
}
