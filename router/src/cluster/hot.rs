//! The prompts that were placed last, which move to other engines when the only one that has them cached leaves.
//!
//! Whoever asks on fetches what it needs from the engine that leaves, but only while that lives. So a request of the
//! router's own has another engine fetch what nobody asks for in that time.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use contract::error::RequestError;
use contract::ids::{EngineId, RequestId, TenantId, Token};
use contract::request::{GenerateRequest, SamplingParams, StopParams};
use futures::stream::{FuturesUnordered, StreamExt as _, iter};
use proto::status::from_status;
use proto::worker::v1 as wire;
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};

use super::{Cluster, Engine, Placement, Resumed};
use crate::model::PromptBlocks;

/// Prompts that are kept, and their tokens in all.
const N_PROMPTS_MAX: usize = 32;
const N_TOKENS_MAX: usize = 1 << 20;
/// Fewer blocks are not worth a request.
const N_BLOCKS_MIN: usize = 4;
/// Requests that run at once.
const N_RUNNING_MAX: usize = 4;
/// What an engine hands over as it leaves goes first, and moves its own blocks.
const HEAD_START: Duration = Duration::from_millis(50);
/// Longest time of one: no engine that leaves lends for longer.
const MOVE_MAX: Duration = Duration::from_secs(2);
/// Who has so much to do has no time for it before the other has left.
const WAIT_MS_MAX: f64 = 500.0;
/// After everything that anybody asks for.
const PRIORITY: i32 = i32::MAX;

/// Prompts of which none begins with another, the one placed last at the end.
#[derive(Default)]
pub(super) struct HotPrompts(Mutex<VecDeque<Arc<HotPrompt>>>);

/// The full blocks of a prompt, and a token after them.
struct HotPrompt {
    tokens: Vec<Token>,
    blocks: Arc<PromptBlocks>,
    tenant: TenantId,
    cache_salt: String,
    adapter: String,
}

impl HotPrompts {
    /// Keeps a prompt that was placed.
    pub(super) fn put(&self, request: &GenerateRequest, blocks: &Arc<PromptBlocks>) {
        let n_tokens = blocks.hashes.len() * blocks.block_size as usize + 1;
        if blocks.hashes.len() < N_BLOCKS_MIN || n_tokens > N_TOKENS_MAX {
            return;
        }
        let mut prompts = self.lock();
        if let Some(longer) = prompts.iter().position(|known| begins_with(&known.blocks, blocks)) {
            let known = prompts.remove(longer);
            return prompts.extend(known);
        }
        prompts.retain(|known| !begins_with(blocks, &known.blocks));
        prompts.push_back(Arc::new(HotPrompt {
            tokens: request.prompt[..n_tokens].to_vec(),
            blocks: Arc::clone(blocks),
            tenant: request.tenant.clone(),
            cache_salt: request.cache_salt.clone(),
            adapter: request.adapter.clone(),
        }));
        let mut n_kept: usize = prompts.iter().map(|prompt| prompt.tokens.len()).sum();
        while n_kept > N_TOKENS_MAX || prompts.len() > N_PROMPTS_MAX {
            n_kept -= prompts.pop_front().map_or(n_kept, |prompt| prompt.tokens.len());
        }
    }

    fn last_first(&self) -> Vec<Arc<HotPrompt>> {
        self.lock().iter().rev().cloned().collect()
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Arc<HotPrompt>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Moves what engines alone have cached when they begin to leave; never returns.
pub(super) async fn keep(cluster: Arc<Cluster>) {
    let (running, mut emptying) = (Semaphore::new(N_RUNNING_MAX), FuturesUnordered::new());
    loop {
        let ready = cluster.ready.load_full();
        // Without anybody who takes over, they wait for one.
        for engine in ready.iter().filter(|engine| engine.is_leaving() && cluster.is_ready()) {
            if !engine.is_emptied.swap(true, Ordering::Relaxed) {
                emptying.push(empty(&cluster, Arc::clone(engine), &running));
            }
        }
        tokio::select! {
            () = cluster.leaving.notified() => {}
            Some(()) = emptying.next() => {}
        }
    }
}

async fn empty(cluster: &Arc<Cluster>, engine: Arc<Engine>, running: &Semaphore) {
    sleep(HEAD_START).await;
    let (from, prompts) = (&engine.id, cluster.hot.last_first());
    let moving = iter(prompts).for_each_concurrent(None, |prompt| async move {
        let Ok(_permit) = running.acquire().await else { return };
        // Who was chosen first may leave as well.
        while timeout(MOVE_MAX, carry(cluster, &prompt, from)).await.is_ok_and(|moved| moved == Some(Moved::Leaves)) {}
    });
    moving.await;
}

/// How it went with an engine that was to fetch a prompt.
#[derive(PartialEq, Eq)]
enum Moved {
    /// It has, or cannot.
    Done,
    /// It leaves itself.
    Leaves,
}

/// Has another engine fetch what only `from` has cached of a prompt; none where that is little, or nobody has time for it.
async fn carry(cluster: &Arc<Cluster>, prompt: &HotPrompt, from: &EngineId) -> Option<Moved> {
    let PromptBlocks { block_size, hashes } = &*prompt.blocks;
    let decision = cluster.explain(&prompt.tenant, prompt.tokens.len() as u64, &prompt.blocks).ok()?;
    let n_blocks = |n_tokens: u64| n_tokens as usize / *block_size as usize;
    let is_free = decision.chosen().prediction.wait_ms < WAIT_MS_MAX;
    let held = n_blocks(decision.lender.filter(|lender| lender.engine == *from && is_free)?.tokens_cached);
    let elsewhere = decision.considered.iter().map(|one| n_blocks(one.tokens_cached)).max()?;
    if held < elsewhere + N_BLOCKS_MIN {
        return None;
    }
    let blocks = PromptBlocks { block_size: *block_size, hashes: hashes[..held].to_vec() };
    let mut request = prompt.request(cluster.model.name(), held * *block_size as usize + 1);
    let resumed = Resumed { question: None, request: &request, blocks: &blocks, tried: &[], numerics: None };
    let Placement { engine, prefill_on, flight } = cluster.place_again(&resumed)?;
    // It is decided anew, and nobody is to compute it.
    if prefill_on.first().is_none_or(|peer| peer.engine != *from) {
        return None;
    }
    request.prefill_on = prefill_on;
    tracing::debug!(engine = %engine.id, %from, n_blocks = held, "moves a prompt from an engine that leaves");
    let mut frames = engine.line.call(tonic::Request::new(wire::GenerateRequest::new(&request, &engine.id)));
    let moved = loop {
        match frames.message().await {
            Ok(Some(_)) => {}
            Ok(None) => break Moved::Done,
            Err(status) if matches!(from_status(&status), RequestError::ShuttingDown(_)) => {
                cluster.leaves(&engine);
                break Moved::Leaves;
            }
            Err(_) => break Moved::Done,
        }
    };
    drop(flight);
    Some(moved)
}

impl HotPrompt {
    /// Asks for the first tokens to be cached.
    fn request(&self, model: &str, n_tokens: usize) -> GenerateRequest {
        GenerateRequest {
            id: RequestId(daemon::random::u128()),
            attempt: 0,
            model: model.into(),
            prompt: self.tokens[..n_tokens].to_vec(),
            generated: Vec::new(),
            tenant: self.tenant.clone(),
            cache_salt: self.cache_salt.clone(),
            adapter: self.adapter.clone(),
            priority: PRIORITY,
            deadline: Some(MOVE_MAX),
            sampling: SamplingParams::default(),
            stop: StopParams { max_tokens: 1, ..StopParams::default() },
            logprobs: None,
            prompt_logprobs: None,
            prefill_on: Vec::new(),
        }
    }
}

/// Whether a chain of blocks begins with another.
fn begins_with(longer: &PromptBlocks, shorter: &PromptBlocks) -> bool {
    let last = shorter.hashes.len().checked_sub(1);
    last.is_none_or(|last| longer.hashes.get(last) == Some(&shorter.hashes[last]))
}

#[cfg(test)]
mod tests {
    use contract::hash::BlockHash;

    use super::*;

    fn put(hot: &HotPrompts, hashes: impl IntoIterator<Item = u32>) {
        let hash = |n: u32| BlockHash([n.to_le_bytes(); 4].concat().try_into().unwrap());
        let hashes: Vec<_> = hashes.into_iter().map(hash).collect();
        let blocks = Arc::new(PromptBlocks { block_size: 16, hashes });
        let prompt = HotPrompt {
            tokens: vec![0; blocks.hashes.len() * 16 + 1],
            blocks: Arc::clone(&blocks),
            tenant: "t".into(),
            cache_salt: String::new(),
            adapter: String::new(),
        };
        hot.put(&prompt.request("m", prompt.tokens.len()), &blocks);
    }

    fn kept(hot: &HotPrompts) -> Vec<usize> {
        hot.last_first().iter().map(|prompt| prompt.blocks.hashes.len()).collect()
    }

    #[test]
    fn a_conversation_is_kept_once_and_as_long_as_it_has_become() {
        let hot = HotPrompts::default();
        put(&hot, [1, 2, 3]);
        assert_eq!(kept(&hot), [0; 0], "it is short");
        put(&hot, 1..10);
        put(&hot, 20..25);
        put(&hot, 1..13);
        assert_eq!(kept(&hot), [12, 5]);
        put(&hot, 20..24);
        assert_eq!(kept(&hot), [5, 12], "it is a part of what is kept");
    }

    #[test]
    fn what_was_placed_longest_ago_is_forgotten() {
        let hot = HotPrompts::default();
        (0..40).for_each(|n| put(&hot, n * 100..n * 100 + 4 + n));
        assert_eq!(kept(&hot), (12..44).rev().collect::<Vec<_>>());
        put(&hot, 10_000..75_000);
        assert_eq!(kept(&hot).len(), 15, "tokens are bounded, too");
        put(&hot, 100_000..170_000);
        assert_eq!(kept(&hot)[0], 65_000, "more than all that is kept");
    }
}
