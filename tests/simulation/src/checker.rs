//! What must hold of a cluster at any time, and when nothing is on its way any more.

use std::collections::HashSet;
use std::time::Duration;

use contract::hash::BlockHash;
use contract::plan::SamplingSpec;
use contract::request::SamplingParams;
use thiserror::Error;

use crate::book::Book;
use crate::event::RequestIdx;
use crate::network::Network;
use crate::prepared::{EOS, Prepared};
use crate::router::Router;
use crate::worker::{HEARTBEAT, Worker};

/// No promise lasts this long.
const LATER: Duration = Duration::from_secs(1_000_000);

/// An invariant that does not hold.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Violation {
    /// A device or an engine found that the other contradicts it, such as a block that does not hold what it should.
    #[error("worker {worker}: {error}")]
    Device {
        /// Its number.
        worker: usize,
        /// What was found.
        error: String,
    },
    /// A stream lost, repeated or reordered tokens.
    #[error("request {request}: token {expected} is next, {got} came")]
    Stream {
        /// Its number.
        request: RequestIdx,
        /// Position that is next.
        expected: u32,
        /// Position that came.
        got: u32,
    },
    /// A stream has other tokens than the request alone would have had.
    #[error("request {request} has other tokens, from output token {position} on, than alone on one worker")]
    Tokens {
        /// Its number.
        request: RequestIdx,
        /// The first that differs.
        position: usize,
    },
    /// A router credits an engine with a block that this life of its worker never had.
    #[error("router {router} credits {engine} with a block that it never cached")]
    Credit {
        /// Its number.
        router: usize,
        /// The engine.
        engine: String,
    },
    /// A router credits an engine whose life ended longer than a heartbeat ago.
    #[error("router {router} credits {engine}, which is gone for longer than a heartbeat, with {n} blocks")]
    Gone {
        /// Its number.
        router: usize,
        /// The engine.
        engine: String,
        /// Blocks that it is credited with.
        n: usize,
    },
    /// A router's directory is wrong although nothing is on its way.
    #[error("router {router} knows {known} blocks of all workers, which have {cached}; {missing} of these are missing")]
    Directory {
        /// Its number.
        router: usize,
        /// Blocks in the directory.
        known: usize,
        /// Blocks in all caches.
        cached: usize,
        /// Cached and not in the directory.
        missing: usize,
    },
    /// A ledger holds requests although all have ended.
    #[error("the ledger of router {router} holds {n} requests that have ended")]
    Ledger {
        /// Its number.
        router: usize,
        /// Placements that it holds.
        n: usize,
    },
    /// A request took longer than any may.
    #[error("a request took {took:?}")]
    Late {
        /// How long.
        took: Duration,
    },
    /// Something is left although all requests have ended.
    #[error("{what} {index} still has something to do")]
    Left {
        /// Router or worker.
        what: &'static str,
        /// Its number.
        index: usize,
    },
    /// Nothing happens any more although requests have not ended.
    #[error("{n} requests never end")]
    Stuck {
        /// How many.
        n: usize,
    },
}

/// Checks what a router that is about to place a prompt credits its engines with.
pub(crate) fn check_credit(
    router: usize,
    routers: &[Router],
    workers: &[Worker],
    hashes: &[BlockHash],
    network: &Network,
) -> Result<(), Violation> {
    let directory = routers[router].placer.directory();
    for (worker, peer) in routers[router].peered.iter().enumerate() {
        let Some(peer) = peer else { continue };
        let n = directory.count(&peer.engine, hashes, network.instant() + LATER);
        let Some(ever) = &workers[worker].ever_cached else { continue };
        // What a router knows of an earlier life is over with that life's connection, which it notices within a heartbeat.
        let is_present = workers[worker].is_up && workers[worker].id == peer.engine;
        if is_present && !hashes[..n].iter().all(|hash| ever.contains(hash)) {
            return Err(Violation::Credit { router, engine: peer.engine.to_string() });
        }
        if !is_present && n > 0 && network.now > workers[worker].crashed + HEARTBEAT {
            return Err(Violation::Gone { router, engine: peer.engine.to_string(), n });
        }
    }
    Ok(())
}

/// Checks that no request took longer than it may.
pub(crate) fn check_lives(book: &Book, patience: Option<Duration>) -> Result<(), Violation> {
    match patience {
        Some(patience) if book.longest > patience => Err(Violation::Late { took: book.longest }),
        _ => Ok(()),
    }
}

/// Checks everything when all requests have ended and nothing is on its way.
pub(crate) fn check_rest(
    routers: &[Router],
    workers: &[Worker],
    book: &Book,
    prepared: &Prepared,
    network: &Network,
) -> Result<(), Violation> {
    for (index, worker) in workers.iter().enumerate().filter(|(_, worker)| worker.is_up) {
        worker.engine.check_invariants();
        if worker.is_busy() {
            return Err(Violation::Left { what: "worker", index });
        }
    }
    for (index, router) in routers.iter().enumerate() {
        let n = router.placer.ledger().len();
        if n > 0 {
            return Err(Violation::Ledger { router: index, n });
        }
        if router.n_open() > 0 {
            return Err(Violation::Left { what: "router", index });
        }
        check_directory(index, router, workers, network)?;
    }
    check_tokens(book, prepared)
}

/// Compares a directory with the caches.
fn check_directory(index: usize, router: &Router, workers: &[Worker], network: &Network) -> Result<(), Violation> {
    let directory = router.placer.directory();
    let (mut cached, mut missing) = (0, 0);
    for worker in workers.iter().filter(|worker| worker.is_up) {
        let blocks: HashSet<BlockHash> = worker.engine.kv_snapshot().into_iter().map(|(hash, _)| hash).collect();
        cached += blocks.len();
        let is_known = |hash: &BlockHash| directory.count(&worker.id, &[*hash], network.instant() + LATER) == 1;
        missing += blocks.iter().filter(|hash| !is_known(hash)).count();
    }
    let known = directory.n_blocks();
    if missing > 0 || known != cached {
        return Err(Violation::Directory { router: index, known, cached, missing });
    }
    Ok(())
}

/// Compares each answer with what the simulated model says to the prompt alone.
fn check_tokens(book: &Book, prepared: &Prepared) -> Result<(), Violation> {
    let profile = prepared.profile();
    for (request, progress) in book.progress.iter().enumerate() {
        let asked = &prepared.requests()[request];
        let prompt = asked.prompt(prepared.vocab_size());
        let spec = SamplingSpec {
            params: SamplingParams { temperature: 0.0, ..SamplingParams::default() },
            logprobs: None,
            n_prompt: asked.n_prompt,
            min_tokens: 0,
            stop_token_ids: vec![EOS],
            history: Vec::new(),
        };
        let n = progress.tokens.len();
        let alone = worker::sim::answer(&prompt, &spec, prepared.vocab_size(), profile.eos_probability, n);
        let differs = alone.iter().zip(&progress.tokens).position(|(alone, got)| alone != got);
        let is_whole = n == prepared.output_max(asked) as usize || progress.tokens.last() == Some(&EOS);
        let is_short = progress.finished.is_some() && !is_whole;
        if let Some(position) = differs.or(is_short.then_some(n)) {
            return Err(Violation::Tokens { request: request as RequestIdx, position });
        }
    }
    Ok(())
}
