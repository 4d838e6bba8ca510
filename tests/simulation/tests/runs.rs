//! A run repeats and measures what it should.

#![allow(clippy::unwrap_used, reason = "tests")]

mod mooncake;

use std::path::Path;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use simulation::{Options, Prepared, Report, Request, SimulationError, Synthetic, Workload, page, simulate};
use worker::sim::Profile;

fn run(prepared: &Prepared, options: &Options) -> Result<Report, SimulationError> {
    simulate(prepared, options, &AtomicUsize::new(0))
}

fn trace(name: &str) -> Workload {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/traces").join(name);
    Workload::new(name, mooncake::requests(&path, usize::MAX))
}

fn mooncake() -> Profile {
    Profile::load(Path::new("mooncake")).unwrap()
}

#[test]
fn the_same_seed_makes_the_same_report_and_another_does_not() {
    let prepared = Prepared::new(trace("mooncake_conversation.jsonl"), mooncake()).unwrap();
    let options = Options { n_routers: 2, ..Options::default() };
    let report = |seed| {
        let report = run(&prepared, &Options { seed, ..options.clone() }).unwrap();
        (serde_json::to_string(&report).unwrap(), page(&[report]))
    };
    assert_eq!(report(1), report(1));
    assert_ne!(report(1).0, report(2).0);
}

#[test]
fn every_request_of_each_trace_ends_with_its_tokens() {
    for name in ["mooncake_conversation.jsonl", "mooncake_synthetic.jsonl"] {
        let load = trace(name);
        let (n, tokens) = (load.requests().len(), load.requests().iter().map(|r| u64::from(r.n_output)).sum::<u64>());
        let prepared = Prepared::new(load, mooncake()).unwrap();
        let report = run(&prepared, &Options { checks: true, ..Options::default() }).unwrap();
        assert_eq!((report.requests, report.failed, report.output_tokens), (n, 0, tokens), "{name}");
        assert!(report.ttft_s.p50 <= report.ttft_s.p99 && report.ttft_s.mean > 0.0, "{}", report.text());
        assert!((0.0..1.0).contains(&report.hit_rate) && report.requests_max_over_mean >= 1.0, "{}", report.text());
    }
}

#[test]
fn one_request_takes_what_the_profile_says() {
    let request = Request { after: Default::default(), n_prompt: 4096, n_output: 11, blocks: vec![], tenant: 0 };
    let prepared = Prepared::new(Workload::new("one", vec![request]), mooncake()).unwrap();
    let report = run(&prepared, &Options { n_workers: 1, ..Options::default() }).unwrap();
    // Two steps of 2,048 tokens at 8,000 a second, and up to a millisecond each way.
    assert!((0.512..0.514).contains(&report.ttft_s.mean), "{}", report.text());
    // 20 ms, 0.2 ms for the request and 0.4096 ms for its context.
    assert!((0.0204..0.0208).contains(&report.tpot_s.mean), "{}", report.text());
    assert_eq!((report.goodput, report.requests_max_over_mean, report.output_tokens), (1.0, 1.0, 11));
}

#[test]
fn options_that_make_no_sense_are_named() {
    let load = Prepared::new(Workload::synthetic(&Synthetic::default(), 0), mooncake()).unwrap();
    let error = |options: Options| run(&load, &options).unwrap_err().to_string();
    assert!(error(Options { n_workers: 0, ..Options::default() }).contains("workers is 0"));
    assert!(error(Options { speed: f64::NAN, ..Options::default() }).contains("speed is NaN"));
    assert!(error(Options { speed: 1e-308, ..Options::default() }).contains("speed is 1e-308"));
    assert!(error(Options { n_workers: 10_000, n_routers: 101, ..Options::default() }).contains("times routers"));
}

fn short(more: &str) -> Profile {
    let bounds = "block_size = 16\nn_blocks = 100\nmax_running = 8\nprefill_budget = 512\ncontext_length = 1000\n";
    Profile::parse(&format!("{bounds}{more}"), "short").unwrap()
}

fn requests(n_prompt: u32) -> Workload {
    let request = |n| Request { after: Duration::from_secs(n), n_prompt, n_output: 30, blocks: vec![], tenant: 0 };
    Workload::new("load", (0..20).map(request).collect())
}

#[test]
fn a_token_ends_a_request_as_often_as_the_profile_says() {
    let tokens = |probability: &str| {
        let prepared = Prepared::new(requests(100), short(&format!("eos_probability = {probability}"))).unwrap();
        run(&prepared, &Options { checks: true, ..Options::default() }).unwrap().output_tokens
    };
    assert_eq!((tokens("0.0"), tokens("1.0")), (20 * 30, 20));
    assert!((50..400).contains(&tokens("0.1")), "{}", tokens("0.1"));
}

#[test]
fn requests_that_all_fail_have_reasons_and_no_times() {
    let prepared = Prepared::new(requests(1_001), short("")).unwrap();
    let report = run(&prepared, &Options::default()).unwrap();
    assert!(report.has_failed() && report.ttft_s.is_empty());
    assert!(
        report.text().ends_with("no request was answered, 20 (20 context_length_exceeded) failed"),
        "{}",
        report.text()
    );
    let json = serde_json::to_value(&report).unwrap();
    assert_eq!((json.get("ttft_s"), &json["failures"]["context_length_exceeded"]), (None, &20.into()));
}
