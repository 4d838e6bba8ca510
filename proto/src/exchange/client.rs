//! The router's end: a line that anyone may call on, and the traffic that someone drives.

use std::collections::{HashMap, VecDeque};
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use contract::error::RequestError;
use futures::Stream;
use prost::Message as _;
use tonic::transport::Channel;
use tonic::{Request, Status, Streaming};

use super::{MESSAGE_BYTES_MAX, is_last};
use crate::status::to_status;
use crate::worker::v1 as wire;
use crate::worker::v1::worker_client::WorkerClient;
use wire::exchange_frame::Body as Answer;
use wire::exchange_request::Body as Asked;

/// Room that a call's number and trace context need beside its request.
const ENVELOPE_BYTES_MAX: usize = 4 << 10;

/// Where calls begin; when the last clone is dropped the stream ends as soon as its calls have.
#[derive(Clone, Debug)]
pub struct Line(Arc<Handle>);

/// What drives a line's stream: nothing comes or goes unless [`Traffic::run`] is polled.
pub struct Traffic {
    shared: Arc<Shared>,
    frames: Streaming<wire::ExchangeFrame>,
}

/// The frames of one call; dropping it before its end aborts the call.
#[derive(Debug)]
pub struct Frames {
    shared: Arc<Shared>,
    call: u64,
}

#[derive(Debug)]
struct Handle(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    tokens_max: usize,
}

#[derive(Debug, Default)]
struct State {
    /// Requests of calls that live, and aborts of calls whose request was sent.
    outgoing: VecDeque<wire::ExchangeRequest>,
    sender: Option<Waker>,
    calls: HashMap<u64, Call>,
    n_calls: u64,
    /// Nobody calls any more.
    is_closed: bool,
    /// Why the stream has ended.
    lost: Option<Status>,
}

/// What has come for a call and was not read.
#[derive(Debug, Default)]
struct Call {
    frame: Option<wire::GenerateFrame>,
    end: Option<Status>,
    is_complete: bool,
    reader: Option<Waker>,
}

/// Opens a stream of calls to a worker; of each, at most `tokens_max` tokens wait for their reader.
///
/// # Errors
/// What the worker said.
pub async fn open(mut client: WorkerClient<Channel>, tokens_max: usize) -> Result<(Line, Traffic), Status> {
    let shared = Arc::new(Shared { state: Mutex::default(), tokens_max });
    let opening = Asked::Opening(wire::ExchangeOpening {});
    shared.state().outgoing.push_back(wire::ExchangeRequest { body: Some(opening), ..Default::default() });
    let line = Line(Arc::new(Handle(Arc::clone(&shared))));
    let frames = client.exchange(Outgoing(Arc::clone(&shared))).await?.into_inner();
    Ok((line, Traffic { shared, frames }))
}

impl Line {
    /// Begins a call; `request` may hold a trace context.
    #[must_use]
    pub fn call(&self, request: Request<wire::GenerateRequest>) -> Frames {
        let (metadata, _, request) = request.into_parts();
        let text = |key| metadata.get(key).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned();
        let (traceparent, tracestate) = (text("traceparent"), text("tracestate"));
        let is_too_large = request.encoded_len() > MESSAGE_BYTES_MAX - ENVELOPE_BYTES_MAX;
        let shared = &self.0.0;
        let mut state = shared.state();
        state.n_calls += 1;
        let call = state.n_calls;
        let end = if is_too_large {
            // It would end the stream, and all other calls with it.
            Some(Status::out_of_range(format!("the request takes more than {MESSAGE_BYTES_MAX} bytes")))
        } else {
            state.lost.clone()
        };
        let is_lost = end.is_some();
        state.calls.insert(call, Call { end, ..Call::default() });
        if !is_lost {
            let body = Some(Asked::Generate(request));
            state.send(wire::ExchangeRequest { call, body, traceparent, tracestate });
        }
        drop(state);
        Frames { shared: Arc::clone(shared), call }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.is_closed = true;
        state.wake_sender();
    }
}

impl Traffic {
    /// Hands frames to their calls until the stream ends; returns why. Calls that run then end with that.
    pub async fn run(mut self) -> Status {
        loop {
            match self.frames.message().await {
                Ok(Some(frame)) => self.shared.deliver(frame),
                Ok(None) => return self.shared.lose(Status::unavailable("it ended the stream")),
                Err(status) => return self.shared.lose(status),
            }
        }
    }
}

impl Drop for Traffic {
    fn drop(&mut self) {
        self.shared.lose(Status::unavailable("the stream was given up"));
    }
}

impl Frames {
    /// The next frame, which may be several that came; none after the last.
    ///
    /// # Errors
    /// How the call ended early, or that it was not read fast enough.
    pub async fn message(&mut self) -> Result<Option<wire::GenerateFrame>, Status> {
        poll_fn(|context| {
            let mut state = self.shared.state();
            let call = state.calls.get_mut(&self.call).expect("only dropping this takes the call out");
            if let Some(frame) = call.frame.take() {
                return Poll::Ready(Ok(Some(frame)));
            }
            if let Some(status) = &call.end {
                return Poll::Ready(Err(status.clone()));
            }
            if call.is_complete {
                return Poll::Ready(Ok(None));
            }
            call.reader = Some(context.waker().clone());
            Poll::Pending
        })
        .await
    }
}

impl Drop for Frames {
    fn drop(&mut self) {
        let mut state = self.shared.state();
        let gone = state.calls.remove(&self.call);
        if gone.is_some_and(|call| !call.is_over()) {
            state.cancel(self.call);
        } else if state.is_done() {
            state.wake_sender();
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn deliver(&self, frame: wire::ExchangeFrame) {
        let wire::ExchangeFrame { call: number, body } = frame;
        let mut state = self.state();
        // Its reader may have gone.
        let Some(call) = state.calls.get_mut(&number).filter(|call| !call.is_over()) else { return };
        let is_frame = matches!(body, Some(Answer::Frame(_)));
        match body {
            Some(Answer::Frame(frame)) => call.push(frame, self.tokens_max),
            Some(Answer::Error(error)) => call.end = Some(error.into()),
            None => call.end = Some(Status::internal("an answer of neither frame nor error")),
        }
        let reader = call.reader.take();
        if is_frame && call.end.is_some() {
            // The worker knows of all other ends.
            state.cancel(number);
        }
        drop(state);
        if let Some(reader) = reader {
            reader.wake();
        }
    }

    fn lose(&self, status: Status) -> Status {
        let mut state = self.state();
        state.outgoing.clear();
        let lost = state.lost.get_or_insert(status).clone();
        let mut readers = Vec::new();
        for call in state.calls.values_mut().filter(|call| !call.is_over()) {
            call.end = Some(lost.clone());
            readers.extend(call.reader.take());
        }
        drop(state);
        readers.into_iter().for_each(Waker::wake);
        lost
    }
}

impl State {
    fn send(&mut self, request: wire::ExchangeRequest) {
        if self.lost.is_none() {
            self.outgoing.push_back(request);
            self.wake_sender();
        }
    }

    fn cancel(&mut self, call: u64) {
        // What was not sent yet is not sent at all, so that what waits is bounded by calls that live and those aborted.
        if let Some(index) = self.outgoing.iter().position(|request| request.call == call) {
            self.outgoing.remove(index);
            return self.wake_sender();
        }
        let body = Some(Asked::Cancel(wire::ExchangeCancel {}));
        self.send(wire::ExchangeRequest { call, body, ..Default::default() });
    }

    fn wake_sender(&mut self) {
        if let Some(sender) = self.sender.take() {
            sender.wake();
        }
    }

    fn is_done(&self) -> bool {
        self.is_closed && self.calls.is_empty()
    }
}

impl Call {
    /// Adds a frame to those that wait; too many tokens end the call.
    fn push(&mut self, frame: wire::GenerateFrame, tokens_max: usize) {
        self.is_complete = is_last(&frame);
        match &mut self.frame {
            None => self.frame = Some(frame),
            Some(earlier) => {
                earlier.tokens.extend(frame.tokens);
                earlier.finish_reason = frame.finish_reason;
                earlier.cached_tokens = earlier.cached_tokens.or(frame.cached_tokens);
            }
        }
        let n_tokens = self.frame.as_ref().map_or(0, |frame| frame.tokens.len());
        if !self.is_complete && n_tokens > tokens_max {
            let n_tokens = u32::try_from(n_tokens).unwrap_or(u32::MAX);
            self.end = Some(to_status(&RequestError::SlowReader(n_tokens)));
        }
    }

    /// Nothing more comes.
    fn is_over(&self) -> bool {
        self.is_complete || self.end.is_some()
    }
}

/// What this end sends.
struct Outgoing(Arc<Shared>);

impl Stream for Outgoing {
    type Item = wire::ExchangeRequest;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<wire::ExchangeRequest>> {
        let mut state = self.0.state();
        if let Some(request) = state.outgoing.pop_front() {
            return Poll::Ready(Some(request));
        }
        if state.is_done() || state.lost.is_some() {
            return Poll::Ready(None);
        }
        state.sender = Some(context.waker().clone());
        Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    use futures::executor::block_on;
    use futures::{FutureExt as _, StreamExt as _};
    use tonic::Code;

    use super::*;
    use crate::status::from_status;

    const TOKENS_MAX: usize = 4;

    fn line() -> (Line, Arc<Shared>, Outgoing) {
        let shared = Arc::new(Shared { state: Mutex::default(), tokens_max: TOKENS_MAX });
        (Line(Arc::new(Handle(Arc::clone(&shared)))), Arc::clone(&shared), Outgoing(shared))
    }

    fn frame(call: u64, first_position: u32, n_tokens: usize, is_last: bool) -> wire::ExchangeFrame {
        let finish = if is_last { wire::FinishReason::Length } else { wire::FinishReason::Unspecified };
        let frame = wire::GenerateFrame {
            first_position,
            tokens: vec![wire::SampledToken::default(); n_tokens],
            finish_reason: finish.into(),
            ..Default::default()
        };
        wire::ExchangeFrame { call, body: Some(Answer::Frame(frame)) }
    }

    /// Calls whose requests were sent, and calls that were aborted.
    fn sent(outgoing: &mut Outgoing) -> (Vec<u64>, Vec<u64>) {
        let (mut begun, mut aborted) = (Vec::new(), Vec::new());
        while let Some(Some(wire::ExchangeRequest { call, body, .. })) = outgoing.next().now_or_never() {
            match body {
                Some(Asked::Generate(_)) => begun.push(call),
                Some(Asked::Cancel(_)) => aborted.push(call),
                None | Some(Asked::Opening(_)) => panic!("neither begins nor ends a call"),
            }
        }
        (begun, aborted)
    }

    fn call(line: &Line) -> Frames {
        line.call(Request::new(wire::GenerateRequest::default()))
    }

    #[test]
    fn frames_go_to_their_calls_and_join_while_nobody_reads() {
        let (line, shared, mut outgoing) = line();
        let (mut one, mut other) = (call(&line), call(&line));
        assert_eq!(sent(&mut outgoing), (vec![1, 2], vec![]));
        assert!(one.message().now_or_never().is_none());
        for news in [frame(2, 0, 1, false), frame(1, 0, 2, false), frame(2, 1, 1, false), frame(2, 2, 1, true)] {
            shared.deliver(news);
        }
        assert_eq!(block_on(one.message()).unwrap().unwrap().tokens.len(), 2);
        let joined = block_on(other.message()).unwrap().unwrap();
        assert_eq!((joined.first_position, joined.tokens.len(), is_last(&joined)), (0, 3, true));
        assert!(block_on(other.message()).unwrap().is_none());
        drop((one, other));
        assert_eq!(sent(&mut outgoing), (vec![], vec![1]), "the one that is not over is aborted");
        drop(call(&line));
        assert_eq!(sent(&mut outgoing), (vec![], vec![]), "nobody needs to know");
    }

    #[test]
    fn a_slow_reader_gets_what_came_and_then_the_error_and_its_call_is_aborted_once() {
        let (line, shared, mut outgoing) = line();
        let mut slow = call(&line);
        assert_eq!(sent(&mut outgoing), (vec![1], vec![]));
        shared.deliver(frame(1, 0, TOKENS_MAX, false));
        shared.deliver(frame(1, 4, 1, false));
        shared.deliver(frame(1, 5, 1, true));
        assert_eq!(block_on(slow.message()).unwrap().unwrap().tokens.len(), TOKENS_MAX + 1);
        let error = from_status(&block_on(slow.message()).unwrap_err());
        assert_eq!(error, RequestError::SlowReader(5));
        drop(slow);
        assert_eq!(sent(&mut outgoing), (vec![], vec![1]));
    }

    #[test]
    fn a_lost_stream_ends_every_call_and_each_that_comes_later() {
        let (line, shared, mut outgoing) = line();
        let mut before = call(&line);
        drop(shared.lose(Status::unavailable("reset")));
        let mut after = call(&line);
        for frames in [&mut before, &mut after] {
            assert_eq!(block_on(frames.message()).unwrap_err().code(), Code::Unavailable);
        }
        assert!(block_on(outgoing.next()).is_none());
    }

    #[test]
    fn errors_stay_typed_and_a_request_that_is_too_large_harms_no_other() {
        let (line, shared, mut outgoing) = line();
        let request = wire::GenerateRequest { prompt: vec![u32::MAX; MESSAGE_BYTES_MAX / 5], ..Default::default() };
        let mut large = line.call(Request::new(request));
        assert_eq!(block_on(large.message()).unwrap_err().code(), Code::OutOfRange);
        let mut small = call(&line);
        let error = RequestError::ShuttingDown("worker w".to_owned());
        let body = Some(Answer::Error((&to_status(&error)).into()));
        shared.deliver(wire::ExchangeFrame { call: small.call, body });
        assert_eq!(from_status(&block_on(small.message()).unwrap_err()), error);
        assert_eq!(sent(&mut outgoing), (vec![small.call], vec![]));
    }

    #[test]
    fn the_stream_ends_when_nobody_can_call_and_no_call_runs() {
        let (line, shared, mut outgoing) = line();
        let running = call(&line);
        drop(line);
        assert_eq!(sent(&mut outgoing).0, [1]);
        assert!(outgoing.next().now_or_never().is_none());
        shared.deliver(frame(1, 0, 1, true));
        drop(running);
        assert!(block_on(outgoing.next()).is_none());
    }
}
