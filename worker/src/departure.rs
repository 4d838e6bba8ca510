//! How a worker leaves: it takes no new request, and those it has end by themselves or, when their time is over, go on at
//! other workers. These read what is cached here meanwhile, and the worker waits a moment for them before it goes.

use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use contract::error::RequestError;
use contract::occupancy::Occupancy;
use daemon::clock;
use daemon::shutdown::{Shutdown, Trigger};
use tokio::sync::watch;
use tokio::time::{sleep_until, timeout};

use crate::engine_loop::EngineHandle;

/// Part of a grace in which what is handed over gets away, at most half of it.
const HAND_OVER_MAX: Duration = Duration::from_secs(2);
/// A worker on which nothing runs any more goes when nobody has read what is cached for so long: routers hear that it
/// leaves, and what it handed over orders its blocks, within this time.
const LINGER: Duration = Duration::from_millis(300);
/// Longest grace: who wants more does not want the worker to leave.
const GRACE_MAX: Duration = Duration::from_secs(7 * 24 * 3600);

/// Whether the worker is to leave, and when it hands over what still runs; clones are the same one.
#[derive(Clone, Debug, Default)]
pub(crate) struct Departure(Arc<watch::Sender<Option<Instant>>>);

/// What a worker that leaves hears of, and what it ends.
pub(crate) struct Signals<'a> {
    /// The process is to end.
    pub(crate) stopping: &'a Shutdown,
    /// The server has ended.
    pub(crate) server_ended: &'a Shutdown,
    /// Ends the server.
    pub(crate) stop: &'a Trigger,
    /// Ends what tells others of the cache, and what they read it by.
    pub(crate) part: &'a Trigger,
    /// Others can read what is cached.
    pub(crate) is_read: bool,
}

impl Departure {
    /// Lets the worker leave, and hand over what still runs after `grace`; the earliest such wish counts.
    pub(crate) fn wish(&self, grace: Duration) {
        let at = clock::now() + grace.min(GRACE_MAX);
        self.0.send_modify(|known| *known = Some(known.map_or(at, |known| known.min(at))));
    }

    /// Returns when anybody wishes so.
    pub(crate) async fn wished(&self) {
        // The sender lives as long as this.
        let _ = self.0.subscribe().wait_for(Option::is_some).await;
    }

    /// Hands over what still runs when its time is over, lends what is cached for a moment once nothing runs, and returns when
    /// the server has ended. A signal leaves `grace` until the server cuts what runs.
    pub(crate) async fn see_through(&self, handle: &EngineHandle, signals: &Signals<'_>, grace: Duration) {
        let hand_over_max = HAND_OVER_MAX.min(grace / 2);
        let mut over = pin!(self.over(signals.stopping, grace - hand_over_max));
        let mut occupancy = handle.occupancy();
        let is_handed_over = tokio::select! {
            // Nobody is connected any more.
            () = signals.server_ended.triggered() => return,
            () = idle(&mut occupancy) => false,
            () = &mut over => true,
        };
        let (readers, n_left) = (handle.readers(), n_requests(&occupancy.borrow()));
        let n_expected = readers.n_entered() + u64::from(n_left);
        let error = || RequestError::ShuttingDown("the worker".to_owned());
        if is_handed_over {
            tracing::info!(n_requests = n_left, "handing over what runs");
            handle.hand_over(error());
        }
        let blocks = occupancy.borrow().blocks;
        if signals.is_read && blocks.free < blocks.total {
            // What is handed over reads once it has room elsewhere. It times out when that takes long, or others go on reading.
            let _ = timeout(hand_over_max * 3 / 4, readers.gone(n_expected, LINGER)).await;
        }
        signals.part.fire();
        signals.stop.fire();
        if !is_handed_over {
            tokio::select! {
                () = signals.server_ended.triggered() => return,
                // A request that came just before none was taken any more may run.
                () = over => {}
            }
        }
        handle.stop(error());
        signals.server_ended.triggered().await;
    }

    /// Returns when what still runs is to be handed over, which a signal wishes after `grace`.
    async fn over(&self, stopping: &Shutdown, grace: Duration) {
        let (mut wishes, mut is_stopping) = (self.0.subscribe(), false);
        loop {
            let at = *wishes.borrow_and_update();
            let over = async {
                match at {
                    Some(at) => sleep_until(at.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = over => return,
                () = stopping.triggered(), if !is_stopping => {
                    is_stopping = true;
                    self.wish(grace);
                }
                Ok(()) = wishes.changed() => {}
            }
        }
    }
}

/// Requests that an engine has.
pub(crate) fn n_requests(occupancy: &Occupancy) -> u32 {
    occupancy.requests_running + occupancy.requests_waiting
}

/// Returns when the engine has no request, or is gone.
async fn idle(occupancy: &mut watch::Receiver<Occupancy>) {
    let _ = occupancy.wait_for(|occupancy| n_requests(occupancy) == 0).await;
}
