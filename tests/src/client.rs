//! An OpenAI client small enough to see each event of a stream.

use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use futures::StreamExt as _;
use serde_json::{Value, json};

/// One client for all: connections are reused as real clients do.
pub fn http() -> reqwest::Client {
    static CLIENT: OnceLock<reqwest::Client> = OnceLock::new();
    let build = || builder().connect_timeout(Duration::from_secs(5)).build().unwrap();
    CLIENT.get_or_init(build).clone()
}

/// A client builder that reaches the loopback interface whatever the environment says.
pub fn builder() -> reqwest::ClientBuilder {
    // Nothing here uses TLS, but the client cannot be made without a provider; a second installation is refused.
    let _ = rustls::crypto::ring::default_provider().install_default();
    reqwest::Client::builder().no_proxy()
}

/// Posts JSON and returns status and body.
pub async fn post(address: &str, path: &str, body: &Value) -> Result<(u16, Value)> {
    let response = http().post(format!("http://{address}{path}")).json(body).send().await?;
    let status = response.status().as_u16();
    let text = response.text().await?;
    let body = serde_json::from_str(&text).with_context(|| format!("status {status}, not JSON: {text}"))?;
    Ok((status, body))
}

/// A completion request of tokens for a stream.
pub fn completion(model: &str, prompt: &[u32], max_tokens: u32) -> Value {
    json!({
        "model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": true,
        "stream": true, "return_token_ids": true, "stream_options": {"include_usage": true},
    })
}

/// How a stream ended.
#[derive(Clone, Debug, Default)]
pub struct Streamed {
    pub tokens: Vec<u32>,
    pub text: String,
    pub finish_reason: Option<String>,
    pub usage: Option<Value>,
    /// The error object, when it ended badly.
    pub error: Option<Value>,
    /// Whether `[DONE]` came.
    pub done: bool,
}

/// A stream being read, event by event; dropping it disconnects.
pub struct EventStream {
    body: futures::stream::BoxStream<'static, reqwest::Result<Vec<u8>>>,
    buffer: Vec<u8>,
}

impl EventStream {
    /// Starts a streaming request.
    pub async fn open(client: &reqwest::Client, address: &str, path: &str, body: &Value) -> Result<Self> {
        let response = client.post(format!("http://{address}{path}")).json(body).send().await?;
        let status = response.status();
        if !status.is_success() {
            bail!("status {status}: {}", response.text().await?);
        }
        let body = response.bytes_stream().map(|chunk| chunk.map(|bytes| bytes.to_vec())).boxed();
        Ok(Self { body, buffer: Vec::new() })
    }

    /// The next event's data, none at the end of the body.
    pub async fn next(&mut self) -> Result<Option<String>> {
        loop {
            if let Some(end) = self.buffer.windows(2).position(|pair| pair == b"\n\n") {
                let event: Vec<u8> = self.buffer.drain(..end + 2).collect();
                let event = String::from_utf8(event).context("an event that is not UTF-8")?;
                if let Some(data) = event.trim_end().strip_prefix("data: ") {
                    return Ok(Some(data.to_owned()));
                }
                continue;
            }
            match self.body.next().await {
                Some(chunk) => self.buffer.extend(chunk?),
                None if self.buffer.is_empty() => return Ok(None),
                None => bail!("the body ended inside an event"),
            }
        }
    }
}

/// Reads a streamed completion to its end.
pub async fn stream(address: &str, body: &Value) -> Result<Streamed> {
    let mut events = EventStream::open(&http(), address, "/v1/completions", body).await?;
    let mut streamed = Streamed::default();
    while let Some(data) = events.next().await? {
        if data == "[DONE]" {
            streamed.done = true;
            continue;
        }
        let event: Value = serde_json::from_str(&data).with_context(|| format!("not JSON: {data}"))?;
        take(&mut streamed, &event);
    }
    Ok(streamed)
}

fn take(streamed: &mut Streamed, event: &Value) {
    if event.get("error").is_some() {
        streamed.error = Some(event["error"].clone());
    }
    if event["usage"].is_object() {
        streamed.usage = Some(event["usage"].clone());
    }
    for choice in event["choices"].as_array().into_iter().flatten() {
        streamed.text += choice["text"].as_str().unwrap_or_default();
        let ids = choice["token_ids"].as_array().into_iter().flatten();
        streamed.tokens.extend(ids.map(|id| u32::try_from(id.as_u64().unwrap()).unwrap()));
        if let Some(reason) = choice["finish_reason"].as_str() {
            streamed.finish_reason = Some(reason.to_owned());
        }
    }
}
