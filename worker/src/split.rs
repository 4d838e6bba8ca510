//! Splits requests between workers: fetches prompts that others compute, and computes prompts for others.

use std::sync::Arc;
use std::time::Duration;

use contract::error::RequestError;
use contract::ids::{EngineId, RequestId};
use contract::kv::KvLayout;
use contract::model::ModelIdentity;
use contract::request::PrefillPeer;
use daemon::shutdown::Shutdown;
use daemon::task::Tasks;
use daemon::{clock, random};
use kernels::memory::blocks::BlockMemory;
use tokio::net::TcpListener;
use tokio::runtime::Handle;

use crate::config::Config;
use crate::engine_loop::EngineHandle;
use crate::error::Error;
use crate::lent::{Fetch, Filling, Lending};
use crate::transfer::client::Client;
use crate::transfer::cost::MoveCost;
use crate::transfer::endpoint::Endpoint;
use crate::transfer::fetch::FetchFailure;
use crate::transfer::listen::listen;
use crate::transfer::{Order, Peer, PrefillSource, Reservation, Share, Ticket};

/// An engine's block pool, for those who move blocks beside its executor.
#[derive(Clone, Debug)]
pub(crate) struct Pool {
    pub(crate) layout: KvLayout,
    pub(crate) memory: BlockMemory,
}

/// A worker's place among those that move prompts.
#[derive(Default)]
pub(crate) struct Transfers {
    /// Where others order prompts; empty where nobody can.
    pub(crate) address: String,
    bound: Option<Bound>,
}

struct Bound {
    endpoint: Arc<Endpoint>,
    client: Arc<Client>,
    listener: TcpListener,
    bounds: FetchBounds,
}

impl Transfers {
    /// Listens for orders, if there is a pool to take blocks from.
    ///
    /// # Errors
    /// When it cannot.
    pub(crate) async fn bind(
        config: &Config,
        engine: &EngineId,
        identity: &ModelIdentity,
        pool: Option<Pool>,
    ) -> Result<Self, Error> {
        let Some(pool) = pool else { return Ok(Self::default()) };
        let transfer = &config.transfer;
        let listen = if transfer.listen.is_empty() { with_port(&config.listen, 0) } else { transfer.listen.clone() };
        let bound = async { TcpListener::bind(&listen).await.and_then(|it| Ok((it.local_addr()?, it))) };
        let bound = bound.await.map_err(|source| Error::TransferListen { address: listen.clone(), source });
        let (address, listener) = bound?;
        let address = match (transfer.advertise.as_str(), config.advertise.as_str()) {
            ("", "") => address.to_string(),
            ("", worker) => with_port(worker, address.port()),
            (told, _) => told.to_owned(),
        };
        let bounds = FetchBounds {
            block_size: pool.layout.block_size as usize,
            deadline: transfer.deadline(),
            lease: transfer.lease(),
        };
        let share = Share::whole(pool.layout);
        let endpoint = Endpoint::new(engine.clone(), identity.clone(), share, pool.memory, transfer.clone());
        let endpoint = Arc::new(endpoint);
        let client = Arc::new(Client::new(Arc::clone(&endpoint)));
        Ok(Self { address, bound: Some(Bound { endpoint, client, listener, bounds }) })
    }

    /// What moving tokens takes; nothing where none move.
    pub(crate) fn cost(&self) -> Arc<MoveCost> {
        self.bound.as_ref().map(|bound| Arc::clone(&bound.endpoint.cost)).unwrap_or_default()
    }

    /// What gets prompts from others.
    pub(crate) fn fetcher(&self, tasks: &Tasks) -> Option<Arc<dyn Fetch>> {
        let Bound { client, bounds, .. } = self.bound.as_ref()?;
        Some(Arc::new(Fetcher {
            client: Arc::clone(client),
            runtime: Handle::current(),
            tasks: tasks.clone(),
            bounds: *bounds,
        }))
    }

    /// Serves the orders of others until `shutdown`.
    pub(crate) fn serve(self, engine: &EngineHandle, tasks: &Tasks, shutdown: &Shutdown) {
        if let Some(Bound { endpoint, client, listener, .. }) = self.bound {
            let ended = shutdown.clone();
            tasks.spawn("kv-connections", async move {
                tokio::select! {
                    () = ended.triggered() => {}
                    () = client.tidy() => {}
                }
            });
            let (source, of_orders) = (Arc::new(engine.clone()), tasks.clone());
            tasks.spawn("kv-transfers", listen(endpoint, listener, source, of_orders, shutdown.clone()));
        }
    }
}

/// The same host with another port.
fn with_port(address: &str, port: u16) -> String {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    format!("{host}:{port}")
}

/// Fetches prompts from other workers, each in a task of its own.
struct Fetcher {
    client: Arc<Client>,
    runtime: Handle,
    tasks: Tasks,
    bounds: FetchBounds,
}

/// How prompts lie in blocks, and how long one may be on its way.
#[derive(Clone, Copy, Debug)]
struct FetchBounds {
    /// Tokens in a block.
    block_size: usize,
    /// From the first order to the last block, whoever it comes from; then the rest is computed here.
    deadline: Duration,
    /// The other worker keeps computed blocks so long without an acknowledgement.
    lease: Duration,
}

impl Fetch for Fetcher {
    fn fetch(&self, filling: Filling) {
        let (client, bounds) = (Arc::clone(&self.client), self.bounds);
        let _on_runtime = self.runtime.enter();
        self.tasks.spawn("fetch-prompt", fill(client, filling, bounds));
    }
}

/// Fills blocks as far as they come, from one worker after the other until one has given all; dropping what is filled tells
/// the engine, which computes the rest.
async fn fill(client: Arc<Client>, filling: Filling, bounds: FetchBounds) {
    let block_size = bounds.block_size;
    let Filling { request, hold, mut cancelled, mut filled } = filling;
    let until = clock::now() + bounds.deadline;
    let n_cached = hold.n_cached / block_size;
    let mut n_blocks = 0;
    for PrefillPeer { engine, address } in request.prefill_on.clone() {
        let n_first = n_cached + n_blocks;
        let order = Order::of(&request, n_first, until.saturating_duration_since(clock::now()), bounds.lease);
        let reservation = Reservation { blocks: hold.table[n_first..].to_vec() };
        let peer = Peer { address, engine };
        let fetched = tokio::select! {
            fetched = client.fetch(&peer, &order, &reservation) => fetched,
            _ = &mut cancelled => return,
        };
        let Err(error) = fetched else {
            n_blocks += reservation.blocks.len();
            break;
        };
        n_blocks += error.blocks_complete as usize;
        let n_blocks = error.blocks_complete;
        if matches!(error.reason, FetchFailure::Refused(RequestError::ShuttingDown(_))) {
            tracing::debug!(request = %order.request, peer = %peer.engine, n_blocks, "a worker that leaves sent what it had");
            continue;
        }
        tracing::warn!(request = %order.request, peer = %peer.engine, n_blocks, error = %error.reason,
            "a prompt did not come as a whole");
    }
    filled.n_tokens = hold.n_filled(n_blocks, block_size);
}

impl PrefillSource for EngineHandle {
    async fn begin(&self, order: Order) -> Result<Ticket, RequestError> {
        let Lending { progress, guard } = self.lend(order.into_request(RequestId(random::u128())))?;
        let engine = self.clone();
        let lost = Box::pin(async move { engine.lost(&engine.stall().begun().await, 0) });
        Ok(Ticket { progress, lost, guard: Box::new(guard) })
    }
}
