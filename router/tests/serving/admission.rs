//! Tenants and their quotas over both APIs.

use std::num::NonZeroU64;
use std::sync::atomic::Ordering;

use contract::error::RequestError;
use futures::StreamExt as _;
use proto::inference::v1 as wire;
use router::Config;
use router::admission::{ApiKey, TenantLimits};
use serde_json::{Value, json};

use crate::client::{Reply, send, send_with};
use crate::place::{Place, until};

fn with_tenants(config: &mut Config) {
    let limits = |requests, tokens, at_once| TenantLimits {
        requests_per_minute: NonZeroU64::new(requests),
        tokens_per_minute: NonZeroU64::new(tokens),
        n_concurrent_max: NonZeroU64::new(at_once),
        ..TenantLimits::default()
    };
    let tenants = [("few", limits(6, 0, 0)), ("short", limits(0, 600, 0)), ("one", limits(0, 0, 1))];
    let admission = &mut config.admission;
    admission.keys = tenants.iter().map(|(name, _)| (ApiKey(format!("sk-{name}")), (*name).to_owned())).collect();
    admission.tenants = tenants.map(|(name, limits)| (name.to_owned(), limits)).into();
}

/// A series of admission as its page spells it.
fn series(place: &Place, name: &str, label: &str) -> String {
    format!("tessera_admission_{name}_total{{role=\"router\",instance=\"{}\",{label}}}", place.id)
}

async fn complete(place: &Place, headers: &[(&str, &str)], body: Value) -> Reply {
    send_with(place.http, "POST", "/v1/completions", headers, body.to_string().as_bytes()).await
}

async fn refusal(reply: Reply) -> (Vec<String>, Value) {
    assert_eq!(reply.status, 429, "{:?}", reply.headers);
    let headers = reply.headers.clone();
    let error = serde_json::from_str::<Value>(&reply.text().await).unwrap()["error"].take();
    (headers, error)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_has_its_quota_and_others_are_not_touched_by_it() {
    let place = Place::start_with(1, with_tenants).await;
    let body = json!({"prompt": [5, 6], "max_tokens": 1});
    let key = [("authorization", "Bearer sk-few")];
    assert_eq!(complete(&place, &key, body.clone()).await.status, 200, "a burst of one");
    let (headers, error) = refusal(complete(&place, &key, body.clone()).await).await;
    assert_eq!((&error["code"], &error["type"]), (&json!("quota_exceeded"), &json!("rate_limit_error")));
    assert!(error["message"].as_str().unwrap().contains("tenant few has used its 6 requests per minute"), "{error}");
    let after = headers.iter().find_map(|header| header.strip_prefix("retry-after: ")?.parse::<u64>().ok());
    assert!(after.is_some_and(|seconds| (1..=10).contains(&seconds)), "{headers:?}");

    let others: [&[(&str, &str)]; 4] =
        [&[], &[("authorization", "Bearer sk-9")], &[("authorization", "Basic sk-few")], &[("x-tenant", "few")]];
    for headers in others {
        assert_eq!(complete(&place, headers, body.clone()).await.status, 200, "{headers:?}");
    }
    assert_eq!(place.workers[0].state.requests.lock().unwrap()[0].tenant, "few");
    assert_eq!(place.workers[0].state.requests.lock().unwrap()[1].tenant, "default");
    assert_eq!(place.metric(&series(&place, "rejections", "reason=\"quota_exceeded\"")).await, 1.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_wrong_at_first_sight_costs_no_request() {
    let place = Place::start_with(1, with_tenants).await;
    let key = [("authorization", "Bearer sk-few")];
    for (field, value, status) in [
        ("model", json!("gpt-9"), 404),
        ("prompt", json!([]), 400),
        ("n", json!(0), 400),
        ("temperature", json!(-1), 400),
    ] {
        let mut body = json!({"prompt": [5, 6], "max_tokens": 1});
        body[field] = value;
        for _ in 0..3 {
            assert_eq!(complete(&place, &key, body.clone()).await.status, status, "{field}");
        }
    }
    let body = json!({"prompt": [5, 6], "max_tokens": 1});
    assert_eq!(complete(&place, &key, body.clone()).await.status, 200, "the burst of one is still there");
    refusal(complete(&place, &key, body).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_says_how_long_it_waits() {
    let place = Place::start_with(1, with_tenants).await;
    place.workers[0].state.hold_after.store(1, Ordering::SeqCst);
    let ask = async |ms: &str| {
        let body = json!({"prompt": [5, 6], "max_tokens": 5});
        let reply = complete(&place, &[("x-request-timeout-ms", ms)], body).await;
        let status = reply.status;
        (status, serde_json::from_str::<Value>(&reply.text().await).unwrap()["error"].take())
    };
    let (status, error) = ask("50").await;
    assert_eq!((status, &error["code"]), (504, &json!("deadline_exceeded")), "{error}");
    for wrong in ["soon", "0", "-5", ""] {
        let (status, error) = ask(wrong).await;
        assert_eq!((status, &error["param"]), (400, &json!("x-request-timeout-ms")), "{wrong}: {error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_are_charged_for_prompt_and_answer_and_refused_ones_are_free() {
    let place = Place::start_with(1, with_tenants).await;
    let key = [("authorization", "Bearer sk-short")];
    // 600 a minute is a burst of 100.
    let wrong = json!({"prompt": vec![5; 90], "max_tokens": 1, "temperature": -1});
    assert_eq!(complete(&place, &key, wrong).await.status, 400);
    let body = json!({"prompt": vec![5; 60], "max_tokens": 40});
    let reply = complete(&place, &key, body.clone()).await;
    assert_eq!(reply.status, 200);
    reply.text().await;
    let charged = async |tenant: &str| place.metric(&series(&place, "tokens", &format!("tenant=\"{tenant}\""))).await;
    until("it is settled", async || charged("short").await == 100.0).await;
    let (_, error) = refusal(complete(&place, &key, body).await).await;
    assert!(error["message"].as_str().unwrap().contains("600 tokens per minute"), "{error}");
    assert_eq!(charged("other").await, 0.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_at_once_are_counted_until_their_stream_ends() {
    let place = Place::start_with(1, |config| {
        with_tenants(config);
        config.admission.tenant_header = Some("x-tenant".to_owned());
    })
    .await;
    place.workers[0].state.hold_after.store(1, Ordering::SeqCst);
    let ask = async || {
        let request = wire::GenerateRequest {
            prompt: Some(wire::generate_request::Prompt::Tokens(wire::TokenIds { ids: vec![5] })),
            ..wire::GenerateRequest::default()
        };
        let mut request = tonic::Request::new(request);
        request.metadata_mut().insert("x-tenant", "one".parse().unwrap());
        place.inference().await.generate(request).await
    };
    let mut first = ask().await.unwrap().into_inner();
    first.next().await.unwrap().unwrap();
    let refused = ask().await.unwrap_err();
    let expected = RequestError::QuotaExceeded {
        tenant: "one".to_owned(),
        quota: "1 requests at once".to_owned(),
        retry_after_ms: 1_000,
    };
    assert_eq!(proto::status::from_status(&refused), expected);
    assert_eq!(refused.code(), tonic::Code::ResourceExhausted);
    drop(first);
    until("the place is free again", async || ask().await.is_ok()).await;
}

/// Series of this router on its page.
async fn n_series(place: &Place) -> usize {
    let page = send(place.http, "GET", "/metrics", b"").await.text().await;
    page.lines().filter(|line| line.contains(&format!("instance=\"{}\"", place.id))).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_model_and_tenant_names_make_no_metric_series() {
    let place = Place::start_with(1, |config| {
        with_tenants(config);
        config.admission.tenant_header = Some("x-tenant".to_owned());
    })
    .await;
    let client = place.inference().await;
    let ask = |index: u64| {
        let mut client = client.clone();
        let name = format!("{:x}", daemon::random::u64());
        let request = wire::GenerateRequest {
            // One in ten is served.
            model: if index.is_multiple_of(10) { String::new() } else { name.clone() },
            prompt: Some(wire::generate_request::Prompt::Tokens(wire::TokenIds { ids: vec![5] })),
            options: Some(wire::Options { max_tokens: Some(1), ..wire::Options::default() }),
        };
        let mut request = tonic::Request::new(request);
        request.metadata_mut().insert("x-tenant", name.parse().unwrap());
        request.metadata_mut().insert("authorization", format!("Bearer {name}").parse().unwrap());
        async move {
            match client.generate(request).await {
                Ok(stream) => {
                    let mut parts = stream.into_inner();
                    while let Some(part) = parts.next().await {
                        part.unwrap();
                    }
                }
                Err(status) => assert_eq!(status.code(), tonic::Code::NotFound, "{status}"),
            }
        }
    };
    futures::stream::iter(0..100).for_each_concurrent(32, &ask).await;
    let before = n_series(&place).await;
    futures::stream::iter(0..10_000).for_each_concurrent(32, &ask).await;
    assert!(before > 10, "{before}");
    assert_eq!(n_series(&place).await, before);
}

/// A router that places next to nothing ahead, on a worker whose first tokens are held.
///
/// Nothing is known of the worker's speed, so a prompt is taken for some time: one more is placed when that is over, and
/// then none until the first has its token.
async fn held() -> Place {
    let place = Place::start_with(1, |config| {
        with_tenants(config);
        config.workers.dispatch_ahead_ms = 1;
    })
    .await;
    place.workers[0].state.is_held.store(true, Ordering::SeqCst);
    place
}

/// A prompt that shares nothing with another token's, so that none is promised what another computes.
fn uncached(token: u32) -> Value {
    json!({"prompt": vec![token + 3; 500], "max_tokens": 1})
}

async fn n_queued(place: &Place) -> f64 {
    let series = format!("tessera_router_requests{{role=\"router\",instance=\"{}\",state=\"queued\"}}", place.id);
    place.metric(&series).await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_tenants_request_goes_before_those_that_another_has_waiting() {
    let place = held().await;
    let ask = async |token: u32, headers: &[(&str, &str)]| complete(&place, headers, uncached(token)).await.status;
    let others = futures::future::join_all((0..12).map(|token| ask(token, &[])));
    let idle = async {
        until("all but two wait", async || place.workers[0].n_requests() == 2 && n_queued(&place).await == 10.0).await;
        ask(12, &[("authorization", "Bearer sk-one")]).await
    };
    let release = async {
        until("it waits too", async || place.workers[0].n_requests() == 2 && n_queued(&place).await == 11.0).await;
        place.workers[0].state.is_held.store(false, Ordering::SeqCst);
    };
    let (statuses, status, ()) = tokio::join!(others, idle, release);
    assert!(statuses.into_iter().chain([status]).all(|status| status == 200));
    let requests = place.workers[0].state.requests.lock().unwrap();
    let tenants: Vec<&str> = requests.iter().map(|request| request.tenant.as_str()).collect();
    assert_eq!((tenants.len(), tenants[2]), (13, "one"), "{tenants:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_goes_away_leaves_the_queue_at_once() {
    let place = held().await;
    let mut asks: Vec<_> = (0..20).map(|token| Box::pin(complete(&place, &[], uncached(token)))).collect();
    tokio::select! {
        _ = futures::future::join_all(&mut asks) => panic!("none is answered"),
        () = until("they wait", async || n_queued(&place).await > 10.0) => {}
    }
    drop(asks);
    until("none waits", async || n_queued(&place).await == 0.0).await;
    let streams = &place.workers[0].state.n_streams;
    until("none runs", async || streams.load(Ordering::SeqCst) == 0).await;
}
