//! Bad input gets a clear typed error, and nothing is lost or left behind.

#![allow(
    clippy::disallowed_methods,
    clippy::print_stderr,
    clippy::unwrap_used,
    missing_docs,
    reason = "tests: a failed step panics, and real time is what they measure"
)]

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};
use tests::cluster::{Cluster, Plan};
use tests::process::Process;
use tests::{client, etcd, place, wait};

const END: Duration = Duration::from_secs(60);

/// Body, status, `code` (or any), and what the message must name.
type Row = (Value, u16, &'static str, &'static str);

fn completion_rows() -> Vec<Row> {
    let ask = |key: &str, value: Value| {
        let mut body = json!({"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 2});
        body[key] = value;
        body
    };
    vec![
        (ask("model", json!("gpt-9")), 404, "model_not_found", "gpt-9"),
        (ask("prompt", json!("")), 400, "", "prompt"),
        (ask("prompt", json!([])), 400, "", "prompt"),
        (ask("prompt", json!([999_999])), 400, "", "999999"),
        (ask("prompt", json!([-1])), 400, "", "prompt"),
        (ask("prompt", json!(vec![5; 600])), 400, "context_length_exceeded", "600"),
        (ask("temperature", json!(-1)), 400, "", "temperature"),
        (ask("temperature", json!("hot")), 400, "", "temperature"),
        (ask("top_p", json!(0)), 400, "", "top_p"),
        (ask("n", json!(0)), 400, "", "n"),
        (ask("n", json!(1_000_000)), 400, "", "n"),
        (ask("max_tokens", json!(0)), 400, "", "max_tokens"),
        (ask("min_tokens", json!(9)), 400, "", "min_tokens"),
        (ask("logprobs", json!(10_000)), 400, "", "logprobs"),
        (ask("stop_token_ids", json!([999_999])), 400, "", "stop_token_ids"),
        (ask("logit_bias", json!({"5": 1000})), 400, "", "logit_bias"),
        (ask("temprature", json!(1)), 400, "", "temprature"),
        (json!({"model": "tiny"}), 400, "", "prompt"),
    ]
}

async fn check_error(cluster: &Cluster, path: &str, (body, status, code, names): &Row) {
    let (got, answer) = cluster.post(path, body).await;
    assert_eq!(got, *status, "{body}: {answer}");
    let error = &answer["error"];
    assert!(error["message"].as_str().is_some_and(|message| message.contains(names)), "{body}: {answer}");
    assert!(error["type"].is_string(), "{body}: {answer}");
    if !code.is_empty() {
        assert_eq!(error["code"], *code, "{body}: {answer}");
    }
}

async fn raw(cluster: &Cluster, body: &[u8]) -> (u16, Value) {
    let url = format!("http://{}/v1/completions", cluster.routers[0].http);
    let request = client::http().post(url).header("content-type", "application/json").body(body.to_vec());
    let response = request.send().await.unwrap();
    (response.status().as_u16(), response.json().await.unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_requests_are_refused_by_name_and_leave_nothing() {
    let cluster = Cluster::start(Plan::default()).await;
    for row in completion_rows() {
        check_error(&cluster, "/v1/completions", &row).await;
    }
    for row in [
        (json!({"model": "tiny", "messages": []}), 400, "", "messages"),
        (json!({"model": "tiny", "messages": [{"content": "x"}]}), 400, "", "role"),
        (json!({"model": "tiny", "messages": [{"role": "user", "content": "x"}]}), 400, "", "template"),
    ] {
        check_error(&cluster, "/v1/chat/completions", &row).await;
    }
    for body in
        [&b"\xff\xfe{"[..], b"{\"model\": \"tiny\", \"prompt\": \"\xc3\x28\"}", b"{\"model\": \"tiny\"", b"", b"[]"]
    {
        let (status, answer) = raw(&cluster, body).await;
        assert_eq!(status, 400, "{answer}");
        assert!(answer["error"]["message"].is_string(), "{answer}");
    }
    let (status, answer) =
        cluster.post("/v1/completions", &json!({"model": "tiny", "prompt": [5], "max_tokens": 2})).await;
    assert_eq!(status, 200, "it still serves: {answer}");
    cluster.wait_for_rest(Duration::from_secs(20)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_longer_than_the_pool_is_refused_with_the_pools_limit() {
    let mut plan = Plan::default();
    plan.worker.insert("n_blocks".to_owned(), 8.into());
    let cluster = Cluster::start(plan).await;
    let body = json!({"model": "tiny", "prompt": vec![5; 200], "max_tokens": 2});
    let (status, answer) = cluster.post("/v1/completions", &body).await;
    assert_eq!((status, &answer["error"]["code"]), (400, &json!("context_length_exceeded")), "{answer}");
    assert!(answer["error"]["message"].as_str().unwrap().contains("200"), "{answer}");
    cluster.wait_for_rest(Duration::from_secs(20)).await;
}

/// Runs `tessera serve` to its failure and returns what it said.
fn refused(args: &[&str]) -> String {
    let mut all = vec!["serve", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"];
    all.extend(args);
    let mut process = Process::tessera("serve", &all, None);
    let status = process.ended(END);
    let errors = process.errors();
    assert_eq!(status.code(), Some(1), "{args:?}: {errors}");
    assert!(!errors.contains("panicked"), "{errors}");
    errors
}

fn copy_of_tiny(folder: &Path) -> PathBuf {
    for entry in std::fs::read_dir(place::tiny("llama")).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), folder.join(entry.file_name())).unwrap();
    }
    folder.to_owned()
}

#[test]
fn damaged_model_files_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let model = copy_of_tiny(folder.path());
    let weights = model.join("model.safetensors");
    let whole = std::fs::read(&weights).unwrap();
    std::fs::write(&weights, &whole[..whole.len() / 2]).unwrap();
    let model = model.to_str().unwrap();
    assert!(refused(&["--model", model]).contains("model.safetensors"));
    let mut huge = whole.clone();
    huge[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    std::fs::write(&weights, &huge).unwrap();
    assert!(refused(&["--model", model]).contains("model.safetensors"));
    std::fs::write(&weights, &whole).unwrap();
    std::fs::remove_file(folder.path().join("tokenizer.json")).unwrap();
    assert!(refused(&["--model", model]).contains("tokenizer.json"));
    assert!(refused(&["--model", "/no/such/model"]).contains("/no/such/model"));
    let gguf = folder.path().join("cut.gguf");
    let whole = std::fs::read(place::smollm2()).unwrap();
    for length in [0, 3, 20, 1000, 2_000_000, whole.len() - 1] {
        std::fs::write(&gguf, &whole[..length]).unwrap();
        assert!(refused(&["--model", gguf.to_str().unwrap()]).contains("cut.gguf"));
    }
}

#[test]
fn a_port_in_use_is_named_with_the_way_out() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let tiny = place::tiny("llama");
    for flag in ["--http", "--grpc"] {
        let args = ["serve", "--model", tiny.to_str().unwrap(), flag, &address];
        let other = if flag == "--http" { ["--grpc", "127.0.0.1:0"] } else { ["--http", "127.0.0.1:0"] };
        let mut process = Process::tessera("serve", &[&args[..], &other[..]].concat(), None);
        assert_eq!(process.ended(END).code(), Some(1));
        let errors = process.errors();
        assert!(errors.contains(&address) && errors.contains("in use"), "{errors}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_etcd_that_is_down_at_start_is_waited_for_and_named() {
    let port = etcd::free_port();
    let config = toml::toml! {
        hash_key = "0707070707070707070707070707070707070707070707070707070707070707"
        [membership]
        kind = "etcd"
    };
    let mut config = config;
    let endpoint = format!("http://127.0.0.1:{port}");
    config["membership"].as_table_mut().unwrap().insert("endpoints".to_owned(), vec![endpoint.clone()].into());
    let mut process =
        Process::tessera("scheduler", &["scheduler", "--set", "scheduler.listen=127.0.0.1:0"], Some(&config));
    wait::until("the endpoint is named", END, async || {
        if process.errors().contains(&endpoint) { Ok(()) } else { Err(process.errors()) }
    })
    .await;
    assert!(process.is_running(), "an absent etcd ends nobody");
}

#[test]
fn configuration_mistakes_are_named() {
    let tiny = place::tiny("llama");
    let model = ["--model", tiny.to_str().unwrap()];
    assert!(refused(&[&model[..], &["--set", "worker.dtype=f17"]].concat()).contains("dtype"));
    let check = refused(&[&model[..], &["--check-config", "--set", "worker.blok_size=16"]].concat());
    assert!(check.contains("worker.blok_size"), "{check}");
}

#[test]
fn what_cannot_work_is_told_by_a_check_alone() {
    let key = "hash_key=".to_owned() + &"0a".repeat(32);
    let check = |role: &str, sets: &[&str]| {
        let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
        let mut process = Process::tessera(role, &[&[role, "--check-config"], &sets[..]].concat(), None);
        (process.ended(END).success(), process.errors() + &process.output())
    };
    for role in ["scheduler", "router", "worker"] {
        let (is_good, said) = check(role, &[&key]);
        assert!(is_good && said.contains("the configuration is good"), "{role}: {said}");
    }
    let wrong = [
        ("worker", "hash_key=zz", "worker.hash_key has 2 characters"),
        ("router", "hash_key=zz", "router.hash_key has 2 characters"),
        ("worker", "worker.n_blocks=0", "worker.n_blocks is 0"),
        ("worker", "worker.listen=nowhere", "worker.listen \"nowhere\""),
        ("worker", "worker.advertise=garbage", "worker.advertise \"garbage\""),
        ("worker", "worker.id=' w'", "\" w\""),
        ("worker", "membership.ttl_ms=0", "ttl_ms"),
        ("router", "router.advertise=0.0.0.0:80", "router.advertise \"0.0.0.0:80\""),
        ("router", "scheduler_addresses=['x']", "router.scheduler_addresses \"x\""),
        ("router", "router.policy=luck", "prefix_latency"),
        ("router", "router.workers.backoff_ms_min=9000", "backoff_ms_min is 9000"),
        ("scheduler", "scheduler.listen=:80", "scheduler.listen \":80\""),
        ("scheduler", "scheduler.occupancy_stale_ms=0", "occupancy_stale_ms"),
        ("scheduler", "membership.endpoints=['one two']", "one two"),
    ];
    for (role, set, what) in wrong {
        let (is_good, said) = check(role, &[&key, set]);
        assert!(!is_good && said.contains(what), "{role} {set}: {said}");
    }
}
