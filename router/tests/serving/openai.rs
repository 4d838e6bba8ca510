//! The OpenAI API as its clients see it.

use serde_json::{Value, json};

use crate::client::{post, send, stream};
use crate::place::{Place, until};

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

fn chat(extra: Value) -> Value {
    let mut body = json!({"model": "tiny", "messages": [{"role": "user", "content": "t3 t4"}], "max_tokens": 3});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

fn completion(extra: Value) -> Value {
    let mut body = json!({"model": "tiny", "prompt": "t3 t4 t5", "max_tokens": 3});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

#[tokio::test(flavor = "multi_thread")]
async fn chat_and_completions_answer_with_usage_and_reasons() {
    let place = Place::start(1).await;
    let (status, answer) = post(place.http, CHAT, &chat(json!({}))).await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!(
        answer["choices"][0]["message"],
        json!({"role": "assistant", "content": "t10 t11 t12", "refusal": null})
    );
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert_eq!(answer["usage"]["prompt_tokens"], 3, "two words and the generation prompt: {answer}");
    assert_eq!((&answer["usage"]["completion_tokens"], &answer["usage"]["total_tokens"]), (&json!(3), &json!(6)));
    let parts = json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "t3 t4"}]}]});
    assert_eq!(post(place.http, CHAT, &chat(parts)).await.1["usage"]["prompt_tokens"], 3);
    let (_, answer) = post(place.http, COMPLETIONS, &completion(json!({"return_token_ids": true}))).await;
    assert_eq!(answer["choices"][0]["token_ids"], json!([10, 11, 12]), "{answer}");
    assert_eq!(answer["object"], "text_completion");
    let (_, answer) = post(place.http, COMPLETIONS, &json!({"prompt": [3]})).await;
    assert_eq!(answer["usage"]["completion_tokens"], 16, "as OpenAI's default: {answer}");
    let models = send(place.http, "GET", "/v1/models", b"").await.text().await;
    assert!(models.contains("\"tiny\""), "{models}");
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_begin_with_the_role_and_end_with_usage_and_done() {
    let place = Place::start(1).await;
    let body = chat(json!({"stream_options": {"include_usage": true}}));
    let events = stream(place.http, CHAT, &body).await.events().await;
    assert_eq!(events[0]["choices"][0]["delta"]["role"], "assistant");
    let text: String = events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(text, "t10 t11 t12");
    let n = events.len();
    assert_eq!(events[n - 1], "[DONE]");
    assert_eq!((&events[n - 2]["choices"], &events[n - 2]["usage"]["completion_tokens"]), (&json!([]), &json!(3)));
    assert_eq!(events[n - 3]["choices"][0]["finish_reason"], "length");
}

#[tokio::test(flavor = "multi_thread")]
async fn several_choices_and_prompts_have_indexes_and_ids_of_their_own() {
    let place = Place::start(2).await;
    let (status, answer) = post(place.http, COMPLETIONS, &completion(json!({"prompt": ["t3", "t4 t5"], "n": 2}))).await;
    assert_eq!(status, 200, "{answer}");
    let indexes: Vec<_> = answer["choices"].as_array().unwrap().iter().map(|choice| choice["index"].clone()).collect();
    assert_eq!(indexes, [0, 1, 2, 3]);
    assert_eq!(answer["usage"]["prompt_tokens"], 3, "each prompt counts once: {answer}");
    let of = |index: usize| place.workers[index].state.requests.lock().unwrap().clone();
    let all = [of(0), of(1)].concat();
    let of_first: Vec<_> = all.iter().filter(|request| request.prompt == [3]).collect();
    assert_eq!(of_first.len(), 2, "both choices of a prompt are requests of their own");
    assert_ne!(of_first[0].request_id, of_first[1].request_id);
    assert_ne!(of_first[0].sampling.as_ref().unwrap().seed, of_first[1].sampling.as_ref().unwrap().seed);
}

#[tokio::test(flavor = "multi_thread")]
async fn stop_strings_and_stop_tokens_end_a_choice_and_name_themselves() {
    let place = Place::start(1).await;
    let body = completion(json!({"max_tokens": 50, "stop": "t13 t14", "return_token_ids": true}));
    let (_, answer) = post(place.http, COMPLETIONS, &body).await;
    let choice = &answer["choices"][0];
    assert_eq!(
        (&choice["text"], &choice["finish_reason"], &choice["stop_reason"]),
        (&json!("t10 t11 t12 "), &json!("stop"), &json!("t13 t14")),
        "{answer}"
    );
    assert_eq!(answer["usage"]["completion_tokens"], 5, "{answer}");
    until("the worker's stream is dropped", async || {
        place.workers[0].state.n_streams.load(std::sync::atomic::Ordering::SeqCst) == 0
    })
    .await;
    let body = completion(json!({"max_tokens": 50, "stop_token_ids": [12]}));
    let (_, answer) = post(place.http, COMPLETIONS, &body).await;
    let choice = &answer["choices"][0];
    assert_eq!((&choice["text"], &choice["stop_reason"]), (&json!("t10 t11"), &json!(12)), "{answer}");
    let text: String = stream(place.http, COMPLETIONS, &completion(json!({"max_tokens": 50, "stop": ["t13 t14"]})))
        .await
        .events()
        .await
        .iter()
        .filter_map(|event| event["choices"][0]["text"].as_str())
        .collect();
    assert_eq!(text, "t10 t11 t12 ", "no part of a stop string is shown");
}

#[tokio::test(flavor = "multi_thread")]
async fn logprobs_come_in_both_forms() {
    let place = Place::start(1).await;
    let (_, answer) = post(place.http, CHAT, &chat(json!({"logprobs": true, "top_logprobs": 2}))).await;
    let entry = &answer["choices"][0]["logprobs"]["content"][0];
    assert_eq!(
        (&entry["token"], &entry["bytes"], &entry["logprob"]),
        (&json!("t10"), &json!(b"t10"), &json!(-0.5)),
        "{answer}"
    );
    assert_eq!(entry["top_logprobs"].as_array().unwrap().len(), 2);
    let (_, answer) = post(place.http, COMPLETIONS, &completion(json!({"logprobs": 2}))).await;
    let logprobs = &answer["choices"][0]["logprobs"];
    assert_eq!(
        (&logprobs["tokens"], &logprobs["token_logprobs"]),
        (&json!(["t10", "t11", "t12"]), &json!([-0.5, -0.5, -0.5]))
    );
    assert_eq!(logprobs["top_logprobs"][0], json!({"t10": -0.5, "t11": -1.5}), "{answer}");
}
