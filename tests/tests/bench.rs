//! `tessera bench` as scripts use it: its JSON, its page, and what it says when the server dies.

#![allow(
    clippy::disallowed_methods,
    clippy::print_stderr,
    clippy::unwrap_used,
    missing_docs,
    reason = "tests: a failed step panics, and real time is what they measure"
)]

use std::process::Command;
use std::time::Duration;

use serde_json::Value;
use tests::metrics::Metrics;
use tests::place;
use tests::process::{Process, fields};

const READY: Duration = Duration::from_secs(120);

fn served() -> (Process, String, String) {
    let tiny = place::tiny("llama");
    let args = ["serve", "--workers", "1", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"];
    let process = Process::tessera("serve", &[&args[..], &["--model", tiny.to_str().unwrap()]].concat(), None);
    let (http, grpc) = process.line("ready line", READY, |line| {
        let fields = fields(line.strip_prefix("ready ")?);
        Some((fields["http"].to_owned(), fields["grpc"].to_owned()))
    });
    (process, http, grpc)
}

/// Runs `tessera bench ARGS` and returns its output.
fn bench(args: &[&str]) -> String {
    let output = Command::new(place::tessera()).arg("bench").args(args).output().unwrap();
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// The values of a distribution in ascending order.
fn ordered(distribution: &Value) -> [f64; 5] {
    ["min", "p50", "p90", "p99", "max"].map(|field| distribution[field].as_f64().unwrap())
}

const SMALL: [&str; 6] = ["--input-len", "8", "--output-len", "4", "--vocab-size", "256"];

#[tokio::test(flavor = "multi_thread")]
async fn serve_measures_http_and_grpc_with_the_same_counts() {
    let (_process, http, grpc) = served();
    let url = format!("http://{http}");
    let folder = tempfile::tempdir().unwrap();
    let (file, page) = (folder.path().join("report.json"), folder.path().join("report.html"));
    let files = ["--json", file.to_str().unwrap(), "--html", page.to_str().unwrap()];
    let load = ["--concurrency", "1,4", "--requests-per-slot", "3", "--warmup", "2"];
    let tables = bench(&[&["serve", "--url", &url][..], &SMALL, &load, &files].concat());
    assert!(tables.contains("concurrency 4") && tables.contains("TTFT"), "{tables}");
    let report = json(&std::fs::read_to_string(&file).unwrap());
    for (point, n) in report["points"].as_array().unwrap().iter().zip([3, 12]) {
        assert_eq!((&point["requests"], &point["completed"], &point["short"]), (&n.into(), &n.into(), &0.into()));
        assert_eq!((&point["input_tokens"], &point["output_tokens"]), (&(8 * n).into(), &(4 * n).into()));
        for times in ["ttft_ms", "itl_ms", "e2e_ms"] {
            let values = ordered(&point[times]);
            assert!(values.is_sorted() && values[0] > 0.0, "{times}: {values:?}");
        }
        assert!(point["output_tokens_per_s"].as_f64().unwrap() > 0.0);
    }
    let page = std::fs::read_to_string(page).unwrap();
    assert!(page.starts_with("<!doctype html>") && page.contains("<svg") && page.contains("Throughput"));

    let load = ["--grpc", &grpc, "--concurrency", "2", "--num-requests", "6", "--json", "-"];
    let report = json(&bench(&[&["serve"][..], &SMALL, &load].concat()));
    let point = &report["points"][0];
    assert_eq!((&report["api"], &point["completed"], &point["output_tokens"]), (&"grpc".into(), &6.into(), &24.into()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_killed_is_errors_by_kind_in_the_report() {
    let (mut process, http, _grpc) = served();
    let url = format!("http://{http}");
    let load = ["--concurrency", "4", "--num-requests", "3000", "--output-len", "64", "--input-len", "8"];
    let args = [&["bench", "serve", "--url", &url, "--vocab-size", "256", "--json", "-"][..], &load].concat();
    let mut running = Process::tessera("bench", &args, None);
    tests::wait::until("requests are answered", READY, async || {
        let n = Metrics::fetch(&http).await?.sum("gen_ai_server_request_duration_seconds_count", &[]);
        if n >= 4.0 { Ok(()) } else { Err(anyhow::anyhow!("{n} requests so far")) }
    })
    .await;
    process.kill();
    let status = running.ended(READY);
    let point = json(&running.output())["points"][0].clone();
    let errors = point["errors"].as_object().unwrap();
    let n_errors: u64 = errors.values().map(|n| n.as_u64().unwrap()).sum();
    let n_completed = point["completed"].as_u64().unwrap();
    // It gives up on a server that is gone.
    assert!(n_completed >= 4 && n_errors >= 4 * 16 && n_completed + n_errors <= 3000, "{point:#}");
    assert_eq!(status.success(), n_errors <= n_completed, "{}", running.errors());
    assert!(errors.contains_key("connect"), "{errors:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interrupted_load_still_reports() {
    let (_process, http, _grpc) = served();
    let url = format!("http://{http}");
    let args = [&["bench", "serve", "--url", &url, "--duration", "3600", "--json", "-"][..], &SMALL].concat();
    let mut running = Process::tessera("bench", &args, None);
    tests::wait::until("requests are answered", READY, async || {
        let n = Metrics::fetch(&http).await?.sum("gen_ai_server_request_duration_seconds_count", &[]);
        if n >= 4.0 { Ok(()) } else { Err(anyhow::anyhow!("{n} requests so far")) }
    })
    .await;
    running.terminate();
    assert!(running.ended(READY).success(), "{}", running.errors());
    let report = json(&running.output());
    assert_eq!(report["interrupted"], true);
    assert!(report["points"][0]["completed"].as_u64().unwrap() >= 3, "{report:#}");
}

#[test]
fn engine_times_prefill_decode_and_the_step_around_them() {
    let tiny = place::tiny("llama");
    let sizes = ["--prompt", "16,32", "--batch", "1,2", "--context", "16", "--decode-steps", "4", "--repetitions", "2"];
    let args = ["engine", "--model", tiny.to_str().unwrap(), "--threads", "2", "--engine", "--json"];
    let report = json(&bench(&[&args[..], &sizes].concat()));
    let results = report["results"].as_array().unwrap();
    let tests: Vec<&str> = results.iter().map(|result| result["test"].as_str().unwrap()).collect();
    assert_eq!(tests, ["prefill", "prefill", "decode", "decode", "engine_decode", "engine_decode"]);
    for result in results {
        let rates = ["min", "median", "max"].map(|field| result["tokens_per_s"][field].as_f64().unwrap());
        assert!(rates.is_sorted() && rates[0] > 0.0, "{result:#}");
        assert!(result["bound_tokens_per_s"].as_f64().unwrap() > 0.0, "{result:#}");
    }
    assert!(results[5]["overhead_us"]["median"].as_f64().unwrap() > 0.0);
    assert!(report["read_bytes_per_s"].as_f64().unwrap() > 1e8 && report["weight_bytes"].as_u64().unwrap() > 0);
}

#[test]
fn kernels_are_timed_beside_their_bound() {
    let sizes = ["--rows", "1,8", "--time-ms", "1", "--spread-mb", "1", "--context-max", "512"];
    let args = ["kernels", "--threads", "2", "--format", "bf16,q8_0", "--json"];
    let report = json(&bench(&[&args[..], &sizes].concat()));
    let results = report["results"].as_array().unwrap();
    for kernel in ["matmul", "attention_prefill", "attention_decode", "rms_norm", "rope", "gated_activation"] {
        assert!(results.iter().any(|result| result["kernel"] == kernel), "no {kernel}");
    }
    assert_eq!(results.iter().filter(|result| result["kernel"] == "matmul").count(), 2 * 5 * 2);
    for result in results {
        for field in ["us", "gflops", "gbytes_per_s", "bound_gflops", "of_bound"] {
            let value = result[field].as_f64().unwrap();
            assert!(value > 0.0 && value.is_finite(), "{field} of {result:#}");
        }
    }
}

#[test]
fn what_cannot_be_measured_is_said_and_fails() {
    let failed = |args: &[&str]| {
        let output = Command::new(place::tessera()).arg("bench").args(args).output().unwrap();
        assert!(!output.status.success(), "{args:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let gone = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let error = failed(&["serve", "--url", &format!("http://{gone}")]);
    assert!(error.contains(&gone.to_string()) && error.contains("--model"), "{error}");
    let error = failed(&["serve", "--json", "no/such/folder/report.json"]);
    assert!(error.contains("no/such/folder"), "{error}");
    let tiny = place::tiny("llama");
    let error = failed(&["engine", "--model", tiny.to_str().unwrap(), "--prompt", "100000"]);
    assert!(error.contains("100000") && error.contains("512"), "{error}");
    let error = failed(&["kernels", "--cpu", "nonsense"]);
    assert!(error.contains("nonsense"), "{error}");
}
