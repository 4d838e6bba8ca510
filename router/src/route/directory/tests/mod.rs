//! What the directory promises, each way it finds out that it is wrong, and what its memory is bounded by.

mod churn;
mod model;

use std::time::Duration;

use contract::ids::{DataRank, Incarnation};

use super::*;

const LARGE: usize = 1 << 26;

fn engine(index: u64) -> EngineId {
    life(index, index)
}

fn life(index: u64, incarnation: u64) -> EngineId {
    EngineId { worker: format!("w{index}").into(), incarnation: Incarnation(incarnation), data_rank: DataRank(0) }
}

/// A hash as good as any, different for each `n`.
fn hash(n: u64) -> BlockHash {
    let mut z = n.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&(z ^ (z >> 31)).to_le_bytes());
    bytes[8..].copy_from_slice(&n.to_le_bytes());
    BlockHash(bytes)
}

fn hashes(blocks: &[u64]) -> Vec<BlockHash> {
    blocks.iter().copied().map(hash).collect()
}

fn stored(n: u64) -> KvEvent {
    KvEvent::BlockStored { hash: hash(n), parent: None }
}

fn removed(n: u64) -> KvEvent {
    KvEvent::BlockRemoved { hash: hash(n) }
}

fn snapshot(blocks: &[u64], last: bool) -> Update {
    Update::Snapshot { blocks: hashes(blocks), last }
}

fn begin(directory: &PrefixDirectory, engine: &EngineId, blocks: &[u64]) -> Slot {
    let slot = directory.begin(engine);
    directory.apply(slot, 5, snapshot(blocks, true)).unwrap();
    slot
}

fn watched(blocks: &[u64]) -> (PrefixDirectory, Slot) {
    let directory = PrefixDirectory::new(LARGE);
    let slot = begin(&directory, &engine(0), blocks);
    (directory, slot)
}

fn count_at(directory: &PrefixDirectory, slot: Slot, blocks: &[u64], now: Instant) -> usize {
    directory.lookup(&hashes(blocks), now).of(slot).n_blocks
}

fn count(directory: &PrefixDirectory, slot: Slot, blocks: &[u64]) -> usize {
    count_at(directory, slot, blocks, daemon::clock::now())
}

/// Checks what the budgets say against the structures themselves.
fn check_bytes(directory: &PrefixDirectory) {
    let each = (0..shard::N_SHARDS).map(|index| directory.shards.read(index).bytes());
    let held = each.fold((0, 0), |sum, bytes| (sum.0 + bytes.0, sum.1 + bytes.1));
    assert_eq!(held, (directory.shards.cached.bytes(), directory.shards.promised.bytes()));
}

#[test]
fn a_prefix_counts_up_to_its_first_missing_block() {
    let (directory, slot) = watched(&[1, 2, 4]);
    assert_eq!(count(&directory, slot, &[1, 2, 3, 4]), 2);
    assert_eq!(count(&directory, slot, &[9, 1]), 0);
    assert_eq!(count(&directory, slot, &[]), 0);
    let other = directory.begin(&engine(1));
    assert_eq!(count(&directory, other, &[1]), 0, "another engine holds nothing");
}

#[test]
fn gaps_and_repetitions_ask_for_a_snapshot() {
    let check = |blocks: &[u64], sequence, update| {
        let (directory, slot) = watched(blocks);
        directory.apply(slot, sequence, update)
    };
    assert_eq!(check(&[], 7, Update::Events(vec![stored(1)])), Err(Resync::Gap));
    assert_eq!(check(&[], 5, Update::Events(vec![stored(1)])), Err(Resync::Gap));
    assert_eq!(check(&[1], 6, Update::Events(vec![stored(1)])), Err(Resync::Digest));
    assert_eq!(check(&[1], 6, Update::Events(vec![removed(2)])), Err(Resync::Digest));
    assert_eq!(check(&[], 6, Update::Events(vec![removed(2)])), Err(Resync::Digest));
    assert_eq!(check(&[], 6, Update::Heartbeat(KvDigest::default())), Err(Resync::Gap));
    assert_eq!(check(&[1], 5, Update::Heartbeat(KvDigest { n_blocks: 1, digest: 3 })), Err(Resync::Digest));
    assert_eq!(check(&[1], 5, snapshot(&[], true)), Err(Resync::Order));
    let early = PrefixDirectory::new(LARGE);
    let slot = early.begin(&engine(0));
    assert_eq!(early.apply(slot, 1, Update::Events(vec![stored(1)])), Err(Resync::Order));
}

#[test]
fn a_snapshot_in_parts_counts_when_it_is_whole() {
    let (directory, slot) = watched(&[7]);
    assert_eq!(directory.begin(&engine(0)), slot, "a slot stays for as long as its engine");
    assert_eq!(count(&directory, slot, &[7]), 0);
    directory.apply(slot, 9, snapshot(&[1], false)).unwrap();
    directory.apply(slot, 9, snapshot(&[2], true)).unwrap();
    directory.apply(slot, 10, Update::Events(vec![stored(3)])).unwrap();
    assert_eq!((count(&directory, slot, &[1, 2, 3]), directory.n_blocks()), (3, 3));
}

#[test]
fn a_removed_engine_is_credited_with_nothing_and_cannot_come_back() {
    let (directory, old) = watched(&[1, 2]);
    let now = daemon::clock::now();
    directory.promise(old, &hashes(&[1, 2, 3]), now, now + Duration::from_secs(1));
    directory.remove(old);
    assert_eq!((count_at(&directory, old, &[1], now), directory.n_blocks()), (0, 0));
    let new = directory.begin(&life(0, 99));
    assert_ne!(old, new);
    assert_eq!(directory.apply(old, 6, Update::Events(vec![stored(1)])), Err(Resync::Order), "late events");
    directory.promise(old, &hashes(&[1]), now, now + Duration::from_secs(1));
    directory.remove(old);
    for slot in [old, new] {
        assert_eq!(directory.lookup(&hashes(&[1, 2, 3]), now).of(slot), Match::default());
    }
    directory.apply(new, 1, snapshot(&[1], true)).unwrap();
    assert_eq!(count_at(&directory, new, &[1, 2], now), 1);
    assert_eq!(count_at(&directory, old, &[1, 2], now), 0);
}

#[test]
fn promises_count_until_they_expire_and_survive_a_resync() {
    let (directory, slot) = watched(&[1]);
    let now = daemon::clock::now();
    let until = now + Duration::from_secs(1);
    directory.promise(slot, &hashes(&[1, 2]), now, until);
    let found = |at| directory.lookup(&hashes(&[1, 2]), at).of(slot);
    assert_eq!(found(now), Match { n_blocks: 2, n_promised: 1 });
    directory.begin(&engine(0));
    assert_eq!(found(now), Match { n_blocks: 2, n_promised: 2 });
    directory.apply(slot, 1, snapshot(&[1], true)).unwrap();
    assert_eq!(found(until), Match { n_blocks: 1, n_promised: 0 });
    directory.settle(until);
    assert_eq!((found(now).n_blocks, directory.take_promises_missed()), (1, 1), "block 1 was there already");
    check_bytes(&directory);
}

#[test]
fn a_promise_is_missed_when_its_block_is_not_stored_in_time() {
    let (directory, slot) = watched(&[]);
    let now = daemon::clock::now();
    let (soon, later) = (now + Duration::from_secs(1), now + Duration::from_secs(2));
    directory.promise(slot, &hashes(&[1, 2]), now, soon);
    directory.promise(slot, &hashes(&[1, 2, 3]), now, later);
    directory.apply(slot, 6, Update::Events(vec![stored(1)])).unwrap();
    assert_eq!(directory.lookup(&hashes(&[1, 2, 3]), soon).of(slot), Match { n_blocks: 3, n_promised: 2 });
    directory.settle(soon);
    assert_eq!(directory.take_promises_missed(), 0, "the second promise prolongs the first");
    directory.apply(slot, 7, Update::Events(vec![stored(2)])).unwrap();
    directory.settle(later);
    assert_eq!(directory.take_promises_missed(), 1);
    assert_eq!(directory.shards.promised.bytes(), 0);
}

#[test]
fn blocks_beyond_the_bound_are_unknown_but_no_reason_to_resync() {
    const N: u64 = 20_000;
    let bytes_max = 200_000;
    let directory = PrefixDirectory::new(bytes_max);
    let slot = begin(&directory, &engine(0), &[]);
    let mut digest = KvDigest::default();
    let chain: Vec<KvEvent> =
        (0..N).map(|n| KvEvent::BlockStored { hash: hash(n), parent: n.checked_sub(1).map(hash) }).collect();
    (0..N).for_each(|n| digest.insert(hash(n)));
    for (i, events) in chain.chunks(100).enumerate() {
        directory.apply(slot, 5 + 100 * (i as u64 + 1), Update::Events(events.to_vec())).unwrap();
    }
    let n_known = directory.n_blocks();
    assert!((4_000..N as usize / 2).contains(&n_known), "{n_known}");
    assert!(directory.shards.cached.bytes() <= bytes_max);
    let n_credited = count(&directory, slot, &(0..N).collect::<Vec<_>>());
    // In the batch that met the bound some blocks were stored and others not; what follows has to follow.
    assert!(n_credited.abs_diff(n_known) < batch::N_CHANGES_MAX, "{n_credited} credited, {n_known} known");
    directory.apply(slot, 5 + N, Update::Heartbeat(digest)).unwrap();
    directory.apply(slot, 6 + N, Update::Events(vec![removed(N - 1)])).unwrap();
    assert_eq!(directory.n_blocks(), n_known, "an unknown block was removed");
    directory.apply(slot, 7 + N, Update::Events(vec![KvEvent::AllBlocksCleared])).unwrap();
    directory.apply(slot, 8 + N, Update::Events(vec![stored(1)])).unwrap();
    assert_eq!((count(&directory, slot, &[1]), directory.n_blocks()), (1, 1));
    let blocks: Vec<u64> = (0..N).collect();
    let now = daemon::clock::now();
    directory.promise(slot, &hashes(&blocks), now, now + Duration::from_secs(1));
    assert!(directory.shards.promised.bytes() <= bytes_max / PROMISED_SHARE);
    assert!(directory.bytes() <= bytes_max, "{} bytes", directory.bytes());
    check_bytes(&directory);
}

#[test]
fn engines_and_empty_shards_count_towards_the_bound() {
    for bytes_max in [PrefixDirectory::BYTES_MAX_LEAST, 300_000, 2_000_000] {
        let directory = PrefixDirectory::new(bytes_max);
        assert!(directory.bytes() < bytes_max, "{} bytes of {bytes_max} when empty", directory.bytes());
        let now = daemon::clock::now();
        for index in 0..100 {
            let blocks: Vec<u64> = (0..2_000).map(|n| index * 2_000 + n).collect();
            let slot = begin(&directory, &engine(index), &blocks);
            directory.promise(slot, &hashes(&blocks), now, now + Duration::from_secs(1));
            // Engines that come when all is full already.
            let beyond = if bytes_max < 2_000_000 { 40_000 } else { 0 };
            assert!(directory.bytes() <= bytes_max + beyond, "{} bytes of {bytes_max}", directory.bytes());
        }
        assert!(directory.n_blocks() > 32, "{} blocks in {bytes_max} bytes", directory.n_blocks());
        check_bytes(&directory);
    }
}

#[test]
fn readers_and_writers_do_not_wait_for_each_other_forever() {
    let directory = PrefixDirectory::new(LARGE);
    let now = daemon::clock::now();
    let until = now + Duration::from_secs(1);
    let prompt: Vec<u64> = (0..64).collect();
    std::thread::scope(|scope| {
        for index in 0..3 {
            let (directory, prompt) = (&directory, &prompt);
            scope.spawn(move || {
                for turn in 0..200 {
                    let slot = begin(directory, &life(index, turn), prompt);
                    directory
                        .apply(slot, 69, Update::Events(prompt.iter().rev().map(|&n| removed(n)).collect()))
                        .unwrap();
                    directory.promise(slot, &hashes(prompt), now, until);
                    assert_eq!(directory.lookup(&hashes(prompt), now).of(slot), Match { n_blocks: 64, n_promised: 64 });
                    directory.begin(&life(index, turn));
                    directory.apply(slot, 5, snapshot(prompt, true)).unwrap();
                    assert_eq!(directory.lookup(&hashes(prompt), now).of(slot), Match { n_blocks: 64, n_promised: 0 });
                    directory.remove(slot);
                }
            });
        }
    });
    directory.settle(until);
    assert_eq!((directory.n_blocks(), directory.shards.cached.bytes(), directory.shards.promised.bytes()), (0, 0, 0));
}
