//! The relay among routers that connect, lag, lose their way, come back and die, in any order.

use std::collections::VecDeque;

use contract::demand::{RouterDemand, TenantDemand};
use contract::ids::{DataRank, EngineId};
use contract::ledger::{LedgerEvent, PlacedWork, PlacementKey};
use proptest::prelude::*;

use super::*;

const GRACE: Duration = Duration::from_millis(100);
/// Batches that wait for a router at most.
const N_BATCHES_MAX: usize = 6;
const N_ROUTERS: usize = 4;

fn placed(router: u64, number: u64) -> LedgerEvent {
    let engine = EngineId { worker: "w".into(), incarnation: Incarnation(1), data_rank: DataRank(0) };
    let work = PlacedWork { engine, tenant: "t".into(), tokens_new: 1, tokens_prompt: 2, prefill_us: 3 };
    LedgerEvent::Placed(PlacementKey { router: Incarnation(router), number }, work)
}

/// A router as far as it is told of: what it runs, its stream, and what it knows of others.
#[derive(Default)]
struct Peer {
    id: u64,
    own: Placements,
    running: Vec<PlacementKey>,
    n_placed: u64,
    stream: Option<Wire>,
    lost_at: Option<Instant>,
    view: BTreeMap<Incarnation, Placements>,
}

/// A stream: batches on their way in both directions.
struct Wire {
    id: StreamId,
    up: VecDeque<LedgerBatch>,
    down: VecDeque<Arc<LedgerBatch>>,
}

#[derive(Clone, Debug)]
enum Step {
    Place,
    FirstToken,
    Finish,
    Ask(bool),
    Connect,
    Disconnect,
    Restart,
    Up,
    Down,
    Wait(u64),
}

struct World {
    relay: LedgerRelay,
    now: Instant,
    peers: Vec<Peer>,
    n_streams: u64,
    n_lives: u64,
}

impl World {
    fn new() -> Self {
        let peers = (0..N_ROUTERS as u64).map(|id| Peer { id, ..Peer::default() }).collect();
        let (relay, now) = (LedgerRelay::new(GRACE), daemon::clock::now());
        Self { relay, now, peers, n_streams: 0, n_lives: N_ROUTERS as u64 }
    }

    fn step(&mut self, index: usize, step: &Step) {
        match step {
            Step::Place => {
                let peer = &mut self.peers[index];
                let event = placed(peer.id, peer.n_placed);
                peer.running.push(PlacementKey { router: Incarnation(peer.id), number: peer.n_placed });
                peer.n_placed += 1;
                peer.tell(event);
            }
            Step::FirstToken => {
                let peer = &mut self.peers[index];
                if let Some(&key) = peer.running.first() {
                    peer.tell(LedgerEvent::FirstToken(key));
                }
            }
            Step::Finish => {
                let peer = &mut self.peers[index];
                if !peer.running.is_empty() {
                    let key = peer.running.remove(0);
                    peer.tell(LedgerEvent::Finished(key));
                }
            }
            Step::Ask(is_waiting) => self.peers[index].ask(*is_waiting),
            Step::Connect => self.connect(index),
            Step::Disconnect => self.disconnect(index),
            Step::Restart => {
                self.disconnect(index);
                self.peers[index] = Peer { id: self.n_lives, ..Peer::default() };
                self.n_lives += 1;
            }
            Step::Up => self.up(index),
            Step::Down => self.peers[index].down(),
            Step::Wait(ms) => {
                self.now += Duration::from_millis(*ms);
                let deliveries = self.relay.tick(self.now);
                for delivery in &deliveries {
                    self.check_gone(delivery.batch.router);
                }
                self.deliver(deliveries);
            }
        }
    }

    fn connect(&mut self, index: usize) {
        let peer = &mut self.peers[index];
        if peer.stream.is_none() {
            let all = peer.own.all().map(|news| LedgerBatch { router: Incarnation(peer.id), news });
            let id = StreamId(self.n_streams);
            self.n_streams += 1;
            peer.stream = Some(Wire { id, up: all.collect(), down: VecDeque::new() });
            peer.view.clear();
        }
    }

    fn disconnect(&mut self, index: usize) {
        let peer = &mut self.peers[index];
        if let Some(wire) = peer.stream.take() {
            peer.lost_at.get_or_insert(self.now);
            self.relay.ended(wire.id, self.now);
        }
    }

    fn up(&mut self, index: usize) {
        let Some(wire) = &mut self.peers[index].stream else { return };
        let Some(batch) = wire.up.pop_front() else { return };
        let deliveries = self.relay.take(wire.id, batch).unwrap();
        self.peers[index].lost_at = None;
        self.deliver(deliveries);
    }

    fn deliver(&mut self, deliveries: Vec<Delivery>) {
        for Delivery { to, batch } in deliveries {
            let owner = self.peers.iter().position(|peer| peer.stream.as_ref().is_some_and(|wire| wire.id == to));
            // Whoever lagged earlier in this loop has no stream any more.
            let Some(index) = owner else { continue };
            assert_ne!(batch.router.0, self.peers[index].id, "nobody is told of itself");
            let wire = self.peers[index].stream.as_mut().unwrap();
            wire.down.push_back(batch);
            if wire.down.len() > N_BATCHES_MAX {
                self.disconnect(index);
            }
        }
    }

    /// A router that is told to be gone has been away for the whole grace.
    fn check_gone(&self, router: Incarnation) {
        if let Some(peer) = self.peers.iter().find(|peer| peer.id == router.0) {
            assert!(peer.lost_at.is_some_and(|at| at + GRACE <= self.now), "router {router} is forgotten too early");
        }
    }

    /// Lets all reconnect and read, and the dead be forgotten; whoever lags behind that news reconnects again.
    fn settle(&mut self) {
        for wait_ms in [u64::try_from(GRACE.as_millis()).unwrap(), 0] {
            for _ in 0..200 {
                for index in 0..N_ROUTERS {
                    self.connect(index);
                    self.up(index);
                    self.drain(index);
                }
            }
            self.step(0, &Step::Wait(wait_ms));
        }
    }

    fn drain(&mut self, index: usize) {
        (0..N_BATCHES_MAX).for_each(|_| self.peers[index].down());
    }
}

impl Peer {
    fn tell(&mut self, event: LedgerEvent) {
        let sequence = self.own.put(&event);
        if let Some(wire) = &mut self.stream {
            let news = LedgerNews::Events { sequence, events: vec![event] };
            wire.up.push_back(LedgerBatch { router: Incarnation(self.id), news });
        }
    }

    fn ask(&mut self, is_waiting: bool) {
        let tenants = vec![TenantDemand { is_waiting, ..TenantDemand::none("t".into()) }];
        let news = LedgerNews::Demand(RouterDemand { number: self.own.demand().number + 1, tenants });
        self.own.take(&news).expect("a demand misses nothing");
        if let Some(wire) = &mut self.stream {
            wire.up.push_back(LedgerBatch { router: Incarnation(self.id), news });
        }
    }

    fn down(&mut self) {
        let Some(batch) = self.stream.as_mut().and_then(|wire| wire.down.pop_front()) else { return };
        match &batch.news {
            LedgerNews::Gone => {
                self.view.remove(&batch.router).expect("only who was told of can be gone");
            }
            news => {
                self.view.entry(batch.router).or_default().take(news).expect("no event is missed");
            }
        }
    }
}

fn steps() -> impl Strategy<Value = Vec<(usize, Step)>> {
    let step = prop_oneof![
        4 => Just(Step::Place),
        2 => Just(Step::FirstToken),
        3 => Just(Step::Finish),
        2 => any::<bool>().prop_map(Step::Ask),
        3 => Just(Step::Connect),
        1 => Just(Step::Disconnect),
        1 => Just(Step::Restart),
        8 => Just(Step::Up),
        6 => Just(Step::Down),
        2 => (1..80_u64).prop_map(Step::Wait),
    ];
    proptest::collection::vec((0..N_ROUTERS, step), 0..150)
}

proptest! {
    #[test]
    fn every_router_comes_to_see_what_all_others_run(steps in steps()) {
        let mut world = World::new();
        for (index, step) in &steps {
            world.step(*index, step);
        }
        world.settle();
        for peer in &world.peers {
            let others = world.peers.iter().filter(|other| other.id != peer.id);
            let expected: BTreeMap<_, _> = others.map(|other| (Incarnation(other.id), other.own.clone())).collect();
            prop_assert_eq!(&peer.view, &expected);
        }
        let n_running: usize = world.peers.iter().map(|peer| peer.running.len()).sum();
        prop_assert_eq!((world.relay.n_routers(), world.relay.n_placements()), (N_ROUTERS, n_running));
        prop_assert_eq!(world.relay.next_tick(), None);
    }
}

fn snapshot(router: u64) -> LedgerBatch {
    LedgerBatch { router: Incarnation(router), news: Placements::default().snapshot() }
}

fn events(router: u64, sequence: u64, events: Vec<LedgerEvent>) -> LedgerBatch {
    LedgerBatch { router: Incarnation(router), news: LedgerNews::Events { sequence, events } }
}

#[test]
fn a_router_that_comes_back_within_the_grace_is_not_forgotten() {
    let (mut relay, now) = (LedgerRelay::new(GRACE), daemon::clock::now());
    relay.take(StreamId(1), snapshot(1)).unwrap();
    relay.take(StreamId(2), snapshot(2)).unwrap();
    relay.take(StreamId(1), events(1, 1, vec![placed(1, 0)])).unwrap();
    relay.ended(StreamId(1), now);
    assert_eq!(relay.next_tick(), Some(now + GRACE));
    assert_eq!((relay.tick(now + GRACE / 2), relay.n_placements()), (vec![], 1));
    let own = events(1, 1, vec![placed(1, 0)]);
    let LedgerNews::Events { sequence, events } = own.news.clone() else { unreachable!() };
    let again = LedgerBatch { news: LedgerNews::Snapshot { sequence, events }, ..own };
    relay.take(StreamId(3), again).unwrap();
    assert_eq!((relay.tick(now + 2 * GRACE), relay.n_placements(), relay.n_routers()), (vec![], 1, 2));
    relay.ended(StreamId(3), now + 2 * GRACE);
    let gone = LedgerBatch { router: Incarnation(1), news: LedgerNews::Gone };
    let told = relay.tick(now + 3 * GRACE);
    assert_eq!(told, [Delivery { to: StreamId(2), batch: Arc::new(gone) }]);
    assert_eq!((relay.n_placements(), relay.n_routers(), relay.next_tick()), (0, 1, None));
}

#[test]
fn streams_that_break_the_protocol_are_refused() {
    let mut relay = LedgerRelay::new(GRACE);
    assert_eq!(relay.take(StreamId(1), events(1, 1, vec![placed(1, 0)])), Err(Refused::NoSnapshot));
    relay.take(StreamId(1), snapshot(1)).unwrap();
    let other = Refused::OtherRouter { expected: Incarnation(1), found: Incarnation(2) };
    assert_eq!(relay.take(StreamId(1), snapshot(2)), Err(other));
    let missed = Refused::Missed(MissedEvents { expected: 1, found: 2 });
    assert_eq!(relay.take(StreamId(1), events(1, 2, vec![placed(1, 1)])), Err(missed));
    relay.take(StreamId(2), snapshot(1)).unwrap();
    let late = relay.take(StreamId(1), events(1, 1, vec![placed(1, 0)]));
    assert_eq!(late, Err(Refused::NoSnapshot), "a newer stream speaks for the router");
}

#[test]
fn a_router_that_says_goodbye_is_gone_at_once() {
    let mut relay = LedgerRelay::new(GRACE);
    relay.take(StreamId(1), snapshot(1)).unwrap();
    relay.take(StreamId(2), snapshot(2)).unwrap();
    relay.take(StreamId(1), events(1, 1, vec![placed(1, 0)])).unwrap();
    let gone = LedgerBatch { router: Incarnation(1), news: LedgerNews::Gone };
    let told = relay.take(StreamId(1), gone.clone()).unwrap();
    assert_eq!(told, [Delivery { to: StreamId(2), batch: Arc::new(gone) }]);
    assert_eq!((relay.n_routers(), relay.n_placements()), (1, 0));
}
