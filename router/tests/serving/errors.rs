//! Bad requests are refused by name, with the status that OpenAI's clients expect.

use serde_json::{Value, json};

use crate::client::{post, post_bytes, send};
use crate::place::Place;

fn rows() -> Vec<(&'static str, Value, u16, &'static str)> {
    vec![
        ("model", json!("gpt-9"), 404, "gpt-9"),
        ("prompt", json!(""), 400, "prompt"),
        ("prompt", json!([]), 400, "prompt"),
        ("prompt", json!([999]), 400, "999"),
        ("prompt", json!([-1]), 400, "prompt"),
        ("prompt", json!(vec![5; 600]), 400, "600"),
        ("temperature", json!(-1), 400, "temperature"),
        ("temperature", json!("hot"), 400, "temperature"),
        ("top_p", json!(0), 400, "top_p"),
        ("top_k", json!(-2), 400, "top_k"),
        ("n", json!(0), 400, "n:"),
        ("n", json!(-1), 400, "n:"),
        ("n", json!(1_000_000), 400, "n:"),
        ("max_tokens", json!(0), 400, "max_tokens"),
        ("min_tokens", json!(9), 400, "min_tokens"),
        ("logprobs", json!(10_000), 400, "logprobs"),
        ("stop", json!([""]), 400, "stop"),
        ("stop_token_ids", json!([999]), 400, "stop_token_ids"),
        ("logit_bias", json!({"5": 1000}), 400, "logit_bias"),
        ("temprature", json!(1), 400, "temprature"),
        ("echo", json!(true), 400, "echo"),
        ("response_format", json!({"type": "json_object"}), 400, "response_format"),
        ("stream_options", json!({"include_usage": true}), 400, "stream_options"),
        ("echo", json!(false), 200, ""),
        ("response_format", json!({"type": "text"}), 200, ""),
        ("user", json!("me"), 200, ""),
        ("seed", json!(-5), 200, ""),
        ("top_k", json!(-1), 200, ""),
        ("stop", json!(null), 200, ""),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_fields_are_refused_by_name_and_harmless_ones_pass() {
    let place = Place::start(1).await;
    for (key, value, expected, names) in rows() {
        let mut body = json!({"model": "tiny", "prompt": [5, 6], "max_tokens": 2});
        body[key] = value;
        let (status, answer) = post(place.http, "/v1/completions", &body).await;
        assert_eq!(status, expected, "{body}: {answer}");
        if expected != 200 {
            assert!(answer["error"]["message"].as_str().unwrap().contains(names), "{body}: {answer}");
        }
    }
    for (body, names) in [
        (json!({"messages": []}), "messages"),
        (json!({"messages": [{"content": "x"}]}), "role"),
        (json!({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}), "image_url"),
        (json!({"messages": [{"role": "user", "content": "t3"}], "max_completion_tokens": 0}), "max_completion_tokens"),
        (json!({"messages": [{"role": "user", "content": "t3"}], "top_logprobs": 2}), "top_logprobs"),
        (json!({"messages": [{"role": "user", "content": "t3"}], "tools": [{"type": "function"}]}), "tools"),
    ] {
        let (status, answer) = post(place.http, "/v1/chat/completions", &body).await;
        assert_eq!(status, 400, "{body}: {answer}");
        assert!(answer["error"]["message"].as_str().unwrap().contains(names), "{body}: {answer}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn broken_json_says_where() {
    let place = Place::start(0).await;
    for (body, names) in [
        (&b"{\"prompt\": \"\xc3\x28\"}"[..], "UTF-8"),
        (b"{\"prompt\": \"x\"", "line 1 column 14"),
        (b"", "line 1"),
        (b"[]", "object"),
        (b"{\"prompt\": \"x\",\n \"top_p\": []}", "line 2"),
    ] {
        let (status, answer) = post_bytes(place.http, "/v1/completions", body).await;
        assert_eq!(status, 400, "{answer}");
        assert!(answer["error"]["message"].as_str().unwrap().contains(names), "{names}: {answer}");
    }
    assert_eq!(send(place.http, "POST", "/v1/nothing", b"{}").await.status, 404);
    assert_eq!(send(place.http, "GET", "/v1/completions", b"").await.status, 405);
}

#[tokio::test(flavor = "multi_thread")]
async fn bounds_and_absent_workers_have_their_own_status() {
    let place = Place::start_with(0, |config| {
        config.limits.body_bytes_max = 200;
        config.workers.handshake_timeout_ms = 200;
    })
    .await;
    let (status, answer) = post(place.http, "/v1/completions", &json!({"prompt": "t3 ".repeat(100)})).await;
    assert_eq!(status, 413, "{answer}");
    let (status, answer) = post(place.http, "/v1/completions", &json!({"prompt": [5]})).await;
    assert_eq!((status, &answer["error"]["code"]), (503, &json!("no_worker")), "{answer}");
    assert_eq!(send(place.http, "GET", "/readyz", b"").await.status, 503);
    let full = Place::start_with(0, |config| config.limits.n_in_flight_max = 0).await;
    let reply = send(full.http, "POST", "/v1/completions", b"{\"prompt\": [5]}").await;
    assert_eq!(reply.status, 429);
    assert!(reply.headers.iter().any(|header| header.starts_with("retry-after: 1")), "{:?}", reply.headers);
}
