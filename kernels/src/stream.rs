//! Order on a device: streams, events, and groups of ranks that compute together.

use std::fmt;
use std::sync::Arc;

use crate::error::Result;

/// A queue of a device: what is enqueued on one runs in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct StreamId(pub u32);

impl StreamId {
    /// The queue every device has.
    pub const MAIN: Self = Self(0);
}

/// Ranks that take part in a collective or in a fused compute-and-communicate operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GroupId(pub u32);

/// A device's side of an [`Event`].
pub trait Pending: Send + Sync {
    /// Whether all work before the event is done.
    fn is_done(&self) -> Result<bool>;
    /// Blocks until all work before the event is done.
    fn wait(&self) -> Result<()>;
}

/// A point in a stream that a host thread or another stream can wait for.
#[derive(Clone)]
pub struct Event(Option<Arc<dyn Pending>>);

impl Event {
    /// An event that has happened, as all have on a device that executes at once.
    pub fn done() -> Self {
        Self(None)
    }

    /// An event that a device tracks.
    pub fn pending(state: Arc<dyn Pending>) -> Self {
        Self(Some(state))
    }

    /// Whether all work before the event is done.
    ///
    /// # Errors
    /// What the device reports about that work.
    pub fn is_done(&self) -> Result<bool> {
        self.0.as_ref().map_or(Ok(true), |state| state.is_done())
    }

    /// Blocks the calling thread until all work before the event is done.
    ///
    /// # Errors
    /// What the device reports about that work.
    pub fn wait(&self) -> Result<()> {
        self.0.as_ref().map_or(Ok(()), |state| state.wait())
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Event(tracked)" } else { "Event(done)" })
    }
}
