//! One request's way from the engine thread to its reader: a single frame that grows while the reader is slow.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use contract::error::RequestError;
use contract::stream::GenerateFrame;
use futures::Stream;

/// The engine's end.
#[derive(Debug)]
pub(crate) struct Writer {
    shared: Arc<Mutex<State>>,
    tokens_max: usize,
}

/// The request's end: a stream of frames, the last of them with a finish reason, or an error.
///
/// Dropping it before its end calls what it was given for that.
pub(crate) struct Reader {
    shared: Arc<Mutex<State>>,
    on_abandon: Option<Box<dyn FnOnce() + Send>>,
}

/// What became of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Delivery {
    /// It waits for the reader or joined one that does.
    Queued,
    /// So many tokens wait that the reader counts as gone; it has been told so.
    TooSlow(u32),
}

#[derive(Debug, Default)]
struct State {
    frame: Option<GenerateFrame>,
    end: Option<Result<(), RequestError>>,
    waker: Option<Waker>,
}

/// Makes both ends; at most `tokens_max` tokens wait for the reader.
pub(crate) fn mailbox(tokens_max: usize, on_abandon: impl FnOnce() + Send + 'static) -> (Writer, Reader) {
    let shared = Arc::new(Mutex::new(State::default()));
    let reader = Reader { shared: Arc::clone(&shared), on_abandon: Some(Box::new(on_abandon)) };
    (Writer { shared, tokens_max }, reader)
}

impl Writer {
    /// Hands a frame to the reader; one with a finish reason is the last.
    pub(crate) fn push(&self, frame: GenerateFrame) -> Delivery {
        let mut state = lock(&self.shared);
        if state.end.is_some() {
            return Delivery::Queued;
        }
        let waiting = state.frame.as_ref().map_or(0, |frame| frame.tokens.len()) + frame.tokens.len();
        if waiting > self.tokens_max {
            let waiting = u32::try_from(waiting).unwrap_or(u32::MAX);
            end(state, Err(RequestError::SlowReader(waiting)));
            return Delivery::TooSlow(waiting);
        }
        let finish = frame.finish;
        match &mut state.frame {
            None => state.frame = Some(frame),
            Some(earlier) => {
                earlier.tokens.extend(frame.tokens);
                earlier.finish = finish;
                earlier.cached_tokens = earlier.cached_tokens.or(frame.cached_tokens);
            }
        }
        if finish.is_some() {
            end(state, Ok(()));
        } else {
            wake(state);
        }
        Delivery::Queued
    }

    /// Ends the stream with an error, after what waits.
    pub(crate) fn fail(&self, error: RequestError) {
        let state = lock(&self.shared);
        if state.end.is_none() {
            end(state, Err(error));
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.fail(RequestError::Internal("the engine has stopped".to_owned()));
    }
}

impl Stream for Reader {
    type Item = Result<GenerateFrame, RequestError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let mut state = lock(&self.shared);
        if let Some(frame) = state.frame.take() {
            return Poll::Ready(Some(Ok(frame)));
        }
        match &mut state.end {
            None => {
                state.waker = Some(context.waker().clone());
                Poll::Pending
            }
            Some(ended) => {
                let ended = std::mem::replace(ended, Ok(()));
                drop(state);
                self.on_abandon = None;
                Poll::Ready(ended.err().map(Err))
            }
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let ended = lock(&self.shared).end.is_some();
        if let Some(on_abandon) = self.on_abandon.take().filter(|_| !ended) {
            on_abandon();
        }
    }
}

fn lock(shared: &Mutex<State>) -> MutexGuard<'_, State> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

fn end(mut state: MutexGuard<'_, State>, how: Result<(), RequestError>) {
    state.end = Some(how);
    wake(state);
}

/// Wakes the reader without holding its lock.
fn wake(mut state: MutexGuard<'_, State>) {
    let waker = state.waker.take();
    drop(state);
    if let Some(waker) = waker {
        waker.wake();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use contract::plan::SampledToken;
    use contract::stream::FinishReason;
    use futures::StreamExt as _;
    use futures::executor::block_on;

    use super::*;

    fn frame(first_position: u32, n: u32, finish: Option<FinishReason>) -> GenerateFrame {
        let token = |token| SampledToken { token, logprob: 0.0, top: vec![] };
        let tokens = (first_position..first_position + n).map(token).collect();
        let cached_tokens = (first_position == 0).then_some(3);
        GenerateFrame { attempt: 1, first_position, tokens, finish, cached_tokens }
    }

    #[test]
    fn frames_coalesce_while_nobody_reads() {
        let (writer, mut reader) = mailbox(10, || panic!("nothing was abandoned"));
        writer.push(frame(0, 2, None));
        writer.push(frame(2, 1, None));
        let first = block_on(reader.next()).unwrap().unwrap();
        assert_eq!((first.first_position, first.tokens.len(), first.cached_tokens), (0, 3, Some(3)));
        writer.push(frame(3, 1, None));
        writer.push(frame(4, 1, Some(FinishReason::Length)));
        let last = block_on(reader.next()).unwrap().unwrap();
        assert_eq!((last.first_position, last.tokens.len(), last.finish), (3, 2, Some(FinishReason::Length)));
        assert!(block_on(reader.next()).is_none());
    }

    #[test]
    fn beyond_the_bound_the_reader_gets_what_waits_and_then_the_error() {
        let (writer, mut reader) = mailbox(3, || panic!("the engine knows already"));
        assert_eq!(writer.push(frame(0, 3, None)), Delivery::Queued);
        assert_eq!(writer.push(frame(3, 1, None)), Delivery::TooSlow(4));
        assert_eq!(block_on(reader.next()).unwrap().unwrap().tokens.len(), 3);
        assert_eq!(block_on(reader.next()), Some(Err(RequestError::SlowReader(4))));
        assert_eq!(block_on(reader.next()), None);
    }

    #[test]
    fn a_dropped_end_is_noticed_by_the_other() {
        let abandoned = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&abandoned);
        let (writer, reader) = mailbox(3, move || seen.store(true, Ordering::Relaxed));
        drop(reader);
        assert!(abandoned.load(Ordering::Relaxed));
        drop(writer);
        let (writer, mut reader) = mailbox(3, || {});
        drop(writer);
        assert!(matches!(block_on(reader.next()), Some(Err(RequestError::Internal(_)))));
    }
}
