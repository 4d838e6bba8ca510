//! Choices that lose their worker go on at another, and their readers notice nothing.

use std::sync::atomic::Ordering;
use std::time::Duration;

use contract::model::{Fingerprint, ModelIdentity};
use router::Config;
use serde_json::{Value, json};

use crate::client::{post, stream};
use crate::place::{Place, until};

const COMPLETIONS: &str = "/v1/completions";

/// Takes workers in turn, so that the first prompt goes to the first worker.
fn in_turn(config: &mut Config) {
    config.policy = "round_robin".to_owned();
}

/// Two workers, the first of which breaks off every answer after three tokens.
async fn breaking() -> Place {
    let place = Place::start_with(2, in_turn).await;
    place.workers[0].state.break_after.store(3, Ordering::SeqCst);
    place
}

/// Asks as often as there are workers, so that each is asked first once, and expects equal answers.
async fn answers(place: &Place, body: &Value) -> Value {
    let (status, mut first) = post(place.http, COMPLETIONS, body).await;
    assert_eq!(status, 200, "{first}");
    for _ in 1..place.workers.len() {
        let (status, mut other) = post(place.http, COMPLETIONS, body).await;
        assert_eq!(status, 200, "{other}");
        for varies in ["id", "created"] {
            other[varies] = first[varies].take();
            first[varies] = other[varies].clone();
        }
        assert_eq!(other, first);
    }
    first
}

#[tokio::test(flavor = "multi_thread")]
async fn all_choices_go_on_with_their_tokens_usage_and_logprobs() {
    let place = breaking().await;
    let body = json!({
        "prompt": [5, 6], "max_tokens": 9, "n": 2, "logprobs": 2, "return_token_ids": true, "min_tokens": 5,
        "stop_token_ids": [14, 17], "seed": 3, "frequency_penalty": 0.5,
    });
    let answer = answers(&place, &body).await;
    for choice in answer["choices"].as_array().unwrap() {
        assert_eq!(choice["token_ids"], json!([10, 11, 12, 13, 14, 15, 16, 17]), "{choice}");
        assert_eq!(choice["logprobs"]["token_logprobs"].as_array().unwrap().len(), 8, "{choice}");
    }
    let usage = &answer["usage"];
    assert_eq!((&usage["prompt_tokens"], &usage["completion_tokens"]), (&json!(2), &json!(16)), "{usage}");
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 0, "what came later found is not told: {usage}");
    let requests = place.workers[1].state.requests.lock().unwrap().clone();
    let resumed: Vec<_> = requests.iter().filter(|request| request.attempt > 0).collect();
    assert_eq!(resumed.len(), 2);
    for request in resumed {
        assert_eq!((&request.prompt[..], &request.generated[..], request.attempt), (&[5, 6][..], &[10, 11, 12][..], 1));
        assert_eq!(request.sampling.as_ref().unwrap().frequency_penalty, 0.5);
    }
    assert_eq!(place.own_metric("tessera_router_migrations_total{").await, 2.0);
    assert_eq!(place.own_metric("tessera_router_migrations_across_numerics_total").await, 0.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_string_is_found_across_two_workers() {
    let place = breaking().await;
    let answer = answers(&place, &json!({"prompt": [5], "max_tokens": 9, "stop": ["12 t13"]})).await;
    assert_eq!(answer["choices"][0]["text"], "t10 t11 t", "{answer}");
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_another_worker_or_a_budget_the_error_is_typed_and_last() {
    let no_wait = |config: &mut Config| config.workers.worker_wait_ms_max = 50;
    let no_budget = |config: &mut Config| config.workers.n_migrations_max = 0;
    for change in [&no_wait as &dyn Fn(&mut Config), &no_budget] {
        let place = Place::start_with(1, |config| change(config)).await;
        place.workers[0].state.break_after.store(2, Ordering::SeqCst);
        let events = stream(place.http, COMPLETIONS, &json!({"prompt": [5], "max_tokens": 9})).await.events().await;
        let last = events.last().unwrap();
        assert_eq!(last["error"]["code"], "worker_lost", "{events:?}");
        assert!(last["error"]["message"].as_str().unwrap().contains("worker-0 was lost after 2 tokens"), "{last}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn where_no_worker_is_left_a_new_one_is_waited_for() {
    let mut place = Place::start(1).await;
    place.workers[0].state.break_after.store(2, Ordering::SeqCst);
    let mut reply = stream(place.http, COMPLETIONS, &json!({"prompt": [5], "max_tokens": 9})).await;
    reply.event().await.expect("a first token");
    place.join().await;
    let events = reply.events().await;
    assert_eq!(events.last().unwrap(), "[DONE]", "{events:?}");
    assert_eq!(place.workers[1].state.requests.lock().unwrap()[0].generated, [10, 11]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_router_that_has_just_started_lets_requests_wait_for_its_first_worker() {
    let mut place = Place::start(0).await;
    let (http, body) = (place.http, json!({"prompt": [5], "max_tokens": 2}));
    let asked = daemon::task::Tasks::new().spawn("client", async move { post(http, COMPLETIONS, &body).await });
    until("it waits", async || place.own_metric("tessera_router_requests{").await >= 1.0).await;
    place.join().await;
    let (status, answer) = asked.await.unwrap();
    assert_eq!(status, 200, "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_of_equal_numerics_comes_first_and_another_is_counted() {
    let mut place = breaking().await;
    let other = ModelIdentity { numerics: Fingerprint([9; 16]), ..place.identity.clone() };
    place.leave(1).await;
    place.until_ready(1).await;
    place.join_as(&other).await;
    place.until_ready(2).await;
    let ask = async |place: &Place| {
        let n_before = place.workers[0].n_requests();
        while place.workers[0].n_requests() == n_before {
            assert_eq!(post(place.http, COMPLETIONS, &json!({"prompt": [5], "max_tokens": 5})).await.0, 200);
        }
    };
    ask(&place).await;
    assert_eq!(place.own_metric("tessera_router_migrations_across_numerics_total").await, 1.0);
    let same = place.join().await;
    place.until_ready(3).await;
    ask(&place).await;
    assert_eq!(place.own_metric("tessera_router_migrations_across_numerics_total").await, 1.0);
    let requests = place.workers[same].state.requests.lock().unwrap();
    assert!(requests.iter().any(|request| request.generated == [10, 11, 12]), "{requests:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_to_a_worker_that_hangs_go_on_elsewhere_within_the_silence_that_is_allowed() {
    let place = Place::start_with(2, |config| {
        in_turn(config);
        config.workers.kv_silence_ms_max = 600;
    })
    .await;
    place.workers.iter().for_each(|worker| worker.state.hold_after.store(2, Ordering::SeqCst));
    let mut reply = stream(place.http, COMPLETIONS, &json!({"prompt": [5], "max_tokens": 9})).await;
    reply.event().await.expect("a first token");
    let hangs = usize::from(place.workers[1].n_requests() > 0);
    place.workers[1 - hangs].state.hold_after.store(0, Ordering::SeqCst);
    place.workers[hangs].state.is_silent.store(true, Ordering::SeqCst);
    let began = daemon::clock::now();
    let events = reply.events().await;
    assert_eq!(events.last().unwrap(), "[DONE]", "{events:?}");
    assert!(daemon::clock::now() - began < Duration::from_secs(5));
    until("the late one is aborted", async || place.workers[hangs].state.n_streams.load(Ordering::SeqCst) == 0).await;
}
