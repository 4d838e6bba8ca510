//! Two workers, and one order between them.

use std::sync::Arc;
use std::time::Duration;

use contract::ids::{DataRank, EngineId, Incarnation, RequestId};
use contract::kv::{BlockOrder, KvDtype, KvLayout};
use contract::model::{Fingerprint, ModelIdentity};
use daemon::shutdown::{Shutdown, Trigger};
use daemon::task::Tasks;
use tokio::net::TcpListener;

use super::super::client::Client;
use super::super::endpoint::Endpoint;
use super::super::fetch::FetchError;
use super::super::listen::listen;
use super::super::{Order, Peer, Reservation, Share, TransferConfig, Way};
use super::pool::Pool;
use super::random::Random;
use super::source::{Plan, Source, sequence};

pub(super) const WAYS: [Way; 3] = [Way::Tcp, Way::Pull, Way::Ring];
pub(super) const DEADLINE: Duration = Duration::from_secs(20);

/// A prefill worker that listens and a decode worker.
pub(super) struct Pair {
    pub(super) prefill: Source,
    pub(super) decode: Pool,
    pub(super) client: Arc<Client>,
    pub(super) endpoint: Arc<Endpoint>,
    pub(super) peer: Peer,
    pub(super) tasks: Tasks,
    _trigger: Trigger,
}

/// What two workers are made of.
#[derive(Clone)]
pub(super) struct Setup {
    pub(super) shares: [Share; 2],
    pub(super) n_blocks: [u32; 2],
    pub(super) plan: Plan,
    pub(super) config: TransferConfig,
}

impl Setup {
    pub(super) fn new(layout: KvLayout, way: Way) -> Self {
        let config = TransferConfig { ways: vec![way], ..TransferConfig::default() };
        Self { shares: [Share::whole(layout); 2], n_blocks: [64; 2], plan: Plan::default(), config }
    }

    pub(super) async fn start(self, random: &mut Random) -> Pair {
        let [prefill_pool, decode] = [0, 1].map(|i| Pool::new(self.shares[i], self.n_blocks[i], random));
        let endpoint = |name: &str, pool: &Pool, incarnation| {
            let identity = identity(pool.share.layout.block_size);
            let (memory, config) = (pool.memory.clone(), self.config.clone());
            Arc::new(Endpoint::new(engine(name, incarnation), identity, pool.share, memory, config))
        };
        let (tasks, (trigger, shutdown)) = (Tasks::new(), Shutdown::pair());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let listening = endpoint("prefill", &prefill_pool, random.next());
        let peer = Peer { address, engine: listening.engine.clone() };
        let prefill = Source::new(prefill_pool, self.plan, random.next());
        let source = Arc::new(prefill.clone());
        tasks.spawn("listen", listen(listening, listener, source, tasks.clone(), shutdown));
        // A name of its own, since metrics are by worker.
        let endpoint = endpoint(&format!("decode-{:x}", random.next()), &decode, random.next());
        let client = Arc::new(Client::new(Arc::clone(&endpoint)));
        Pair { prefill, decode, client, endpoint, peer, tasks, _trigger: trigger }
    }
}

impl Pair {
    /// Fetches into blocks reserved for it.
    pub(super) async fn fetch(&self, order: &Order) -> (Reservation, Result<(), FetchError>) {
        let reservation = self.reserve(order);
        let result = self.client.fetch(&self.peer, order, &reservation).await;
        (reservation, result)
    }

    /// A decode worker that says something else about its model.
    pub(super) fn client_with(&self, change: impl FnOnce(&mut ModelIdentity)) -> Client {
        let mut identity = self.endpoint.identity.clone();
        change(&mut identity);
        let Endpoint { engine, share, memory, config, .. } = &*self.endpoint;
        Client::new(Arc::new(Endpoint::new(engine.clone(), identity, *share, memory.clone(), config.clone())))
    }

    pub(super) fn reserve(&self, order: &Order) -> Reservation {
        let n_blocks = order.n_tokens().div_ceil(self.decode.share.layout.block_size);
        Reservation { blocks: self.decode.take(n_blocks - order.first_block) }
    }

    /// The first blocks hold what the prefill worker computed.
    pub(super) fn check(&self, order: &Order, reservation: &Reservation, n_blocks: u32) {
        for layer in 0..self.decode.share.layout.n_layers {
            for (i, &block) in reservation.blocks[..n_blocks as usize].iter().enumerate() {
                let index = order.first_block + i as u32;
                assert!(self.decode.holds(block, layer, sequence(order), index), "layer {layer} block {index}");
            }
        }
    }

    /// The prefill worker has blocks in use.
    pub(super) async fn prefill_holds(&self) {
        while self.prefill.pool.n_free() == self.prefill.pool.memory.n_blocks() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// All blocks of the prefill worker are free again.
    pub(super) async fn prefill_is_free(&self) {
        let free = async {
            while self.prefill.pool.n_free() < self.prefill.pool.memory.n_blocks() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(DEADLINE, free).await.expect("blocks come back");
    }
}

pub(super) fn engine(name: &str, incarnation: u64) -> EngineId {
    EngineId { worker: name.into(), incarnation: Incarnation(incarnation), data_rank: DataRank(0) }
}

pub(super) fn identity(block_size: u32) -> ModelIdentity {
    ModelIdentity {
        name: "m".into(),
        block_size,
        context_length: 10_000,
        vocab_size: 1_000,
        model: Fingerprint([1; 16]),
        tokenizer: Fingerprint([2; 16]),
        hash_key: Fingerprint([3; 16]),
        numerics: Fingerprint([4; 16]),
    }
}

pub(super) fn layout() -> KvLayout {
    KvLayout {
        order: BlockOrder::HeadsFirst,
        n_layers: 3,
        kv_heads: 2,
        block_size: 16,
        key_dim: 64,
        value_dim: 64,
        dtype: KvDtype::Bf16,
    }
}

/// Of which a few blocks make a frame that two threads pull.
pub(super) fn wide_layout() -> KvLayout {
    KvLayout { kv_heads: 8, key_dim: 256, value_dim: 256, ..layout() }
}

pub(super) fn order(n_prompt: u32, first_block: u32, random: &mut Random) -> Order {
    Order {
        request: RequestId(random.next().into()),
        attempt: random.range(0, 3),
        prompt: (0..n_prompt).map(|_| random.range(0, 1_000)).collect(),
        first_block,
        cache_salt: "salt".into(),
        adapter: String::new(),
        tenant: "t".into(),
        priority: -1,
        deadline: DEADLINE,
        lease: DEADLINE,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompt_computed_on_one_worker_is_whole_on_the_other_and_the_connection_is_used_again() {
    let mut random = Random::seeded();
    for way in WAYS {
        check_whole(way, &mut random).await;
    }
}

async fn check_whole(way: Way, random: &mut Random) {
    let setup = Setup { plan: Plan { chunk_tokens: 100, ..Plan::default() }, ..Setup::new(layout(), way) };
    let pair = setup.start(random).await;
    for (n_prompt, first_block) in [(500, 0), (2, 0), (498, 30), (33, 1), (49, 0), (1, 0)] {
        let order = order(n_prompt, first_block, random);
        let (reservation, result) = pair.fetch(&order).await;
        result.unwrap();
        pair.check(&order, &reservation, reservation.blocks.len() as u32);
        assert!(pair.decode.others(&reservation.blocks).all(|block| pair.decode.is_untouched(block)));
        pair.prefill_is_free().await;
        // What was received is forgotten, so that the next order finds untouched blocks.
        pair.decode.wipe(&reservation.blocks);
    }
    assert_eq!(pair.tasks.count(), 2, "one connection served all");
}
