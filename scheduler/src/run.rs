//! The scheduler as a process: binds, serves, stops.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use daemon::address::InvalidAddress;
use daemon::clock;
use daemon::server::{BindError, Listener, Readiness, ServeError, Server};
use daemon::shutdown::Shutdown;
use daemon::task::Tasks;
use membership::embedded::Store;
use membership::{Kind, WatchStream};
use thiserror::Error;
use tokio::sync::{mpsc, watch};

use crate::config::Config;
use crate::publish::{EVENTS_MAX, Latest, Publisher};
use crate::relay::Relay;
use crate::service::{self, NAMES, Service};
use crate::state::State;
use crate::state::ledger::LedgerRelay;
use crate::telemetry::{LedgerTelemetry, Telemetry};

/// Longest wait for own tasks after the server has stopped.
const JOIN_DEADLINE: Duration = Duration::from_secs(5);

/// Why the scheduler could not start or serve.
#[derive(Debug, Error)]
pub enum Error {
    /// It cannot listen.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// What it should listen on is no address.
    #[error(transparent)]
    InvalidAddress(#[from] InvalidAddress),
    /// Membership is configured wrongly.
    #[error("cannot use membership")]
    Membership(#[from] membership::Error),
    /// The server cannot be built.
    #[error(transparent)]
    Serve(#[from] ServeError),
}

/// Runs the scheduler until `shutdown`.
///
/// Its epoch is the wall clock's milliseconds at start, so that a scheduler started later has a higher one.
///
/// # Errors
/// When it cannot listen or is configured wrongly; a store of members that is away is waited for.
pub async fn run(config: Config, shutdown: Shutdown) -> Result<(), Error> {
    let listener = Listener::bind_for("scheduler.listen", &config.listen)?;
    let tasks = Tasks::new();
    let store = Store::new();
    // Whatever ends this function ends its tasks.
    let (stop, stopping) = shutdown.part();
    let stop = StopOnDrop(stop);
    let members = watch_members(&config, &store, &tasks).await?;
    let readiness = Readiness::new();
    let (views_sender, views) = watch::channel(None);
    let (events_sender, events) = mpsc::channel(EVENTS_MAX);
    let publisher = Publisher {
        state: State::new(clock::unix_ms(), config.occupancy_stale(), config.roles),
        telemetry: Telemetry::new(),
        interval: config.view_interval(),
        views: views_sender,
        stalled: BTreeSet::new(),
    };
    tasks.spawn("scheduler-state", publisher.run(events, members, stopping.clone()));
    tasks.spawn("scheduler-ready", report_ready(readiness.clone(), views.clone(), config.clone()));
    let (leases, leases_stopping) = (store.clone(), stopping.clone());
    tasks.spawn("scheduler-leases", async move { leases.run(leases_stopping).await });
    let state = LedgerRelay::new(config.ledger_grace());
    let relay = Arc::new(Relay::new(state, config.ledger_batches_max, LedgerTelemetry::new()));
    let (forgetting, forgetting_stops) = (Arc::clone(&relay), stopping.clone());
    tasks.spawn("scheduler-ledger", async move { forgetting.forget_lost(forgetting_stops).await });
    let service = Service {
        events: events_sender,
        views,
        relay,
        tasks: tasks.clone(),
        heartbeat: config.heartbeat(),
        ledger_silence: config.ledger_silence(),
        shutdown: shutdown.clone(),
        next_stream: Arc::new(AtomicU64::new(0)),
    };
    let server = Server::new("scheduler", config.server.clone())
        .grpc(service::routes(service, store))
        .reflection(proto::DESCRIPTOR_SET)
        .service_names(&NAMES)
        .ready(readiness);
    config.announce.listening("grpc", listener.local_addr());
    let served = server.serve(listener, shutdown).await;
    drop(stop);
    if let Err(unjoined) = tasks.join(JOIN_DEADLINE).await {
        tracing::warn!(%unjoined, "the scheduler leaves tasks behind");
    }
    Ok(served?)
}

async fn watch_members(config: &Config, store: &Store, tasks: &Tasks) -> Result<WatchStream, Error> {
    Ok(match config.membership.kind {
        Kind::Embedded => store.watch(tasks),
        Kind::Etcd => membership::connect(&config.membership, tasks)?.watch().await?,
    })
}

/// Ready as soon as membership was reached once; losing it later stops nobody.
async fn report_ready(readiness: Readiness, mut views: watch::Receiver<Latest>, config: Config) {
    readiness.set(false, format!("membership was not reached yet: {}", config.membership.endpoints.join(",")));
    if views.wait_for(Option::is_some).await.is_ok() {
        readiness.set(true, "");
    }
}

struct StopOnDrop(daemon::shutdown::Trigger);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.fire();
    }
}
