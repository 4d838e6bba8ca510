//! Keep a lease, watch the cluster: one trait over etcd and over a store that the scheduler hosts.
//!
//! An outage of the store is a non-event: leases are tried again and re-made with a higher epoch, watches reconnect and
//! deliver a fresh snapshot, and nothing is removed merely because the store cannot be reached.
//! This crate does not decide anything about members; it says who holds a lease.

mod backend;
mod backoff;
mod config;
pub mod embedded;
mod error;
mod etcd;
mod fold;
mod lease;
#[cfg(test)]
mod testing;
mod watch;

use std::sync::Arc;
use std::time::Duration;

use contract::view::Member;
use daemon::task::Tasks;
use futures::future::BoxFuture;

pub use config::{Kind, MembershipConfig, check_id};
pub use error::Error;
pub use lease::{Lease, LeaseState};
pub use watch::{WatchEvent, WatchStream};

/// A place where members keep leases and watch one another.
pub trait Membership: Send + Sync {
    /// Starts to keep a lease for `member`; its epoch is set here, one more for each lease.
    ///
    /// Does not wait for the store: the lease is held as soon as [`Lease::is_held`] says so.
    ///
    /// # Errors
    /// When the member's id or the time to live cannot be used with this store; never because it is unreachable.
    fn register(&self, member: Member, ttl: Duration) -> BoxFuture<'_, Result<Lease, Error>>;

    /// Starts to watch all members: a snapshot as soon as the store is reached, then each change.
    ///
    /// # Errors
    /// When the store's client cannot be made; never because the store is unreachable.
    fn watch(&self) -> BoxFuture<'_, Result<WatchStream, Error>>;
}

/// Makes the client of the configured store; what it keeps running runs in `tasks`.
///
/// # Errors
/// When an endpoint or the prefix cannot be used; whether someone listens there is seen later.
///
/// # Panics
/// Outside a tokio runtime.
pub fn connect(config: &MembershipConfig, tasks: &Tasks) -> Result<Arc<dyn Membership>, Error> {
    Ok(match config.kind {
        Kind::Embedded => Arc::new(embedded::client(config, tasks)?),
        Kind::Etcd => Arc::new(etcd::client(config, tasks)?),
    })
}
