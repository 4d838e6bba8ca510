//! How many requests a worker that leaves still has, for whoever sent it away.

use std::time::Duration;

use async_stream::stream;
use contract::occupancy::Occupancy;
use futures::Stream;
use proto::worker::v1 as wire;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tonic::Status;

use crate::departure::n_requests;

/// Shortest time between two messages.
const PACE: Duration = Duration::from_millis(100);
/// Longest time between two messages.
const SIGN_OF_LIFE: Duration = Duration::from_secs(1);

/// Tells how many are left until none is.
pub(super) fn progress(
    mut occupancy: watch::Receiver<Occupancy>,
) -> impl Stream<Item = Result<wire::DrainProgress, Status>> {
    stream! {
        loop {
            let requests_left = n_requests(&occupancy.borrow_and_update());
            yield Ok(wire::DrainProgress { requests_left });
            if requests_left == 0 {
                return;
            }
            sleep(PACE).await;
            if let Ok(Err(_)) = timeout(SIGN_OF_LIFE, occupancy.changed()).await {
                // The engine has stopped, and nothing is left with it.
                yield Ok(wire::DrainProgress { requests_left: 0 });
                return;
            }
        }
    }
}
