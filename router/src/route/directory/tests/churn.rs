//! Prefixes come and go; what is held afterwards is what was held before. `TESSERA_FULL=1` takes ten million of them.

use std::collections::VecDeque;

use super::*;

const N_ENGINES: u64 = 64;
const N_LIVE: usize = 100_000;
const N_A_STEP: u64 = 100;

/// An engine's events: new blocks, and as many of its oldest ones when enough live.
fn turn(n: &mut u64, live: &mut VecDeque<u64>) -> Vec<KvEvent> {
    let mut events = Vec::new();
    for _ in 0..N_A_STEP {
        if live.len() >= N_LIVE / N_ENGINES as usize {
            events.extend(live.pop_front().map(removed));
        }
        live.push_back(*n);
        events.push(stored(*n));
        *n += 1;
    }
    events
}

#[test]
fn memory_comes_back_to_what_the_live_blocks_take() {
    let n_prefixes = if std::env::var_os("TESSERA_FULL").is_some() { 10_000_000 } else { 400_000 };
    let directory = PrefixDirectory::new(1 << 30);
    let mut engines: Vec<_> =
        (0..N_ENGINES).map(|index| (begin(&directory, &engine(index), &[]), 5, VecDeque::new())).collect();
    let mut n = 0;
    let mut baseline = None;
    while n < n_prefixes {
        for (slot, sequence, live) in &mut engines {
            let events = turn(&mut n, live);
            *sequence += events.len() as u64;
            directory.apply(*slot, *sequence, Update::Events(events)).unwrap();
        }
        if n > 2 * N_LIVE as u64 && baseline.is_none() {
            baseline = Some((directory.n_blocks(), directory.bytes()));
        }
    }
    let (n_blocks, bytes) = baseline.unwrap();
    assert_eq!(directory.n_blocks(), n_blocks);
    let now = directory.bytes();
    assert!(now.abs_diff(bytes) * 100 <= bytes, "{now} bytes, {bytes} before");
    assert!(now <= 40 * n_blocks, "{now} bytes for {n_blocks} blocks");
    check_bytes(&directory);

    // Whole engines come and go, and many hold the same.
    let shared: Vec<u64> = (n..n + 1000).collect();
    for round in 0..20 {
        let slots: Vec<_> = (0..32).map(|index| begin(&directory, &life(1000 + index, round), &shared)).collect();
        slots.into_iter().for_each(|slot| directory.remove(slot));
    }
    assert_eq!(directory.n_blocks(), n_blocks);
    directory.settle(daemon::clock::now());
    let now = directory.bytes();
    assert!(now.abs_diff(bytes) * 100 <= bytes, "{now} bytes, {bytes} before");
    check_bytes(&directory);
}

#[test]
fn columns_are_used_again_without_being_asked_to_settle() {
    let directory = PrefixDirectory::new(LARGE);
    let blocks: Vec<u64> = (0..500).collect();
    for round in 0..1000 {
        let slot = begin(&directory, &life(0, round), &blocks);
        assert_eq!(count(&directory, slot, &blocks), 500);
        directory.remove(slot);
    }
    let n_columns = directory.roster().live().len() * 64;
    assert!(n_columns <= 256, "{n_columns} columns for one engine at a time");
    assert!(directory.bytes() < 200_000, "{} bytes", directory.bytes());
}

#[test]
fn any_engines_that_share_a_block_take_less_than_forty_bytes_each() {
    for n_engines in [1, 2, 4, 5, 64, 65, 200] {
        let directory = PrefixDirectory::new(1 << 30);
        let blocks: Vec<u64> = (0..20_000).collect();
        let empty = directory.bytes();
        (0..n_engines).for_each(|index| {
            begin(&directory, &engine(index), &blocks);
        });
        let each = (directory.bytes() - empty) as f64 / directory.n_blocks() as f64;
        assert!(each <= 40.0, "{each} bytes with {n_engines} engines");
    }
}
