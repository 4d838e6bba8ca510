//! Prompts that one worker computes for another: the same tokens as alone, and every block comes back.

use std::time::Duration;

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
pub(super) fn on(request: GenerateRequest, prefill: &Worker) -> GenerateRequest {
    let peer = PrefillPeer { engine: prefill.engine.clone(), address: prefill.transfer_address.clone() };
    GenerateRequest { prefill_on: vec![peer], id: contract::ids::RequestId(daemon::random::u128()), ..request }
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

pub(super) fn simulated(profile: &str) -> Config {
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
            let alone = GenerateRequest { cache_salt: "another".to_owned(), prefill_on: Vec::new(), ..request };
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
        request.prefill_on.iter_mut().for_each(change);
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

    let mut request = with(&|peer| peer.address = "127.0.0.1:1".to_owned());
    request.cache_salt = "t".to_owned();
    request.prefill_on.extend(on(request.clone(), &prefill).prefill_on);
    assert_eq!(decode.generate(&request).await.unwrap().0, alone);
    decode.at_rest().await;
    assert!(prefill.at_rest().await.cached > 0, "it was asked when the one before it could not be");
}

/// Prompts of 256 tokens beside the one that is computed last: four steps of 32 ms, and a decode step of 20 ms.
const LAYERED: &str = "block_size = 16\nn_blocks = 400\nmax_running = 8\nprefill_budget = 64\ncontext_length = 512\n\
                       [timing]\nprefill_tokens_per_s = 2000\ndecode_base_ms = 20\n";
const PREFILL: Duration = Duration::from_millis(128);
const DECODE: Duration = Duration::from_millis(20);
/// A layer of such a prompt has 16 blocks of 64 bytes, and takes so long on its way.
const LAYER: Duration = Duration::from_millis(20);
const BYTES_PER_S: u64 = 16 * 64 * 50;

#[tokio::test]
async fn layers_travel_while_later_ones_are_computed() {
    let folder = tempfile::tempdir().unwrap();
    let profile = folder.path().join("layered.toml");
    std::fs::write(&profile, LAYERED).unwrap();
    let worker = || Config { n_blocks: None, ..simulated(profile.to_str().unwrap()) };
    let mut throttled = worker();
    throttled.transfer.bytes_per_s_max = Some(BYTES_PER_S);
    throttled.transfer.ways = vec![crate::Way::Tcp];
    let mut receiving = worker();
    receiving.transfer.ways = vec![crate::Way::Tcp];
    let (decode, prefill) = (start_model(receiving).await, start_model(throttled).await);
    let is_full = std::env::var_os("TESSERA_FULL").is_some();
    let mut tails = Vec::new();
    for i in 0..if is_full { 20 } else { 5 } {
        let request = on(decode.request(&prompt(257, i), 1), &prefill);
        let began = daemon::clock::now();
        decode.generate(&request).await.unwrap();
        tails.push(began.elapsed().saturating_sub(PREFILL));
    }
    assert!(prefill.at_rest().await.cached > 0, "it computed the prompts");
    tails.sort_unstable();
    let median = tails[tails.len() / 2];
    println!("from the end of the prefill to the first decode step's end: {median:?}, {tails:?}");
    // One after the other all four layers take 80 ms, and a loaded machine is granted some time.
    let bound = if is_full { (LAYER + DECODE).mul_f64(1.2) } else { 4 * LAYER + DECODE };
    assert!(median < bound, "{median:?} of {bound:?}: {tails:?}");
}
