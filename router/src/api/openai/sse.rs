//! Answers as server-sent events: role first, then text as it comes, usage, and `[DONE]`; or an error, which is the last.

use std::collections::VecDeque;

use axum::body::{Body, Bytes};
use axum::response::Response;
use contract::error::RequestError;
use futures::stream::{BoxStream, StreamExt as _, unfold};
use http::{HeaderValue, header};
use serde::Serialize;

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
        for index in (0..).take(n_choices) {
            let opening = data(&state.format.opening(index));
            state.written.push_back(opening);
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
                    self.written.push_back(data(&self.format.end(usage)));
                }
                self.written.push_back(Bytes::from_static(b"data: [DONE]\n\n"));
                self.is_over = true;
            }
            Some(Err(error)) => {
                self.written.push_back(data(&object(&error)));
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
        self.written.push_back(data(&self.format.part(delta, n_chars)));
    }
}

/// One event.
fn data(value: &impl Serialize) -> Bytes {
    let mut event = b"data: ".to_vec();
    serde_json::to_writer(&mut event, value).expect("keys are strings and memory takes what is written");
    event.extend_from_slice(b"\n\n");
    event.into()
}
