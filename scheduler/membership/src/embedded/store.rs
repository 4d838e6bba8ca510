//! The lease table shared between calls, with watchers and a task that lets leases run out.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use contract::view::Member;
use daemon::clock;
use daemon::shutdown::Shutdown;
use daemon::task::Tasks;
use futures::StreamExt as _;
use tokio::sync::{Notify, broadcast};

use super::table::{Change, LeaseId, LeaseTable, TableError};
use crate::backend::{Backend, Feed, StoreError};
use crate::watch::{self, WatchEvent, WatchStream};

/// Members that fit.
const N_MEMBERS_MAX: usize = 4_096;
/// Changes a watcher may lag behind before it is sent a snapshot instead.
const CHANGES_MAX: usize = 256;

/// The store; clones are the same one.
#[derive(Clone, Debug)]
pub struct Store(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    table: Mutex<LeaseTable>,
    changes: broadcast::Sender<Change>,
    /// A lease was made that may run out before all others.
    earlier: Notify,
}

impl Default for Store {
    fn default() -> Self {
        Self::new()
    }
}

impl Store {
    /// Makes an empty store.
    #[must_use]
    pub fn new() -> Self {
        let (changes, _) = broadcast::channel(CHANGES_MAX);
        let table = Mutex::new(LeaseTable::new(N_MEMBERS_MAX));
        Self(Arc::new(Shared { table, changes, earlier: Notify::new() }))
    }

    /// Lets leases run out until `shutdown`.
    pub async fn run(&self, shutdown: Shutdown) {
        loop {
            let wait = {
                let mut table = self.table();
                let now = clock::now();
                let gone = table.expire(now);
                for change in gone {
                    if let Change::Removed(key) = &change {
                        tracing::info!(kind = ?key.kind, id = key.id, incarnation = %key.incarnation, "lease ran out");
                    }
                    self.tell(change);
                }
                table.next_expiry().map(|at| at.saturating_duration_since(now))
            };
            tokio::select! {
                () = shutdown.triggered() => return,
                () = self.0.earlier.notified() => {}
                () = sleep_or_never(wait) => {}
            }
        }
    }

    /// Watches the store from inside its process.
    #[must_use]
    pub fn watch(&self, tasks: &Tasks) -> WatchStream {
        // Inside the process the store is never away, so nobody is missing after a reconnect.
        watch::start(self.clone(), Duration::ZERO, tasks)
    }

    /// Gives `member` a new lease, in place of the one it had.
    pub(super) fn register(&self, member: Member, ttl: Duration) -> Result<LeaseId, TableError> {
        let mut table = self.table();
        loop {
            let id = LeaseId(daemon::random::u64());
            match table.register(member.clone(), id, ttl, clock::now()) {
                Err(TableError::LeaseInUse) => {}
                Err(error) => return Err(error),
                Ok(change) => {
                    if let Some(change) = change {
                        self.tell(change);
                    }
                    self.0.earlier.notify_one();
                    return Ok(id);
                }
            }
        }
    }

    pub(super) fn keep_alive(&self, id: LeaseId) -> Result<Duration, TableError> {
        self.table().keep_alive(id, clock::now())
    }

    pub(super) fn deregister(&self, id: LeaseId) -> Result<(), TableError> {
        let mut table = self.table();
        let change = table.deregister(id)?;
        self.tell(change);
        Ok(())
    }

    /// A snapshot, then each change; a reader that lags too far is sent a snapshot again.
    pub(super) fn feed(&self) -> Feed {
        let store = self.clone();
        async_stream::stream! {
            let (snapshot, mut changes) = store.subscribe();
            yield Ok(snapshot);
            loop {
                match changes.recv().await {
                    Ok(Change::Changed(member)) => yield Ok(WatchEvent::Changed(member)),
                    Ok(Change::Removed(key)) => yield Ok(WatchEvent::Removed(key)),
                    Err(broadcast::error::RecvError::Lagged(_)) => {
                        let (snapshot, again) = store.subscribe();
                        changes = again;
                        yield Ok(snapshot);
                    }
                    Err(broadcast::error::RecvError::Closed) => return,
                }
            }
        }
        .boxed()
    }

    /// Everyone there is, and a receiver of every change after that.
    fn subscribe(&self) -> (WatchEvent, broadcast::Receiver<Change>) {
        // Changes are sent under the same lock, so none falls between the two.
        let table = self.table();
        (WatchEvent::Snapshot(table.members().cloned().collect()), self.0.changes.subscribe())
    }

    /// Tells watchers; the caller holds the table's lock.
    fn tell(&self, change: Change) {
        // Fails only when nobody watches.
        let _ = self.0.changes.send(change);
    }

    fn table(&self) -> MutexGuard<'_, LeaseTable> {
        self.0.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn sleep_or_never(duration: Option<Duration>) {
    match duration {
        // Timers count in milliseconds; waking a moment late saves waking twice.
        Some(duration) => tokio::time::sleep(duration + Duration::from_millis(1)).await,
        None => std::future::pending().await,
    }
}

impl From<TableError> for StoreError {
    fn from(error: TableError) -> Self {
        match error {
            TableError::NoLease => Self::Lost,
            error => Self::Unavailable(error.to_string()),
        }
    }
}

/// The store as its own client: what the scheduler uses of itself.
impl Backend for Store {
    type Session = LeaseId;

    fn endpoints(&self) -> &str {
        "this process"
    }

    async fn grant(&self, member: &Member, ttl: Duration) -> Result<LeaseId, StoreError> {
        Ok(self.register(member.clone(), ttl)?)
    }

    async fn keep(&self, session: &mut LeaseId) -> Result<(), StoreError> {
        self.keep_alive(*session)?;
        Ok(())
    }

    async fn put(&self, session: &mut LeaseId, member: &Member) -> Result<(), StoreError> {
        let ttl = self.keep_alive(*session)?;
        *session = self.register(member.clone(), ttl)?;
        Ok(())
    }

    async fn end(&self, session: LeaseId) -> Result<(), StoreError> {
        Ok(self.deregister(session)?)
    }

    async fn open(&self) -> Result<Feed, StoreError> {
        Ok(self.feed())
    }
}

#[cfg(test)]
mod tests {
    use contract::ids::Incarnation;
    use contract::view::MemberKind;

    use super::*;

    fn member(index: usize) -> Member {
        Member {
            kind: MemberKind::Router,
            id: format!("r{index}"),
            incarnation: Incarnation(1),
            address: "r:1".to_owned(),
            n_data_ranks: 0,
            identity: None,
            draining: false,
            role: None,
            epoch: 1,
        }
    }

    #[tokio::test]
    async fn a_watcher_that_lags_is_sent_a_snapshot_instead_of_the_changes_it_missed() {
        let store = Store::new();
        let mut feed = store.feed();
        assert_eq!(feed.next().await, Some(Ok(WatchEvent::Snapshot(vec![]))));
        for index in 0..CHANGES_MAX * 2 {
            store.register(member(index), Duration::from_secs(60)).unwrap();
        }
        match feed.next().await {
            Some(Ok(WatchEvent::Snapshot(members))) => assert_eq!(members.len(), CHANGES_MAX * 2),
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn leases_run_out_in_the_store_without_anyone_asking() {
        let tasks = Tasks::new();
        let store = Store::new();
        let (trigger, shutdown) = Shutdown::pair();
        let running = store.clone();
        tasks.spawn("store", async move { running.run(shutdown).await });
        let mut feed = store.feed();
        feed.next().await;
        store.register(member(0), Duration::from_secs(60)).unwrap();
        store.register(member(1), Duration::from_millis(20)).unwrap();
        feed.next().await;
        feed.next().await;
        assert_eq!(feed.next().await, Some(Ok(WatchEvent::Removed(member(1).key()))));
        trigger.fire();
        tasks.join(Duration::from_secs(10)).await.unwrap();
    }
}
