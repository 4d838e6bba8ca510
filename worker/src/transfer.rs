//! Moves keys and values between two workers' block pools.
//!
//! The decode worker connects, orders a prompt's keys and values, and takes them layer by layer into blocks that its
//! engine has reserved; the prefill worker computes and sends, or lets its memory be read.
//!
//! | file | holds |
//! |---|---|
//! | `endpoint`, `config`, `cost`, `metrics` | what both sides know of this worker, and what is counted |
//! | `frame`, `message`, `link` | what a connection carries, and the connection |
//! | `host`, `means`, `pull`, `ring` | ways that two workers on one host have |
//! | `share` | which bytes of two pools mean the same |
//! | `listen`, `send`, `throttle` | the prefill worker's side |
//! | `client`, `fetch`, `receive` | the decode worker's side |
//! | `speed` | how fast it is beside what the machine could do |

pub(crate) mod client;
mod config;
pub(crate) mod cost;
pub(crate) mod endpoint;
pub(crate) mod fetch;
mod frame;
mod host;
mod link;
pub(crate) mod listen;
mod means;
mod message;
mod metrics;
mod pull;
mod receive;
mod ring;
mod send;
mod share;
pub mod speed;
#[cfg(test)]
mod tests;
mod throttle;

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use contract::error::RequestError;
use contract::ids::{BlockId, EngineId, ModelName, RequestId, TenantId, Token};
use contract::request::{GenerateRequest, SamplingParams, StopParams};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

pub use config::TransferConfig;
pub use frame::{Header, Kind};
pub use receive::{Received, Unwanted};
pub use send::WORKING_INTERVAL;
pub(crate) use share::Share;

/// How blocks are moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Way {
    /// Over the connection.
    Tcp,
    /// The decode worker reads the prefill worker's memory: one host, and the system must permit it.
    Pull,
    /// Through a file in memory: one host.
    Ring,
}

/// A prompt that a decode worker wants computed.
#[derive(Clone, Debug, PartialEq)]
pub struct Order {
    /// The request.
    pub request: RequestId,
    /// Counts its placements.
    pub attempt: u32,
    /// Keys and values of all tokens but the last are wanted.
    pub prompt: Vec<Token>,
    /// The first block, by index in the sequence, that the decode worker lacks.
    pub first_block: u32,
    /// Separates cached prefixes; empty is none.
    pub cache_salt: String,
    /// Adapter by name; empty is none.
    pub adapter: String,
    /// Whoever pays.
    pub tenant: TenantId,
    /// Lower runs first.
    pub priority: i32,
    /// Time left for all of it, from connecting to the last block; milliseconds count.
    pub deadline: Duration,
    /// Longest time that the prefill worker keeps computed blocks without an acknowledgement; milliseconds count.
    pub lease: Duration,
}

impl Order {
    /// Asks for the prompt of a request and what was generated of it, from `first_block` on, within `deadline` at most.
    #[must_use]
    pub fn of(request: &GenerateRequest, first_block: usize, deadline: Duration, lease: Duration) -> Self {
        Self {
            request: request.id,
            attempt: request.attempt,
            prompt: request.prompt.iter().chain(&request.generated).copied().collect(),
            first_block: u32::try_from(first_block).unwrap_or(u32::MAX),
            cache_salt: request.cache_salt.clone(),
            adapter: request.adapter.clone(),
            tenant: request.tenant.clone(),
            priority: request.priority,
            deadline: request.deadline.map_or(deadline, |left| left.min(deadline)),
            lease,
        }
    }

    /// What the prefill worker's engine is asked; `id` is its own, as the order's may be that of a request which runs there.
    #[must_use]
    pub fn into_request(self, id: RequestId) -> GenerateRequest {
        let n_tokens = self.n_tokens() as usize;
        let Self { mut prompt, cache_salt, adapter, tenant, priority, deadline, .. } = self;
        // Its last token is computed by whoever ordered.
        prompt.truncate(n_tokens);
        GenerateRequest {
            id,
            attempt: 0,
            model: ModelName::from(""),
            prompt,
            generated: Vec::new(),
            tenant,
            cache_salt,
            adapter,
            priority,
            deadline: Some(deadline),
            sampling: SamplingParams::default(),
            stop: StopParams { max_tokens: 1, ..StopParams::default() },
            logprobs: None,
            prompt_logprobs: None,
            prefill_on: Vec::new(),
        }
    }

    /// Tokens whose keys and values are wanted.
    #[must_use]
    pub fn n_tokens(&self) -> u32 {
        u32::try_from(self.prompt.len().saturating_sub(1)).unwrap_or(u32::MAX)
    }
}

/// The prefill worker's engine, as transfers see it.
pub(crate) trait PrefillSource: Send + Sync + 'static {
    /// Queues a prompt; its progress is told through the ticket.
    ///
    /// Dropping the future or the ticket aborts it and lets its blocks go. While the ticket lives, no block of
    /// its table is written to where it is complete, nor given to another sequence.
    ///
    /// # Errors
    /// When the engine does not take it.
    fn begin(&self, order: Order) -> impl Future<Output = Result<Ticket, RequestError>> + Send;
}

/// A prompt that is being computed for a peer.
pub(crate) struct Ticket {
    /// How far it is; a sender that goes away before the prompt is complete has failed.
    pub(crate) progress: watch::Receiver<Progress>,
    /// Tells why it gets no further, where its progress does not: the engine stands still.
    pub(crate) lost: Pin<Box<dyn Future<Output = RequestError> + Send>>,
    /// Whatever keeps the blocks.
    #[expect(dead_code, reason = "to be dropped is its use")]
    pub(crate) guard: Box<dyn Send>,
}

/// How far a prompt is.
#[derive(Clone, Debug)]
pub struct Progress {
    /// Its blocks from the first on; none until the engine has room for all of them.
    pub table: Arc<[BlockId]>,
    /// For each layer, the tokens from the prompt's start whose keys and values are complete; never less than before.
    pub tokens_by_layer: Arc<[u32]>,
    /// Why it will get no further.
    pub failed: Option<RequestError>,
}

/// Follows a prompt that is computed for a peer.
pub type Follower = watch::Receiver<Progress>;

impl Progress {
    /// Nothing yet of a prompt in `n_layers`, and how it is followed.
    #[must_use]
    pub fn channel(n_layers: usize) -> (watch::Sender<Self>, Follower) {
        let nothing = Self { table: Arc::default(), tokens_by_layer: vec![0; n_layers].into(), failed: None };
        watch::channel(nothing)
    }

    /// Blocks of a layer from the first on that can be sent, of a prompt of `n_tokens`.
    #[must_use]
    pub fn n_ready(&self, layer: usize, n_tokens: u32, block_size: u32) -> u32 {
        let complete = self.tokens_by_layer.get(layer).copied().unwrap_or(0);
        // The last block may be partial; it goes when its last token is there.
        let ready = if complete >= n_tokens { n_tokens.div_ceil(block_size) } else { complete / block_size };
        ready.min(u32::try_from(self.table.len()).unwrap_or(u32::MAX))
    }
}

/// Whom a decode worker orders from.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Peer {
    /// Where it listens for transfers, `host:port`.
    pub(crate) address: String,
    /// The engine, this life of it.
    pub(crate) engine: EngineId,
}

/// Blocks that the decode worker's engine keeps for one transfer.
#[derive(Clone, Debug)]
pub(crate) struct Reservation {
    /// In the order of the sequence, the first of them for the order's `first_block`; enough for all wanted tokens.
    pub(crate) blocks: Vec<BlockId>,
}
