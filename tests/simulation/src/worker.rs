//! A worker: the engine over a device that only takes time, and what it tells routers and the scheduler.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use contract::cost::CostCoefficients;
use contract::error::RequestError;
use contract::hash::BlockHash;
use contract::ids::{DataRank, EngineId, Incarnation, RequestId, Token};
use contract::kv::KvEvent;
use contract::plan::StepOutput;
use contract::request::{GenerateRequest, SamplingParams, StopParams};
use engine::{Engine, Output, OutputEvent, SequenceKey};
use worker::sim::Device;

use crate::checker::Violation;
use crate::event::{Event, KvMessage, RequestIdx, ToRouter, ToScheduler, ToWorker};
use crate::network::Network;
use crate::prepared::{EOS, Prepared};

/// Shortest time between two reports of occupancy.
const REPORT_INTERVAL: Duration = Duration::from_millis(10);
/// Time between two signs of life.
pub(crate) const HEARTBEAT: Duration = Duration::from_secs(1);

/// One worker with one engine.
pub(crate) struct Worker {
    index: usize,
    life: u32,
    pub(crate) id: EngineId,
    pub(crate) is_up: bool,
    /// When its last life ended.
    pub(crate) crashed: Duration,
    pub(crate) engine: Engine,
    device: Device,
    cost: CostCoefficients,
    /// How many times as long its steps take.
    pub(crate) slowness: f64,
    running: Option<StepOutput>,
    /// Who placed what runs here, and over which connection.
    owners: HashMap<RequestIdx, (usize, u32)>,
    /// Connections of the routers that follow the cache.
    watchers: Vec<Option<u32>>,
    reported: Duration,
    is_report_due: bool,
    /// All blocks that this life has ever cached; kept for the checker only.
    pub(crate) ever_cached: Option<HashSet<BlockHash>>,
    outputs: Vec<Output>,
    kv_events: Vec<KvEvent>,
}

impl Worker {
    pub(crate) fn new(index: usize, n_routers: usize, prepared: &Prepared, incarnation: u64, is_checked: bool) -> Self {
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
            running: None,
            owners: HashMap::new(),
            watchers: vec![None; n_routers],
            reported: Duration::ZERO,
            is_report_due: false,
            ever_cached: is_checked.then(HashSet::new),
            outputs: Vec::new(),
            kv_events: Vec::new(),
        }
    }

    /// Begins to live: heartbeats from now on.
    pub(crate) fn begin(&mut self, network: &mut Network) {
        self.beat(network);
        self.change(network);
    }

    /// Lets a router follow the cache.
    pub(crate) fn watch(&mut self, router: usize, connection: u32) {
        self.watchers[router] = Some(connection);
    }

    /// Loses everything, in the middle of what it does.
    pub(crate) fn crash(&mut self, now: Duration) {
        self.is_up = false;
        self.crashed = now;
        self.life += 1;
        self.running = None;
        self.owners.clear();
        self.watchers.fill(None);
        self.is_report_due = false;
    }

    /// Lives again, as another.
    pub(crate) fn restart(&mut self, prepared: &Prepared, network: &mut Network) {
        self.is_up = true;
        self.id.incarnation = Incarnation(network.random.draw());
        self.engine = prepared.engine();
        self.device = prepared.device();
        if let Some(ever) = &mut self.ever_cached {
            ever.clear();
        }
        self.begin(network);
    }

    pub(crate) fn hear(
        &mut self,
        message: ToWorker,
        prepared: &Prepared,
        network: &mut Network,
    ) -> Result<(), Violation> {
        match message {
            ToWorker::Submit { router, connection, request, attempt, generated } => {
                if self.is_up && connection == network.connection(router, self.index) {
                    self.submit((router, connection), request, attempt, generated, (prepared, network));
                    self.start(network)?;
                }
            }
            ToWorker::Watch { router, connection } => {
                if self.is_up && connection == network.connection(router, self.index) {
                    self.publish_kv(network);
                    self.watch(router, connection);
                    let blocks = self.engine.kv_snapshot().into_iter().map(|(hash, _)| hash).collect();
                    let message = KvMessage::Snapshot { sequence: self.engine.kv_sequence(), blocks };
                    network.kv(router, self.index, connection, message);
                }
            }
            ToWorker::Lost { router, connection } => self.forget(router, connection),
            ToWorker::Done { life } if life == self.life => self.finish_step(network)?,
            ToWorker::Heartbeat { life } if life == self.life => self.beat(network),
            ToWorker::Report { life } if life == self.life => self.report(network),
            ToWorker::Done { .. } | ToWorker::Heartbeat { .. } | ToWorker::Report { .. } => {}
        }
        Ok(())
    }

    fn submit(
        &mut self,
        owner: (usize, u32),
        request: RequestIdx,
        attempt: u32,
        generated: Vec<Token>,
        (prepared, network): (&Prepared, &mut Network),
    ) {
        let asked = &prepared.requests()[request as usize];
        let id = RequestId(request.into());
        // An earlier attempt whose connection broke may not have been noticed here.
        self.engine.abort(id);
        let wanted = GenerateRequest {
            id,
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
            prefill_on: None,
        };
        self.owners.insert(request, owner);
        if let Err(error) = self.engine.submit(wanted, network.now) {
            self.refuse(request, attempt, error, network);
        }
        self.change(network);
    }

    fn refuse(&mut self, request: RequestIdx, attempt: u32, error: RequestError, network: &mut Network) {
        let Some((router, connection)) = self.owners.remove(&request) else { return };
        let event = OutputEvent::Failed(error);
        let output = Output { key: SequenceKey(u64::MAX), request: RequestId(request.into()), attempt, event };
        network.answer(
            router,
            self.index,
            connection,
            ToRouter::Frames { worker: self.index, connection, outputs: vec![output] },
        );
    }

    /// Ends what a router asked over a connection that is gone.
    fn forget(&mut self, router: usize, connection: u32) {
        if self.watchers[router] == Some(connection) {
            self.watchers[router] = None;
        }
        let mut gone: Vec<RequestIdx> = self
            .owners
            .iter()
            .filter(|&(_, &owner)| owner == (router, connection))
            .map(|(&request, _)| request)
            .collect();
        gone.sort_unstable();
        for request in gone {
            self.owners.remove(&request);
            self.engine.abort(RequestId(request.into()));
        }
    }

    fn start(&mut self, network: &mut Network) -> Result<(), Violation> {
        if self.running.is_some() {
            return Ok(());
        }
        let Some(plan) = self.engine.plan() else { return Ok(()) };
        let ran = self.device.run(&plan);
        let (output, took) = ran.map_err(|error| Violation::Device { worker: self.index, error: error.to_string() })?;
        self.engine.recycle(plan);
        self.running = Some(output);
        let done = ToWorker::Done { life: self.life };
        network.after(took.mul_f64(self.slowness), Event::Worker(self.index, done));
        Ok(())
    }

    fn finish_step(&mut self, network: &mut Network) -> Result<(), Violation> {
        let Some(output) = self.running.take() else { return Ok(()) };
        let mut outputs = std::mem::take(&mut self.outputs);
        let applied = self.engine.apply(output, &mut outputs);
        applied.map_err(|error| Violation::Device { worker: self.index, error: error.to_string() })?;
        self.answer(&mut outputs, network);
        self.outputs = outputs;
        self.publish_kv(network);
        self.change(network);
        if self.ever_cached.is_some() {
            self.engine.check_invariants();
        }
        self.start(network)
    }

    /// Sends each router what is its.
    fn answer(&mut self, outputs: &mut Vec<Output>, network: &mut Network) {
        let mut frames: Vec<(usize, u32, Vec<Output>)> = Vec::new();
        for output in outputs.drain(..) {
            let request = output.request.0 as RequestIdx;
            let is_over = !matches!(output.event, OutputEvent::Tokens { finish: None, .. });
            let owner = if is_over { self.owners.remove(&request) } else { self.owners.get(&request).copied() };
            let Some((router, connection)) = owner else { continue };
            match frames.iter_mut().find(|frame| (frame.0, frame.1) == (router, connection)) {
                Some(frame) => frame.2.push(output),
                None => frames.push((router, connection, vec![output])),
            }
        }
        for (router, connection, outputs) in frames {
            network.answer(
                router,
                self.index,
                connection,
                ToRouter::Frames { worker: self.index, connection, outputs },
            );
        }
    }

    fn publish_kv(&mut self, network: &mut Network) {
        self.kv_events.clear();
        let first = self.engine.drain_kv_events(&mut self.kv_events);
        if self.kv_events.is_empty() {
            return;
        }
        if let Some(ever) = &mut self.ever_cached {
            ever.extend(self.kv_events.iter().filter_map(|event| match event {
                KvEvent::BlockStored { hash, .. } => Some(*hash),
                KvEvent::BlockRemoved { .. } | KvEvent::AllBlocksCleared => None,
            }));
        }
        let sequence = first + self.kv_events.len() as u64 - 1;
        let events = self.kv_events.as_slice().into();
        self.tell_watchers(&KvMessage::Events { sequence, events }, network);
    }

    fn beat(&mut self, network: &mut Network) {
        self.publish_kv(network);
        let message = KvMessage::Heartbeat { sequence: self.engine.kv_sequence(), digest: self.engine.kv_digest() };
        self.tell_watchers(&message, network);
        self.change(network);
        network.after(HEARTBEAT, Event::Worker(self.index, ToWorker::Heartbeat { life: self.life }));
    }

    fn tell_watchers(&self, message: &KvMessage, network: &mut Network) {
        for (router, watcher) in self.watchers.iter().enumerate() {
            if let Some(connection) = *watcher {
                network.kv(router, self.index, connection, message.clone());
            }
        }
    }

    /// Sees to it that the scheduler hears of a change soon.
    fn change(&mut self, network: &mut Network) {
        if !std::mem::replace(&mut self.is_report_due, true) {
            let at = network.now.max(self.reported + REPORT_INTERVAL);
            network.at(at, Event::Worker(self.index, ToWorker::Report { life: self.life }));
        }
    }

    fn report(&mut self, network: &mut Network) {
        self.is_report_due = false;
        self.reported = network.now;
        let occupancy = Box::new(self.engine.occupancy(self.id.clone(), self.cost));
        network.report(ToScheduler::Report { worker: self.index, occupancy });
    }
}
