//! `tessera serve` as a person uses it: the printed curl, `tessera generate`, the OpenAI client, a reflecting gRPC client.

#![allow(
    clippy::disallowed_methods,
    clippy::print_stderr,
    clippy::unwrap_used,
    missing_docs,
    reason = "tests: a failed step panics, and real time is what they measure"
)]

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::Value;
use tests::place;
use tests::process::{Process, fields};

const READY: Duration = Duration::from_secs(120);

struct Served {
    _process: Process,
    http: String,
    grpc: String,
    model: String,
    curl: String,
}

fn serve(extra: &[&str]) -> Served {
    let model = place::smollm2();
    let mut args = vec!["serve", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--model", model.to_str().unwrap()];
    args.extend(extra);
    let process = Process::tessera("serve", &args, None);
    let (http, grpc, model) = process.line("ready line", READY, |line| {
        let fields = fields(line.strip_prefix("ready ")?);
        Some((fields["http"].to_owned(), fields["grpc"].to_owned(), fields["model"].to_owned()))
    });
    let output = process.output();
    let curl = output.split("curl").nth(1).map(|rest| format!("curl{rest}")).unwrap_or_default();
    let curl = curl.split("\nready ").next().unwrap_or_default().trim().to_owned();
    Served { _process: process, http, grpc, model, curl }
}

fn shell(command: &str) -> String {
    let output = Command::new("bash").args(["-c", command]).output().unwrap();
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn python(script: &str, args: &[&str]) {
    let script = place::here().join("python").join(script);
    let output =
        Command::new("python3").arg(&script).args(args).env("PYTHONPATH", place::python_clients()).output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}:\n{out}\n{err}", script.display());
    eprintln!("{out}");
}

/// What SmolLM2 says after "The capital of France is", from the committed reference.
fn reference() -> (Vec<u32>, Vec<u32>) {
    let text =
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/smollm2_greedy.json")).unwrap();
    let reference: Value = serde_json::from_str(&text).unwrap();
    let ids = |field: &str| -> Vec<u32> {
        let ids = reference["cases"][0][field].as_array().unwrap();
        ids.iter().map(|id| u32::try_from(id.as_u64().unwrap()).unwrap()).collect()
    };
    assert_eq!(reference["cases"][0]["prompt"], "The capital of France is");
    (ids("prompt_ids"), ids("output_ids"))
}

#[tokio::test(flavor = "multi_thread")]
async fn one_command_answers_curl_generate_and_both_python_clients() {
    let served = serve(&[]);
    let answer: Value = serde_json::from_str(&shell(&format!("{} --silent --show-error", served.curl))).unwrap();
    assert!(!answer["choices"][0]["message"]["content"].as_str().unwrap().is_empty(), "{answer}");

    let (prompt, output) = reference();
    let body = serde_json::json!({
        "model": served.model, "prompt": prompt, "max_tokens": 8, "temperature": 0, "return_token_ids": true,
    });
    let (status, answer) = tests::client::post(&served.http, "/v1/completions", &body).await.unwrap();
    assert_eq!(status, 200, "{answer}");
    assert_eq!(answer["choices"][0]["token_ids"], serde_json::json!(output[..8]), "{answer}");

    let generate = Command::new(place::tessera())
        .args(["generate", "The capital of France is", "--grpc", &served.grpc, "--max-tokens", "8"])
        .output()
        .unwrap();
    assert!(generate.status.success(), "{}", String::from_utf8_lossy(&generate.stderr));
    let text = String::from_utf8(generate.stdout).unwrap();
    let expected = answer["choices"][0]["text"].as_str().unwrap();
    assert!(text.contains(expected.trim()), "{text:?} shows {expected:?}");

    python("openai_client.py", &[&format!("http://{}/v1", served.http), &served.model]);
    python("grpc_client.py", &[&served.grpc, &served.model]);
}

#[tokio::test(flavor = "multi_thread")]
async fn isolated_roles_are_processes_of_their_own_and_end_with_their_parent() {
    let tiny = place::tiny("llama");
    let args =
        ["serve", "--isolate", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--model", tiny.to_str().unwrap()];
    let temporary = tempfile::tempdir().unwrap();
    let mut command = Command::new(place::tessera());
    command.args(args).env("TMPDIR", temporary.path());
    let mut process = Process::start("serve --isolate", command);
    let http = process.line("ready line", READY, |line| Some(fields(line.strip_prefix("ready ")?)["http"].to_owned()));
    let output = process.output();
    let children: Vec<(&str, u32)> = output
        .lines()
        .filter_map(|line| {
            let mut words = line.split(' ');
            let role = words.next().filter(|role| ["scheduler", "router", "worker"].contains(role))?;
            Some((role, words.next()?.parse().ok()?))
        })
        .collect();
    let count = |role: &str| children.iter().filter(|(known, _)| *known == role).count();
    assert_eq!((count("scheduler"), count("router"), count("worker")), (1, 1, 2), "{output}");
    let body = serde_json::json!({"prompt": [5, 6, 7], "max_tokens": 4, "model": "llama"});
    let (status, answer) = tests::client::post(&http, "/v1/completions", &body).await.unwrap();
    assert_eq!(status, 200, "{answer}");
    assert_eq!(std::fs::read_dir(temporary.path()).unwrap().count(), 0, "the hash key is in no file");
    process.kill();
    let gone = |pid: u32| !Path::new(&format!("/proc/{pid}/exe")).exists();
    tests::wait::until("children end", Duration::from_secs(10), async || {
        let alive: Vec<_> = children.iter().filter(|(_, pid)| !gone(*pid)).collect();
        if alive.is_empty() { Ok(()) } else { Err(format!("{alive:?}")) }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sigterm_ends_serve_with_success() {
    let tiny = place::tiny("llama");
    let args = ["serve", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--model", tiny.to_str().unwrap()];
    let mut process = Process::tessera("serve", &args, None);
    process.line("ready line", READY, |line| line.strip_prefix("ready ").map(drop));
    process.terminate();
    assert!(process.ended(Duration::from_secs(20)).success(), "{}", process.errors());
}
