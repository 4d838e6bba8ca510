//! The engines that requests can be placed on: found by membership and the scheduler's view, proved by their own streams.

mod link;
mod load;
mod supervise;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use contract::error::RequestError;
use contract::ids::EngineId;
use contract::view::{ClusterView, EngineView, Role};
use proto::worker::v1::worker_client::WorkerClient;
use tonic::transport::Channel;

use crate::config::WorkerSettings;
use crate::metrics::Metrics;
use crate::model::{PromptBlocks, ServedModel};
use crate::route::directory::PrefixDirectory;
use crate::route::{Candidate, RoutePolicy, Situation};

pub(crate) use load::InFlight;
use load::Load;
pub(crate) use supervise::supervise;

/// An engine that described itself, agrees about the model, and whose event stream lives.
#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) id: EngineId,
    pub(crate) client: WorkerClient<Channel>,
    pub(crate) context_length: u32,
    load: Arc<Load>,
    /// Shared by all engines of one worker.
    draining: Arc<AtomicBool>,
}

/// What this router knows of its cluster.
pub(crate) struct Cluster {
    pub(crate) model: Arc<ServedModel>,
    pub(crate) settings: WorkerSettings,
    pub(crate) metrics: Arc<Metrics>,
    policy: &'static dyn RoutePolicy,
    ready: ArcSwap<Vec<Arc<Engine>>>,
    view: ArcSwap<HashMap<EngineId, EngineView>>,
    directory: Mutex<PrefixDirectory>,
    turns: AtomicU64,
    changed: tokio::sync::watch::Sender<usize>,
}

/// Where a request was placed.
pub(crate) struct Placement {
    pub(crate) engine: Arc<Engine>,
    /// Prompt tokens that are probably not cached there.
    pub(crate) n_uncached: u64,
}

impl Cluster {
    pub(crate) fn new(
        model: Arc<ServedModel>,
        settings: WorkerSettings,
        metrics: Arc<Metrics>,
        policy: &'static dyn RoutePolicy,
    ) -> Self {
        let directory = Mutex::new(PrefixDirectory::new(settings.directory_bytes_max));
        Self {
            model,
            settings,
            metrics,
            policy,
            ready: ArcSwap::default(),
            view: ArcSwap::default(),
            directory,
            turns: AtomicU64::new(0),
            changed: tokio::sync::watch::Sender::new(0),
        }
    }

    /// Chooses an engine for a prompt, none of those in `tried`, and promises it the prompt's blocks.
    ///
    /// # Errors
    /// When no engine is ready.
    pub(crate) fn place(
        &self,
        n_prompt_tokens: u64,
        blocks: &PromptBlocks,
        tried: &[EngineId],
    ) -> Result<Placement, RequestError> {
        let (ready, view) = (self.ready.load(), self.view.load());
        let usable: Vec<&Arc<Engine>> =
            ready.iter().filter(|engine| !tried.contains(&engine.id) && takes_work(engine, &view)).collect();
        if usable.is_empty() {
            return Err(RequestError::NoWorker { model: self.model.name().to_owned() });
        }
        let now = daemon::clock::now();
        let mut directory = self.directory();
        let candidates: Vec<Candidate<'_>> = usable
            .iter()
            .map(|engine| {
                let n_blocks = directory.count(&engine.id, &blocks.hashes, now) as u64;
                Candidate {
                    engine: &engine.id,
                    occupancy: view.get(&engine.id).and_then(|view| view.occupancy.as_ref()),
                    n_in_flight: engine.load.n_in_flight(),
                    tokens_pending: engine.load.tokens_pending(),
                    tokens_cached: n_blocks * u64::from(blocks.block_size),
                }
            })
            .collect();
        let turn = self.turns.fetch_add(1, Ordering::Relaxed);
        let situation = Situation { candidates: &candidates, n_prompt_tokens, turn, random: daemon::random::u64() };
        let choice = self.policy.choose(&situation);
        let chosen = &candidates[choice.index];
        tracing::debug!(engine = %chosen.engine, reason = choice.reason.name(), tokens_cached = chosen.tokens_cached,
            n_candidates = candidates.len(), "placed");
        self.metrics.placed(if tried.is_empty() { choice.reason.name() } else { "replaced" });
        let n_uncached = n_prompt_tokens.saturating_sub(chosen.tokens_cached);
        let engine = Arc::clone(usable[choice.index]);
        drop(candidates);
        let until = now + Duration::from_millis(self.settings.promise_ms);
        directory.promise(&engine.id, &blocks.hashes, now, until);
        Ok(Placement { engine, n_uncached })
    }

    /// Whether requests can be placed.
    pub(crate) fn is_ready(&self) -> bool {
        !self.ready.load().is_empty()
    }

    /// Workers that are ready.
    pub(crate) fn n_workers(&self) -> usize {
        let ready = self.ready.load();
        let mut workers: Vec<&str> = ready.iter().map(|engine| engine.id.worker.as_str()).collect();
        workers.sort_unstable();
        workers.dedup();
        workers.len()
    }

    /// Longest sequence that any ready engine takes; the model's own when none is ready.
    pub(crate) fn context_length(&self) -> u32 {
        let own = self.model.context_length();
        self.ready.load().iter().map(|engine| engine.context_length).max().map_or(own, |most| most.min(own))
    }

    /// Follows how many engines are ready.
    pub(crate) fn changes(&self) -> tokio::sync::watch::Receiver<usize> {
        self.changed.subscribe()
    }

    fn directory(&self) -> MutexGuard<'_, PrefixDirectory> {
        self.directory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets requests be placed on `engines`, which replace what there was of their names.
    fn publish(&self, engines: &[Arc<Engine>]) {
        self.ready.rcu(|ready| {
            let others = ready.iter().filter(|known| engines.iter().all(|new| new.id != known.id));
            others.chain(engines).cloned().collect::<Vec<_>>()
        });
        self.count();
    }

    /// Takes engines out, and all that is known of their caches.
    fn withdraw(&self, engines: &[Arc<Engine>]) {
        self.ready.rcu(|ready| {
            ready.iter().filter(|known| engines.iter().all(|gone| gone.id != known.id)).cloned().collect::<Vec<_>>()
        });
        let mut directory = self.directory();
        engines.iter().for_each(|engine| directory.remove(&engine.id));
        drop(directory);
        self.count();
    }

    fn count(&self) {
        let n_ready = self.ready.load().len();
        self.metrics.engines_ready.set(n_ready as i64);
        self.changed.send_replace(n_ready);
    }

    fn count_blocks(&self) {
        self.metrics.directory_blocks.set(i64::try_from(self.directory().n_blocks()).unwrap_or(i64::MAX));
    }

    fn see(&self, view: ClusterView) {
        let engines = view.engines.into_iter().map(|engine| (engine.engine.clone(), engine)).collect();
        self.view.store(Arc::new(engines));
    }
}

fn takes_work(engine: &Engine, view: &HashMap<EngineId, EngineView>) -> bool {
    let viewed = view.get(&engine.id);
    // Nothing hands a prefill over yet, so an engine that only prefills finishes no request.
    let excluded = viewed.is_some_and(|view| view.draining || view.role == Role::Prefill);
    !excluded && !engine.draining.load(Ordering::Relaxed)
}
