//! A streamed completion with its choices apart, and how long its reader waited at most.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use serde_json::Value;

use crate::client::EventStream;

/// A stream that was read.
#[derive(Clone, Debug, Default)]
pub struct Answer {
    said: Said,
    /// The error object, when it ended badly.
    pub error: Option<Value>,
    /// Whether `[DONE]` came.
    pub is_done: bool,
    /// Longest time between two events, the answer's head among them.
    pub longest_gap: Duration,
}

/// What no failure of a worker may change.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Said {
    pub choices: BTreeMap<u64, Choice>,
    pub prompt_tokens: Option<u64>,
    pub completion_tokens: Option<u64>,
}

/// What one choice said.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Choice {
    pub text: String,
    pub tokens: Vec<u64>,
    pub logprobs: Vec<f64>,
    pub finish_reason: Option<String>,
}

impl Answer {
    /// Asks a router and reads its answer; what comes before the answer's head counts as waiting, too.
    ///
    /// # Errors
    /// As of [`EventStream::open`] and [`Self::read`].
    pub async fn ask(client: &reqwest::Client, router: &str, body: &Value, began: impl FnOnce()) -> Result<Self> {
        let asked = Instant::now();
        let events = EventStream::open(client, router, "/v1/completions", body).await?;
        let head = asked.elapsed();
        let mut answer = Self::read(events, began).await?;
        answer.longest_gap = answer.longest_gap.max(head);
        Ok(answer)
    }

    /// Reads a streamed completion to its end; `began` is told when its first event has come.
    pub async fn read(mut events: EventStream, began: impl FnOnce()) -> Result<Self> {
        let mut answer = Self::default();
        let (mut last, mut began) = (Instant::now(), Some(began));
        while let Some(data) = events.next().await? {
            answer.longest_gap = answer.longest_gap.max(last.elapsed());
            last = Instant::now();
            if let Some(began) = began.take() {
                began();
            }
            if data == "[DONE]" {
                answer.is_done = true;
                continue;
            }
            answer.take(&serde_json::from_str(&data).with_context(|| format!("not JSON: {data}"))?);
        }
        Ok(answer)
    }

    /// What it said; none when it ended badly.
    pub fn said(&self) -> Option<&Said> {
        (self.is_done && self.error.is_none()).then_some(&self.said)
    }

    fn take(&mut self, event: &Value) {
        if event.get("error").is_some() {
            self.error = Some(event["error"].clone());
        }
        if event["usage"].is_object() {
            self.said.prompt_tokens = event["usage"]["prompt_tokens"].as_u64();
            self.said.completion_tokens = event["usage"]["completion_tokens"].as_u64();
        }
        for news in event["choices"].as_array().into_iter().flatten() {
            let choice = self.said.choices.entry(news["index"].as_u64().unwrap_or(0)).or_default();
            choice.text += news["text"].as_str().unwrap_or_default();
            let ids = news["token_ids"].as_array().into_iter().flatten();
            choice.tokens.extend(ids.filter_map(Value::as_u64));
            let logprobs = news["logprobs"]["token_logprobs"].as_array().into_iter().flatten();
            choice.logprobs.extend(logprobs.filter_map(Value::as_f64));
            if let Some(reason) = news["finish_reason"].as_str() {
                choice.finish_reason = Some(reason.to_owned());
            }
        }
    }
}
