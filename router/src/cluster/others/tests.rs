//! Two schedulers tell of three routers, each at its own pace, break, come back, and say that routers are gone.

use contract::demand::RouterDemand;
use contract::ids::{DataRank, EngineId};
use contract::ledger::{Ledger, PlacedWork, PlacementKey};
use proptest::prelude::*;

use super::*;

const GRACE: Duration = Duration::from_millis(100);
const N_ROUTERS: u64 = 3;
const N_SCHEDULERS: usize = 2;
const OWN: Incarnation = Incarnation(99);

fn placed(router: u64, number: u64) -> LedgerEvent {
    let engine = EngineId { worker: "w".into(), incarnation: Incarnation(1), data_rank: DataRank(0) };
    let work = PlacedWork { engine, tenant: "t".into(), tokens_new: 1, tokens_prompt: 2, prefill_us: 3 };
    LedgerEvent::Placed(PlacementKey { router: Incarnation(router), number }, work)
}

/// A router's events, and what they make.
#[derive(Default)]
struct Told {
    history: Vec<LedgerEvent>,
    own: Placements,
    running: Vec<PlacementKey>,
    n_placed: u64,
}

/// A scheduler's stream, and up to which event it told of each router.
#[derive(Default)]
struct Scheduler {
    stream: Option<StreamId>,
    told: HashMap<u64, usize>,
}

struct World {
    others: Others,
    ledger: Ledger,
    now: Instant,
    routers: Vec<Told>,
    schedulers: Vec<Scheduler>,
}

#[derive(Clone, Debug)]
enum Step {
    Place,
    FirstToken,
    Finish,
    Ask,
    TellDemand,
    Tell(usize),
    Again,
    Gone,
    Begin,
    Break,
    Wait(u64),
}

impl World {
    fn new() -> Self {
        Self {
            others: Others::new(OWN, GRACE),
            ledger: Ledger::default(),
            now: daemon::clock::now(),
            routers: (0..N_ROUTERS).map(|_| Told::default()).collect(),
            schedulers: (0..N_SCHEDULERS).map(|_| Scheduler::default()).collect(),
        }
    }

    fn step(&mut self, scheduler: usize, router: u64, step: &Step) {
        let of = &mut self.routers[usize::try_from(router).unwrap()];
        match step {
            Step::Place => {
                of.running.push(PlacementKey { router: Incarnation(router), number: of.n_placed });
                of.put(placed(router, of.n_placed));
                of.n_placed += 1;
            }
            Step::FirstToken => {
                if let Some(&key) = of.running.last() {
                    of.put(LedgerEvent::FirstToken(key));
                }
            }
            Step::Finish => {
                if let Some(key) = of.running.pop() {
                    of.put(LedgerEvent::Finished(key));
                }
            }
            Step::Ask => {
                let number = of.own.demand().number + 1;
                of.own.take(&LedgerNews::Demand(RouterDemand { number, tenants: Vec::new() })).unwrap();
            }
            Step::TellDemand => {
                let news = LedgerNews::Demand(of.own.demand().clone());
                if let Some(&to) = self.schedulers[scheduler].told.get(&router) {
                    self.tell(scheduler, router, to, news);
                }
            }
            Step::Tell(n_events) => {
                let history = of.history.clone();
                match self.schedulers[scheduler].told.get(&router).copied() {
                    None => self.snapshot(scheduler, router),
                    Some(from) => {
                        let to = (from + n_events).min(history.len());
                        let events = history[from..to].to_vec();
                        self.tell(scheduler, router, to, LedgerNews::Events { sequence: to as u64, events });
                    }
                }
            }
            Step::Again => self.snapshot(scheduler, router),
            Step::Gone => {
                if self.schedulers[scheduler].told.contains_key(&router) {
                    self.tell(scheduler, router, 0, LedgerNews::Gone);
                    self.schedulers[scheduler].told.remove(&router);
                }
            }
            Step::Begin => {
                if self.schedulers[scheduler].stream.is_none() {
                    self.schedulers[scheduler].stream = Some(self.others.begin());
                }
            }
            Step::Break => {
                if let Some(stream) = std::mem::take(&mut self.schedulers[scheduler]).stream {
                    self.others.ended(stream, self.now);
                }
            }
            Step::Wait(ms) => {
                self.now += Duration::from_millis(*ms);
                let changes = self.others.tick(self.now);
                changes.into_iter().for_each(|event| self.ledger.apply(event, self.now));
            }
        }
    }

    fn snapshot(&mut self, scheduler: usize, router: u64) {
        let of = &self.routers[usize::try_from(router).unwrap()];
        let (to, news) = (of.history.len(), of.own.snapshot());
        self.tell(scheduler, router, to, news);
    }

    fn tell(&mut self, scheduler: usize, router: u64, to: usize, news: LedgerNews) {
        let Scheduler { stream: Some(stream), told } = &mut self.schedulers[scheduler] else { return };
        told.insert(router, to);
        let batch = LedgerBatch { router: Incarnation(router), news };
        let changes = self.others.take(*stream, &batch).expect("no event is missed");
        changes.into_iter().for_each(|event| self.ledger.apply(event, self.now));
    }

    fn everyone(&mut self, step: &Step) {
        for scheduler in 0..N_SCHEDULERS {
            (0..N_ROUTERS).for_each(|router| self.step(scheduler, router, step));
        }
    }
}

impl Told {
    fn put(&mut self, event: LedgerEvent) {
        self.own.put(&event);
        self.history.push(event);
    }
}

fn steps() -> impl Strategy<Value = Vec<(usize, u64, Step)>> {
    let step = prop_oneof![
        4 => Just(Step::Place),
        2 => Just(Step::FirstToken),
        3 => Just(Step::Finish),
        2 => Just(Step::Ask),
        3 => Just(Step::TellDemand),
        8 => (0..4_usize).prop_map(Step::Tell),
        1 => Just(Step::Again),
        1 => Just(Step::Gone),
        3 => Just(Step::Begin),
        1 => Just(Step::Break),
        2 => (1..80_u64).prop_map(Step::Wait),
    ];
    proptest::collection::vec((0..N_SCHEDULERS, 0..N_ROUTERS, step), 0..150)
}

proptest! {
    #[test]
    fn every_event_counts_once_and_nothing_is_lost_with_one_scheduler(steps in steps()) {
        let mut world = World::new();
        for (scheduler, router, step) in &steps {
            world.step(*scheduler, *router, step);
            prop_assert_eq!(world.ledger.len(), world.others.n_placements());
        }
        for step in [Step::Begin, Step::Tell(0), Step::Tell(usize::MAX >> 1), Step::TellDemand] {
            world.everyone(&step);
        }
        world.step(1, 0, &Step::Break);
        world.step(0, 0, &Step::Wait(100));
        prop_assert_eq!(world.others.n_routers(), 4);
        let mut expected = 0;
        for (id, router) in (0..).zip(&world.routers) {
            prop_assert_eq!(&world.others.routers[&Incarnation(id)].placements, &router.own);
            expected += router.running.len();
            prop_assert_eq!(&world.others.demands().unwrap()[&Incarnation(id)], router.own.demand());
        }
        prop_assert_eq!(world.ledger.len(), expected);
        world.step(0, 0, &Step::Break);
        world.step(0, 0, &Step::Wait(99));
        prop_assert_eq!(world.ledger.len(), expected, "a stream that broke counts for the grace");
        world.step(0, 0, &Step::Wait(1));
        prop_assert_eq!((world.ledger.len(), world.others.n_routers()), (0, 4));
        prop_assert_eq!((world.others.next_tick(), world.others.demands()), (None, None));
    }
}

#[test]
fn own_placements_come_back_as_nothing() {
    let mut others = Others::new(OWN, GRACE);
    let stream = others.begin();
    let news = LedgerNews::Events { sequence: 1, events: vec![placed(OWN.0, 0)] };
    assert_eq!(others.take(stream, &LedgerBatch { router: OWN, news }), Ok(vec![]));
    assert_eq!((others.n_placements(), others.n_routers()), (0, 1));
}

#[test]
fn events_of_a_router_without_a_snapshot_end_the_stream() {
    let mut others = Others::new(OWN, GRACE);
    let stream = others.begin();
    let news = LedgerNews::Events { sequence: 1, events: vec![placed(1, 0)] };
    assert!(others.take(stream, &LedgerBatch { router: Incarnation(1), news }).is_err());
}
