//! Prompts that move between workers: what the engine's thread and the transfers tell each other.
//!
//! A worker that computes a prompt for another shows how far each layer has come, and keeps the blocks until the reader
//! has gone. A worker that gets a prompt lends the blocks to be filled, and hears once how much of it is there.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use contract::ids::RequestId;
use contract::request::GenerateRequest;
use engine::{Hold, SequenceKey};
use tokio::sync::{oneshot, watch};
use tokio::time::timeout;

use crate::inbox::{Event, Inbox};
use crate::transfer::Progress;

/// A prompt that is computed for another worker; dropping it ends that, and lets its blocks go.
#[derive(Debug)]
pub(crate) struct Lending {
    pub(crate) progress: watch::Receiver<Progress>,
    pub(crate) guard: LendingGuard,
}

/// Ends a lending.
#[derive(Debug)]
pub(crate) struct LendingGuard {
    pub(crate) inbox: Inbox,
    /// What the prompt is computed as.
    pub(crate) request: RequestId,
    #[expect(dead_code, reason = "to be dropped is its use")]
    pub(crate) reading: Reading,
}

impl Drop for LendingGuard {
    fn drop(&mut self) {
        // A closed inbox has ended everything.
        let _ = self.inbox.push(Event::EndLending(self.request));
    }
}

/// Who reads what an engine lends; clones are the same.
#[derive(Clone, Debug, Default)]
pub(crate) struct Readers(Arc<watch::Sender<Counts>>);

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    n_now: usize,
    n_entered: u64,
}

/// One reader, until it is dropped.
#[derive(Debug)]
pub(crate) struct Reading(Readers);

impl Readers {
    /// Counts one more.
    pub(crate) fn enter(&self) -> Reading {
        self.0.send_modify(|counts| {
            counts.n_now += 1;
            counts.n_entered += 1;
        });
        Reading(self.clone())
    }

    /// Readers so far.
    pub(crate) fn n_entered(&self) -> u64 {
        self.0.borrow().n_entered
    }

    /// Returns when there were `n_expected` readers in all, and nobody has read for `pause`.
    pub(crate) async fn gone(&self, n_expected: u64, pause: Duration) {
        let mut readers = self.0.subscribe();
        loop {
            // The sender lives as long as this.
            let _ = readers.wait_for(|counts| counts.n_now == 0 && counts.n_entered >= n_expected).await;
            if timeout(pause, readers.changed()).await.is_err() {
                return;
            }
        }
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        self.0.0.send_modify(|counts| counts.n_now -= 1);
    }
}

/// Blocks to be filled from another worker. However it ends, dropping it tells the engine how much is there.
#[derive(Debug)]
pub(crate) struct Filling {
    /// What the client asked for, with the workers that compute its prompt.
    pub(crate) request: GenerateRequest,
    pub(crate) hold: Hold,
    /// Ends when nobody wants the request any more; its blocks are not to be written then.
    pub(crate) cancelled: oneshot::Receiver<()>,
    pub(crate) filled: Filled,
}

/// What is filled, told to the engine when dropped.
#[derive(Debug)]
pub(crate) struct Filled {
    pub(crate) inbox: Inbox,
    pub(crate) key: SequenceKey,
    /// Tokens from the first on whose KV is there in every layer.
    pub(crate) n_tokens: usize,
}

impl Drop for Filled {
    fn drop(&mut self) {
        // A closed inbox has ended everything.
        let _ = self.inbox.push(Event::Filled { key: self.key, n_tokens: self.n_tokens });
    }
}

/// Gets prompts from other workers.
pub(crate) trait Fetch: Send + Sync {
    /// Begins to fill blocks, at once and without waiting.
    fn fetch(&self, filling: Filling);
}

/// Tells readers of prompts that are computed for others as each layer of a step is done.
#[derive(Debug, Default)]
pub struct Layers {
    /// Of the step that runs.
    watched: Mutex<Vec<Watched>>,
}

/// A sequence of a step whose progress is told.
#[derive(Clone, Debug)]
pub struct Watched {
    pub(crate) progress: watch::Sender<Progress>,
    /// Its tokens whose KV is there after the step.
    pub(crate) n_tokens: u32,
}

impl Layers {
    /// A step begins.
    pub fn begin(&self, watched: Vec<Watched>) {
        *self.lock() = watched;
    }

    /// Whether anybody follows the step that runs.
    pub(crate) fn is_watched(&self) -> bool {
        !self.lock().is_empty()
    }

    /// The step's KV of a layer is written.
    pub fn written(&self, layer: usize) {
        for Watched { progress, n_tokens } in self.lock().iter() {
            progress.send_modify(|progress| {
                if let Some(of_layer) = Arc::make_mut(&mut progress.tokens_by_layer).get_mut(layer) {
                    *of_layer = *n_tokens;
                }
            });
        }
    }

    /// The step is over: whoever was not told of layers is told of all.
    pub fn end(&self) {
        for Watched { progress, n_tokens } in self.lock().drain(..) {
            progress.send_if_modified(|progress| {
                let is_new = progress.tokens_by_layer.iter().any(|of_layer| *of_layer < n_tokens);
                Arc::make_mut(&mut progress.tokens_by_layer).fill(n_tokens);
                is_new
            });
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Watched>> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn readers_are_gone_when_the_last_has_been_for_a_while() {
        let readers = Readers::default();
        let (first, last) = (readers.enter(), readers.enter());
        drop(first);
        assert!(readers.gone(0, Duration::ZERO).now_or_never().is_none(), "one still reads");
        drop(last);
        assert!(readers.gone(0, Duration::from_secs(60)).now_or_never().is_none(), "another may come");
        assert!(readers.gone(3, Duration::ZERO).now_or_never().is_none(), "one is to come yet");
        readers.gone(2, Duration::ZERO).await;
    }
}
