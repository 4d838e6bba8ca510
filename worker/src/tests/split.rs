//! Prompts that one worker computes for another: the same tokens as alone, and every block comes back.

use contract::ids::Token;
use contract::request::{GenerateRequest, PrefillPeer};

use super::harness::{Worker, config, start_model};
use super::model::fixture;
use crate::Config;
use crate::config::WeightDtype;

fn model(name: &str) -> Config {
    Config {
        model: fixture(name),
        dtype: WeightDtype::F32,
        threads: 1,
        n_blocks: Some(64),
        // Small, so that prompts are computed in chunks.
        max_running: 8,
        token_budget: 16,
        ..config()
    }
}

fn prompt(n: u32, seed: u32) -> Vec<Token> {
    (0..n).map(|i| (i * 11 + seed * 7) % 250).collect()
}

/// The request with its prompt computed on `prefill`.
fn on(request: GenerateRequest, prefill: &Worker) -> GenerateRequest {
    let peer = PrefillPeer { engine: prefill.engine.clone(), address: prefill.transfer_address.clone() };
    GenerateRequest { prefill_on: Some(peer), id: contract::ids::RequestId(daemon::random::u128()), ..request }
}

#[tokio::test]
async fn a_prompt_computed_elsewhere_yields_the_same_tokens() {
    for name in ["llama", "gemma3_text"] {
        let (decode, prefill) = (start_model(model(name)).await, start_model(model(name)).await);
        assert!(!prefill.transfer_address.is_empty());
        for n in [1, 2, 15, 16, 17, 18, 33, 100] {
            let mut request = decode.request(&prompt(n, n), 12);
            request.logprobs = Some(2);
            let split = decode.generate(&on(request.clone(), &prefill)).await.unwrap();
            let mut alone = request;
            alone.id = contract::ids::RequestId(daemon::random::u128());
            alone.cache_salt = "another".to_owned();
            let alone = decode.generate(&alone).await.unwrap();
            assert_eq!(split, alone, "{name} {n}");
        }
        // What is there already is not sent again, and a resumed request goes on.
        let request = decode.request(&prompt(100, 100), 12);
        let (tokens, cached) = decode.generate(&on(request.clone(), &prefill)).await.unwrap();
        assert_eq!(cached, 96);
        let resumed = GenerateRequest { prompt: prompt(90, 3), generated: tokens[..6].to_vec(), attempt: 1, ..request };
        let split = decode.generate(&on(resumed.clone(), &prefill)).await.unwrap();
        let alone = GenerateRequest { cache_salt: "another".to_owned(), ..resumed };
        assert_eq!(split.0, decode.generate(&alone).await.unwrap().0);
        assert!(prefill.at_rest().await.cached >= 12, "it computed prompts");
        for worker in [decode, prefill] {
            worker.at_rest().await;
            worker.shut_down();
            worker.ended().await.unwrap();
        }
    }
}
