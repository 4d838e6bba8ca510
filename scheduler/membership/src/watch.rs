//! Watching all members: reconnects by itself and never forgets what it knew while the store is away.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use contract::view::{Member, MemberKey};
use daemon::clock;
use daemon::task::Tasks;
use futures::{Stream, StreamExt as _};
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;

use crate::backend::{Backend, Feed};
use crate::backoff::Backoff;
use crate::fold::Fold;

/// Events that may wait for the watcher; beyond it the store's stream is not read.
const EVENTS_MAX: usize = 256;
/// Longest time to open a watch and to get its snapshot.
const OPEN_DEADLINE: Duration = Duration::from_secs(3);
/// Longest wait between two attempts to reach the store.
const RETRY_MAX: Duration = Duration::from_secs(2);

/// What a watcher hears.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WatchEvent {
    /// Everyone there is; first, and again after each reconnect.
    Snapshot(Vec<Member>),
    /// Someone joined, or its registration changed.
    Changed(Member),
    /// Someone's lease ended.
    Removed(MemberKey),
}

/// The events of one watch; dropping it ends the watch.
#[derive(Debug)]
pub struct WatchStream {
    events: mpsc::Receiver<WatchEvent>,
    connected: watch::Receiver<bool>,
}

impl WatchStream {
    /// Waits for the next event; `None` only when the task behind the stream was ended.
    pub async fn next(&mut self) -> Option<WatchEvent> {
        self.events.recv().await
    }

    /// Says whether the store is connected now; if not, the last events still stand.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        *self.connected.borrow()
    }

    /// Follows [`Self::is_connected`] from elsewhere, such as a readiness check.
    #[must_use]
    pub fn connected(&self) -> watch::Receiver<bool> {
        self.connected.clone()
    }
}

impl Stream for WatchStream {
    type Item = WatchEvent;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<WatchEvent>> {
        self.events.poll_recv(cx)
    }
}

/// Starts a watch on `backend` that keeps members missing after a reconnect for `grace`.
pub(crate) fn start<B: Backend>(backend: B, grace: Duration, tasks: &Tasks) -> WatchStream {
    let (sender, events) = mpsc::channel(EVENTS_MAX);
    let (connected_sender, connected) = watch::channel(false);
    let watcher = Watcher { backend, fold: Fold::new(grace), sender, connected: connected_sender };
    tasks.spawn("membership-watch", watcher.run());
    WatchStream { events, connected }
}

struct Watcher<B> {
    backend: B,
    fold: Fold,
    sender: mpsc::Sender<WatchEvent>,
    connected: watch::Sender<bool>,
}

/// The reader of the stream is gone.
struct Closed;

impl<B: Backend> Watcher<B> {
    async fn run(mut self) {
        let mut backoff = Backoff::new(RETRY_MAX);
        loop {
            let sender = self.sender.clone();
            let reason = tokio::select! {
                () = sender.closed() => return,
                opened = timeout(OPEN_DEADLINE, self.backend.open()) => match opened {
                    Ok(Ok(feed)) => match self.pump(feed, &mut backoff).await {
                        Ok(reason) => reason,
                        Err(Closed) => return,
                    },
                    Ok(Err(error)) => error.to_string(),
                    Err(_) => format!("no answer within {} ms", OPEN_DEADLINE.as_millis()),
                },
            };
            self.connected.send_replace(false);
            let wait = backoff.fail(daemon::random::u64());
            if backoff.is_worth_a_line() {
                let endpoints = self.backend.endpoints();
                tracing::warn!(endpoints, reason, "membership cannot be watched; the last known stays, trying again");
            }
            tokio::select! {
                () = sender.closed() => return,
                () = tokio::time::sleep(wait) => {}
            }
        }
    }

    /// Passes a feed on until it ends, and returns why it did.
    async fn pump(&mut self, mut feed: Feed, backoff: &mut Backoff) -> Result<String, Closed> {
        // The snapshot has a deadline; after it silence is normal, and pings notice a dead connection.
        let mut next = match timeout(OPEN_DEADLINE, feed.next()).await {
            Ok(event) => event,
            Err(_) => return Ok(format!("no snapshot within {} ms", OPEN_DEADLINE.as_millis())),
        };
        loop {
            match next {
                Some(Ok(event)) => {
                    backoff.succeed();
                    let events = self.fold.apply(event, clock::now());
                    self.send(events).await?;
                    if !self.connected.send_replace(true) {
                        tracing::info!(endpoints = self.backend.endpoints(), "membership is watched");
                    }
                }
                Some(Err(error)) => return Ok(error.to_string()),
                None => return Ok("the stream ended".to_owned()),
            }
            next = loop {
                let until_expiry = self.fold.next_expiry().map(|at| at.saturating_duration_since(clock::now()));
                tokio::select! {
                    () = self.sender.closed() => return Err(Closed),
                    event = feed.next() => break event,
                    () = sleep_or_never(until_expiry) => {
                        let events = self.fold.expire(clock::now());
                        self.send(events).await?;
                    }
                }
            };
        }
    }

    async fn send(&self, events: Vec<WatchEvent>) -> Result<(), Closed> {
        for event in events {
            self.sender.send(event).await.map_err(|_| Closed)?;
        }
        Ok(())
    }
}

async fn sleep_or_never(duration: Option<Duration>) {
    match duration {
        // Timers count in milliseconds; waking a moment late saves waking twice.
        Some(duration) => tokio::time::sleep(duration + Duration::from_millis(1)).await,
        None => std::future::pending().await,
    }
}
