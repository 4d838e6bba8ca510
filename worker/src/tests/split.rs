//! Prompts that one worker computes for another: the same tokens as alone, and every block comes back.

use contract::ids::Token;
use contract::request::{GenerateRequest, PrefillPeer};

use super::harness::{Worker, config, start_model};
use super::model::fixture;
use crate::Config;
use crate::config::{EngineKind, WeightDtype};

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

fn simulated(profile: &str) -> Config {
    let sim_profile = std::path::PathBuf::from(profile);
    Config { model: fixture("llama"), engine: EngineKind::Sim, sim_profile, n_blocks: Some(256), ..config() }
}

#[tokio::test]
async fn simulated_workers_move_prompts_as_real_ones_do() {
    for profile in ["instant", "cpu"] {
        let (decode, prefill) = (start_model(simulated(profile)).await, start_model(simulated(profile)).await);
        let requests = (0..6_u32).map(|i| on(decode.request(&prompt(20 + 37 * i, i), 10), &prefill));
        let split = requests.map(|request| {
            let decode = &decode;
            async move { (decode.generate(&request).await.unwrap().0, request) }
        });
        for (tokens, request) in futures::future::join_all(split).await {
            let alone = GenerateRequest { cache_salt: "another".to_owned(), prefill_on: None, ..request };
            assert_eq!(tokens, decode.generate(&alone).await.unwrap().0, "{profile}");
        }
        assert!(prefill.at_rest().await.cached > 0, "it computed prompts");
        decode.at_rest().await;
    }
}

#[tokio::test]
async fn who_cannot_get_a_prompt_computes_it() {
    let (decode, prefill) = (start_model(simulated("instant")).await, start_model(simulated("instant")).await);
    let wanted = decode.request(&prompt(50, 1), 10);
    let alone = decode.generate(&wanted).await.unwrap().0;
    let with = |change: &dyn Fn(&mut PrefillPeer)| {
        let mut request = on(GenerateRequest { cache_salt: "s".to_owned(), ..wanted.clone() }, &prefill);
        request.prefill_on.as_mut().map(change);
        request
    };
    // Nobody listens; it is another's next life; it is this engine itself.
    let gone = with(&|peer| peer.address = "127.0.0.1:1".to_owned());
    let stale = with(&|peer| peer.engine.incarnation = contract::ids::Incarnation(1));
    let own = with(&|peer| peer.engine = decode.engine.clone());
    let salted = GenerateRequest { cache_salt: "s".to_owned(), ..wanted.clone() };
    for request in [gone, stale, own, salted] {
        assert_eq!(decode.generate(&request).await.unwrap().0, alone);
    }
    decode.at_rest().await;
    assert_eq!(prefill.at_rest().await.cached, 0, "it was never asked for anything that it could give");
}
