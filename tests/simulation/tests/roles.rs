//! What roles that the scheduler gives are worth beside roles that are fixed: on traces where a split pays, and on loads
//! where it does not.
//!
//! Goals are 2 s to the first token and 50 ms for each token. `TESSERA_TRACES` names a directory with Mooncake's whole
//! traces; what is usual is a slice of one.

#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "tests")]

mod mooncake;

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicUsize;

use contract::view::Role;
use scheduler::state::roles::RoleSettings;
use simulation::compare::run_all;
use simulation::{Goals, Options, Prepared, Report, Roles, Synthetic, Workload};
use worker::sim::Profile;

const GOALS: Goals = Goals { ttft_s: 2.0, tpot_s: 0.05 };

fn is_full() -> bool {
    std::env::var_os("TESSERA_FULL").is_some()
}

/// Whole traces, or a slice of the one where roles are given long before it ends.
fn traces() -> Vec<Prepared> {
    let slices = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../fixtures/traces");
    std::env::var_os("TESSERA_TRACES").map(PathBuf::from).map_or_else(
        || vec![trace(&slices.join("mooncake_conversation.jsonl"), 400)],
        |dir| {
            let whole = ["mooncake_conversation_trace.jsonl", "mooncake_synthetic_trace.jsonl"];
            whole.into_iter().map(|name| trace(&dir.join(name), usize::MAX)).collect()
        },
    )
}

/// The first `n` requests of a trace.
fn trace(path: &Path, n: usize) -> Prepared {
    let name = path.file_stem().unwrap().to_string_lossy();
    prepared(Workload::new(&*name, mooncake::requests(path, n)))
}

fn prepared(load: Workload) -> Prepared {
    Prepared::new(load, Profile::load("ascend-910b".as_ref()).unwrap()).unwrap()
}

fn auto() -> Roles {
    Roles::Auto(RoleSettings::default())
}

fn fixed(n_prefill: usize, n_workers: usize) -> Roles {
    let role = |worker| if worker < n_prefill { Role::Prefill } else { Role::Decode };
    Roles::Fixed((0..n_workers).map(role).collect())
}

/// Runs a load with the roles of each of `choices`, over all seeds.
fn runs(load: &Prepared, n_workers: usize, speed: f64, choices: &[Roles]) -> Vec<Vec<Report>> {
    let n_seeds = if is_full() { 3 } else { 1 };
    let first = std::env::var("SEED").map_or(0, |seed| seed.parse::<u64>().expect("SEED is a number"));
    let options = |roles: &Roles, seed| Options {
        n_workers,
        speed,
        seed,
        roles: roles.clone(),
        goals: GOALS,
        ..Options::default()
    };
    let of = |roles| (first..first + n_seeds).map(move |seed| (load, options(roles, seed)));
    let jobs: Vec<(&Prepared, Options)> = choices.iter().flat_map(of).collect();
    let n_threads = std::thread::available_parallelism().map_or(1, usize::from);
    let reports = run_all(&jobs, n_threads, &AtomicUsize::new(0)).unwrap();
    let by_roles: Vec<Vec<Report>> = reports.chunks(n_seeds as usize).map(<[Report]>::to_vec).collect();
    for reports in &by_roles {
        let Report { workload, roles, .. } = &reports[0];
        let good: Vec<String> = reports.iter().map(|report| format!("{:.1}", 100.0 * report.goodput)).collect();
        eprintln!(
            "{workload} at {speed}x on {n_workers}, {roles:<6} {:>22} % good; first token {:.2} s, p99 {:.1} s; token {:.1} ms; between two, p99 {:.0} ms",
            good.join(" "),
            mean(reports, |report| report.ttft_s.mean),
            mean(reports, |report| report.ttft_s.p99),
            1e3 * mean(reports, |report| report.tpot_s.mean),
            1e3 * mean(reports, |report| report.itl_s.p99),
        );
    }
    by_roles
}

fn mean(reports: &[Report], of: fn(&Report) -> f64) -> f64 {
    reports.iter().map(of).sum::<f64>() / reports.len() as f64
}

fn goodput(reports: &[Report]) -> f64 {
    mean(reports, |report| report.goodput)
}

/// A made-up load of `rate` requests a second; where `n_output` is 0 each has one token.
fn made_up(rate: f64, n_prompt: u32, n_output: u32) -> Prepared {
    let n_requests = if is_full() { 2_000 } else { 400 };
    let load = Synthetic { n_requests, rate, n_prompt, n_output, ..Synthetic::default() };
    prepared(Workload::synthetic(&load, 0))
}

/// How much of goodput a seed or the time until roles are given may cost.
const NOISE: f64 = 0.02;
/// The same on a slice, of which the time until roles are given is a sixth.
const NOISE_OF_SLICE: f64 = 0.05;

#[test]
fn automatic_roles_are_worth_as_much_as_the_best_fixed_ones() {
    let speeds: &[f64] = if is_full() { &[0.5, 0.75, 1.0] } else { &[1.0] };
    let n_prefills = if is_full() { 4..=7 } else { 6..=7 };
    let noise = if std::env::var_os("TESSERA_TRACES").is_some() { NOISE } else { NOISE_OF_SLICE };
    for load in traces() {
        let name = load.workload().name();
        for &speed in speeds {
            let fixed = n_prefills.clone().map(|n_prefill| fixed(n_prefill, 8));
            let choices: Vec<Roles> = [auto(), Roles::Mixed].into_iter().chain(fixed).collect();
            let found = runs(&load, 8, speed, &choices);
            let best = found[1..].iter().map(|reports| goodput(reports)).fold(0.0, f64::max);
            let auto = goodput(&found[0]);
            assert!(auto >= best - noise, "{name} at {speed}x: {auto:.3}, the best fixed roles {best:.3}");
        }
    }
}

#[test]
fn a_split_halves_the_longest_gaps_and_first_tokens_come_hardly_later() {
    // Faster, the second overloads every split: its prompts share so much that nothing is worth what caches lose.
    for (load, speed) in traces().into_iter().zip([1.0, 0.75]) {
        let name = load.workload().name();
        let found = runs(&load, 8, speed, &[Roles::Mixed, fixed(6, 8), auto()]);
        let p99 = |of: fn(&Report) -> f64| [0, 1, 2].map(|index| mean(&found[index], of));
        let (gaps, first_tokens) = (p99(|report| report.itl_s.p99), p99(|report| report.ttft_s.p99));
        for split in [1, 2] {
            assert!(2.0 * gaps[split] <= gaps[0], "{name}: {} s between tokens, mixed {} s", gaps[split], gaps[0]);
            assert!(first_tokens[split] <= 1.5 * first_tokens[0], "{name}: first tokens {first_tokens:?} s");
        }
    }
}

#[test]
fn automatic_roles_stay_within_a_twentieth_of_mixed_where_that_is_better() {
    let loads = [
        ("little to do", 8, made_up(1.0, 4_000, 200)),
        ("short prompts and long answers", 8, made_up(12.0, 300, 600)),
        ("prompts alone", 8, made_up(6.0, 8_000, 0)),
        ("two workers", 2, made_up(1.0, 4_000, 200)),
    ];
    for (name, n_workers, load) in loads {
        let found = runs(&load, n_workers, 1.0, &[auto(), Roles::Mixed, fixed(n_workers / 2, n_workers)]);
        let [auto, mixed, split] = [0, 1, 2].map(|index| goodput(&found[index]));
        let [_, sooner, later] = [0, 1, 2].map(|index| mean(&found[index], |report| report.ttft_s.mean));
        let is_better = mixed >= split - 0.01 && sooner < later;
        assert!(
            is_better,
            "{name}: mixed is not better, {mixed:.3} and {sooner:.2} s beside {split:.3} and {later:.2} s"
        );
        assert!(auto >= 0.95 * mixed, "{name}: {auto:.3}, mixed {mixed:.3}");
        let [auto, mixed] = [0, 1].map(|index| mean(&found[index], |report| report.e2e_s.mean));
        assert!(auto <= 1.05 * mixed, "{name}: {auto:.2} s to the last token, mixed {mixed:.2} s");
    }
}
