//! A router from its configuration to its end.

use std::sync::Arc;
use std::time::Duration;

use contract::ids::Incarnation;
use contract::view::{Member, MemberKind};
use daemon::server::{Listener, Readiness, Server, ServerConfig};
use daemon::shutdown::Shutdown;
use daemon::task::Tasks;
use tonic::service::Routes;

use crate::api;
use crate::cluster::{Cluster, supervise};
use crate::config::Config;
use crate::error::Error;
use crate::generate::Service;
use crate::metrics::Metrics;
use crate::model::ServedModel;
use crate::route::placer::Placer;

/// Longest time for the router's own tasks to end.
const END: Duration = Duration::from_secs(5);

/// Serves until `shutdown`, then lets running streams end within the servers' grace.
///
/// # Errors
/// When something of the configuration cannot be used; an absent scheduler, store or worker is no error.
pub async fn run(config: Config, shutdown: Shutdown) -> Result<(), Error> {
    let policy = config.policy()?;
    let grpc = Listener::bind_for("router.grpc", &config.grpc)?;
    let http = Listener::bind_for("router.http", &config.http)?;
    let opened = config.clone();
    let model = Arc::new(tokio::task::spawn_blocking(move || ServedModel::open(&opened)).await??);
    let metrics = Arc::new(Metrics::new(&config.id, model.name(), policy.name()));
    let incarnation = Incarnation(daemon::random::u64());
    let placer = Placer::new(policy, config.workers.placer(), incarnation);
    let cluster = Arc::new(Cluster::new(Arc::clone(&model), config.workers.clone(), Arc::clone(&metrics), placer));

    let (limits, admission) = (config.limits.clone(), config.admission.clone());
    let service = Arc::new(Service::new(model, Arc::clone(&cluster), limits, admission, metrics)?);

    let tasks = Tasks::new();
    let membership = membership::connect(&config.membership, &tasks)?;
    // What the streams at the end still need outlives the servers.
    let (stop_watching, watching) = Shutdown::pair();
    supervise(&cluster, membership.watch().await?, &config.scheduler_addresses, &tasks, &watching)?;
    let address = if config.advertise.is_empty() { grpc.local_addr().to_string() } else { config.advertise.clone() };
    let lease = membership.register(member(&config, incarnation, address), config.membership.ttl()).await?;

    let readiness = Readiness::new();
    follow_readiness(&cluster, &readiness, &tasks, &watching);
    follow_cluster(&service, &tasks, &watching);
    let routes = Routes::new(api::grpc::server(Arc::clone(&service)));
    let grpc_server = Server::new("router", config.server.clone())
        .grpc(routes)
        .reflection(proto::DESCRIPTOR_SET)
        .service_names(&["tessera.inference.v1.Inference"])
        .ready(readiness.clone());
    // The API's own bound answers in its own form, so the server's must not come first.
    let settings = ServerConfig { body_bytes_max: usize::MAX, ..config.server.clone() };
    let http_server =
        Server::new("router", settings).http(api::openai::router(service, config.cors)).ready(readiness.clone());
    config.announce.listening("grpc", grpc.local_addr());
    config.announce.listening("http", http.local_addr());
    let (one, other) =
        tokio::join!(grpc_server.serve(grpc, shutdown.clone()), http_server.serve(http, shutdown.clone()));

    lease.revoke().await;
    stop_watching.fire();
    drop(membership);
    if let Err(unjoined) = tasks.join(END).await {
        tracing::warn!("{unjoined}");
    }
    one.and(other).map_err(Error::from)
}

fn member(config: &Config, incarnation: Incarnation, address: String) -> Member {
    Member {
        kind: MemberKind::Router,
        id: config.id.clone(),
        incarnation,
        address,
        n_data_ranks: 0,
        identity: None,
        draining: false,
        role: None,
        epoch: 0,
    }
}

/// Places requests that wait, as room appears, and keeps this router to its share of quotas.
fn follow_cluster(service: &Arc<Service>, tasks: &Tasks, shutdown: &Shutdown) {
    let (service, shutdown) = (Arc::clone(service), shutdown.clone());
    tasks.spawn("placement", async move {
        tokio::select! {
            () = shutdown.triggered() => {}
            () = service.place_waiting() => {}
            () = service.share() => {}
        }
    });
}

/// Ready while at least one worker is.
fn follow_readiness(cluster: &Arc<Cluster>, readiness: &Readiness, tasks: &Tasks, shutdown: &Shutdown) {
    let (cluster, readiness, shutdown) = (Arc::clone(cluster), readiness.clone(), shutdown.clone());
    tasks.spawn("readiness", async move {
        let mut changes = cluster.changes();
        loop {
            let reason = format!("no worker is ready for model {:?}", cluster.model.name());
            readiness.set(cluster.is_ready(), reason);
            tokio::select! {
                () = shutdown.triggered() => return,
                changed = changes.changed() => if changed.is_err() { return },
            }
        }
    });
}
