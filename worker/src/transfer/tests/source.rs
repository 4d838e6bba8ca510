//! A prefill worker's engine that writes known bytes, layer by layer and chunk by chunk.

use std::future::pending;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use contract::error::RequestError;
use contract::ids::BlockId;
use daemon::task::Tasks;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::super::{Order, PrefillSource, Progress, Ticket};
use super::pool::Pool;
use super::random::Random;

#[derive(Clone)]
pub(super) struct Source {
    pub(super) pool: Pool,
    pub(super) plan: Plan,
    random: Arc<Mutex<Random>>,
    tasks: Tasks,
}

/// How prompts are computed.
#[derive(Clone, Debug, Default)]
pub(super) struct Plan {
    /// Tokens of a chunk; 0 is any.
    pub(super) chunk_tokens: u32,
    /// Longest pause before a layer, in microseconds.
    pub(super) pause_us_max: u32,
    /// Fail after so many layers of chunks.
    pub(super) fail_after: Option<u32>,
    /// Never get further than so many layers of chunks.
    pub(super) hang_after: Option<u32>,
}

impl Source {
    pub(super) fn new(pool: Pool, plan: Plan, seed: u64) -> Self {
        Self { pool, plan, random: Arc::new(Mutex::new(Random(seed))), tasks: Tasks::new() }
    }
}

/// What a sequence's bytes are drawn from.
pub(super) fn sequence(order: &Order) -> u64 {
    order.prompt.iter().fold(7, |hash, &token| Random(hash ^ u64::from(token)).next())
}

impl PrefillSource for Source {
    async fn begin(&self, order: Order) -> Result<Ticket, RequestError> {
        let layout = self.pool.share.layout;
        let n_blocks = order.n_tokens().div_ceil(layout.block_size);
        let blocks = self.pool.take(n_blocks);
        let zeros = vec![0; layout.n_layers as usize];
        let start = Progress { table: Arc::new([]), tokens_by_layer: zeros.into(), failed: None };
        let (sender, progress) = watch::channel(start);
        let (this, table) = (self.clone(), blocks.clone());
        let computing = self.tasks.spawn("prefill", async move { this.compute(&order, &table, &sender).await });
        let guard = Box::new(Held { pool: self.pool.clone(), blocks, computing });
        Ok(Ticket { progress, lost: Box::pin(pending()), guard })
    }
}

impl Source {
    async fn compute(&self, order: &Order, table: &[BlockId], progress: &watch::Sender<Progress>) {
        let layout = self.pool.share.layout;
        let (sequence, n_tokens) = (sequence(order), order.n_tokens());
        let (mut done, mut n_steps) = (0, 0);
        while done < n_tokens {
            let chunk = self.chunk(n_tokens - done);
            let blocks = done / layout.block_size..(done + chunk).div_ceil(layout.block_size);
            progress.send_modify(|progress| progress.table = table[..blocks.end as usize].into());
            for layer in 0..layout.n_layers {
                let pause = self.random.lock().unwrap().range(0, self.plan.pause_us_max + 1);
                if pause > 0 {
                    tokio::time::sleep(Duration::from_micros(pause.into())).await;
                }
                if self.plan.hang_after == Some(n_steps) {
                    pending::<()>().await;
                }
                if self.plan.fail_after == Some(n_steps) {
                    let error = RequestError::Overloaded { reason: "the test says so".into(), retry_after_ms: 9 };
                    progress.send_modify(|progress| progress.failed = Some(error));
                    return;
                }
                n_steps += 1;
                for index in blocks.clone() {
                    self.pool.compute(table[index as usize], layer, sequence, index);
                }
                progress.send_modify(|progress| {
                    let mut tokens = progress.tokens_by_layer.to_vec();
                    tokens[layer as usize] = done + chunk;
                    progress.tokens_by_layer = tokens.into();
                });
            }
            done += chunk;
        }
        // The ticket's holder may still look.
        progress.closed().await;
    }

    fn chunk(&self, n_left: u32) -> u32 {
        let mut random = self.random.lock().unwrap();
        let most = if self.plan.chunk_tokens == 0 { random.range(1, n_left + 1) } else { self.plan.chunk_tokens };
        most.min(n_left)
    }
}

struct Held {
    pool: Pool,
    blocks: Vec<BlockId>,
    computing: JoinHandle<()>,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.computing.abort();
        self.pool.give_back(&self.blocks);
    }
}
