//! Waits for a condition with a deadline, never for a time.

use std::fmt::Debug;
use std::time::{Duration, Instant};

const POLL: Duration = Duration::from_millis(10);

/// Looks until `look` gives `Ok`; panics with its last complaint at the deadline.
pub async fn until<T, E: Debug>(what: &str, deadline: Duration, mut look: impl AsyncFnMut() -> Result<T, E>) -> T {
    let end = Instant::now() + deadline;
    loop {
        match look().await {
            Ok(value) => return value,
            Err(complaint) if Instant::now() >= end => panic!("{what} not within {deadline:?}: {complaint:?}"),
            Err(_) => tokio::time::sleep(POLL).await,
        }
    }
}
