//! The worker's end: begins calls as they come and sends their frames as they are there.

use std::collections::HashMap;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures::future::BoxFuture;
use futures::stream::{AbortHandle, BoxStream, SelectAll, Stream, StreamExt as _, abortable, once};
use tonic::{Request, Status, Streaming};

use super::is_last;
use crate::worker::v1 as wire;
use wire::exchange_frame::Body as Answer;
use wire::exchange_request::Body as Asked;

type Frame = Result<wire::GenerateFrame, Status>;

/// Answers the calls of one stream, each by what `begin` gives for it, until its caller ends it and all calls have ended.
///
/// `begin` gets the call's trace context as metadata. Once `stopping` is done the stream ends when no call runs.
pub fn serve<F, S>(
    requests: Streaming<wire::ExchangeRequest>,
    begin: F,
    stopping: impl Future<Output = ()> + Send + 'static,
) -> impl Stream<Item = Result<wire::ExchangeFrame, Status>> + Send
where
    F: Fn(Request<wire::GenerateRequest>) -> Result<S, Status> + Send + Unpin,
    S: Stream<Item = Frame> + Send + 'static,
{
    Serving {
        requests: Some(requests),
        begin,
        calls: SelectAll::new(),
        aborts: HashMap::new(),
        stopping: Box::pin(stopping),
    }
}

struct Serving<F> {
    /// None when the caller sends no more.
    requests: Option<Streaming<wire::ExchangeRequest>>,
    begin: F,
    calls: SelectAll<BoxStream<'static, (u64, Option<Frame>)>>,
    aborts: HashMap<u64, AbortHandle>,
    stopping: BoxFuture<'static, ()>,
}

impl<F, S> Serving<F>
where
    F: Fn(Request<wire::GenerateRequest>) -> Result<S, Status>,
    S: Stream<Item = Frame> + Send + 'static,
{
    fn take(&mut self, request: wire::ExchangeRequest) {
        let wire::ExchangeRequest { call, body, traceparent, tracestate } = request;
        match body {
            None | Some(Asked::Opening(_)) => {}
            Some(Asked::Cancel(_)) => drop(self.aborts.remove(&call).map(|abort| abort.abort())),
            Some(Asked::Generate(request)) => {
                let mut request = Request::new(request);
                for (key, value) in [("traceparent", traceparent), ("tracestate", tracestate)] {
                    if let Some(value) =
                        Some(value).filter(|value| !value.is_empty()).and_then(|value| value.parse().ok())
                    {
                        request.metadata_mut().insert(key, value);
                    }
                }
                let frames = match (self.begin)(request) {
                    Ok(frames) => frames.boxed(),
                    Err(status) => once(async { Err(status) }).boxed(),
                };
                let (frames, abort) = abortable(frames);
                self.aborts.insert(call, abort);
                let end = once(async { None });
                self.calls.push(frames.map(Some).chain(end).map(move |frame| (call, frame)).boxed());
            }
        }
    }

    /// What is said of a call's news, if anything.
    fn answer(&mut self, call: u64, frame: Option<Frame>) -> Option<wire::ExchangeFrame> {
        let frame = match frame {
            Some(frame) => frame,
            // Its last frame, its error or its abort was the end that counts.
            None if self.aborts.remove(&call).is_none() => return None,
            None => Err(Status::unavailable("it ended the stream before the last token")),
        };
        if frame.as_ref().map_or(true, is_last) {
            self.aborts.remove(&call);
        }
        let body = frame.map_or_else(|status| Answer::Error((&status).into()), Answer::Frame);
        Some(wire::ExchangeFrame { call, body: Some(body) })
    }
}

impl<F, S> Stream for Serving<F>
where
    F: Fn(Request<wire::GenerateRequest>) -> Result<S, Status> + Unpin,
    S: Stream<Item = Frame> + Send + 'static,
{
    type Item = Result<wire::ExchangeFrame, Status>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        while let Some(requests) = &mut this.requests {
            match requests.poll_next_unpin(context) {
                Poll::Ready(Some(Ok(request))) => this.take(request),
                Poll::Ready(Some(Err(_)) | None) => this.requests = None,
                Poll::Pending => break,
            }
        }
        loop {
            match this.calls.poll_next_unpin(context) {
                Poll::Ready(Some((call, frame))) => {
                    if let Some(frame) = this.answer(call, frame) {
                        return Poll::Ready(Some(Ok(frame)));
                    }
                }
                Poll::Ready(None) if this.requests.is_none() || this.stopping.as_mut().poll(context).is_ready() => {
                    return Poll::Ready(None);
                }
                Poll::Ready(None) | Poll::Pending => return Poll::Pending,
            }
        }
    }
}
