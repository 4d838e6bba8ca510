//! Starts a worker in this process, on a free port, with whatever executor a test wants.

use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use contract::hash::HashKey;
use contract::ids::{EngineId, ModelName, RequestId, Token};
use contract::model::{Fingerprint, ModelIdentity};
use contract::occupancy::BlockCounts;
use contract::request::{GenerateRequest, SamplingParams, StopParams};
use daemon::announce::Announce;
use daemon::client::{ChannelOptions, channel};
use daemon::server::Listener;
use daemon::shutdown::{Shutdown, Trigger};
use daemon::telemetry::metrics;
use engine::{Engine, EngineConfig};
use proto::worker::v1 as wire;
use proto::worker::v1::worker_client::WorkerClient;
use tokio::task::JoinHandle;
use tonic::transport::Channel;
use tonic::{Status, Streaming};

use super::fake::{Behaviour, Fake, VOCAB};
use crate::load::{Loaded, Memory};
use crate::{Config, Error};

/// Long enough for a loaded machine; nothing waits for it in vain.
pub(super) const DEADLINE: Duration = Duration::from_secs(30);

/// A door that lets steps through one by one, or all.
#[derive(Clone, Default)]
pub(super) struct Gate(Arc<(Mutex<(usize, bool)>, Condvar)>);

impl Gate {
    /// Lets `n` more steps through.
    pub(super) fn admit(&self, n: usize) {
        self.0.0.lock().unwrap().0 += n;
        self.0.1.notify_all();
    }

    /// Lets everything through from now on.
    pub(super) fn open(&self) {
        self.0.0.lock().unwrap().1 = true;
        self.0.1.notify_all();
    }

    /// Waits at the door, for a while: a test that fails must not hang.
    pub(super) fn pass(&self) {
        let door = self.0.0.lock().unwrap();
        let mut door = self.0.1.wait_timeout_while(door, DEADLINE, |(n, open)| *n == 0 && !*open).unwrap().0;
        door.0 = door.0.saturating_sub(1);
    }
}

/// A running worker and a client of it.
pub(super) struct Worker {
    pub(super) client: WorkerClient<Channel>,
    pub(super) engine: EngineId,
    pub(super) identity: ModelIdentity,
    /// Where it listens for transfers.
    pub(super) transfer_address: String,
    pub(super) config: Config,
    trigger: Trigger,
    running: JoinHandle<Result<(), Error>>,
}

/// Config of a worker that nobody shares a name with.
pub(super) fn config() -> Config {
    let mut config = Config { id: format!("w-{:016x}", daemon::random::u64()), ..Config::default() };
    config.hash_key = "07".repeat(32);
    config.heartbeat_ms = 50;
    // Nobody listens there: membership waits, as it does when its store is away.
    config.membership.endpoints = vec!["127.0.0.1:1".to_owned()];
    config
}

/// Bounds of an engine over the fake executor.
pub(super) fn engine_config(n_blocks: u32) -> EngineConfig {
    EngineConfig {
        block_size: 4,
        n_blocks,
        max_running: 8,
        max_waiting: 64,
        token_budget: 32,
        prefill_budget: None,
        max_prefill_chunk: None,
        context_length: 4096,
        watermark_blocks: 0,
        retry_after_ms: 10,
        hash_key: HashKey([7; 32]),
        model: Fingerprint([1; 16]),
    }
}

/// Starts a worker with the fake executor.
pub(super) async fn start_fake(config: Config, n_blocks: u32, behaviour: Behaviour) -> Worker {
    let engine = engine_config(n_blocks);
    let identity = ModelIdentity {
        name: "fake".into(),
        block_size: engine.block_size,
        context_length: engine.context_length,
        vocab_size: VOCAB,
        model: engine.model,
        tokenizer: Fingerprint([2; 16]),
        hash_key: engine.hash_key.fingerprint(),
        numerics: Fingerprint([4; 16]),
    };
    let executor = Box::new(Fake::new(engine.max_running as usize, behaviour));
    let engine = Engine::new(engine).unwrap();
    let loaded = Loaded { engine, executor, identity, pool: None, memory: Memory::default(), unwritten: None };
    start(config, move |config, shutdown| async move {
        let listener = Listener::bind(&config.listen).unwrap();
        Box::pin(crate::run::serve(config, listener, loaded, shutdown)).await
    })
    .await
}

/// A greedy request.
pub(super) fn request(model: ModelName, prompt: &[Token], max_tokens: u32) -> GenerateRequest {
    GenerateRequest {
        id: RequestId(daemon::random::u128()),
        attempt: 0,
        model,
        prompt: prompt.to_vec(),
        generated: vec![],
        tenant: "default".into(),
        cache_salt: String::new(),
        adapter: String::new(),
        priority: 0,
        deadline: None,
        sampling: SamplingParams { temperature: 0.0, ..SamplingParams::default() },
        stop: StopParams { token_ids: vec![], min_tokens: 0, max_tokens },
        logprobs: None,
        prompt_logprobs: None,
        prefill_on: Vec::new(),
    }
}

/// Starts a worker on a real model.
pub(super) async fn start_model(config: Config) -> Worker {
    start(config, |config, shutdown| async move { Box::pin(crate::run(config, shutdown)).await }).await
}

async fn start<F>(mut config: Config, run: impl FnOnce(Config, Shutdown) -> F) -> Worker
where
    F: Future<Output = Result<(), Error>> + Send + 'static,
{
    let (announce, mut announced) = Announce::channel();
    config.announce = announce;
    let (trigger, shutdown) = Shutdown::pair();
    let running = daemon::task::Tasks::new().spawn("worker", run(config.clone(), shutdown));
    config.announce = Announce::default();
    let (_, address) = tokio::time::timeout(DEADLINE, announced.next()).await.unwrap().expect("the worker listens");
    let address = address.to_string();
    let mut client = WorkerClient::new(channel(&address, &ChannelOptions::default()).unwrap());
    let described = client.describe(wire::DescribeRequest {}).await.unwrap().into_inner();
    let engine = described.engines.into_iter().next().unwrap().into();
    let identity = described.identity.unwrap().try_into().unwrap();
    let transfer_address = described.transfer_address;
    Worker { client, engine, identity, transfer_address, config, trigger, running }
}

impl Worker {
    pub(super) fn request(&self, prompt: &[Token], max_tokens: u32) -> GenerateRequest {
        request(self.identity.name.clone(), prompt, max_tokens)
    }

    pub(super) async fn open(&self, request: &GenerateRequest) -> Result<Streaming<wire::GenerateFrame>, Status> {
        let message = wire::GenerateRequest::new(request, &self.engine);
        self.client.clone().generate(message).await.map(tonic::Response::into_inner)
    }

    /// All tokens of a request, with the prompt tokens that were cached.
    pub(super) async fn generate(&self, request: &GenerateRequest) -> Result<(Vec<Token>, u32), Status> {
        let mut stream = self.open(request).await?;
        let (mut tokens, mut cached) = (Vec::new(), None);
        while let Some(frame) = stream.message().await? {
            assert_eq!(frame.first_position as usize, request.generated.len() + tokens.len(), "no gap, no repeat");
            tokens.extend(frame.tokens.iter().map(|sampled| sampled.token));
            cached = cached.or(frame.cached_tokens);
        }
        Ok((tokens, cached.expect("the first frame tells what was cached")))
    }

    /// A gauge with a `state` label, as the metrics show it.
    fn gauge(&self, name: &str, state: &str) -> u32 {
        let series = format!(r#"{name}{{role="worker",instance="{}",state="{state}"}} "#, self.config.id);
        let page = metrics::render();
        page.lines().find_map(|line| line.strip_prefix(&series)?.parse().ok()).unwrap_or(u32::MAX)
    }

    /// Waits until so many requests hold a slot.
    pub(super) async fn until_running(&self, n: u32) {
        for _ in 0..DEADLINE.as_millis() {
            if self.gauge("tessera_engine_requests", "running") == n {
                return;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        panic!("{n} requests never run at once");
    }

    /// Blocks as the metrics show them.
    pub(super) fn blocks(&self) -> BlockCounts {
        let count = |state: &str| self.gauge("tessera_kv_cache_blocks", state);
        BlockCounts {
            total: count("total"),
            allocated: count("allocated"),
            cached: count("cached"),
            free: count("free"),
        }
    }

    /// Waits until no request holds a block, and checks that none is lost.
    pub(super) async fn at_rest(&self) -> BlockCounts {
        let mut last = BlockCounts::default();
        for _ in 0..DEADLINE.as_millis() {
            last = self.blocks();
            if last.allocated == 0 && last.is_conserved() && last.total > 0 {
                return last;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        panic!("blocks are not at rest: {last:?}");
    }

    /// Tells the worker to finish.
    pub(super) fn shut_down(&self) {
        self.trigger.fire();
    }

    /// Waits for its end.
    pub(super) async fn ended(self) -> Result<(), Error> {
        drop(self.client);
        tokio::time::timeout(DEADLINE, self.running).await.expect("ends in time").unwrap()
    }
}

impl Worker {
    /// Waits until a request has left blocks in the cache and none holds any.
    pub(super) async fn at_rest_after_start(&self) {
        for _ in 0..DEADLINE.as_millis() {
            if self.at_rest().await.cached > 0 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        panic!("nothing was computed");
    }
}
