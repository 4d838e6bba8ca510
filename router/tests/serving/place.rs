//! A router, the store that its members register with, and workers, all in this process.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use contract::hash::{BlockHash, HashKey, PrefixScope};
use contract::ids::Incarnation;
use contract::model::{Fingerprint, ModelIdentity};
use contract::view::{Member, MemberKind};
use daemon::announce::Announce;
use daemon::shutdown::{Shutdown, Trigger};
use daemon::task::Tasks;
use membership::{Lease, Membership, MembershipConfig};
use models::ModelFiles;
use router::Config;

use crate::client::{self, PATIENCE};
use crate::worker::Fake;

const KEY: [u8; 32] = [7; 32];

pub struct Place {
    pub id: String,
    pub http: SocketAddr,
    pub grpc: SocketAddr,
    pub workers: Vec<Fake>,
    pub identity: ModelIdentity,
    leases: Vec<Lease>,
    membership: Arc<dyn Membership>,
    tasks: Tasks,
    stop: Trigger,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.stop.fire();
        self.workers.iter().for_each(Fake::kill);
    }
}

/// The tiny model, with a chat template that its words survive.
pub fn model() -> PathBuf {
    let source = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/tiny/llama");
    let folder = std::env::temp_dir().join(format!("tessera-router-test-{}", std::process::id()));
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        std::fs::create_dir_all(&folder).unwrap();
        for entry in std::fs::read_dir(source).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), folder.join(entry.file_name())).unwrap();
        }
        let template = "{% for m in messages %}{{ m.content }} {% endfor %}{% if add_generation_prompt %}t9{% endif %}";
        std::fs::write(folder.join("chat_template.jinja"), template).unwrap();
    });
    folder
}

fn identity() -> ModelIdentity {
    let files = ModelFiles::open(model()).unwrap();
    ModelIdentity {
        name: "tiny".into(),
        block_size: 4,
        context_length: 512,
        vocab_size: 256,
        model: files.model_fingerprint(),
        tokenizer: files.tokenizer_fingerprint(),
        hash_key: HashKey(KEY).fingerprint(),
        numerics: Fingerprint([1; 16]),
    }
}

fn member(worker: &Fake, draining: bool) -> Member {
    Member {
        kind: MemberKind::Worker,
        id: worker.id.clone(),
        incarnation: Incarnation(worker.incarnation),
        address: worker.address.to_string(),
        n_data_ranks: 1,
        identity: Some(worker.identity.clone()),
        draining,
        role: None,
        epoch: 0,
    }
}

impl Place {
    pub async fn start(n_workers: usize) -> Self {
        Self::start_with(n_workers, |_| ()).await
    }

    pub async fn start_with(n_workers: usize, change: impl FnOnce(&mut Config)) -> Self {
        let tasks = Tasks::new();
        let (stop, shutdown) = Shutdown::pair();
        let store = host_store(&tasks, &shutdown).await;
        let settings =
            MembershipConfig { endpoints: vec![store.to_string()], ttl_ms: 2_000, ..MembershipConfig::default() };
        let membership = membership::connect(&settings, &tasks).unwrap();
        let (announce, mut announced) = Announce::channel();
        let mut config = Config {
            id: format!("router-{:x}", daemon::random::u64()),
            grpc: "127.0.0.1:0".to_owned(),
            http: "127.0.0.1:0".to_owned(),
            model: model(),
            model_name: "tiny".to_owned(),
            hash_key: "07".repeat(32),
            membership: settings,
            announce,
            ..Config::default()
        };
        config.server.grace_ms = 2_000;
        let id = config.id.clone();
        change(&mut config);
        tasks.spawn("router", async move { router::run(config, shutdown).await.unwrap() });
        let (mut http, mut grpc) = (None, None);
        while http.is_none() || grpc.is_none() {
            match announced.next().await.expect("the router listens") {
                ("http", address) => http = Some(address),
                (_, address) => grpc = Some(address),
            }
        }
        let (workers, leases) = (Vec::new(), Vec::new());
        let (http, grpc) = (http.unwrap(), grpc.unwrap());
        let mut place = Self { id, http, grpc, workers, identity: identity(), leases, membership, tasks, stop };
        for _ in 0..n_workers {
            place.join().await;
        }
        place.until_ready(n_workers).await;
        place
    }

    /// Starts one more worker and registers it.
    pub async fn join(&mut self) -> usize {
        let identity = self.identity.clone();
        self.join_as(&identity).await
    }

    pub async fn join_as(&mut self, identity: &ModelIdentity) -> usize {
        let worker = Fake::start(&format!("worker-{}", self.workers.len()), identity, &self.tasks).await;
        let member = member(&worker, false);
        self.leases.push(self.membership.register(member, Duration::from_secs(2)).await.unwrap());
        self.workers.push(worker);
        self.workers.len() - 1
    }

    /// Lets a worker say that it leaves, while it serves on.
    pub fn drain(&self, index: usize) {
        self.leases[index].update(member(&self.workers[index], true)).unwrap();
    }

    /// Lets a worker's lease go, while the worker itself lives.
    pub async fn forget(&mut self, index: usize) {
        self.leases.remove(index).revoke().await;
    }

    /// Lets a worker's lease go, and the worker itself.
    pub async fn leave(&mut self, index: usize) {
        self.forget(index).await;
        self.workers[index].kill();
    }

    /// Hashes of a prompt's full blocks.
    pub fn hashes(&self, prompt: &[u32]) -> Vec<BlockHash> {
        let scope = PrefixScope::new(self.identity.model, "", "");
        scope.hash_blocks(&HashKey(KEY), prompt, self.identity.block_size as usize)
    }

    pub async fn until_ready(&self, n_workers: usize) {
        until("the router sees the workers", async || self.n_workers().await == n_workers).await;
    }

    pub async fn n_workers(&self) -> usize {
        let mut client = self.inference().await;
        let models = client.list_models(proto::inference::v1::ListModelsRequest {}).await.unwrap().into_inner();
        models.models[0].n_workers as usize
    }

    pub async fn inference(
        &self,
    ) -> proto::inference::v1::inference_client::InferenceClient<tonic::transport::Channel> {
        let url = format!("http://{}", self.grpc);
        proto::inference::v1::inference_client::InferenceClient::connect(url).await.unwrap()
    }

    /// The same of this router alone, where others run in the process.
    pub async fn own_metric(&self, name: &str) -> f64 {
        let page = client::send(self.http, "GET", "/metrics", b"").await.text().await;
        let own = page.lines().filter(|line| line.starts_with(name) && line.contains(&self.id));
        own.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
    }

    pub async fn metric(&self, series: &str) -> f64 {
        let page = client::send(self.http, "GET", "/metrics", b"").await.text().await;
        page.lines()
            .filter(|line| line.starts_with(series))
            .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
            .sum()
    }
}

/// Asks again until it holds.
pub async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let end = daemon::clock::now() + PATIENCE;
    while !holds().await {
        assert!(daemon::clock::now() < end, "not in time: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

async fn host_store(tasks: &Tasks, shutdown: &Shutdown) -> SocketAddr {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let service = crate::cluster::store(tasks, shutdown);
    let incoming = tonic::transport::server::TcpIncoming::from(listener).with_nodelay(Some(true));
    tasks.spawn("store", async move {
        let server = tonic::transport::Server::builder().add_service(service);
        let _ = server.serve_with_incoming(incoming).await;
    });
    address
}
