//! Answers and their parts as JSON.

use std::sync::Arc;

use contract::error::RequestError;
use contract::ids::RequestId;
use contract::plan::SampledToken;
use futures::stream::{BoxStream, StreamExt as _};
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
    /// Fields of every part.
    head: Map<String, Value>,
    pub(super) reply: Reply,
}

impl Format {
    pub(super) fn new(service: &Service, id: RequestId, reply: Reply) -> Self {
        let mut head = Map::new();
        head.insert("id".to_owned(), format!("{}-{id}", reply.prefix).into());
        head.insert("object".to_owned(), Value::Null);
        head.insert("created".to_owned(), reply.created_unix_s.into());
        head.insert("model".to_owned(), service.model.name().into());
        head.insert("system_fingerprint".to_owned(), service.model.system_fingerprint().into());
        Self { text: Arc::clone(&service.model.text), head, reply }
    }

    /// The whole answer, or a part of a stream.
    pub(super) fn object(&self, is_chunk: bool, choices: Vec<Value>, usage: Option<Usage>) -> Value {
        let mut object = self.head.clone();
        let kind = if is_chunk { self.reply.chunk_object } else { self.reply.object };
        object.insert("object".to_owned(), kind.into());
        object.insert("choices".to_owned(), choices.into());
        if let Some(usage) = usage {
            object.insert("usage".to_owned(), write_usage(usage));
        } else if is_chunk && self.reply.include_usage {
            object.insert("usage".to_owned(), Value::Null);
        }
        object.into()
    }

    /// The part of a chat that opens a choice.
    pub(super) fn opening(&self, index: usize) -> Value {
        let choice = json!({
            "index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": null, "finish_reason": null,
        });
        self.object(true, vec![choice], None)
    }

    /// A choice of a stream's part; `n_chars` counts the characters that its tokens have begun so far.
    pub(super) fn part(&self, delta: &Delta, n_chars: &mut usize) -> Value {
        let body = if self.reply.form.is_chat { json!({"content": delta.text}) } else { delta.text.clone().into() };
        let key = if self.reply.form.is_chat { "delta" } else { "text" };
        self.choice(delta, key, body, n_chars)
    }

    fn whole(&self, delta: &Delta) -> Value {
        if !self.reply.form.is_chat {
            return self.choice(delta, "text", delta.text.clone().into(), &mut 0);
        }
        self.choice(delta, "message", json!({"role": "assistant", "content": delta.text, "refusal": null}), &mut 0)
    }

    fn choice(&self, delta: &Delta, key: &str, body: Value, n_chars: &mut usize) -> Value {
        let Form { is_chat, logprobs, token_ids } = self.reply.form;
        let logprobs = logprobs.map(|Logprobs { n_top }| {
            if is_chat {
                self.chat_logprobs(&delta.tokens, n_top)
            } else {
                self.logprobs(&delta.tokens, n_top, n_chars)
            }
        });
        let mut choice = Map::new();
        choice.insert("index".to_owned(), delta.index.into());
        choice.insert(key.to_owned(), body);
        choice.insert("logprobs".to_owned(), logprobs.unwrap_or(Value::Null));
        choice.insert("finish_reason".to_owned(), delta.finish.as_ref().map(|finish| finish.reason).into());
        choice.insert("stop_reason".to_owned(), delta.finish.as_ref().map_or(Value::Null, stop_reason));
        if token_ids {
            let ids: Vec<u32> = delta.tokens.iter().map(|sampled| sampled.token).collect();
            choice.insert("token_ids".to_owned(), ids.into());
        }
        choice.into()
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

/// Waits for a whole answer.
///
/// # Errors
/// What ended it early.
pub(super) async fn collect(
    format: Format,
    mut events: BoxStream<'static, Result<Event, RequestError>>,
    n_choices: usize,
) -> Result<Value, RequestError> {
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
                let choices = choices.iter().map(|choice| format.whole(choice)).collect();
                return Ok(format.object(false, choices, Some(usage)));
            }
        }
    }
    Err(RequestError::Internal("an answer ended without its end".to_owned()))
}

fn write_usage(usage: Usage) -> Value {
    json!({
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": u64::from(usage.prompt_tokens) + u64::from(usage.completion_tokens),
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    })
}

fn stop_reason(finish: &Finish) -> Value {
    match &finish.stopped_by {
        None => Value::Null,
        Some(StoppedBy::Text(text)) => text.clone().into(),
        Some(StoppedBy::Token(token)) => (*token).into(),
    }
}

fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob.max(LOGPROB_MIN) } else { LOGPROB_MIN }
}
