//! Tenants share the workers by tokens, with one router and with several, and who was idle is served soon.

#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "tests")]

use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use simulation::{Options, Prepared, Report, Request, Workload, simulate};
use worker::sim::Profile;

const LONG: u32 = 0;
const SHORT: u32 = 1;
const IDLE: u32 = 2;
/// Workers, each of which takes 8,000 prompt tokens a second.
const N_WORKERS: usize = 2;
const TOKENS_PER_S: u32 = 16_000;
/// The longest step, which a long prompt just fits into.
const STEP_S: f64 = 2_048.0 / 8_000.0;
const DISPATCH_AHEAD_S: f64 = 0.2;

/// Two tenants that each ask for as much as there is, one with prompts ten times as long, and one that asks now and then.
fn load(span_s: u32, n_long: u32) -> Prepared {
    let tenant = |tenant, n_prompt, per_s: f64| {
        let n = (f64::from(span_s) * per_s) as u32;
        (0..n).map(move |index| Request {
            after: Duration::from_secs_f64(f64::from(index) / per_s),
            n_prompt,
            n_output: 1,
            blocks: Vec::new(),
            tenant,
        })
    };
    let per_s = |n_prompt: u32| f64::from(TOKENS_PER_S) / f64::from(n_prompt);
    let requests = tenant(LONG, n_long, per_s(n_long))
        .chain(tenant(SHORT, n_long / 10, per_s(n_long / 10)))
        .chain(tenant(IDLE, 200, 0.5));
    let profile = Profile::parse(
        "block_size = 512\nn_blocks = 4000\nmax_running = 256\nprefill_budget = 2048\ncontext_length = 131072\n\
        [timing]\nprefill_tokens_per_s = 8000\ndecode_base_ms = 20\ndecode_per_sequence_ms = 0.2\n",
        "fair",
    );
    Prepared::new(Workload::new("two tenants", requests.collect()), profile.unwrap()).unwrap()
}

fn run(prepared: &Prepared, n_routers: usize, seed: u64) -> Report {
    let options = Options { n_workers: N_WORKERS, n_routers, seed, ..Options::default() };
    simulate(prepared, &options, &AtomicUsize::new(0)).unwrap()
}

/// Tokens computed for a tenant between two times.
fn tokens(report: &Report, tenant: u32, between_s: std::ops::Range<f64>) -> f64 {
    let of = report.served.iter().filter(|one| one.tenant == tenant && between_s.contains(&one.first_token_s));
    of.map(|one| f64::from(one.tokens_new)).sum()
}

fn seeds() -> std::ops::Range<u64> {
    let first = std::env::var("SEED").ok().map(|seed| seed.parse::<u64>().expect("SEED is a number"));
    let n = if std::env::var_os("TESSERA_FULL").is_some() { 20 } else { 2 };
    first.map_or(0..n, |seed| seed..seed + 1)
}

#[test]
fn tenants_that_always_ask_get_the_same_tokens_however_long_their_prompts() {
    for n_long in [2_000, 10_000] {
        let span_s = if n_long == 2_000 { 60 } else { 240 };
        let prepared = load(span_s, n_long);
        for (seed, n_routers) in seeds().flat_map(|seed| [(seed, 1), (seed, 4)]) {
            let report = run(&prepared, n_routers, seed);
            let [long, short] = [LONG, SHORT].map(|tenant| tokens(&report, tenant, 5.0..f64::from(span_s)));
            eprintln!("{n_long} tokens, {n_routers} routers, seed {seed}: {long} and {short}, {:.3}", long / short);
            assert!((long / short - 1.0).abs() < 0.05, "SEED={seed}, {n_routers} routers: {long} and {short}");
        }
    }
}

#[test]
fn an_idle_tenants_request_waits_for_dispatch_ahead_and_one_step_at_most() {
    let prepared = load(60, 2_000);
    for (seed, n_routers) in seeds().flat_map(|seed| [(seed, 1), (seed, 4)]) {
        let report = run(&prepared, n_routers, seed);
        let waits = report.served.iter().filter(|one| one.tenant == IDLE && one.arrived_s < 60.0);
        // The step that computes it may compute others too, and so take as long as the longest.
        let mut waits: Vec<f64> = waits.map(|one| one.first_token_s - one.arrived_s - STEP_S).collect();
        waits.sort_by(f64::total_cmp);
        let (median, longest) = (waits[waits.len() / 2] + STEP_S, waits[waits.len() - 1]);
        eprintln!(
            "{n_routers} routers, seed {seed}: first token after {median:.3} s, at most {:.3} s",
            longest + STEP_S
        );
        // Several routers may still take the same room at once; then there is more ahead of it, which one in ten may see.
        let n_late = waits.iter().filter(|&&wait| wait >= DISPATCH_AHEAD_S + STEP_S).count();
        let n_late_max = if n_routers == 1 { 0 } else { waits.len() / 10 };
        assert!(n_late <= n_late_max, "SEED={seed}, {n_routers} routers: {waits:?}");
    }
}
