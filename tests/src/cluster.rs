//! A cluster of separate processes over loopback: etcd, one scheduler, routers, workers.

use std::path::PathBuf;
use std::time::Duration;

use toml::{Table, Value};

use crate::etcd::Etcd;
use crate::metrics::{Blocks, Metrics};
use crate::process::Process;
use crate::{client, place, wait};

/// Long enough for a loaded two-core machine.
pub const START: Duration = Duration::from_secs(60);

/// What to start.
pub struct Plan {
    pub model: PathBuf,
    pub model_name: String,
    pub n_routers: usize,
    pub n_workers: usize,
    /// Set in every worker's table.
    pub worker: Table,
    /// Set in the tables of the first workers, one by one.
    pub each_worker: Vec<Table>,
    /// Set in every router's table.
    pub router: Table,
    /// The telemetry table of every process.
    pub telemetry: Table,
    /// Lease of every member in milliseconds.
    pub ttl_ms: i64,
}

impl Default for Plan {
    fn default() -> Self {
        let worker = toml::toml! {
            dtype = "f32"
            threads = 1
        };
        Self {
            model: place::tiny("llama"),
            model_name: "tiny".to_owned(),
            n_routers: 1,
            n_workers: 1,
            worker,
            each_worker: Vec::new(),
            router: Table::new(),
            telemetry: Table::new(),
            ttl_ms: 2000,
        }
    }
}

/// A running router.
pub struct Router {
    pub process: Process,
    pub http: String,
    pub grpc: String,
}

/// A running worker.
pub struct Worker {
    pub process: Process,
    pub id: String,
    pub address: String,
}

/// A running cluster.
pub struct Cluster {
    pub etcd: Etcd,
    pub scheduler: Process,
    pub routers: Vec<Router>,
    pub workers: Vec<Worker>,
    plan: Plan,
    shared: Table,
}

impl Cluster {
    /// Starts everything and waits until each router sees all workers.
    pub async fn start(plan: Plan) -> Self {
        let etcd = Etcd::start().await;
        let membership = toml::toml! {
            kind = "etcd"
        };
        let mut shared = Table::new();
        shared.insert("hash_key".to_owned(), Value::from("07".repeat(32)));
        shared.insert("membership".to_owned(), membership.into());
        set(&mut shared, "membership", "endpoints", vec![etcd.endpoint.clone()]);
        set(&mut shared, "membership", "ttl_ms", plan.ttl_ms);
        shared.insert("telemetry".to_owned(), plan.telemetry.clone().into());
        let scheduler =
            Process::tessera("scheduler", &["scheduler", "--set", "scheduler.listen=127.0.0.1:0"], Some(&shared));
        shared.insert("scheduler_addresses".to_owned(), vec![scheduler.address("grpc")].into());
        let mut cluster = Self { etcd, scheduler, routers: Vec::new(), workers: Vec::new(), shared, plan };
        for index in 0..cluster.plan.n_workers {
            let own = cluster.plan.each_worker.get(index).cloned().unwrap_or_default();
            let worker = cluster.start_worker_with(&format!("worker-{index}"), &own);
            cluster.workers.push(worker);
        }
        for index in 0..cluster.plan.n_routers {
            let router = cluster.start_router(&format!("router-{index}"));
            cluster.routers.push(router);
        }
        cluster.wait_for_workers(cluster.plan.n_workers).await;
        cluster
    }

    /// Starts one more worker; the caller keeps it.
    pub fn start_worker(&self, id: &str) -> Worker {
        self.start_worker_at(id, "127.0.0.1:0")
    }

    /// Starts a worker that listens on `listen`; the caller keeps it.
    pub fn start_worker_at(&self, id: &str, listen: &str) -> Worker {
        self.start_worker_with(id, &Table::from_iter([("listen".to_owned(), listen.into())]))
    }

    /// Starts a worker with more in its table than all have; the caller keeps it.
    pub fn start_worker_with(&self, id: &str, own: &Table) -> Worker {
        let mut config = self.shared.clone();
        let mut table = self.plan.worker.clone();
        table.insert("id".to_owned(), id.into());
        table.insert("listen".to_owned(), "127.0.0.1:0".into());
        table.extend(own.clone());
        self.add_shared(&mut table);
        config.insert("worker".to_owned(), table.into());
        let process = Process::tessera(id, &["worker"], Some(&config));
        let address = process.address("grpc");
        Worker { process, id: id.to_owned(), address }
    }

    /// Starts one more router; the caller keeps it.
    pub fn start_router(&self, id: &str) -> Router {
        self.start_router_at(id, "127.0.0.1:0", "127.0.0.1:0")
    }

    /// Starts a router that listens on these addresses; the caller keeps it.
    pub fn start_router_at(&self, id: &str, http: &str, grpc: &str) -> Router {
        let mut config = self.shared.clone();
        let mut table = self.plan.router.clone();
        table.insert("id".to_owned(), id.into());
        table.insert("http".to_owned(), http.into());
        table.insert("grpc".to_owned(), grpc.into());
        self.add_shared(&mut table);
        config.insert("router".to_owned(), table.into());
        let process = Process::tessera(id, &["router"], Some(&config));
        let (http, grpc) = (process.address("http"), process.address("grpc"));
        Router { process, http, grpc }
    }

    /// Waits until every router would place on `n` workers.
    pub async fn wait_for_workers(&self, n: usize) {
        for router in &self.routers {
            wait::until("router sees the workers", START, async || {
                let seen = Metrics::fetch(&router.http)
                    .await
                    .map_or(-1.0, |m| m.sum("tessera_route_engines", &["state=\"ready\""]));
                if seen == n as f64 { Ok(()) } else { Err(format!("{seen} of {n}")) }
            })
            .await;
        }
    }

    /// Waits until no worker holds a block of a request, and checks that none is lost.
    pub async fn wait_for_rest(&self, deadline: Duration) {
        for worker in &self.workers {
            let what = format!("blocks of {} at rest", worker.id);
            wait::until(&what, deadline, async || match Metrics::fetch(&worker.address).await {
                Ok(metrics) => Blocks::of(&metrics).at_rest().map_err(|blocks| format!("{blocks:?}")),
                Err(error) => Err(format!("{error:#}")),
            })
            .await;
        }
    }

    /// A client with connections of its own, so that dropping a stream closes its connection.
    pub fn new_client() -> reqwest::Client {
        client::builder().pool_max_idle_per_host(0).build().unwrap()
    }

    /// Posts to the first router.
    pub async fn post(&self, path: &str, body: &serde_json::Value) -> (u16, serde_json::Value) {
        client::post(&self.routers[0].http, path, body).await.unwrap()
    }

    fn add_shared(&self, table: &mut Table) {
        table.insert("model".to_owned(), self.plan.model.display().to_string().into());
        table.insert("model_name".to_owned(), self.plan.model_name.clone().into());
    }
}

fn set(config: &mut Table, table: &str, key: &str, value: impl Into<Value>) {
    let inner = config.get_mut(table).and_then(Value::as_table_mut).expect("the table was inserted");
    inner.insert(key.to_owned(), value.into());
}
