//! A worker: the engine over a device that only takes time, and what it tells routers, the scheduler and other workers.

mod fetching;
mod lending;
mod telling;

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::time::Duration;

use contract::cost::CostCoefficients;
use contract::error::RequestError;
use contract::hash::BlockHash;
use contract::ids::{DataRank, EngineId, Incarnation, RequestId};
use contract::kv::KvEvent;
use contract::plan::StepOutput;
use contract::request::{GenerateRequest, PrefillPeer, SamplingParams, StopParams};
use contract::view::Role;
use engine::{Engine, Output, OutputEvent, SequenceKey};
use worker::sim::Device;
use worker::{Layers, Lendings};

use crate::checker::Violation;
use crate::event::{Event, KvMessage, RequestIdx, Submission, ToRouter, ToWorker};
use crate::faults::Fault;
use crate::network::{Links, Network};
use crate::options::{Options, Planted};
use crate::prepared::{EOS, Prepared};
use fetching::{Fetch, Split};
use lending::Lent;
pub(crate) use telling::HEARTBEAT;

/// One worker with one engine.
pub(crate) struct Worker {
    index: usize,
    life: u32,
    pub(crate) id: EngineId,
    pub(crate) is_up: bool,
    /// When its last life ended.
    pub(crate) crashed: Duration,
    pub(crate) engine: Engine,
    pub(crate) device: Device,
    cost: CostCoefficients,
    /// How many times as long its steps take.
    pub(crate) slowness: f64,
    /// What it was told to do; none leaves it to the scheduler.
    pub(crate) role: Option<Role>,
    /// Takes no new work, and leaves.
    pub(crate) is_draining: bool,
    step: Option<Step>,
    live: HashMap<RequestIdx, Live>,
    links: Links,
    block_size: usize,
    planted: Option<Planted>,
    /// Prompts that others compute; numbers are not used twice, whatever the life.
    fetches: BTreeMap<u64, Fetch>,
    n_fetches: u64,
    /// Prompts that are computed for others, by ticket.
    lent: BTreeMap<u64, Lent>,
    n_tickets: u64,
    lendings: Lendings,
    layers: Layers,
    /// Until when blocks are being sent.
    sends_until: Duration,
    pub(crate) tally: Tally,
    /// Connections of the routers that follow the cache.
    watchers: Vec<Option<u32>>,
    reported: Duration,
    is_report_due: bool,
    /// All blocks that this life has ever cached; kept for the checker only.
    pub(crate) ever_cached: Option<HashSet<BlockHash>>,
    outputs: Vec<Output>,
    kv_events: Vec<KvEvent>,
}

/// What prompts that moved came to, over all lives.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tally {
    /// Came as a whole.
    pub(crate) n_whole: usize,
    /// Came in part or not at all.
    pub(crate) n_broken: usize,
    /// Of these, with blocks that could be used.
    pub(crate) n_partial: usize,
    /// Were not wanted any more.
    pub(crate) n_cancelled: usize,
    /// Frames that nobody waited for, or that followed a lost one.
    pub(crate) n_frames_dropped: usize,
    /// Requests that were handed over when their worker left.
    pub(crate) n_handed_over: usize,
}

/// The step that runs.
struct Step {
    output: StepOutput,
    began: Duration,
    took: Duration,
}

/// A request that the engine knows.
struct Live {
    /// Who placed it, and over which connection.
    owner: (usize, u32),
    attempt: u32,
    key: SequenceKey,
    /// What its prompt is fetched for; gone once it is being fetched.
    split: Option<Split>,
    fetch: Option<u64>,
}

impl Worker {
    pub(crate) fn new(index: usize, prepared: &Prepared, options: &Options, incarnation: u64) -> Self {
        let worker = prepared.worker_name(index);
        Self {
            index,
            life: 0,
            id: EngineId { worker, incarnation: Incarnation(incarnation), data_rank: DataRank(0) },
            is_up: true,
            crashed: Duration::ZERO,
            engine: prepared.engine(),
            device: prepared.device(),
            cost: prepared.cost(),
            slowness: 1.0,
            role: options.roles.of(index),
            is_draining: false,
            step: None,
            live: HashMap::new(),
            links: options.links,
            block_size: prepared.block_size() as usize,
            planted: options.planted,
            fetches: BTreeMap::new(),
            n_fetches: 0,
            lent: BTreeMap::new(),
            n_tickets: 0,
            lendings: Lendings::default(),
            layers: Layers::default(),
            sends_until: Duration::ZERO,
            tally: Tally::default(),
            watchers: vec![None; options.n_routers],
            reported: Duration::ZERO,
            is_report_due: false,
            ever_cached: options.is_checked().then(HashSet::new),
            outputs: Vec::new(),
            kv_events: Vec::new(),
        }
    }

    /// Begins to live: heartbeats from now on.
    pub(crate) fn begin(&mut self, network: &mut Network) {
        self.beat(network);
        self.change(network);
    }

    /// Loses everything, in the middle of what it does.
    pub(crate) fn crash(&mut self, now: Duration) {
        self.is_up = false;
        self.crashed = now;
        self.life += 1;
        self.step = None;
        self.live.clear();
        self.fetches.clear();
        self.lent.clear();
        (self.lendings, self.layers) = Default::default();
        self.watchers.fill(None);
        self.is_report_due = false;
    }

    /// Lives again, as another.
    pub(crate) fn restart(&mut self, prepared: &Prepared, network: &mut Network) {
        self.is_up = true;
        self.is_draining = false;
        self.id.incarnation = Incarnation(network.random.draw());
        self.engine = prepared.engine();
        self.device = prepared.device();
        if let Some(ever) = &mut self.ever_cached {
            ever.clear();
        }
        self.begin(network);
    }

    /// Whether something is left to do, for itself or for others.
    pub(crate) fn is_busy(&self) -> bool {
        let holds = self.engine.n_held() > 0 || self.engine.blocks().allocated > 0;
        !self.engine.is_idle() || holds || !self.fetches.is_empty() || !self.lent.is_empty()
    }

    pub(crate) fn hear(
        &mut self,
        message: ToWorker,
        prepared: &Prepared,
        network: &mut Network,
    ) -> Result<(), Violation> {
        if !self.is_up {
            if let ToWorker::Peer { from, message } = message {
                self.refuse_peer(from, &message, network);
            }
            return Ok(());
        }
        match message {
            ToWorker::Submit(submission) => {
                if submission.connection == network.connection(submission.router, self.index) {
                    self.submit(submission, prepared, network);
                }
            }
            ToWorker::Cancel { router, connection, request, attempt } => {
                let is_it = |live: &&Live| live.owner == (router, connection) && live.attempt == attempt;
                if self.live.get(&request).filter(is_it).is_some() {
                    self.abort(request, network);
                }
            }
            ToWorker::Watch { router, connection } => {
                if connection == network.connection(router, self.index) {
                    self.publish_kv(network);
                    self.watch(router, connection);
                    let blocks = self.engine.kv_snapshot().into_iter().map(|(hash, _)| hash).collect();
                    let message = KvMessage::Snapshot { sequence: self.engine.kv_sequence(), blocks };
                    network.kv(router, self.index, connection, message);
                }
            }
            ToWorker::Lost { router, connection } => self.forget(router, connection, network),
            ToWorker::Done { life } if life == self.life => self.finish_step(network)?,
            ToWorker::Peer { from, message } => self.hear_peer(from, message, network),
            // Only the whole cluster can read another's pool.
            ToWorker::Blocks(_) | ToWorker::Wake => {}
            ToWorker::PeerLost { peer } => self.lose_peer(peer, network),
            ToWorker::Filled { life, key, n_tokens } if life == self.life => drop(self.engine.let_go(key, n_tokens)),
            ToWorker::FetchDue { fetch } => self.fetch_due(fetch, network),
            ToWorker::Working { ticket } => self.tell_working(ticket, network),
            ToWorker::LeaseOver { ticket } => self.close_lent(ticket, network),
            ToWorker::Drain { grace } => self.drain(grace, network),
            ToWorker::HandOver { life } if life == self.life => self.hand_over(network),
            ToWorker::Heartbeat { life } if life == self.life => self.beat(network),
            ToWorker::Report { life } if life == self.life => self.report(network),
            ToWorker::Filled { .. } | ToWorker::HandOver { .. } => return Ok(()),
            ToWorker::Done { .. } | ToWorker::Heartbeat { .. } | ToWorker::Report { .. } => return Ok(()),
        }
        self.go_on(network)
    }

    /// What follows from any event: requests expire, a step begins, what is computed for others is sent.
    pub(crate) fn go_on(&mut self, network: &mut Network) -> Result<(), Violation> {
        let mut outputs = std::mem::take(&mut self.outputs);
        self.engine.expire(network.now, &mut outputs);
        self.answer(&mut outputs, network);
        self.outputs = outputs;
        self.start(network)?;
        self.send_ready(network);
        if self.is_draining && !self.is_busy() {
            self.leave(network);
        }
        Ok(())
    }

    fn submit(&mut self, submission: Submission, prepared: &Prepared, network: &mut Network) {
        let Submission { router, connection, request, attempt, generated, prefill_on } = submission;
        let owner = (router, connection);
        if self.is_draining {
            return self.refuse(owner, request, attempt, leaving(), network);
        }
        let asked = &prepared.requests()[request as usize];
        // An earlier attempt whose connection broke may not have been noticed here.
        self.abort(request, network);
        let peers: VecDeque<_> = prefill_on.into_iter().filter(|(_, engine)| *engine != self.id).collect();
        let prefill_on = peers.iter().map(|(_, engine)| PrefillPeer { engine: engine.clone(), address: String::new() });
        let wanted = GenerateRequest {
            id: RequestId(request.into()),
            attempt,
            model: prepared.model_name(),
            prompt: asked.prompt(prepared.vocab_size()),
            generated,
            tenant: prepared.tenant(asked.tenant),
            cache_salt: String::new(),
            adapter: String::new(),
            priority: 0,
            deadline: None,
            sampling: SamplingParams { temperature: 0.0, ..SamplingParams::default() },
            stop: StopParams { token_ids: vec![EOS], max_tokens: asked.n_output, ..StopParams::default() },
            logprobs: None,
            prompt_logprobs: None,
            prefill_on: prefill_on.collect(),
        };
        let split = (!peers.is_empty()).then(|| Split { peers, request: wanted.clone() });
        match self.engine.submit(wanted, network.now) {
            Ok(key) => {
                self.live.insert(request, Live { owner, attempt, key, split, fetch: None });
            }
            Err(error) => self.refuse(owner, request, attempt, error, network),
        }
        self.change(network);
    }

    fn refuse(
        &self,
        (router, connection): (usize, u32),
        request: RequestIdx,
        attempt: u32,
        error: RequestError,
        network: &mut Network,
    ) {
        let event = OutputEvent::Failed(error);
        let output = Output { key: SequenceKey(u64::MAX), request: RequestId(request.into()), attempt, event };
        let message = ToRouter::Frames { worker: self.index, connection, outputs: vec![output] };
        network.answer(router, self.index, connection, message);
    }

    /// Forgets a request that nobody reads any more.
    fn abort(&mut self, request: RequestIdx, network: &mut Network) {
        let Some(live) = self.live.remove(&request) else { return };
        self.engine.abort(RequestId(request.into()));
        if let Some(fetch) = live.fetch {
            self.cancel_fetch(fetch, network);
        }
        self.change(network);
    }

    /// Ends what a router asked over a connection that is gone.
    fn forget(&mut self, router: usize, connection: u32, network: &mut Network) {
        if self.watchers[router] == Some(connection) {
            self.watchers[router] = None;
        }
        let is_gone = |live: &Live| live.owner == (router, connection);
        let mut gone: Vec<RequestIdx> =
            self.live.iter().filter(|(_, live)| is_gone(live)).map(|(&request, _)| request).collect();
        gone.sort_unstable();
        gone.into_iter().for_each(|request| self.abort(request, network));
    }

    /// Takes nothing new from now on; what runs may end by itself for so long.
    fn drain(&mut self, grace: Duration, network: &mut Network) {
        if !std::mem::replace(&mut self.is_draining, true) {
            network.after(grace, Event::Worker(self.index, ToWorker::HandOver { life: self.life }));
        }
    }

    /// Lets what still runs go on elsewhere, and leaves.
    fn hand_over(&mut self, network: &mut Network) {
        let mut outputs = std::mem::take(&mut self.outputs);
        self.step = None;
        self.layers = Layers::default();
        self.engine.fail_all(&leaving(), &mut outputs);
        self.tally.n_handed_over += outputs.iter().filter(|output| output.request.0 <= u32::MAX.into()).count();
        self.answer(&mut outputs, network);
        self.outputs = outputs;
        self.leave(network);
    }

    fn leave(&self, network: &mut Network) {
        network.after(Duration::ZERO, Event::Fault(Fault::Exit { worker: self.index, life: self.life }));
    }

    /// Counts lives.
    pub(crate) fn life(&self) -> u32 {
        self.life
    }

    fn start(&mut self, network: &mut Network) -> Result<(), Violation> {
        if self.step.is_some() {
            return Ok(());
        }
        let plan = self.engine.plan();
        // Whoever moves may have been admitted although there is nothing to compute yet.
        for hold in self.lendings.take_holds(&mut self.engine) {
            self.fill(hold, network);
        }
        let Some(plan) = plan else { return Ok(()) };
        self.layers.begin(self.lendings.watched(&plan));
        let ran = self.device.run(&plan);
        let (output, took) = ran.map_err(|error| Violation::Device { worker: self.index, error: error.to_string() })?;
        self.engine.recycle(plan);
        let took = took.mul_f64(self.slowness);
        self.step = Some(Step { output, began: network.now, took });
        network.after(took, Event::Worker(self.index, ToWorker::Done { life: self.life }));
        Ok(())
    }

    fn finish_step(&mut self, network: &mut Network) -> Result<(), Violation> {
        let Some(Step { output, began, took }) = self.step.take() else { return Ok(()) };
        let mut outputs = std::mem::take(&mut self.outputs);
        let applied = self.engine.apply(output, &mut outputs);
        applied.map_err(|error| Violation::Device { worker: self.index, error: error.to_string() })?;
        self.answer(&mut outputs, network);
        self.outputs = outputs;
        self.layers.end();
        self.send_computed(began, took, network);
        self.publish_kv(network);
        self.change(network);
        if self.ever_cached.is_some() {
            self.engine.check_invariants();
        }
        Ok(())
    }

    /// Sends each router what is its.
    fn answer(&mut self, outputs: &mut Vec<Output>, network: &mut Network) {
        let mut frames: Vec<(usize, u32, Vec<Output>)> = Vec::new();
        for output in outputs.drain(..) {
            let is_for_others = match &output.event {
                OutputEvent::Prefilled => self.lendings.over(output.request, None),
                OutputEvent::Failed(error) => self.lendings.over(output.request, Some(error)),
                OutputEvent::Tokens { .. } => false,
            };
            // Ids of what is computed for others are none of any request.
            if is_for_others || output.request.0 > u32::MAX.into() {
                continue;
            }
            let request = output.request.0 as RequestIdx;
            let Some(live) = self.live.get(&request) else { continue };
            let ((router, connection), fetch) = (live.owner, live.fetch);
            if !matches!(output.event, OutputEvent::Tokens { finish: None, .. }) {
                self.live.remove(&request);
                fetch.into_iter().for_each(|fetch| self.cancel_fetch(fetch, network));
            }
            match frames.iter_mut().find(|frame| (frame.0, frame.1) == (router, connection)) {
                Some(frame) => frame.2.push(output),
                None => frames.push((router, connection, vec![output])),
            }
        }
        for (router, connection, outputs) in frames {
            let message = ToRouter::Frames { worker: self.index, connection, outputs };
            network.answer(router, self.index, connection, message);
        }
    }
}

fn leaving() -> RequestError {
    RequestError::ShuttingDown("the worker".to_owned())
}
