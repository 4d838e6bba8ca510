//! One signal that tells every part of a process to finish.

use std::io;
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::clock;
use crate::task::Tasks;

/// Exit code of a process whose user would not wait: 128 + SIGINT.
const EXIT_IMPATIENT: i32 = 130;

/// Signals this soon after the first are the same wish: supervisors signal a process and its group.
const SAME_WISH: Duration = Duration::from_millis(500);

/// Learns that the process, or the part of it that holds this, should finish.
#[derive(Clone, Debug)]
pub struct Shutdown(CancellationToken);

/// Tells every [`Shutdown`] of its pair to finish.
#[derive(Clone, Debug)]
pub struct Trigger(CancellationToken);

impl Shutdown {
    /// Makes a trigger and the shutdown that it fires; dropping the trigger fires nothing.
    #[must_use]
    pub fn pair() -> (Trigger, Self) {
        let token = CancellationToken::new();
        (Trigger(token.clone()), Self(token))
    }

    /// Makes a shutdown that never comes.
    #[must_use]
    pub fn never() -> Self {
        Self(CancellationToken::new())
    }

    /// Makes a shutdown that SIGTERM and SIGINT fire; a second signal ends the process at once.
    ///
    /// # Errors
    /// When the signal handlers cannot be installed.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub fn on_signals() -> io::Result<Self> {
        let (trigger, shutdown) = Self::pair();
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        Tasks::new().spawn("signals", async move {
            let mut first = None;
            loop {
                tokio::select! {
                    _ = terminate.recv() => {}
                    _ = interrupt.recv() => {}
                }
                match first {
                    None => {
                        first = Some(clock::now());
                        tracing::info!("shutting down; a second signal ends the process at once");
                        trigger.fire();
                    }
                    Some(first) if clock::now().duration_since(first) < SAME_WISH => {}
                    Some(_) => std::process::exit(EXIT_IMPATIENT),
                }
            }
        });
        Ok(shutdown)
    }

    /// Makes a part of this shutdown: it comes with the whole, or earlier by its own trigger.
    #[must_use]
    pub fn part(&self) -> (Trigger, Self) {
        let token = self.0.child_token();
        (Trigger(token.clone()), Self(token))
    }

    /// Waits until the shutdown was triggered; returns at once when it was.
    pub async fn triggered(&self) {
        self.0.cancelled().await;
    }

    /// Says whether the shutdown was triggered.
    #[must_use]
    pub fn is_triggered(&self) -> bool {
        self.0.is_cancelled()
    }
}

impl Trigger {
    /// Fires; firing twice is firing once.
    pub fn fire(&self) {
        self.0.cancel();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_part_ends_alone_but_the_whole_ends_every_part() {
        let (whole, shutdown) = Shutdown::pair();
        let (first_trigger, first) = shutdown.part();
        let (_second_trigger, second) = shutdown.part();
        first_trigger.fire();
        first.triggered().await;
        assert!(!shutdown.is_triggered() && !second.is_triggered());
        whole.fire();
        second.triggered().await;
        assert!(shutdown.is_triggered());
    }
}
