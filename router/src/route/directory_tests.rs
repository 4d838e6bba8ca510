//! The directory against a naive model, and each way it finds out that it is wrong.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use contract::ids::{DataRank, Incarnation};
use proptest::prelude::*;

use super::*;

const LARGE: usize = 1 << 20;

fn engine(index: u8) -> EngineId {
    EngineId { worker: format!("w{index}").into(), incarnation: Incarnation(u64::from(index)), data_rank: DataRank(0) }
}

fn hash(n: u8) -> BlockHash {
    BlockHash([n; 16])
}

fn stored(n: u8) -> KvEvent {
    KvEvent::BlockStored { hash: hash(n), parent: None }
}

fn removed(n: u8) -> KvEvent {
    KvEvent::BlockRemoved { hash: hash(n) }
}

fn watched(blocks: &[u8]) -> PrefixDirectory {
    let mut directory = PrefixDirectory::new(LARGE);
    directory.begin(&engine(0));
    let blocks = blocks.iter().copied().map(hash).collect();
    directory.apply(&engine(0), 5, Update::Snapshot { blocks, last: true }).unwrap();
    directory
}

fn count(directory: &PrefixDirectory, blocks: &[u8]) -> usize {
    let hashes: Vec<BlockHash> = blocks.iter().copied().map(hash).collect();
    directory.count(&engine(0), &hashes, daemon::clock::now())
}

#[test]
fn a_prefix_counts_up_to_its_first_missing_block() {
    let directory = watched(&[1, 2, 4]);
    assert_eq!(count(&directory, &[1, 2, 3, 4]), 2);
    assert_eq!(count(&directory, &[9, 1]), 0);
    assert_eq!(directory.count(&engine(1), &[hash(1)], daemon::clock::now()), 0, "another engine holds nothing");
}

#[test]
fn gaps_and_repetitions_ask_for_a_snapshot() {
    assert_eq!(watched(&[]).apply(&engine(0), 7, Update::Events(vec![stored(1)])), Err(Resync::Gap));
    assert_eq!(watched(&[]).apply(&engine(0), 5, Update::Events(vec![stored(1)])), Err(Resync::Gap));
    assert_eq!(watched(&[1]).apply(&engine(0), 6, Update::Events(vec![stored(1)])), Err(Resync::Digest));
    assert_eq!(watched(&[1]).apply(&engine(0), 6, Update::Events(vec![removed(2)])), Err(Resync::Digest));
    assert_eq!(watched(&[]).apply(&engine(1), 6, Update::Events(vec![])), Err(Resync::Order));
    assert_eq!(watched(&[]).apply(&engine(0), 6, Update::Heartbeat(KvDigest::default())), Err(Resync::Gap));
    let other = KvDigest { n_blocks: 1, digest: 3 };
    assert_eq!(watched(&[1]).apply(&engine(0), 5, Update::Heartbeat(other)), Err(Resync::Digest));
    let mut early = PrefixDirectory::new(LARGE);
    early.begin(&engine(0));
    assert_eq!(early.apply(&engine(0), 1, Update::Events(vec![stored(1)])), Err(Resync::Order));
}

#[test]
fn a_snapshot_in_parts_counts_when_it_is_whole() {
    let mut directory = watched(&[7]);
    directory.begin(&engine(0));
    assert_eq!(count(&directory, &[7]), 0);
    directory.apply(&engine(0), 9, Update::Snapshot { blocks: vec![hash(1)], last: false }).unwrap();
    directory.apply(&engine(0), 9, Update::Snapshot { blocks: vec![hash(2)], last: true }).unwrap();
    directory.apply(&engine(0), 10, Update::Events(vec![stored(3)])).unwrap();
    assert_eq!((count(&directory, &[1, 2, 3]), directory.n_blocks()), (3, 3));
}

#[test]
fn a_removed_engine_is_credited_with_nothing() {
    let mut directory = watched(&[1, 2]);
    directory.remove(&engine(0));
    assert_eq!((count(&directory, &[1]), directory.n_blocks()), (0, 0));
}

#[test]
fn promises_count_until_they_expire_and_survive_a_resync() {
    let mut directory = watched(&[1]);
    let now = daemon::clock::now();
    let until = now + Duration::from_secs(1);
    directory.promise(&engine(0), &[hash(1), hash(2)], now, until);
    let both = [hash(1), hash(2)];
    assert_eq!(directory.count(&engine(0), &both, now), 2);
    assert_eq!(directory.count(&engine(0), &both, until), 1);
    directory.begin(&engine(0));
    assert_eq!(directory.count(&engine(0), &both, now), 2);
    directory.promise(&engine(0), &[], until, until);
    assert_eq!(directory.count(&engine(0), &both, now), 0);
}

#[test]
fn blocks_beyond_the_bound_are_unknown_but_no_reason_to_resync() {
    let mut directory = PrefixDirectory::new(2 * BYTES_PER_BLOCK);
    directory.begin(&engine(0));
    directory.apply(&engine(0), 0, Update::Snapshot { blocks: vec![], last: true }).unwrap();
    directory.apply(&engine(0), 3, Update::Events(vec![stored(1), stored(2), stored(3)])).unwrap();
    assert_eq!((count(&directory, &[1, 2, 3]), directory.n_blocks()), (2, 2));
    let mut digest = KvDigest::default();
    [1, 2, 3].into_iter().for_each(|n| digest.insert(hash(n)));
    directory.apply(&engine(0), 3, Update::Heartbeat(digest)).unwrap();
    directory.apply(&engine(0), 4, Update::Events(vec![removed(3)])).unwrap();
    assert_eq!(directory.n_blocks(), 2);
}

#[derive(Clone, Debug)]
enum Step {
    Begin(u8),
    Remove(u8),
    Change(u8, KvEvent),
    Heartbeat(u8),
}

fn step() -> impl Strategy<Value = Step> {
    let event = prop_oneof![
        4 => (0..12_u8).prop_map(stored),
        2 => (0..12_u8).prop_map(removed),
        1 => Just(KvEvent::AllBlocksCleared),
    ];
    prop_oneof![
        1 => (0..3_u8).prop_map(Step::Begin),
        1 => (0..3_u8).prop_map(Step::Remove),
        12 => (0..3_u8, event).prop_map(|(engine, event)| Step::Change(engine, event)),
        2 => (0..3_u8).prop_map(Step::Heartbeat),
    ]
}

proptest! {
    #[test]
    fn agrees_with_a_set_for_each_engine(steps in proptest::collection::vec(step(), 1..80), asked in proptest::collection::vec(0..12_u8, 0..6)) {
        let mut directory = PrefixDirectory::new(LARGE);
        let mut model: BTreeMap<u8, (u64, BTreeSet<u8>)> = BTreeMap::new();
        for step in steps {
            match step {
                Step::Begin(index) => {
                    directory.begin(&engine(index));
                    directory.apply(&engine(index), 3, Update::Snapshot { blocks: vec![], last: true }).unwrap();
                    model.insert(index, (3, BTreeSet::new()));
                }
                Step::Remove(index) => {
                    directory.remove(&engine(index));
                    model.remove(&index);
                }
                Step::Change(index, event) => {
                    let Some((sequence, set)) = model.get_mut(&index) else { continue };
                    let is_valid = match event {
                        KvEvent::BlockStored { hash, .. } => set.insert(hash.0[0]),
                        KvEvent::BlockRemoved { hash } => set.remove(&hash.0[0]),
                        KvEvent::AllBlocksCleared => { set.clear(); true }
                    };
                    *sequence += 1;
                    let result = directory.apply(&engine(index), *sequence, Update::Events(vec![event]));
                    prop_assert_eq!(result.is_ok(), is_valid);
                }
                Step::Heartbeat(index) => {
                    let Some((sequence, set)) = model.get(&index) else { continue };
                    let mut digest = KvDigest::default();
                    set.iter().for_each(|&n| digest.insert(hash(n)));
                    prop_assert_eq!(directory.apply(&engine(index), *sequence, Update::Heartbeat(digest)), Ok(()));
                }
            }
            let total: usize = model.values().map(|(_, set)| set.len()).sum();
            prop_assert_eq!(directory.n_blocks(), total);
        }
        let hashes: Vec<BlockHash> = asked.iter().copied().map(hash).collect();
        for index in 0..3 {
            let expected = model.get(&index).map_or(0, |(_, set)| asked.iter().take_while(|n| set.contains(n)).count());
            prop_assert_eq!(directory.count(&engine(index), &hashes, daemon::clock::now()), expected);
        }
    }
}
