//! What must hold does so whatever breaks, and the checks find a defect.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::path::Path;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use simulation::{Delays, Options, Planted, Prepared, Report, Request, SimulationError, Synthetic, Workload, simulate};
use worker::sim::Profile;

fn run(prepared: &Prepared, options: &Options) -> Result<Report, SimulationError> {
    simulate(prepared, options, &AtomicUsize::new(0))
}

/// A small worker on which blocks are evicted, requests preempted and steps short.
fn small() -> Profile {
    let text = "block_size = 16\nn_blocks = 120\nmax_running = 8\nprefill_budget = 256\ncontext_length = 1500\n\
        [timing]\nprefill_tokens_per_s = 20000\ndecode_base_ms = 2\ndecode_per_sequence_ms = 0.2\n";
    Profile::parse(text, "small").unwrap()
}

/// A load that a seed decides, small enough for hundreds of runs.
fn small_load(seed: u64) -> Prepared {
    let load = Synthetic { n_requests: 60, rate: 40.0, n_tenants: 2, n_prefixes: 3, n_prompt: 1_024, n_output: 12 };
    let mut requests = Workload::synthetic(&load, seed).requests().to_vec();
    requests.iter_mut().for_each(|request| request.n_prompt = request.n_prompt.min(1_200));
    Prepared::new(Workload::new("small", requests), small()).unwrap()
}

fn faulty(seed: u64) -> Options {
    let (n_workers, n_routers) = (2 + seed as usize % 3, 1 + seed as usize / 3 % 3);
    // Each kind of message takes its own time, up to several times the usual.
    let spread = |kind: u32| (seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(11 * kind) % 1_000) as f64 / 1e3;
    let delays = Delays {
        view_ms: 1.0 + 200.0 * spread(1),
        kv_ms: 1.0 + 200.0 * spread(2),
        ledger_ms_min: 2.0,
        ledger_ms_max: 2.0 + 50.0 * spread(3),
        request_ms_max: 10.0 * spread(4),
    };
    Options { n_workers, n_routers, seed, delays, faults: true, ..Options::default() }
}

/// CI runs a slice of the seeds and some that nobody ran before, `cargo xtask full faults` five hundred.
#[test]
fn invariants_hold_whatever_breaks() {
    let n = if std::env::var_os("TESSERA_FULL").is_some() { 500 } else { 60 };
    let first = std::env::var("SEED").ok().map(|seed| seed.parse::<u64>().expect("SEED is a number"));
    let new = std::iter::repeat_with(|| daemon::random::u64() >> 16).take(10);
    let seeds = first.map_or_else(|| (0..n).chain(new).collect(), |seed| vec![seed]);
    for seed in seeds {
        let outcome = run(&small_load(seed), &faulty(seed));
        if let Err(error) = outcome {
            panic!("SEED={seed} repeats this: {error}");
        }
    }
}

/// News of caches that are long on their way are what the check is for.
#[test]
fn a_router_that_skips_the_incarnation_check_is_found() {
    let late = |seed| {
        let usual = faulty(seed);
        Options { delays: Delays { kv_ms: 300.0 + 3.0 * usual.delays.kv_ms, ..usual.delays }, ..usual }
    };
    let found = (0..200).find(|&seed| {
        let options = Options { planted: Some(Planted::SkipIncarnation), ..late(seed) };
        matches!(run(&small_load(seed), &options), Err(SimulationError::Violation { .. }))
    });
    let seed = found.expect("one of 200 seeds finds the planted fault");
    run(&small_load(seed), &late(seed)).unwrap();
}

#[test]
fn a_router_that_forgets_the_tokens_of_what_it_places_again_is_found() {
    let planted = |seed| Options { planted: Some(Planted::ForgetTokens), ..faulty(seed) };
    let is_found = |seed| matches!(run(&small_load(seed), &planted(seed)), Err(SimulationError::Violation { .. }));
    assert!((0..20).any(is_found), "one of 20 seeds finds the planted fault");
}

#[test]
fn an_answer_that_the_context_cuts_has_lost_nothing() {
    let request = |n_prompt| Request { after: Duration::ZERO, n_prompt, n_output: 50, blocks: vec![], tenant: 0 };
    let load = Workload::new("cut", vec![request(1_490), request(100)]);
    let report = run(&Prepared::new(load, small()).unwrap(), &Options { checks: true, ..Options::default() }).unwrap();
    assert_eq!((report.failed, report.output_tokens), (0, 10 + 50));
}

#[test]
fn news_may_be_late_and_arrivals_far_apart() {
    let load = Synthetic { n_requests: 200, ..Synthetic::default() };
    let prepared = Prepared::new(Workload::synthetic(&load, 2), Profile::load(Path::new("mooncake")).unwrap()).unwrap();
    let late =
        Options { n_workers: 3, n_routers: 3, delays: Delays { kv_ms: 5_000.0, ..Delays::default() }, ..faulty(2) };
    assert_eq!(run(&prepared, &late).unwrap().requests, 200);
    let request = |after_s| Request {
        after: Duration::from_secs(after_s),
        n_prompt: 100,
        n_output: 2,
        blocks: vec![],
        tenant: 0,
    };
    let load = Prepared::new(Workload::new("two", vec![request(0), request(4)]), small()).unwrap();
    let report = run(&load, &Options { n_workers: 1, speed: 0.000_03, ..Options::default() }).unwrap();
    assert_eq!((report.failed, report.duration_s.floor()), (0, 133_333.0));
}

/// Faults that last longer than the load are over before what is left is looked at.
#[test]
fn what_is_left_is_looked_at_when_nothing_breaks_any_more() {
    let load = Synthetic { n_requests: 300, rate: 2.0, n_prompt: 1_024, n_output: 12, ..Synthetic::default() };
    let requests = |seed| {
        let mut requests = Workload::synthetic(&load, seed).requests().to_vec();
        requests.iter_mut().for_each(|request| request.n_prompt = request.n_prompt.min(1_200));
        requests
    };
    for seed in 0..20 {
        let prepared = Prepared::new(Workload::new("long", requests(seed)), small()).unwrap();
        if let Err(error) = run(&prepared, &faulty(seed)) {
            panic!("seed {seed}: {error}");
        }
    }
}
