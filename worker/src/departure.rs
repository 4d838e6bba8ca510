//! How a worker leaves: it takes no new request, and those it has end by themselves or, when their time is over, go on at
//! other workers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use contract::error::RequestError;
use contract::occupancy::Occupancy;
use daemon::clock;
use daemon::shutdown::{Shutdown, Trigger};
use tokio::sync::watch;
use tokio::time::sleep_until;

use crate::engine_loop::EngineHandle;

/// Part of a grace in which what is handed over gets away, at most half of it.
const HAND_OVER_MAX: Duration = Duration::from_secs(2);
/// Longest grace: who wants more does not want the worker to leave.
const GRACE_MAX: Duration = Duration::from_secs(7 * 24 * 3600);

/// Whether the worker is to leave, and when it hands over what still runs; clones are the same one.
#[derive(Clone, Debug, Default)]
pub(crate) struct Departure(Arc<watch::Sender<Option<Instant>>>);

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

    /// Hands over what still runs when its time is over, and returns when the server has ended: it is told to by `stop` as
    /// soon as nothing runs. A signal, which `stopping` tells of, leaves `grace` until the server cuts what runs.
    pub(crate) async fn see_through(
        &self,
        handle: &EngineHandle,
        (stop, stopping): (&Trigger, &Shutdown),
        grace: Duration,
        server_ended: &Shutdown,
    ) {
        let (mut wishes, mut occupancy) = (self.0.subscribe(), handle.occupancy());
        let (mut is_stopping, mut is_handed_over) = (false, false);
        loop {
            let hand_over_at = *wishes.borrow_and_update();
            let hand_over = async {
                match hand_over_at {
                    Some(at) => sleep_until(at.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = server_ended.triggered() => return,
                () = stopping.triggered(), if !is_stopping => {
                    is_stopping = true;
                    self.wish(grace - HAND_OVER_MAX.min(grace / 2));
                }
                () = idle(&mut occupancy), if !is_stopping => stop.fire(),
                () = hand_over, if !is_handed_over => {
                    is_handed_over = true;
                    tracing::info!(n_requests = n_requests(&handle.occupancy().borrow()), "handing over what runs");
                    handle.stop(RequestError::ShuttingDown("the worker".to_owned()));
                    stop.fire();
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
