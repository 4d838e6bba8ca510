//! Answers as server-sent events: role first, then text as it comes, usage, and `[DONE]`; or an error, which is the last.

use std::collections::VecDeque;

use axum::body::{Body, Bytes};
use axum::response::Response;
use contract::error::RequestError;
use futures::stream::{BoxStream, StreamExt as _, unfold};
use http::{HeaderValue, header};
use serde_json::Value;

use super::error::object;
use super::format::Format;
use crate::generate::{Delta, Event};

struct State {
    format: Format,
    events: BoxStream<'static, Result<Event, RequestError>>,
    /// Written and not yet taken; a few at most, since events are read only when it is empty.
    written: VecDeque<Bytes>,
    /// Characters that each choice's tokens have begun so far.
    n_chars: Vec<usize>,
    is_over: bool,
}

/// Waits for the first event, so that an error before it has its own status, then streams.
///
/// # Errors
/// What kept the answer from beginning.
pub(super) async fn respond(
    format: Format,
    mut events: BoxStream<'static, Result<Event, RequestError>>,
    n_choices: usize,
) -> Result<Response, RequestError> {
    let first = match events.next().await {
        Some(Err(error)) => return Err(error),
        first => first,
    };
    let written = VecDeque::new();
    let mut state = State { format, events, written, n_chars: vec![0; n_choices], is_over: false };
    if state.format.reply.form.is_chat {
        for index in 0..n_choices {
            let opening = state.format.opening(index);
            state.write(&opening);
        }
    }
    state.take(first);
    let body = unfold(state, |mut state| async move {
        while state.written.is_empty() && !state.is_over {
            let event = state.events.next().await;
            state.take(event);
        }
        let bytes = state.written.pop_front()?;
        Some((Ok::<Bytes, std::convert::Infallible>(bytes), state))
    });
    let mut response = Response::new(Body::from_stream(body));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Proxies that collect responses would turn a stream into one piece.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    Ok(response)
}

impl State {
    fn take(&mut self, event: Option<Result<Event, RequestError>>) {
        match event {
            Some(Ok(Event::Delta(delta))) => self.delta(&delta),
            Some(Ok(Event::End(usage))) => {
                if self.format.reply.include_usage {
                    let last = self.format.object(true, Vec::new(), Some(usage));
                    self.write(&last);
                }
                self.written.push_back(Bytes::from_static(b"data: [DONE]\n\n"));
                self.is_over = true;
            }
            Some(Err(error)) => {
                self.write(&object(&error));
                self.is_over = true;
            }
            None => self.is_over = true,
        }
    }

    fn delta(&mut self, delta: &Delta) {
        let form = self.format.reply.form;
        let shows_tokens = (form.logprobs.is_some() || form.token_ids) && !delta.tokens.is_empty();
        if delta.text.is_empty() && delta.finish.is_none() && !shows_tokens {
            return;
        }
        let Some(n_chars) = self.n_chars.get_mut(delta.index as usize) else { return };
        let part = self.format.part(delta, n_chars);
        let chunk = self.format.object(true, vec![part], None);
        self.write(&chunk);
    }

    fn write(&mut self, value: &Value) {
        self.written.push_back(format!("data: {value}\n\n").into());
    }
}
