//! Spawned tasks have a name, are counted, and are waited for with a deadline.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio_util::task::TaskTracker;

/// Tasks alive in the whole process, shown as a gauge.
static ALIVE: AtomicUsize = AtomicUsize::new(0);

/// A group of tasks that someone answers for; clones are the same group.
#[derive(Clone, Debug, Default)]
pub struct Tasks {
    tracker: TaskTracker,
    names: Arc<Mutex<BTreeMap<&'static str, usize>>>,
}

/// Tasks that did not end within the deadline of [`Tasks::join`].
#[derive(Debug, thiserror::Error)]
#[error("{n_tasks} tasks still run after {deadline_ms} ms: {names}")]
pub struct Unjoined {
    /// How many still run.
    pub n_tasks: usize,
    /// The deadline that passed.
    pub deadline_ms: u128,
    /// Their names, each with its count.
    pub names: String,
}

impl Tasks {
    /// Makes an empty group.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Starts `future` as a task of this group; a panic in it is logged with the task's name.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub fn spawn<F>(&self, name: &'static str, future: F) -> JoinHandle<F::Output>
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        let alive = Alive::new(name, &self.names);
        self.tracker.spawn(async move {
            let _alive = alive;
            future.await
        })
    }

    /// Counts the tasks of this group that run.
    #[must_use]
    pub fn count(&self) -> usize {
        self.tracker.len()
    }

    /// Waits until no task of this group runs, but no longer than `deadline`.
    ///
    /// # Errors
    /// Names the tasks that still run; they go on.
    pub async fn join(&self, deadline: Duration) -> Result<(), Unjoined> {
        self.tracker.close();
        if tokio::time::timeout(deadline, self.tracker.wait()).await.is_ok() {
            return Ok(());
        }
        let names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        let n_tasks = names.values().sum();
        let names = names.iter().map(|(name, n)| format!("{name} x{n}")).collect::<Vec<_>>().join(", ");
        Err(Unjoined { n_tasks, deadline_ms: deadline.as_millis(), names })
    }
}

/// Counts the tasks alive in the process.
#[must_use]
pub fn alive() -> usize {
    ALIVE.load(Ordering::Relaxed)
}

/// Counts one task for as long as it lives, however it ends.
struct Alive {
    name: &'static str,
    names: Arc<Mutex<BTreeMap<&'static str, usize>>>,
}

impl Alive {
    fn new(name: &'static str, names: &Arc<Mutex<BTreeMap<&'static str, usize>>>) -> Self {
        ALIVE.fetch_add(1, Ordering::Relaxed);
        *names.lock().unwrap_or_else(PoisonError::into_inner).entry(name).or_default() += 1;
        Self { name, names: Arc::clone(names) }
    }
}

impl Drop for Alive {
    fn drop(&mut self) {
        if std::thread::panicking() {
            tracing::error!(task = self.name, "a task panicked");
        }
        ALIVE.fetch_sub(1, Ordering::Relaxed);
        let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(n) = names.get_mut(self.name) {
            *n -= 1;
            if *n == 0 {
                names.remove(self.name);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn join_waits_for_every_task_and_returns_their_results() {
        let tasks = Tasks::new();
        let (finish, finished) = tokio::sync::oneshot::channel::<u32>();
        let handle = tasks.spawn("answer", async move { finished.await.unwrap() });
        assert_eq!(tasks.count(), 1);
        finish.send(7).unwrap();
        tasks.join(Duration::from_secs(10)).await.unwrap();
        assert_eq!((handle.await.unwrap(), tasks.count()), (7, 0));
    }

    #[tokio::test]
    async fn join_names_what_still_runs_at_the_deadline() {
        let tasks = Tasks::new();
        tasks.spawn("stuck", std::future::pending::<()>());
        tasks.spawn("stuck", std::future::pending::<()>());
        let error = tasks.join(Duration::from_millis(5)).await.unwrap_err();
        assert_eq!((error.n_tasks, error.names.as_str()), (2, "stuck x2"));
    }

    #[tokio::test]
    async fn a_task_that_panics_or_is_aborted_is_no_longer_counted() {
        let tasks = Tasks::new();
        let panicking = tasks.spawn("panics", async { panic!("on purpose") });
        assert!(panicking.await.unwrap_err().is_panic());
        let aborted = tasks.spawn("aborted", std::future::pending::<()>());
        aborted.abort();
        assert!(aborted.await.unwrap_err().is_cancelled());
        tasks.join(Duration::from_secs(10)).await.unwrap();
        assert!(tasks.names.lock().unwrap().is_empty());
    }
}
