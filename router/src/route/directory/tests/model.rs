//! Random interleavings against a set for each engine.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

/// Blocks form a tree: those of a prompt are the way from a root to one of them.
const N_BLOCKS: u64 = 40;
/// More than a word's bits.
const N_ENGINES: u64 = 90;

fn parent(block: u64) -> Option<u64> {
    (block >= 3).then_some(block / 3)
}

fn prompt(block: u64) -> Vec<u64> {
    let mut way: Vec<u64> = std::iter::successors(Some(block), |&block| parent(block)).collect();
    way.reverse();
    way
}

#[derive(Clone, Debug)]
enum Step {
    /// A watch begins, of a new life or again; its snapshot holds a block's prompt.
    Begin {
        engine: u64,
        is_new_life: bool,
        block: u64,
    },
    /// A watch begins and its snapshot is late.
    BeginOnly(u64),
    Remove(u64),
    Store {
        engine: u64,
        block: u64,
    },
    /// A range of engines stores a prompt.
    StoreOnMany {
        first: u64,
        n: u64,
        block: u64,
    },
    Evict {
        engine: u64,
        block: u64,
    },
    Clear(u64),
    Heartbeat(u64),
    /// Events of an engine that was removed.
    Late(u64),
    Gap(u64),
    Promise {
        engine: u64,
        block: u64,
        ms: u64,
    },
    Advance(u64),
    Settle,
    Lookup(u64),
}

fn step() -> impl Strategy<Value = Step> {
    // A few engines meet often, many now and then.
    let engine = || prop_oneof![3 => 0..4_u64, 2 => 0..N_ENGINES];
    let block = || 0..N_BLOCKS;
    prop_oneof![
        2 => (engine(), any::<bool>(), block())
            .prop_map(|(engine, is_new_life, block)| Step::Begin { engine, is_new_life, block }),
        1 => engine().prop_map(Step::BeginOnly),
        1 => engine().prop_map(Step::Remove),
        8 => (engine(), block()).prop_map(|(engine, block)| Step::Store { engine, block }),
        2 => (0..N_ENGINES, 1..N_ENGINES, block())
            .prop_map(|(first, n, block)| Step::StoreOnMany { first, n, block }),
        6 => (engine(), block()).prop_map(|(engine, block)| Step::Evict { engine, block }),
        1 => engine().prop_map(Step::Clear),
        1 => engine().prop_map(Step::Heartbeat),
        1 => any::<u64>().prop_map(Step::Late),
        1 => engine().prop_map(Step::Gap),
        4 => (engine(), block(), 1..50_u64).prop_map(|(engine, block, ms)| Step::Promise { engine, block, ms }),
        2 => (1..30_u64).prop_map(Step::Advance),
        1 => Just(Step::Settle),
        3 => block().prop_map(Step::Lookup),
    ]
}

/// What the directory should know of one engine.
struct Known {
    slot: Slot,
    life: u64,
    sequence: u64,
    is_complete: bool,
    cached: BTreeSet<u64>,
    /// When each promise ends, and whether its block was stored before.
    promised: BTreeMap<u64, (u64, bool)>,
}

struct World {
    directory: PrefixDirectory,
    engines: BTreeMap<u64, Known>,
    gone: Vec<Slot>,
    first: Instant,
    now_ms: u64,
    /// The latest time that the directory was told.
    told_ms: u64,
    n_lives: u64,
    n_missed: u64,
}

impl World {
    fn now(&self) -> Instant {
        self.first + Duration::from_millis(self.now_ms)
    }

    fn begin(&mut self, index: u64, is_new_life: bool) {
        if is_new_life {
            self.remove(index);
        }
        self.n_lives += 1;
        let life_number = self.engines.get(&index).map_or(self.n_lives, |known| known.life);
        let slot = self.directory.begin(&life(index, life_number));
        let known = self.engines.entry(index).or_insert_with(|| Known {
            slot,
            life: life_number,
            sequence: 0,
            is_complete: false,
            cached: BTreeSet::new(),
            promised: BTreeMap::new(),
        });
        assert_eq!(known.slot, slot);
        known.cached.clear();
        known.is_complete = false;
    }

    fn snapshot(&mut self, index: u64, blocks: &[u64]) {
        let Some(known) = self.engines.get_mut(&index) else { return };
        known.sequence = 7;
        let (first, second) = blocks.split_at(blocks.len() / 2);
        self.directory.apply(known.slot, 7, snapshot(first, false)).unwrap();
        self.directory.apply(known.slot, 7, snapshot(second, true)).unwrap();
        known.is_complete = true;
        known.store(blocks, self.told_ms);
    }

    fn events(&mut self, index: u64, events: Vec<KvEvent>) -> Option<Result<(), Resync>> {
        let known = self.engines.get_mut(&index)?;
        if !known.is_complete {
            let result = self.directory.apply(known.slot, known.sequence + 1, Update::Events(vec![stored(0)]));
            assert_eq!(result, Err(Resync::Order), "nothing is taken before the snapshot is whole");
            return None;
        }
        known.sequence += events.len() as u64;
        Some(self.directory.apply(known.slot, known.sequence, Update::Events(events)))
    }

    /// Stores what of a prompt is not there.
    fn store(&mut self, index: u64, block: u64) {
        let Some(known) = self.engines.get(&index) else { return };
        let new: Vec<u64> = prompt(block).into_iter().filter(|block| !known.cached.contains(block)).collect();
        let events =
            new.iter().map(|&block| KvEvent::BlockStored { hash: hash(block), parent: parent(block).map(hash) });
        if let Some(result) = self.events(index, events.collect()) {
            assert_eq!(result, Ok(()));
            self.engines.get_mut(&index).unwrap().store(&new, self.told_ms);
        }
    }

    /// Evicts the deepest block under `block`; a block that is not there asks for a new watch.
    fn evict(&mut self, index: u64, block: u64) {
        let Some(known) = self.engines.get(&index) else { return };
        let is_below = |other: &&u64| prompt(**other).contains(&block);
        let leaf = known.cached.iter().rev().find(is_below).copied();
        let Some(result) = self.events(index, vec![removed(leaf.unwrap_or(block))]) else { return };
        match leaf {
            Some(leaf) => {
                assert_eq!(result, Ok(()));
                self.engines.get_mut(&index).unwrap().cached.remove(&leaf);
            }
            None => {
                assert_eq!(result, Err(Resync::Digest));
                self.begin(index, false);
            }
        }
    }

    fn remove(&mut self, index: u64) {
        // What is over is counted, what is not yet over is moot.
        self.settle();
        if let Some(known) = self.engines.remove(&index) {
            self.directory.remove(known.slot);
            self.gone.push(known.slot);
        }
    }

    fn settle(&mut self) {
        self.directory.settle(self.now());
        self.told_ms = self.now_ms;
        for known in self.engines.values_mut() {
            let is_over = |&until_ms: &u64| until_ms <= self.now_ms;
            self.n_missed +=
                known.promised.values().filter(|(until, is_kept)| is_over(until) && !is_kept).count() as u64;
            known.promised.retain(|_, (until, _)| !is_over(until));
        }
        assert_eq!(self.directory.take_promises_missed(), std::mem::take(&mut self.n_missed));
    }

    fn promise(&mut self, index: u64, block: u64, ms: u64) {
        let (now, now_ms) = (self.now(), self.now_ms);
        let Some(known) = self.engines.get_mut(&index) else { return };
        self.told_ms = now_ms;
        self.directory.promise(known.slot, &hashes(&prompt(block)), now, now + Duration::from_millis(ms));
        for block in prompt(block) {
            let is_stored = known.cached.contains(&block);
            let new = (now_ms + ms, is_stored);
            let promise = known.promised.entry(block).or_insert(new);
            if promise.0 > now_ms {
                *promise = (promise.0.max(new.0), promise.1 || is_stored);
            } else {
                self.n_missed += u64::from(!promise.1);
                *promise = new;
            }
        }
    }

    fn look(&self, block: u64) {
        let blocks = prompt(block);
        let matches = self.directory.lookup(&hashes(&blocks), self.now());
        for (index, known) in &self.engines {
            let n_cached = blocks.iter().take_while(|block| known.cached.contains(block)).count();
            let is_promised = |block: &&u64| known.promised.get(block).is_some_and(|(until, _)| *until > self.now_ms);
            let n_promised = blocks.iter().take_while(is_promised).count();
            let n_blocks = n_cached.max(n_promised);
            let expected = Match { n_blocks, n_promised: n_blocks - n_cached };
            assert_eq!(matches.of(known.slot), expected, "engine {index}, prompt {blocks:?}");
        }
        self.gone.iter().for_each(|&slot| assert_eq!(matches.of(slot), Match::default()));
    }

    fn take(&mut self, step: Step) {
        match step {
            Step::Begin { engine, is_new_life, block } => {
                self.begin(engine, is_new_life);
                self.snapshot(engine, &prompt(block));
            }
            Step::BeginOnly(engine) => self.begin(engine, false),
            Step::Remove(engine) => self.remove(engine),
            Step::Store { engine, block } => self.store(engine, block),
            Step::StoreOnMany { first, n, block } => (0..n).for_each(|i| {
                let engine = (first + i) % N_ENGINES;
                if !self.engines.contains_key(&engine) {
                    self.begin(engine, false);
                    self.snapshot(engine, &[]);
                }
                self.store(engine, block);
            }),
            Step::Evict { engine, block } => self.evict(engine, block),
            Step::Clear(engine) => {
                if let Some(result) = self.events(engine, vec![stored(77), KvEvent::AllBlocksCleared]) {
                    assert_eq!(result, Ok(()));
                    self.engines.get_mut(&engine).unwrap().cached.clear();
                }
            }
            Step::Heartbeat(engine) => {
                let Some(known) = self.engines.get(&engine).filter(|known| known.is_complete) else { return };
                let mut digest = KvDigest::default();
                known.cached.iter().for_each(|&block| digest.insert(hash(block)));
                assert_eq!(self.directory.apply(known.slot, known.sequence, Update::Heartbeat(digest)), Ok(()));
            }
            Step::Late(which) => {
                let Some(n_gone) = std::num::NonZeroU64::new(self.gone.len() as u64) else { return };
                let slot = self.gone[(which % n_gone) as usize];
                let (now, until) = (self.now(), self.now() + Duration::from_millis(9));
                assert_eq!(self.directory.apply(slot, 8, Update::Events(vec![stored(0)])), Err(Resync::Order));
                assert_eq!(self.directory.apply(slot, 8, snapshot(&[0, 1, 2], true)), Err(Resync::Order));
                self.directory.promise(slot, &hashes(&[0]), now, until);
                self.told_ms = self.now_ms;
                self.directory.remove(slot);
            }
            Step::Gap(engine) => {
                let Some(known) = self.engines.get(&engine).filter(|known| known.is_complete) else { return };
                let update = Update::Events(vec![stored(78)]);
                assert_eq!(self.directory.apply(known.slot, known.sequence + 2, update), Err(Resync::Gap));
                self.begin(engine, false);
            }
            Step::Promise { engine, block, ms } => self.promise(engine, block, ms),
            Step::Advance(ms) => self.now_ms += ms,
            Step::Settle => self.settle(),
            Step::Lookup(block) => self.look(block),
        }
    }
}

impl Known {
    fn store(&mut self, blocks: &[u64], told_ms: u64) {
        self.cached.extend(blocks);
        for block in blocks {
            if let Some((until, is_kept)) = self.promised.get_mut(block) {
                *is_kept |= *until > told_ms;
            }
        }
    }
}

proptest! {
    #[test]
    fn agrees_with_a_set_for_each_engine(steps in proptest::collection::vec(step(), 1..250)) {
        let first = daemon::clock::now();
        let mut world = World {
            directory: PrefixDirectory::new(LARGE),
            engines: BTreeMap::new(),
            gone: Vec::new(),
            first,
            now_ms: 0,
            told_ms: 0,
            n_lives: 0,
            n_missed: 0,
        };
        for step in steps {
            world.take(step);
            let total: usize = world.engines.values().map(|known| known.cached.len()).sum();
            prop_assert_eq!(world.directory.n_blocks(), total);
        }
        (0..N_BLOCKS).for_each(|block| world.look(block));
        world.settle();
        check_bytes(&world.directory);
        (0..N_ENGINES).for_each(|index| world.remove(index));
        world.now_ms += 100;
        world.settle();
        prop_assert_eq!(world.directory.n_blocks(), 0);
        prop_assert_eq!((world.directory.shards.cached.bytes(), world.directory.shards.promised.bytes()), (0, 0));
    }
}
