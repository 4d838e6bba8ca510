//! One request's way from the engine thread to its reader: a single frame that grows while the reader is slow.
//!
//! Tokens that come faster than one a millisecond travel together: nobody reads faster, and each frame costs all that it
//! passes.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use contract::error::RequestError;
use contract::stream::GenerateFrame;
use daemon::clock;
use futures::Stream;
use tokio::time::{Sleep, sleep_until};

/// Shortest time between two frames, but for the last.
const PACE: Duration = Duration::from_millis(1);

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
    pace: Duration,
    /// When a frame was given last.
    given_at: Option<Instant>,
    /// Until then the frame at hand may grow.
    pause: Option<Pin<Box<Sleep>>>,
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
    /// The reader comes back by itself, and is woken for the end only.
    is_paced: bool,
}

/// Makes both ends; at most `tokens_max` tokens wait for the reader.
pub(crate) fn mailbox(tokens_max: usize, on_abandon: impl FnOnce() + Send + 'static) -> (Writer, Reader) {
    let shared = Arc::new(Mutex::new(State::default()));
    let on_abandon: Option<Box<dyn FnOnce() + Send>> = Some(Box::new(on_abandon));
    let reader = Reader { shared: Arc::clone(&shared), on_abandon, pace: PACE, given_at: None, pause: None };
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
        } else if !state.is_paced {
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

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        let mut guard = lock(&this.shared);
        let state = &mut *guard;
        if state.frame.is_some() {
            let due = this.given_at.map(|given_at| given_at + this.pace);
            state.is_paced = state.end.is_none() && due.is_some_and(|due| is_early(due, &mut this.pause, context));
            if !state.is_paced {
                this.pause = None;
                this.given_at = Some(clock::now());
                return Poll::Ready(state.frame.take().map(Ok));
            }
        } else if let Some(ended) = &mut state.end {
            let ended = std::mem::replace(ended, Ok(()));
            drop(guard);
            this.on_abandon = None;
            return Poll::Ready(ended.err().map(Err));
        }
        state.waker = Some(context.waker().clone());
        Poll::Pending
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

/// Whether it is not yet time for the next frame; the reader is woken when it is.
fn is_early(due: Instant, pause: &mut Option<Pin<Box<Sleep>>>, context: &mut Context<'_>) -> bool {
    if clock::now() >= due {
        return false;
    }
    let pause = pause.get_or_insert_with(|| Box::pin(sleep_until(due.into())));
    pause.as_mut().poll(context).is_pending()
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

    #[tokio::test]
    async fn frames_that_follow_at_once_join_until_the_pace_or_the_end_allows_one() {
        let (writer, mut reader) = mailbox(10, || panic!("nothing was abandoned"));
        writer.push(frame(0, 1, None));
        assert_eq!(reader.next().await.unwrap().unwrap().tokens.len(), 1);
        writer.push(frame(1, 1, None));
        assert_eq!(reader.next().await.unwrap().unwrap().tokens.len(), 1, "it comes when the pace allows");
        reader.pace = Duration::from_secs(3600);
        writer.push(frame(2, 1, None));
        assert!(futures::poll!(reader.next()).is_pending());
        writer.push(frame(3, 1, Some(FinishReason::Length)));
        let joined = reader.next().await.unwrap().unwrap();
        assert_eq!((joined.first_position, joined.tokens.len()), (2, 2));
        assert!(reader.next().await.is_none());
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
