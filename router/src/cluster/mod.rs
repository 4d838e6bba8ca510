//! The engines that requests can be placed on: found by membership and the scheduler's view, proved by their own streams.

mod elsewhere;
mod flight;
mod hot;
mod leader;
mod ledger;
mod link;
mod others;
mod outbox;
mod search;
mod supervise;

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use contract::demand::{RouterDemand, TenantDemand};
use contract::error::RequestError;
use contract::ids::{EngineId, Incarnation, RequestId, TenantId};
use contract::model::Fingerprint;
use contract::request::{GenerateRequest, PrefillPeer};
use contract::view::{ClusterView, DrainReason, EngineView, Role};
use daemon::telemetry::names::attribute;
use proto::exchange::Line;
use tokio::sync::{Notify, watch};
use tracing::field;

use crate::admission::Turn;
use crate::config::WorkerSettings;
use crate::decisions::Decisions;
use crate::metrics::Metrics;
use crate::model::{PromptBlocks, ServedModel};
use crate::route::directory::PrefixDirectory;
use crate::route::placer::{Decision, NotPlaced, Patience, Placed, Placer, Prompt, Target};

pub(crate) use elsewhere::{Demands, Elsewhere};
pub(crate) use flight::Flight;
use hot::HotPrompts;
use ledger::SharedLedger;
use search::Search;
pub(crate) use supervise::supervise;

/// An engine that described itself, agrees about the model, and whose event stream lives.
#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) id: EngineId,
    /// Shared by all engines of one worker.
    pub(crate) line: Line,
    pub(crate) context_length: u32,
    /// Engines of equal ones say the same tokens.
    pub(crate) numerics: Fingerprint,
    /// Where its worker listens for transfers; empty where it takes no part in them.
    pub(crate) transfer_address: String,
    /// It is about to leave, as others say. Shared by all engines of one worker.
    draining: Arc<AtomicBool>,
    /// It is about to leave, as it says itself.
    leaves: AtomicBool,
    /// What it alone has cached of the last prompts has been moved, or is being moved.
    is_emptied: AtomicBool,
    /// It computes prompts for others now, of whom some take what decodes here.
    hands_over: AtomicBool,
}

impl Engine {
    /// Whether what decodes there is better off elsewhere, since it computes prompts for others.
    pub(crate) fn hands_over(&self) -> bool {
        self.hands_over.load(Ordering::Relaxed)
    }

    /// Whether it takes nothing any more, and lends what it has cached until it goes.
    fn is_leaving(&self) -> bool {
        self.draining.load(Ordering::Relaxed) || self.leaves.load(Ordering::Relaxed)
    }
}

/// What this router knows of its cluster.
pub(crate) struct Cluster {
    pub(crate) model: Arc<ServedModel>,
    pub(crate) settings: WorkerSettings,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) decisions: Decisions,
    /// Told when an engine may have room that had none.
    pub(crate) room: Notify,
    /// Told when an engine begins to leave.
    leaving: Notify,
    hot: HotPrompts,
    /// Routers that are registered, this one included.
    pub(crate) n_routers: watch::Sender<u32>,
    /// What others serve and are asked for.
    pub(crate) elsewhere: Elsewhere,
    placer: Placer,
    ledger: SharedLedger,
    ready: ArcSwap<Vec<Arc<Engine>>>,
    view: ArcSwap<HashMap<EngineId, EngineView>>,
    changed: watch::Sender<usize>,
    search: Mutex<Search>,
}

/// Predicted prefill of what waits for each engine and was passed over, in milliseconds.
type Backlog = HashMap<EngineId, f64>;

/// What is placed once more.
pub(crate) struct Resumed<'a> {
    /// What the client asked, which this is a part of; none for what the router asks itself, which nobody is told of.
    pub(crate) question: Option<RequestId>,
    pub(crate) request: &'a GenerateRequest,
    /// Blocks of its prompt and of what was generated.
    pub(crate) blocks: &'a PromptBlocks,
    /// Engines that it does not go to.
    pub(crate) tried: &'a [EngineId],
    /// What its tokens came from, if it has any.
    pub(crate) numerics: Option<Fingerprint>,
}

/// Where a request was placed.
pub(crate) struct Placement {
    pub(crate) engine: Arc<Engine>,
    /// Who has the prompt cached and leaves, or computes it, if others do, in the order in which they are asked.
    pub(crate) prefill_on: Vec<PrefillPeer>,
    pub(crate) flight: Flight,
}

impl Cluster {
    pub(crate) fn new(
        model: Arc<ServedModel>,
        settings: WorkerSettings,
        metrics: Arc<Metrics>,
        placer: Placer,
    ) -> Self {
        let ledger = SharedLedger::new(placer.router(), settings.ledger_grace());
        Self {
            model,
            settings,
            metrics,
            decisions: Decisions::default(),
            room: Notify::new(),
            leaving: Notify::new(),
            hot: HotPrompts::default(),
            n_routers: watch::Sender::new(1),
            elsewhere: Elsewhere::default(),
            placer,
            ledger,
            ready: ArcSwap::default(),
            view: ArcSwap::default(),
            changed: watch::Sender::new(0),
            search: Mutex::default(),
        }
    }

    /// An engine refused or ended a call because it leaves, which no life of a worker takes back.
    pub(crate) fn leaves(&self, engine: &Engine) {
        if !engine.leaves.swap(true, Ordering::Relaxed) {
            self.count();
            self.leaving.notify_one();
        }
    }

    /// Keeps a prompt that was placed for when the engine leaves that has it cached.
    pub(crate) fn remember(&self, request: &GenerateRequest, blocks: &Arc<PromptBlocks>) {
        self.hot.put(request, blocks);
    }

    /// Chooses another engine, one that says the same tokens where there is any, and promises it the blocks; none when no
    /// engine is left.
    pub(crate) fn place_again(self: &Arc<Self>, resumed: &Resumed<'_>) -> Option<Placement> {
        let &Resumed { question, request, blocks, tried, numerics } = resumed;
        let n_tokens = request.prompt.len() + request.generated.len();
        let takes = |engine: &Engine| n_tokens < engine.context_length as usize && !tried.contains(&engine.id);
        // Nothing is placed on an engine that leaves.
        let fits = |engine: &&Arc<Engine>| engine.is_leaving() || takes(engine);
        let ready = self.ready.load();
        let usable: Vec<&Arc<Engine>> = ready.iter().filter(fits).collect();
        let says_the_same = |engine: &&Arc<Engine>| numerics.is_none_or(|numerics| engine.numerics == numerics);
        let (same, others): (Vec<_>, Vec<_>) = usable.into_iter().partition(says_the_same);
        let prompt = prompt(&request.tenant, n_tokens as u64, blocks);
        let place =
            |engines: &[&Arc<Engine>]| self.place_on(engines, question, &prompt, Patience::None, &Backlog::new()).ok();
        place(&same).or_else(|| place(&others))
    }

    /// Chooses an engine for a prompt of `request`, unless it has enough to do, counting what was passed over before in the
    /// same search; when the request is overdue the choice is among those that have not.
    ///
    /// # Errors
    /// Why it was not placed.
    pub(crate) fn place_if_free(
        self: &Arc<Self>,
        request: RequestId,
        tenant: &TenantId,
        n_tokens: u64,
        blocks: &PromptBlocks,
        turn: Turn,
    ) -> Result<Placement, NotPlaced> {
        let ready = self.ready.load();
        let all: Vec<&Arc<Engine>> = ready.iter().collect();
        let (patience, n_before) = if turn.is_overdue { (Patience::Any, 0) } else { (Patience::Best, turn.n_before) };
        let prompt = Prompt { n_before, ..prompt(tenant, n_tokens, blocks) };
        let mut search = self.search();
        if turn.n_passed == 0 {
            search.backlog.clear();
        }
        let placed = self.place_on(&all, Some(request), &prompt, patience, &search.backlog);
        search.found(!matches!(placed, Err(NotPlaced::NoEngine)), daemon::clock::now());
        if let Err(NotPlaced::Busy { index, prefill_ms, .. }) = placed {
            *search.backlog.entry(all[index].id.clone()).or_default() += prefill_ms;
        }
        placed
    }

    fn place_on(
        self: &Arc<Self>,
        engines: &[&Arc<Engine>],
        request: Option<RequestId>,
        prompt: &Prompt<'_>,
        patience: Patience,
        backlog: &Backlog,
    ) -> Result<Placement, NotPlaced> {
        let view = self.view.load();
        let targets: Vec<Target<'_>> = engines.iter().map(|engine| target(engine, &view, backlog)).collect();
        let (now, random) = (daemon::clock::now(), daemon::random::u64());
        let Placed { index, decision, key, work, prefill, instead, lender } =
            self.placer.place(&targets, prompt, patience, now, random)?;
        let (chosen, computes) = (decision.chosen(), decision.computes());
        let reason = decision.reason.name();
        tracing::debug!(engine = %chosen.engine, reason, tokens_cached = chosen.tokens_cached,
            predicted_ms = computes.prediction.first_token_ms, computed_by = %computes.engine, n_candidates = targets.len(), "placed");
        let span = tracing::Span::current();
        span.record(attribute::ROUTE_ENGINE, field::display(&chosen.engine));
        span.record(attribute::ROUTE_REASON, reason);
        span.record(attribute::ROUTE_CACHED_TOKENS, chosen.tokens_cached);
        span.record(attribute::ROUTE_PREDICTED_MS, computes.prediction.first_token_ms);
        if let Some(request) = request {
            self.metrics.placed(decision.reason, patience == Patience::None);
            self.decisions.put(request, key, decision, now);
        }
        let computing = prefill.as_ref().map(|prefill| prefill.index).into_iter().chain(instead);
        let peers = lender.into_iter().chain(computing);
        let peer =
            |engine: &Engine| PrefillPeer { engine: engine.id.clone(), address: engine.transfer_address.clone() };
        Ok(Placement {
            engine: Arc::clone(engines[index]),
            prefill_on: peers.map(|index| peer(engines[index])).collect(),
            flight: Flight::new(self, request, key, work, prefill),
        })
    }

    /// Where a prompt would go now.
    ///
    /// # Errors
    /// When no engine is ready.
    pub(crate) fn explain(
        &self,
        tenant: &TenantId,
        n_tokens: u64,
        blocks: &PromptBlocks,
    ) -> Result<Decision, RequestError> {
        let (ready, view) = (self.ready.load(), self.view.load());
        let targets: Vec<Target<'_>> = ready.iter().map(|engine| target(engine, &view, &Backlog::new())).collect();
        let (now, random) = (daemon::clock::now(), daemon::random::u64());
        let decision = self.placer.explain(&targets, &prompt(tenant, n_tokens, blocks), now, random);
        decision.ok_or_else(|| self.refusal(NotPlaced::NoEngine))
    }

    /// Tells other routers what this one is asked for.
    pub(crate) fn tell_demand(&self, tenants: Vec<TenantDemand>) {
        self.ledger.outbox.put_demand(tenants);
    }

    /// This router, and what it last told of what it is asked for.
    pub(crate) fn own_demand(&self) -> (Incarnation, RouterDemand) {
        (self.placer.router(), self.ledger.outbox.demand())
    }

    /// The policy's name.
    pub(crate) fn policy(&self) -> &'static str {
        self.placer.policy()
    }

    /// The error of a request that is not placed.
    pub(crate) fn refusal(&self, why: NotPlaced) -> RequestError {
        match why {
            NotPlaced::NoEngine => RequestError::NoWorker { model: self.model.name().to_owned() },
            NotPlaced::Busy { wait_ms, .. } => RequestError::Overloaded {
                reason: "every worker has enough to do".to_owned(),
                retry_after_ms: wait_ms as u64,
            },
        }
    }

    /// How long a request that found no engine waits for one; none when there has not been any for too long.
    pub(crate) fn waits_for_engine(&self) -> Option<Duration> {
        let wait_max = Duration::from_millis(self.settings.worker_wait_ms_max);
        self.search().left(daemon::clock::now(), wait_max)
    }

    fn search(&self) -> MutexGuard<'_, Search> {
        self.search.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether requests can be placed.
    pub(crate) fn is_ready(&self) -> bool {
        self.ready.load().iter().any(|engine| !engine.is_leaving())
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
    pub(crate) fn changes(&self) -> watch::Receiver<usize> {
        self.changed.subscribe()
    }

    fn directory(&self) -> &PrefixDirectory {
        self.placer.directory()
    }

    /// Lets requests be placed on `engines`, which replace what there was of their names.
    fn publish(&self, engines: &[Arc<Engine>]) {
        self.ready.rcu(|ready| {
            let others = ready.iter().filter(|known| engines.iter().all(|new| new.id != known.id));
            others.chain(engines).cloned().collect::<Vec<_>>()
        });
        self.search().found(true, daemon::clock::now());
        self.count();
        // What an engine that leaves has cached can move to these.
        self.leaving.notify_one();
    }

    /// Takes engines out, and all that is known of their caches.
    fn withdraw(&self, engines: &[Arc<Engine>]) {
        self.ready.rcu(|ready| {
            // Another link to the same engine may have published it anew.
            let stays = |known: &&Arc<Engine>| engines.iter().all(|gone| !Arc::ptr_eq(gone, known));
            ready.iter().filter(stays).cloned().collect::<Vec<_>>()
        });
        engines.iter().for_each(|engine| self.directory().remove(&engine.id));
        self.count();
    }

    fn count(&self) {
        let n_ready = self.ready.load().iter().filter(|engine| !engine.is_leaving()).count();
        self.metrics.engines_ready.set(n_ready as i64);
        self.changed.send_replace(n_ready);
        self.room.notify_one();
    }

    fn count_blocks(&self) {
        let (directory, metrics) = (self.directory(), &self.metrics);
        metrics.directory_blocks.set(i64::try_from(directory.n_blocks()).unwrap_or(i64::MAX));
        metrics.directory_bytes.set(i64::try_from(directory.bytes()).unwrap_or(i64::MAX));
        metrics.promises_missed.inc_by(directory.take_promises_missed());
    }

    fn see(&self, mut view: ClusterView) {
        let before = self.view.load();
        view.keep_roles(|engine| before.get(engine)?.role);
        let engines: HashMap<EngineId, EngineView> =
            view.engines.into_iter().map(|engine| (engine.engine.clone(), engine)).collect();
        let ready = self.ready.load();
        let role = |engine: &Arc<Engine>| role(engine, engines.get(&engine.id));
        let is_open = |engine: &Arc<Engine>| {
            !engine.is_leaving() && engines.get(&engine.id).is_none_or(|view| view.draining.is_none())
        };
        let takers: HashSet<Fingerprint> = ready
            .iter()
            .filter(|engine| role(engine) != Role::Prefill && is_open(engine))
            .map(|engine| engine.numerics)
            .collect();
        for engine in ready.iter() {
            let is_taken = takers.contains(&engine.numerics);
            engine.hands_over.store(is_taken && role(engine) == Role::Prefill, Ordering::Relaxed);
        }
        self.view.store(Arc::new(engines));
        self.room.notify_one();
    }

    /// Forgets which engines the scheduler wished to drain, since nobody is heard who would take that back: one that stands
    /// still refuses by itself.
    fn forget_wishes(&self) {
        if !self.view.load().values().any(is_wish) {
            return;
        }
        let mut engines = HashMap::clone(&self.view.load());
        engines.values_mut().filter(|view| is_wish(view)).for_each(|view| view.draining = None);
        self.view.store(Arc::new(engines));
        self.room.notify_one();
    }
}

/// Whether the scheduler wishes an engine to be left alone for a while.
fn is_wish(view: &EngineView) -> bool {
    view.draining == Some(DrainReason::Stalled)
}

fn target<'a>(engine: &'a Engine, view: &'a HashMap<EngineId, EngineView>, backlog: &Backlog) -> Target<'a> {
    let viewed = view.get(&engine.id);
    let occupancy = viewed.and_then(|view| view.occupancy.as_ref());
    let transfers = !engine.transfer_address.is_empty();
    Target {
        engine: &engine.id,
        occupancy,
        draining: viewed.is_some_and(|view| view.draining.is_some()) || engine.is_leaving(),
        lends: engine.is_leaving() && transfers && !occupancy.is_some_and(|occupancy| occupancy.is_stalled),
        fetches: transfers,
        numerics: engine.numerics,
        role: role(engine, viewed),
        backlog_ms: backlog.get(&engine.id).copied().unwrap_or(0.0),
    }
}

/// The role that the scheduler gave an engine; whoever nobody can fetch from serves requests itself.
fn role(engine: &Engine, viewed: Option<&EngineView>) -> Role {
    let is_reachable = !engine.transfer_address.is_empty();
    viewed.and_then(|view| view.role).filter(|_| is_reachable).unwrap_or_default()
}

/// A prompt's first block stands for its session: what goes on begins alike.
fn prompt<'a>(tenant: &'a TenantId, n_tokens: u64, blocks: &'a PromptBlocks) -> Prompt<'a> {
    let session = blocks.hashes.first().map_or(0, |hash| hash.low_u64());
    Prompt { tenant, n_before: 0, n_tokens, hashes: &blocks.hashes, block_size: blocks.block_size, session }
}
