//! Whether this process can answer, as `/readyz` and gRPC health tell it.

use std::sync::Arc;

use tokio::sync::watch;

/// Whether a role can answer and, if not, why; clones are the same readiness.
#[derive(Clone, Debug)]
pub struct Readiness(Arc<watch::Sender<State>>);

/// What a [`Readiness`] says at one time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct State {
    pub(super) ready: bool,
    pub(super) reason: String,
    /// The process ends: it will not become ready again.
    pub(super) draining: bool,
}

impl Default for Readiness {
    fn default() -> Self {
        Self::new()
    }
}

impl Readiness {
    /// Makes a readiness that says no, because the role is starting.
    #[must_use]
    pub fn new() -> Self {
        let state = State { ready: false, reason: "starting".to_owned(), draining: false };
        Self(Arc::new(watch::Sender::new(state)))
    }

    /// Says whether the role can answer; `reason` is shown when it cannot.
    ///
    /// A process that shuts down stays not ready whatever is set.
    pub fn set(&self, ready: bool, reason: impl Into<String>) {
        let reason = reason.into();
        self.0.send_if_modified(|state| {
            let changed = !state.draining && (state.ready != ready || state.reason != reason);
            if changed {
                tracing::debug!(ready, reason, "readiness");
                *state = State { ready, reason, draining: false };
            }
            changed
        });
    }

    /// Says whether the role can answer.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.0.borrow().ready
    }

    /// Tells why the role cannot answer; empty or meaningless when it can.
    #[must_use]
    pub fn reason(&self) -> String {
        self.0.borrow().reason.clone()
    }

    /// Waits until the role can answer.
    pub async fn until_ready(&self) {
        // The sender is alive: it is `self`.
        let _ = self.0.subscribe().wait_for(|state| state.ready).await;
    }

    /// Says no for good.
    pub(super) fn drain(&self) {
        self.0.send_replace(State { ready: false, reason: "shutting down".to_owned(), draining: true });
    }

    pub(super) fn subscribe(&self) -> watch::Receiver<State> {
        self.0.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn tells_whether_and_why_not_and_draining_is_final() {
        let readiness = Readiness::new();
        assert_eq!((readiness.is_ready(), readiness.reason().as_str()), (false, "starting"));
        readiness.set(false, "no workers");
        assert_eq!(readiness.reason(), "no workers");
        let clone = readiness.clone();
        clone.set(true, "");
        readiness.until_ready().await;
        readiness.drain();
        clone.set(true, "");
        assert_eq!((clone.is_ready(), clone.reason().as_str()), (false, "shutting down"));
    }
}
