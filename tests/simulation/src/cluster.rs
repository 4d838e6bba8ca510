//! The whole cluster under virtual time.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use contract::view::{MemberKey, MemberKind};
use membership::WatchEvent;

use crate::book::Book;
use crate::checker::{Violation, check_credit, check_lives, check_rest};
use crate::event::{Blocks, Event, KvMessage, ToRouter, ToScheduler, ToWorker};
use crate::faults::{self, Fault};
use crate::network::Network;
use crate::options::{Options, Roles};
use crate::prepared::Prepared;
use crate::random::Random;
use crate::router::{Router, RouterSettings, Surroundings};
use crate::scheduler::{Scheduler, member};
use crate::span;
use crate::worker::Worker;

/// Time until a lease that nobody renews is over.
const LEASE_MS: f64 = 2_000.0;
/// Time until routers hear of a member, at most.
const MEMBERSHIP_MS_MAX: f64 = 60.0;
/// Time until a worker that left is back, at most.
const AWAY_MS_MAX: f64 = 500.0;
/// After so long nothing is on its way where messages take no time: several heartbeats, lost messages made good.
const QUIESCENCE: Duration = Duration::from_secs(12);
/// When clients go away, after they came, in milliseconds; early is as likely as late on a logarithmic scale.
const ABORT_MS_MIN: f64 = 0.5;
const ABORT_MS_MAX: f64 = 2_000.0;
/// Ways of a message one after the other until all that was lost is made good, some of which take up to four times as long.
const N_WAYS: f64 = 20.0;

/// Everything there is.
pub(crate) struct Cluster<'a> {
    prepared: &'a Prepared,
    network: Network,
    scheduler: Scheduler,
    routers: Vec<Router>,
    workers: Vec<Worker>,
    book: Book,
    /// The router of each request.
    entrances: Vec<u32>,
    settings: RouterSettings,
    is_checked: bool,
    may_split: bool,
    /// When nothing breaks any more.
    calm_at: Duration,
    quiescence: Duration,
    /// No run takes longer than this, or it does not end.
    longest: Duration,
    /// No request takes longer than this.
    patience: Option<Duration>,
}

/// What is left of a run.
pub(crate) struct Finished {
    pub(crate) book: Book,
    pub(crate) workers: Vec<Worker>,
    /// When the last request ended.
    pub(crate) took: Duration,
    pub(crate) n_events: u64,
}

impl<'a> Cluster<'a> {
    pub(crate) fn new(prepared: &'a Prepared, options: &Options) -> Self {
        let &Options { n_routers, n_workers, seed, .. } = options;
        let is_checked = options.is_checked();
        // What was ordered and lost on its way is kept for so long.
        let moving =
            if options.roles.may_split() { options.links.deadline + options.links.lease } else { Duration::ZERO };
        let origin = daemon::clock::now();
        let mut network = Network::new(n_routers, n_workers, options.delays, origin, Random::new(seed, 3));
        let settings = RouterSettings {
            policy: options.policy,
            placer: options.placer,
            waiting: options.waiting,
            planted: options.planted,
        };
        let mut cluster = Self {
            prepared,
            scheduler: Scheduler::new(n_routers, options.roles.settings()),
            routers: (0..n_routers).map(|index| Router::new(index, &settings, n_routers, n_workers, origin)).collect(),
            workers: (0..n_workers).map(|index| Worker::new(index, prepared, options, network.random.draw())).collect(),
            book: Book::new(prepared.requests().len(), is_checked),
            entrances: prepared.requests().iter().map(|_| network.random.below(n_routers as u64) as u32).collect(),
            settings,
            is_checked,
            may_split: options.roles.may_split(),
            calm_at: Duration::ZERO,
            quiescence: QUIESCENCE + moving + Duration::from_secs_f64(N_WAYS * options.delays.sum_ms() / 1e3),
            longest: span::longest(prepared, options.speed),
            patience: options.patience,
            network,
        };
        cluster.begin(options);
        cluster
    }

    /// Runs until every request has ended; `n_ended` counts them.
    pub(crate) fn run(mut self, n_ended: &AtomicUsize) -> Result<Finished, Violation> {
        let n_requests = self.book.n_open;
        let mut n_events = 0_u64;
        let mut ended: Option<Duration> = None;
        while let Some(event) = self.network.next() {
            n_events += 1;
            if let Some(at) = ended
                && self.network.now > at.max(self.calm_at) + self.quiescence
            {
                check_lives(&self.book, self.patience)?;
                check_rest(&self.routers, &self.workers, &self.book, self.prepared, &self.network)?;
                break;
            }
            self.take(event)?;
            if n_events.is_multiple_of(1024) {
                n_ended.store(n_requests - self.book.n_open, Ordering::Relaxed);
            }
            if self.book.n_open == 0 && ended.is_none() {
                ended = Some(self.network.now);
                if !self.is_checked {
                    break;
                }
            }
            if ended.is_none() && self.network.now > self.longest {
                return Err(Violation::Stuck { n: self.book.n_open });
            }
        }
        n_ended.store(n_requests, Ordering::Relaxed);
        Ok(Finished { book: self.book, workers: self.workers, took: ended.unwrap_or_default(), n_events })
    }

    /// Sets out who knows whom, and when requests arrive.
    fn begin(&mut self, options: &Options) {
        let Self { network, workers, routers, prepared, calm_at, .. } = self;
        let mut random = Random::new(options.seed, 4);
        let arrivals = prepared.workload().arrivals(options.speed, &mut random);
        let span = arrivals.last().map_or(Duration::ZERO, |&(at, _)| at);
        for (at, request) in arrivals {
            let at = at + Duration::from_millis(1);
            network.at(at, Event::Arrive(request as u32));
            if options.aborts > 0.0 && random.unit() < options.aborts {
                let after_ms = ABORT_MS_MIN * (ABORT_MS_MAX / ABORT_MS_MIN).powf(random.unit());
                network.at(at + Duration::from_secs_f64(after_ms / 1e3), Event::Abort(request as u32));
            }
        }
        if let Some(patience) = options.patience {
            self.longest = self.longest.min(span + patience);
        }
        if options.faults {
            let scene = faults::Scene {
                span,
                n_routers: routers.len(),
                n_workers: workers.len(),
                n_mean: options.n_faults_mean,
                may_split: options.roles.may_split(),
            };
            *calm_at = faults::draw(&scene, &mut Random::new(options.seed, 5), network);
        }
        if matches!(options.roles, Roles::Auto(_)) {
            network.at(Duration::ZERO, Event::Scheduler(ToScheduler::GiveRoles));
        }
        self.scheduler.begin(workers, prepared, network);
        for worker in workers.iter_mut() {
            worker.begin(network);
        }
        for (index, worker) in workers.iter().enumerate() {
            for (router, known) in routers.iter_mut().enumerate() {
                known.know(index, worker.id.clone(), 0);
                let message = KvMessage::Snapshot { sequence: 0, blocks: Vec::new() };
                network
                    .at(Duration::ZERO, Event::Router(router, ToRouter::Kv { worker: index, connection: 0, message }));
            }
        }
        for worker in workers.iter_mut() {
            (0..routers.len()).for_each(|router| worker.watch(router, 0));
        }
    }

    fn take(&mut self, event: Event) -> Result<(), Violation> {
        let Self { network, prepared, book, .. } = self;
        match event {
            Event::Arrive(request) => {
                let router = self.entrances[request as usize] as usize;
                if self.is_checked {
                    check_credit(router, &self.routers, &self.workers, prepared.hashes(request), network)?;
                }
                self.routers[router].arrive(request, &mut Surroundings { prepared, book, network })
            }
            Event::Router(router, message) => {
                self.routers[router].hear(message, &mut Surroundings { prepared, book, network })
            }
            Event::Abort(request) => {
                let router = self.entrances[request as usize] as usize;
                if !book.has_ended(request) {
                    self.routers[router].abort(request, &mut Surroundings { prepared, book, network });
                }
                Ok(())
            }
            Event::Worker(worker, ToWorker::Blocks(blocks)) => self.carry(worker, &blocks),
            Event::Worker(worker, message) => self.workers[worker].hear(message, prepared, network),
            Event::Scheduler(message) => {
                self.scheduler.hear(message, network);
                Ok(())
            }
            Event::Fault(fault) => {
                self.fail(fault);
                Ok(())
            }
        }
    }

    /// Lets a worker read blocks of another's pool, if both still stand by that.
    fn carry(&mut self, to: usize, blocks: &Blocks) -> Result<(), Violation> {
        let Ok([reader, sender]) = self.workers.get_disjoint_mut([to, blocks.from]) else { return Ok(()) };
        if !reader.is_up {
            return Ok(());
        }
        let device = sender.lends(blocks.ticket).then_some(&sender.device);
        reader.take_blocks(blocks, device, &mut self.network)
    }

    fn fail(&mut self, fault: Fault) {
        match fault {
            Fault::Crash { worker } if self.workers[worker].is_up => {
                self.end_worker(worker, LEASE_MS);
            }
            Fault::Drain { worker, grace } if self.workers[worker].is_up && !self.workers[worker].is_draining => {
                self.network.after(Duration::ZERO, Event::Worker(worker, ToWorker::Drain { grace }));
                self.network.after_ms(MEMBERSHIP_MS_MAX, Event::Fault(Fault::Announce { worker }));
            }
            Fault::Exit { worker, life } if self.workers[worker].is_up && self.workers[worker].life() == life => {
                self.end_worker(worker, MEMBERSHIP_MS_MAX);
                let away_ms = self.network.random.between(1.0, AWAY_MS_MAX);
                self.network.after_ms(away_ms, Event::Fault(Fault::Restart { worker }));
            }
            Fault::Role { worker, role } => {
                self.workers[worker].role = role;
                self.fail(Fault::Announce { worker });
            }
            Fault::Announce { worker } => self.announce(worker),
            Fault::CutPeers { one, two } if one != two => self.network.cut_peers(one, two, true),
            Fault::HealPeers { one, two } if one != two => self.network.cut_peers(one, two, false),
            Fault::PeerLoss { chance } => self.network.peer_loss = chance,
            Fault::Restart { worker } if !self.workers[worker].is_up => {
                self.workers[worker].restart(self.prepared, &mut self.network);
                self.announce(worker);
                (0..self.routers.len()).for_each(|router| self.introduce(router, worker));
            }
            Fault::RestartRouter { router } => self.restart_router(router),
            Fault::Cut { router, worker } if !self.network.is_cut(router, worker) => {
                self.network.cut(router, worker, true);
                self.network.disconnect(router, worker);
            }
            Fault::Heal { router, worker } if self.network.is_cut(router, worker) => {
                self.network.cut(router, worker, false);
                self.introduce(router, worker);
            }
            Fault::Slow { worker, times } => self.workers[worker].slowness = times,
            Fault::SchedulerDown | Fault::SchedulerUp => self.switch_scheduler(fault == Fault::SchedulerUp),
            Fault::KvLoss { chance } => self.network.kv_loss = chance,
            Fault::Calm => self.calm(),
            Fault::Crash { .. } | Fault::Restart { .. } | Fault::Drain { .. } | Fault::Exit { .. } => {}
            Fault::Cut { .. } | Fault::Heal { .. } | Fault::CutPeers { .. } | Fault::HealPeers { .. } => {}
        }
    }

    /// Ends a life of a worker, of which the scheduler hears after so long, and all others when their connections break.
    fn end_worker(&mut self, worker: usize, told_ms: f64) {
        let dead = &mut self.workers[worker];
        dead.crash(self.network.now);
        let key =
            MemberKey { kind: MemberKind::Worker, id: dead.id.worker.to_string(), incarnation: dead.id.incarnation };
        let gone = ToScheduler::Member(WatchEvent::Removed(key));
        self.network.after_ms(told_ms, Event::Scheduler(gone));
        (0..self.routers.len()).for_each(|router| self.network.disconnect(router, worker));
        if self.may_split {
            let others = (0..self.workers.len()).filter(|&other| other != worker);
            others.for_each(|other| self.network.lose_peer(other, worker));
        }
    }

    /// Tells the scheduler what a worker is like now.
    fn announce(&mut self, worker: usize) {
        if self.workers[worker].is_up {
            let changed = WatchEvent::Changed(member(&self.workers[worker], self.prepared));
            let delay = self.network.random.between(0.0, MEMBERSHIP_MS_MAX);
            self.network.after_ms(delay, Event::Scheduler(ToScheduler::Member(changed)));
        }
    }

    /// Lets a router begin anew, while others go on: they tell it what they run, and it finds the workers again.
    fn restart_router(&mut self, router: usize) {
        let Self { network, routers, book, .. } = self;
        let anew = Router::new(router, &self.settings, routers.len(), self.workers.len(), network.instant());
        std::mem::replace(&mut routers[router], anew).end(book, network);
        routers.iter().enumerate().filter(|(other, _)| *other != router).for_each(|(_, other)| other.tell_all(network));
        for worker in 0..self.workers.len() {
            self.network.disconnect(router, worker);
            self.introduce(router, worker);
        }
    }

    /// Lets a router find a worker, if it can be reached.
    fn introduce(&mut self, router: usize, worker: usize) {
        if self.workers[worker].is_up && !self.network.is_cut(router, worker) {
            let connection = self.network.connection(router, worker);
            let engine = self.workers[worker].id.clone();
            let delay = self.network.random.between(0.0, MEMBERSHIP_MS_MAX);
            self.network.after_ms(delay, Event::Router(router, ToRouter::Joined { worker, connection, engine }));
        }
    }

    fn switch_scheduler(&mut self, is_up: bool) {
        if self.network.is_scheduler_up == is_up {
            return;
        }
        self.network.is_scheduler_up = is_up;
        if is_up {
            self.scheduler.begin(&self.workers, self.prepared, &mut self.network);
        }
        for router in 0..self.routers.len() {
            let delay = self.network.random.between(0.0, 5.0);
            self.network.after_ms(delay, Event::Router(router, ToRouter::Scheduler { is_up }));
        }
    }

    /// Repairs what is still broken.
    fn calm(&mut self) {
        self.network.kv_loss = 0.0;
        self.network.peer_loss = 0.0;
        self.network.heal_peers();
        self.switch_scheduler(true);
        for worker in 0..self.workers.len() {
            self.workers[worker].slowness = 1.0;
            self.fail(Fault::Restart { worker });
            (0..self.routers.len()).for_each(|router| self.fail(Fault::Heal { router, worker }));
        }
    }
}
