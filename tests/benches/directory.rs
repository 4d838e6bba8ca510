//! The router's prefix directory on one core: block operations a second, time of a lookup, bytes of an entry.
//!
//! `cargo bench -p router --bench directory`
//!
//! 64 engines hold 1 M blocks, each on one engine, and 1,000 more that all of them share. Events come in batches of 256, half
//! of them new blocks and half the engine's oldest. An item is one block stored, removed or looked up. Divan counts
//! allocations beside: what `fill` allocates at most is to be compared with the directory's own count, printed first.

use std::collections::VecDeque;
use std::time::Duration;

use contract::hash::BlockHash;
use contract::ids::{DataRank, EngineId, Incarnation};
use contract::kv::KvEvent;
use divan::counter::ItemsCount;
use divan::{AllocProfiler, Bencher, black_box};
use router::route::directory::{PrefixDirectory, Slot, Update};

#[global_allocator]
static ALLOCATOR: AllocProfiler = AllocProfiler::system();

const N_ENGINES: u64 = 64;
const N_LIVE: u64 = 1_000_000;
const N_SHARED: u64 = 1_000;
const N_EVENTS: usize = 256;
const BYTES_MAX: usize = 1 << 30;

fn main() {
    let (directory, _) = filled();
    let (n_blocks, bytes) = (directory.n_blocks(), directory.bytes());
    let each = bytes as f64 / n_blocks as f64;
    let words = format!("{n_blocks} blocks of {N_ENGINES} engines take {bytes} bytes, {each:.1} each\n");
    std::io::Write::write_all(&mut std::io::stdout(), words.as_bytes()).expect("standard output is open");
    drop(directory);
    divan::main();
}

/// What feeds a directory.
struct Feed {
    engines: Vec<Engine>,
    /// The next new block.
    n: u64,
}

struct Engine {
    slot: Slot,
    sequence: u64,
    /// Its own blocks, oldest first.
    live: VecDeque<u64>,
}

fn filled() -> (PrefixDirectory, Feed) {
    let directory = PrefixDirectory::new(BYTES_MAX);
    let mut n = N_SHARED;
    let engines = (0..N_ENGINES).map(|index| {
        let id =
            EngineId { worker: format!("w{index}").into(), incarnation: Incarnation(index), data_rank: DataRank(0) };
        let slot = directory.begin(&id);
        let live: VecDeque<u64> = (n..n + N_LIVE / N_ENGINES).collect();
        n += live.len() as u64;
        let blocks = (0..N_SHARED).chain(live.iter().copied()).map(hash).collect();
        directory.apply(slot, 0, Update::Snapshot { blocks, last: true }).expect("a snapshot comes first");
        Engine { slot, sequence: 0, live }
    });
    let engines = engines.collect();
    (directory, Feed { engines, n })
}

impl Feed {
    /// The next batch of some engine's events.
    fn events(&mut self) -> (Slot, u64, Update) {
        let engine = &mut self.engines[(mix(self.n) % N_ENGINES) as usize];
        let mut events = Vec::with_capacity(N_EVENTS);
        for _ in 0..N_EVENTS / 2 {
            events.extend(engine.live.pop_front().map(|n| KvEvent::BlockRemoved { hash: hash(n) }));
            events.push(KvEvent::BlockStored { hash: hash(self.n), parent: None });
            engine.live.push_back(self.n);
            self.n += 1;
        }
        engine.sequence += events.len() as u64;
        (engine.slot, engine.sequence, Update::Events(events))
    }

    /// A prompt of which an eighth is shared by all engines, a half is some engine's own, and the rest is new.
    fn prompt(&self, seed: u64, n_blocks: usize) -> Vec<BlockHash> {
        let engine = &self.engines[(mix(seed) % N_ENGINES) as usize];
        let own = engine.live.iter().rev().take(n_blocks / 2).copied();
        let blocks = (0..n_blocks as u64 / 8).chain(own).chain(1 << 40..);
        blocks.take(n_blocks).map(hash).collect()
    }
}

#[divan::bench(sample_count = 5, sample_size = 1)]
fn fill(bencher: Bencher<'_, '_>) {
    bencher.counter(ItemsCount::new(N_LIVE + N_ENGINES * N_SHARED)).bench_local(filled);
}

#[divan::bench(sample_count = 2000, sample_size = 4)]
fn events(bencher: Bencher<'_, '_>) {
    let (directory, mut feed) = filled();
    bencher
        .with_inputs(|| feed.events())
        .counter(ItemsCount::new(N_EVENTS))
        .bench_local_values(|(slot, sequence, update)| directory.apply(slot, sequence, update));
}

/// A batch of events, then a prompt of as many blocks.
#[divan::bench(sample_count = 2000, sample_size = 4)]
fn events_and_lookups(bencher: Bencher<'_, '_>) {
    let ((directory, mut feed), now) = (filled(), daemon::clock::now());
    bencher
        .with_inputs(|| (feed.events(), feed.prompt(feed.n, N_EVENTS)))
        .counter(ItemsCount::new(2 * N_EVENTS))
        .bench_local_refs(|((slot, sequence, update), prompt)| {
            let update = std::mem::replace(update, Update::Events(Vec::new()));
            directory.apply(*slot, *sequence, update).expect("events continue");
            black_box(directory.lookup(prompt, now));
        });
}

/// A placement: a prompt is looked up and its blocks are promised, for ten seconds at fifty prompts a second.
#[divan::bench(args = [8, 256, 2048], sample_count = 1000, sample_size = 1)]
fn place(bencher: Bencher<'_, '_>, n_blocks: usize) {
    let ((directory, feed), mut now, mut seed) = (filled(), daemon::clock::now(), 0);
    bencher
        .with_inputs(|| {
            seed += 1;
            feed.prompt(seed, n_blocks)
        })
        .counter(ItemsCount::new(2 * n_blocks))
        .bench_local_refs(|prompt| {
            now += Duration::from_millis(20);
            black_box(directory.lookup(prompt, now));
            let slot = feed.engines[prompt.len() % feed.engines.len()].slot;
            directory.promise(slot, prompt, now, now + Duration::from_secs(10));
        });
}

/// A prompt of 128k tokens of which no two engines hold the same part.
#[divan::bench(args = [8, 256, 8192])]
fn lookup(bencher: Bencher<'_, '_>, n_blocks: usize) {
    let ((directory, mut feed), now) = (filled(), daemon::clock::now());
    let prompt: Vec<u64> = (0..n_blocks as u64).map(|n| n + (1 << 41)).collect();
    for (index, engine) in feed.engines.iter_mut().enumerate() {
        let n_held = mix(index as u64) as usize % n_blocks + 1;
        let events = prompt[..n_held].iter().map(|&n| KvEvent::BlockStored { hash: hash(n), parent: None }).collect();
        engine.sequence += n_held as u64;
        directory.apply(engine.slot, engine.sequence, Update::Events(events)).expect("events continue");
    }
    let prompt: Vec<BlockHash> = prompt.into_iter().map(hash).collect();
    bencher.counter(ItemsCount::new(n_blocks)).bench_local(|| directory.lookup(black_box(&prompt), now));
}

/// A hash that is spread evenly, different for each `n`.
fn hash(n: u64) -> BlockHash {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&mix(n).to_le_bytes());
    BlockHash(bytes)
}

/// The last step of SplitMix64 (Steele, Lea and Flood 2014).
fn mix(n: u64) -> u64 {
    let mut z = n.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
