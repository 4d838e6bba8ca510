//! Where a request goes: the placer's choice over what this router knows, and the request on its way.

use contract::ids::EngineId;
use contract::ledger::LedgerEvent;
use contract::model::Fingerprint;
use contract::view::{ClusterView, DrainReason, EngineView};
use router::admission::Turn;
use router::route::placer::{NotPlaced, Patience, Placed, Prompt, Target};

use super::resuming::note_placed;
use super::{Flight, Peer, Router, Surroundings};
use crate::event::{RequestIdx, Submission, ToWorker};
use crate::options::Planted;

/// How a request is to be placed.
pub(super) struct Wish<'a> {
    pub(super) patience: Patience,
    pub(super) n_before: u32,
    /// Engines that it does not go to.
    pub(super) tried: &'a [EngineId],
}

impl Router {
    /// How a request is placed whose turn it may be.
    pub(super) fn wish(&self, turn: Turn) -> Wish<'static> {
        let patience = match self.waiting_mode {
            None => Patience::None,
            Some(_) if turn.is_overdue => Patience::Any,
            Some(_) => Patience::Best,
        };
        Wish { patience, n_before: if turn.is_overdue { 0 } else { turn.n_before }, tried: &[] }
    }

    pub(super) fn place(
        &mut self,
        request: RequestIdx,
        wish: &Wish<'_>,
        backlog_ms: &mut [f64],
        around: &mut Surroundings<'_>,
    ) -> Result<u64, NotPlaced> {
        let (now, random) = (around.network.instant(), around.network.random.draw());
        let hashes = around.prepared.hashes(request);
        let n_prompt = around.prepared.requests()[request as usize].n_prompt;
        let n_tokens = u64::from(n_prompt + around.book.of(request).n_tokens);
        let workers: Vec<usize> = (0..self.peered.len())
            .filter(|&worker| {
                let may = |peer: &Peer| self.lends(peer) || !wish.tried.contains(&peer.engine);
                let usable = |peer: &Peer| peer.is_ready && may(peer);
                self.peered[worker].as_ref().is_some_and(usable)
            })
            .collect();
        let targets: Vec<Target<'_>> = workers
            .iter()
            .filter_map(|&worker| Some((worker, self.peered[worker].as_ref()?)))
            .map(|(worker, peer)| {
                let viewed = viewed(&self.view, &peer.engine);
                Target {
                    engine: &peer.engine,
                    occupancy: viewed.and_then(|view| view.occupancy.as_ref()),
                    draining: viewed.is_some_and(|view| view.draining.is_some()),
                    lends: self.lends(peer),
                    fetches: true,
                    numerics: Fingerprint::default(),
                    role: viewed.and_then(|view| view.role).unwrap_or_default(),
                    backlog_ms: backlog_ms[worker],
                }
            })
            .collect();
        let tenant = around.prepared.tenant(around.prepared.requests()[request as usize].tenant);
        let prompt = Prompt {
            tenant: &tenant,
            n_before: wish.n_before,
            n_tokens,
            hashes,
            block_size: around.prepared.block_size(),
            session: hashes.first().map_or(0, |hash| hash.low_u64()),
        };
        let placed = match self.placer.place(&targets, &prompt, wish.patience, now, random) {
            Ok(placed) => placed,
            Err(why) => {
                if let NotPlaced::Busy { index, prefill_ms, .. } = why {
                    backlog_ms[workers[index]] += prefill_ms;
                }
                return Err(why);
            }
        };
        let tokens = u64::from(placed.work.tokens_new)
            + placed.prefill.as_ref().map_or(0, |prefill| u64::from(prefill.work.tokens_new));
        self.send(request, &workers, placed, around);
        Ok(tokens)
    }

    /// Sends a request where it was placed, and tells the others.
    fn send(&mut self, request: RequestIdx, workers: &[usize], placed: Placed, around: &mut Surroundings<'_>) {
        let Placed { index, decision, key, work, prefill, instead, lender } = placed;
        let worker = workers[index];
        let attempt = note_placed(around.book, request);
        around.book.n_split += usize::from(prefill.is_some());
        let progress = around.book.of(request);
        progress.worker = Some(worker);
        if progress.first_token.is_none() {
            progress.placed = around.network.now;
            progress.predicted_ms = decision.computes().prediction.first_token_ms;
        }
        let forgets = progress.n_tokens == 0 || self.planted == Some(Planted::ForgetTokens);
        let generated = if forgets { Vec::new() } else { progress.tokens.clone() };
        around.network.ledger(self.index, LedgerEvent::Placed(key, work.clone()));
        if let Some(prefill) = &prefill {
            around.network.ledger(self.index, LedgerEvent::Placed(prefill.key, prefill.work.clone()));
        }
        let computing = prefill.as_ref().map(|prefill| prefill.index).into_iter().chain(instead);
        let peers = lender.into_iter().chain(computing);
        let engine = |worker: usize| Some((worker, self.peered[worker].as_ref()?.engine.clone()));
        let prefill_on = peers.filter_map(|index| engine(workers[index])).collect();
        let connection = self.peered[worker].as_ref().map_or(0, |peer| peer.connection);
        let submission = Submission { router: self.index, connection, request, attempt, generated, prefill_on };
        around.network.request(self.index, worker, ToWorker::Submit(submission));
        let flight = Flight { worker, attempt, key, work, prefill, has_first_token: false };
        self.flights.insert(request, flight);
    }

    /// Whether a worker is about to leave and lends what it has cached.
    fn lends(&self, peer: &Peer) -> bool {
        viewed(&self.view, &peer.engine).is_some_and(|view| view.draining == Some(DrainReason::Leaving))
    }

    /// Predicted prefill where most is cached.
    pub(super) fn prefill_ms_least(&self, request: RequestIdx, around: &Surroundings<'_>) -> f64 {
        let hashes = around.prepared.hashes(request);
        let matches = self.placer.directory().lookup(hashes, around.network.instant());
        let slots = self.peered.iter().flatten().filter_map(|peer| self.placer.directory().slot(&peer.engine));
        let most = slots.map(|slot| matches.of(slot).n_blocks).max().unwrap_or(0);
        let context = most as u64 * u64::from(around.prepared.block_size());
        let n_prompt = u64::from(around.prepared.requests()[request as usize].n_prompt);
        around.prepared.cost().prefill_ms(n_prompt.saturating_sub(context).max(1), context)
    }
}

/// What the scheduler says of an engine.
pub(super) fn viewed<'a>(view: &'a ClusterView, engine: &EngineId) -> Option<&'a EngineView> {
    let index = view.engines.binary_search_by(|known| known.engine.cmp(engine)).ok()?;
    Some(&view.engines[index])
}
