//! The worker as a process: loads, registers, serves, drains, stops.

use std::net::SocketAddr;
use std::time::Duration;

use contract::error::RequestError;
use contract::ids::{DataRank, EngineId, Incarnation, WorkerId};
use contract::model::ModelIdentity;
use contract::view::{Member, MemberKind};
use daemon::random;
use daemon::server::{Listener, Readiness, Server};
use daemon::shutdown::{Shutdown, Trigger};
use daemon::task::Tasks;
use membership::Lease;

use crate::config::Config;
use crate::departure::{Departure, Signals};
use crate::engine_loop::{self, Bounds, EngineFailure, EngineHandle, EngineThread};
use crate::error::Error;
use crate::load::{Loaded, load};
use crate::report::{self, Pace};
use crate::service::{self, Service};
use crate::split::Transfers;
use crate::stall;

/// Longest wait for the engine thread to end: one step may have to finish first.
const STOP_DEADLINE: Duration = Duration::from_secs(30);
/// Longest wait for own tasks after that.
const JOIN_DEADLINE: Duration = Duration::from_secs(5);

/// Loads the configured model and serves it until `shutdown`.
///
/// # Errors
/// When it cannot listen, cannot load the model or is configured wrongly, and when the engine fails while it runs.
/// Stores of members and schedulers that are away are waited for.
pub async fn run(config: Config, shutdown: Shutdown) -> Result<(), Error> {
    let listener = Listener::bind_for("worker.listen", &config.listen)?;
    let for_loading = config.clone();
    let loading = tokio::task::spawn_blocking(move || load(&for_loading));
    let loaded = loading.await.map_err(Error::LoadPanicked)??;
    serve(config, listener, loaded, shutdown).await
}

/// Serves what was loaded.
pub(crate) async fn serve(
    mut config: Config,
    listener: Listener,
    loaded: Loaded,
    shutdown: Shutdown,
) -> Result<(), Error> {
    let Loaded { engine, executor, identity, pool, memory, unwritten } = loaded;
    let incarnation = Incarnation(random::u64());
    if config.id.is_empty() {
        config.id = format!("worker-{:08x}", random::u64() as u32);
    }
    memory.observe(&config.id);
    let id = EngineId { worker: WorkerId::new(config.id.as_str()), incarnation, data_rank: DataRank(0) };
    let bounds =
        Bounds { reader_tokens_max: config.reader_tokens_max.max(1) as usize, kv_batches_max: config.kv_batches_max };
    let tasks = Tasks::new();
    let transfers = Transfers::bind(&config, &id, &identity, pool).await?;
    let started = engine_loop::start(id.clone(), engine, executor, bounds, transfers.fetcher(&tasks));
    let (handle, thread) = started.map_err(Error::Thread)?;
    // Whatever ends this function stops the engine and every task.
    let (stop, stopping) = shutdown.part();
    // A worker that leaves still lends what is cached.
    let (part, parting) = Shutdown::pair();
    let guard = StopOnDrop { handle: handle.clone(), stop, part };
    let (transfer_address, move_cost) = (transfers.address.clone(), transfers.cost());
    transfers.serve(&handle, &tasks, &parting);
    let address = listener.local_addr();
    let member = member(&config, incarnation, address, &identity);
    let pace = Pace { interval: Duration::from_millis(config.report_interval_ms), heartbeat: config.heartbeat() };
    // Reports go on while the worker drains.
    let (stop_reports, reports_stopping) = Shutdown::pair();
    report::start(&config.scheduler_addresses, &handle, &move_cost, pace, &tasks, &reports_stopping)?;
    watch_stalls(&handle, config.stall_limits(), &tasks, reports_stopping.clone());
    let membership = membership::connect(&config.membership, &tasks)?;
    let readiness = Readiness::new();
    let (departure, grace) = (Departure::default(), Duration::from_millis(config.server.grace_ms));
    let service = Service {
        engine: handle.clone(),
        id,
        identity,
        transfer_address,
        heartbeat: config.heartbeat(),
        snapshot_blocks_max: config.kv_snapshot_blocks_max,
        departure: departure.clone(),
        grace,
        shutdown: parting,
    };
    let is_read = !service.transfer_address.is_empty();
    let server = server(&config, service, &readiness);
    let lease = membership.register(member.clone(), config.membership.ttl()).await?;
    readiness.set(true, "");
    config.announce.listening("grpc", address);
    let writing = unwritten.map(|unwritten| unwritten.write(&tasks));
    let replica = Replica { handle, thread, lease, member, readiness, departure, grace, is_read };
    let (server_ends, server_ended) = Shutdown::pair();
    let serving = async {
        let served = server.serve(listener, stopping.clone()).await;
        server_ends.fire();
        served
    };
    let (served, ended) = tokio::join!(serving, replica.watch(&guard, &stopping, &server_ended));
    let (thread, lease, failure) = ended;
    drop(guard);
    let stopped = join_engine(thread, failure).await;
    lease.revoke().await;
    stop_reports.fire();
    drop(writing);
    if let Err(unjoined) = tasks.join(JOIN_DEADLINE).await {
        tracing::warn!(%unjoined, "tasks outlive the worker");
    }
    served?;
    Ok(stopped?)
}

/// Watches the engine, also while the worker drains.
fn watch_stalls(engine: &EngineHandle, limits: stall::Limits, tasks: &Tasks, shutdown: Shutdown) {
    let engine = engine.clone();
    tasks.spawn("engine-watch", async move {
        tokio::select! {
            () = shutdown.triggered() => {}
            () = stall::watch(engine, limits) => {}
        }
    });
}

fn member(config: &Config, incarnation: Incarnation, address: SocketAddr, identity: &ModelIdentity) -> Member {
    Member {
        kind: MemberKind::Worker,
        id: config.id.clone(),
        incarnation,
        address: if config.advertise.is_empty() { address.to_string() } else { config.advertise.clone() },
        n_data_ranks: 1,
        identity: Some(identity.clone()),
        draining: false,
        role: config.role,
        epoch: 0,
    }
}

fn server(config: &Config, service: Service, readiness: &Readiness) -> Server {
    Server::new("worker", config.server.clone())
        .grpc(service::routes(service))
        .reflection(proto::DESCRIPTOR_SET)
        .service_names(&[service::NAME])
        .ready(readiness.clone())
}

/// A serving engine.
struct Replica {
    handle: EngineHandle,
    thread: EngineThread,
    lease: Lease,
    member: Member,
    readiness: Readiness,
    departure: Departure,
    /// What requests have to end by themselves after a signal.
    grace: Duration,
    /// Others can read what is cached.
    is_read: bool,
}

impl Replica {
    /// Waits for the shutdown, an operator's wish or the engine's failure, then takes no new work and sees through what
    /// runs; a failure is handed on.
    async fn watch(
        mut self,
        guard: &StopOnDrop,
        stopping: &Shutdown,
        server_ended: &Shutdown,
    ) -> (EngineThread, Lease, Option<EngineFailure>) {
        let failure = tokio::select! {
            () = stopping.triggered() => None,
            () = self.departure.wished() => None,
            ended = self.thread.ended() => {
                Some(ended.err().unwrap_or_else(|| EngineFailure("the engine thread ended early".to_owned())))
            }
        };
        let reason = failure.as_ref().map_or_else(|| "the worker leaves".to_owned(), ToString::to_string);
        self.readiness.set(false, reason);
        self.handle.drain(RequestError::ShuttingDown(format!("worker {}", self.member.id)));
        if let Err(error) = self.lease.update(Member { draining: true, ..self.member }) {
            tracing::warn!(%error, "cannot tell the cluster that the worker drains");
        }
        if failure.is_some() {
            guard.part.fire();
            guard.stop.fire();
        } else {
            let (StopOnDrop { stop, part, .. }, is_read) = (guard, self.is_read);
            let signals = Signals { stopping, server_ended, stop, part, is_read };
            self.departure.see_through(&self.handle, &signals, self.grace).await;
        }
        (self.thread, self.lease, failure)
    }
}

/// Waits for the engine thread, unless it has failed already.
async fn join_engine(mut thread: EngineThread, failure: Option<EngineFailure>) -> Result<(), EngineFailure> {
    if let Some(failure) = failure {
        thread.join();
        return Err(failure);
    }
    match tokio::time::timeout(STOP_DEADLINE, thread.ended()).await {
        Ok(ended) => {
            thread.join();
            ended
        }
        Err(_) => Err(EngineFailure(format!("a step still runs {} s after the stop", STOP_DEADLINE.as_secs()))),
    }
}

/// Stops the engine and what watches either trigger, however the worker ends.
struct StopOnDrop {
    handle: EngineHandle,
    /// Ends the server.
    stop: Trigger,
    /// Ends what tells others of the cache, and what they read it by.
    part: Trigger,
}

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.handle.stop(RequestError::ShuttingDown("the worker".to_owned()));
        self.part.fire();
        self.stop.fire();
    }
}
