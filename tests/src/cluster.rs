//! A cluster of separate processes, over loopback or a switch: etcd, schedulers, routers, workers.

use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use toml::{Table, Value};

use crate::etcd::Etcd;
use crate::host::Host;
use crate::metrics::{Blocks, Metrics};
use crate::process::Process;
use crate::proxy::Proxy;
use crate::switch::Switch;
use crate::{client, place, wait};

/// Long enough for a loaded two-core machine.
pub const START: Duration = Duration::from_secs(60);

/// The timing of a simulated worker that decodes in 5 ms and a little more for each request beside.
pub const SWIFT: &str = "
block_size = 16
n_blocks = 4000
max_running = 256
prefill_budget = 512
context_length = 512
[timing]
prefill_tokens_per_s = 20000
decode_base_ms = 5
decode_per_sequence_ms = 0.1
";

/// What to start.
pub struct Plan {
    pub model: PathBuf,
    pub model_name: String,
    pub n_routers: usize,
    pub n_workers: usize,
    pub n_schedulers: usize,
    /// Set in every worker's table.
    pub worker: Table,
    /// Set in the tables of the first workers, one by one.
    pub each_worker: Vec<Table>,
    /// What workers reach etcd through, if not directly.
    pub etcd_proxy: Option<Arc<Proxy>>,
    /// Set in every router's table.
    pub router: Table,
    /// The telemetry table of every process.
    pub telemetry: Table,
    /// Lease of every member in milliseconds.
    pub ttl_ms: i64,
    /// Has a host for `etcd` and for every process by its id; without it all run on the loopback interface.
    pub switch: Option<Arc<Switch>>,
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
            n_schedulers: 1,
            worker,
            each_worker: Vec::new(),
            etcd_proxy: None,
            router: Table::new(),
            telemetry: Table::new(),
            ttl_ms: 2000,
            switch: None,
        }
    }
}

impl Plan {
    /// Lets workers simulate by `profile`, which lies in the folder that is returned.
    pub fn simulate(&mut self, profile: &str) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("profile.toml");
        std::fs::write(&path, profile).unwrap();
        self.worker = Table::from_iter([
            ("engine".to_owned(), Value::from("sim")),
            ("sim_profile".to_owned(), path.display().to_string().into()),
        ]);
        folder
    }

    fn host(&self, name: &str) -> Host {
        self.switch.as_ref().map_or(Host::LOOPBACK, |switch| switch.host(name).clone())
    }
}

/// A running router.
pub struct Router {
    pub process: Process,
    pub http: String,
    pub grpc: String,
}

impl Router {
    /// How many workers it would place on.
    ///
    /// # Errors
    /// When it does not tell.
    pub async fn n_ready(&self) -> anyhow::Result<f64> {
        Ok(Metrics::fetch(&self.http).await?.sum("tessera_route_engines", &["state=\"ready\""]))
    }
}

/// A running worker.
pub struct Worker {
    pub process: Process,
    pub id: String,
    pub address: String,
}

impl Worker {
    /// How many requests it runs.
    ///
    /// # Errors
    /// When it does not tell.
    pub async fn n_running(&self) -> anyhow::Result<f64> {
        Ok(Metrics::fetch(&self.address).await?.sum("tessera_engine_requests", &["state=\"running\""]))
    }
}

/// A running cluster.
pub struct Cluster {
    pub etcd: Etcd,
    pub scheduler: Process,
    /// Those beside it, each started after the one before.
    pub more_schedulers: Vec<Process>,
    pub routers: Vec<Router>,
    pub workers: Vec<Worker>,
    plan: Plan,
    shared: Table,
}

impl Cluster {
    /// Starts everything and waits until each router sees all workers.
    pub async fn start(plan: Plan) -> Self {
        let etcd = Etcd::start(plan.host("etcd")).await;
        if let Some(proxy) = &plan.etcd_proxy {
            proxy.lead_to(etcd.endpoint.trim_start_matches("http://"));
        }
        let membership = toml::toml! {
            kind = "etcd"
        };
        let mut shared = Table::new();
        shared.insert("hash_key".to_owned(), Value::from("07".repeat(32)));
        shared.insert("membership".to_owned(), membership.into());
        set(&mut shared, "membership", "endpoints", vec![etcd.endpoint.clone()]);
        set(&mut shared, "membership", "ttl_ms", plan.ttl_ms);
        shared.insert("telemetry".to_owned(), plan.telemetry.clone().into());
        let on = plan.host("scheduler");
        let mut schedulers: Vec<Process> =
            (0..plan.n_schedulers).map(|_| start_scheduler(&on, &shared, &on.any_port())).collect();
        let addresses: Vec<String> = schedulers.iter().map(|scheduler| scheduler.address("grpc")).collect();
        shared.insert("scheduler_addresses".to_owned(), addresses.into());
        let scheduler = schedulers.remove(0);
        let (routers, workers) = (Vec::new(), Vec::new());
        let mut cluster = Self { etcd, scheduler, more_schedulers: schedulers, routers, workers, shared, plan };
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

    /// Starts a scheduler that listens on `listen`; the caller keeps it.
    pub fn start_scheduler_at(&self, listen: &str) -> Process {
        start_scheduler(&self.plan.host("scheduler"), &self.shared, listen)
    }

    /// Starts one more worker; the caller keeps it.
    pub fn start_worker(&self, id: &str) -> Worker {
        self.start_worker_at(id, &self.plan.host(id).any_port())
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
        let host = self.plan.host(id);
        table.insert("listen".to_owned(), host.any_port().into());
        table.extend(own.clone());
        self.add_shared(&mut table);
        config.insert("worker".to_owned(), table.into());
        if let Some(proxy) = &self.plan.etcd_proxy {
            set(&mut config, "membership", "endpoints", vec![format!("http://{}", proxy.address)]);
        }
        let process = Process::tessera_on(&host, id, &["worker"], Some(&config));
        let address = process.address("grpc");
        Worker { process, id: id.to_owned(), address }
    }

    /// Starts one more router; the caller keeps it.
    pub fn start_router(&self, id: &str) -> Router {
        let any_port = self.plan.host(id).any_port();
        self.start_router_at(id, &any_port, &any_port)
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
        let process = Process::tessera_on(&self.plan.host(id), id, &["router"], Some(&config));
        let (http, grpc) = (process.address("http"), process.address("grpc"));
        Router { process, http, grpc }
    }

    /// Sends a worker away by the command, and waits for it to say that it is done.
    pub fn drain(&self, worker: &str, more: &[&str]) -> Process {
        let mut draining = self.begin_drain(worker, more);
        assert!(draining.ended(START).success(), "{}", draining.errors());
        draining
    }

    /// Takes out the worker that runs so many requests, once one does.
    pub async fn take_busy(&mut self, n_running: f64) -> Worker {
        let index = wait::until("a worker runs it", START, async || {
            for (index, worker) in self.workers.iter().enumerate() {
                if worker.n_running().await.unwrap() >= n_running {
                    return Ok(index);
                }
            }
            Err("nobody")
        })
        .await;
        self.workers.remove(index)
    }

    /// Sends a worker away by the command.
    pub fn begin_drain(&self, worker: &str, more: &[&str]) -> Process {
        let mut command = Command::new(place::tessera());
        command.args(["drain", worker, "--scheduler", &self.scheduler.address("grpc")]).args(more);
        Process::start("drain", command)
    }

    /// Waits until every router would place on `n` workers.
    pub async fn wait_for_workers(&self, n: usize) {
        for router in &self.routers {
            wait::until("router sees the workers", START, async || {
                let seen = router.n_ready().await.unwrap_or(-1.0);
                if seen == n as f64 { Ok(()) } else { Err(format!("{seen} of {n}")) }
            })
            .await;
        }
    }

    /// Every process but etcd.
    pub fn processes(&mut self) -> impl Iterator<Item = &mut Process> {
        let routers = self.routers.iter_mut().map(|router| &mut router.process);
        let workers = self.workers.iter_mut().map(|worker| &mut worker.process);
        routers.chain(workers).chain(&mut self.more_schedulers).chain([&mut self.scheduler])
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

fn start_scheduler(host: &Host, shared: &Table, listen: &str) -> Process {
    let listen = format!("scheduler.listen={listen}");
    Process::tessera_on(host, "scheduler", &["scheduler", "--set", &listen], Some(shared))
}

fn set(config: &mut Table, table: &str, key: &str, value: impl Into<Value>) {
    let inner = config.get_mut(table).and_then(Value::as_table_mut).expect("the table was inserted");
    inner.insert(key.to_owned(), value.into());
}
