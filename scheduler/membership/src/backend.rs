//! What a store must do for leases and watches; retries, deadlines and epochs are not its business.

use std::time::Duration;

use contract::view::Member;
use futures::stream::BoxStream;
use thiserror::Error;

use crate::watch::WatchEvent;

/// Why a call to the store gave nothing.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub(crate) enum StoreError {
    /// The store knows no such lease: make another.
    #[error("the lease is over")]
    Lost,
    /// No answer, or none that helps: try again.
    #[error("{0}")]
    Unavailable(String),
}

/// All members, then each change, until the connection fails.
pub(crate) type Feed = BoxStream<'static, Result<WatchEvent, StoreError>>;

/// A client of one store.
pub(crate) trait Backend: Clone + Send + Sync + 'static {
    /// A lease that the store granted.
    type Session: Send + Sync;

    /// Names the store's endpoints in log lines.
    fn endpoints(&self) -> &str;

    /// Makes a lease of `ttl` that holds `member`.
    fn grant(&self, member: &Member, ttl: Duration) -> impl Future<Output = Result<Self::Session, StoreError>> + Send;

    /// Prolongs the lease.
    fn keep(&self, session: &mut Self::Session) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Lets the lease hold another state of the same member.
    fn put(&self, session: &mut Self::Session, member: &Member) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Ends the lease.
    fn end(&self, session: Self::Session) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Opens a watch whose first event is a snapshot.
    fn open(&self) -> impl Future<Output = Result<Feed, StoreError>> + Send;
}
