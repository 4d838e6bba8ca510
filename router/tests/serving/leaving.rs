//! Workers that leave are asked for what only they have cached.

use std::sync::atomic::Ordering;

use serde_json::json;

use crate::client::{post, stream};
use crate::place::{Place, until};

const COMPLETIONS: &str = "/v1/completions";

/// Two workers, the first of which has a prompt cached, and gets it therefore.
async fn place_and_prompt() -> (Place, Vec<u32>) {
    let place = Place::start(2).await;
    let prompt: Vec<u32> = (0..400).map(|i| i % 200 + 3).collect();
    *place.workers[0].state.cached.lock().unwrap() = place.hashes(&prompt);
    until("the router knows", async || place.own_metric("tessera_prefix_directory_blocks").await >= 100.0).await;
    (place, prompt)
}

/// Whom the second worker was told to ask, by request.
fn asked(place: &Place) -> Vec<Vec<String>> {
    let requests = place.workers[1].state.requests.lock().unwrap();
    let names = |request: &proto::worker::v1::GenerateRequest| {
        request.prefill_on.iter().map(|peer| peer.engine.as_ref().unwrap().worker.clone()).collect()
    };
    requests.iter().map(names).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_that_a_leaving_worker_has_cached_is_fetched_from_it() {
    let (place, prompt) = place_and_prompt().await;
    place.workers[0].state.leaves.store(true, Ordering::SeqCst);
    for _ in 0..3 {
        let (status, answer) = post(place.http, COMPLETIONS, &json!({"prompt": prompt, "max_tokens": 2})).await;
        assert_eq!(status, 200, "{answer}");
    }
    // This worker tells of no cache of its own, and what is only promised may come later.
    assert_eq!(asked(&place), [["worker-0"]; 3]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_leaving_worker_hands_over_is_fetched_from_it() {
    let (place, prompt) = place_and_prompt().await;
    place.workers[0].state.hold_after.store(3, Ordering::SeqCst);
    let body = json!({"prompt": prompt, "max_tokens": 9});
    let mut reply = stream(place.http, COMPLETIONS, &body).await;
    reply.event().await.expect("a first token");
    assert_eq!(place.workers[0].n_requests(), 1, "it runs where it is cached");
    place.workers[0].state.leaves.store(true, Ordering::SeqCst);
    let events = reply.events().await;
    assert_eq!(events.last().unwrap(), "[DONE]", "{events:?}");
    assert_eq!(asked(&place), [["worker-0"]]);
    let short = json!({"prompt": [5, 6, 7], "max_tokens": 2});
    assert_eq!(post(place.http, COMPLETIONS, &short).await.0, 200);
    assert_eq!(asked(&place).last().unwrap().len(), 0, "nothing of it is cached there");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_that_nobody_asks_for_moves_when_the_only_worker_leaves_that_has_it_cached() {
    let (place, prompt) = place_and_prompt().await;
    for prompt in [&prompt[..], &[5, 6, 7]] {
        assert_eq!(post(place.http, COMPLETIONS, &json!({"prompt": prompt, "max_tokens": 2})).await.0, 200);
    }
    let n_asked = place.workers[1].n_requests();
    place.drain(0);
    until("it moves", async || place.workers[1].n_requests() > n_asked).await;
    let moved = place.workers[1].state.requests.lock().unwrap().last().unwrap().clone();
    // The last token of a prompt is always computed, and with it its block.
    assert_eq!((&moved.prompt[..], moved.prefill_on.len()), (&prompt[..397], 1));
    let (status, answer) = post(place.http, COMPLETIONS, &json!({"prompt": prompt, "max_tokens": 2})).await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!(place.workers[1].n_requests(), n_asked + 2, "it moves once");
}
