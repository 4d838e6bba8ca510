//! The simulated worker over real gRPC: answers, hits its cache, takes the time of its profile and finds its costs.

use std::path::PathBuf;
use std::time::Duration;

use contract::hash::HashKey;
use contract::ids::{DataRank, EngineId, Incarnation, Token, WorkerId};
use contract::model::Fingerprint;
use contract::plan::SamplingSpec;
use daemon::clock;
use engine::Engine;
use futures::StreamExt as _;

use super::harness::{DEADLINE, Worker, config, request, start_model};
use super::model::fixture;
use crate::Config;
use crate::config::EngineKind;
use crate::engine_loop::{self, Bounds};
use crate::sim::{Device, Profile, SimExecutor, answer};

async fn start_sim(profile: &str) -> Worker {
    let config = Config {
        model: fixture("llama"),
        engine: EngineKind::Sim,
        sim_profile: PathBuf::from(profile),
        n_blocks: Some(64),
        ..config()
    };
    start_model(config).await
}

/// What a greedy request alone yields.
fn alone(worker: &Worker, prompt: &[Token], n: usize) -> Vec<Token> {
    let request = worker.request(prompt, n as u32);
    let spec = SamplingSpec {
        params: request.sampling,
        logprobs: None,
        n_prompt: prompt.len() as u32,
        min_tokens: 0,
        stop_token_ids: Vec::new(),
        history: Vec::new(),
    };
    answer(prompt, &spec, worker.identity.vocab_size, 0.0, n)
}

#[tokio::test]
async fn a_simulated_worker_answers_and_a_repeated_prompt_hits_its_cache() {
    let worker = start_sim("instant").await;
    assert_eq!(worker.identity.block_size, 16);
    let prompt: Vec<Token> = (0..40).collect();
    let expected = alone(&worker, &prompt, 30);
    let first = worker.generate(&worker.request(&prompt, 30)).await.unwrap();
    assert_eq!(first, (expected.clone(), 0));
    let mut resumed = worker.request(&prompt, 30);
    resumed.attempt = 1;
    resumed.generated = expected[..10].to_vec();
    assert_eq!(worker.generate(&resumed).await.unwrap(), (expected[10..].to_vec(), 40));
    let many = (0..20_u32).map(|i| {
        let (worker, prompt) = (&worker, [&prompt[..], &[i]].concat());
        async move { (worker.generate(&worker.request(&prompt, 20)).await.unwrap(), alone(worker, &prompt, 20)) }
    });
    for ((tokens, cached), expected) in futures::future::join_all(many).await {
        assert_eq!((tokens, cached), (expected, 32));
    }
    let blocks = worker.at_rest().await;
    assert_eq!((blocks.total, blocks.is_conserved()), (64, true));
    worker.shut_down();
    worker.ended().await.unwrap();
}

#[tokio::test]
async fn a_simulated_worker_takes_the_time_of_its_profile() {
    let worker = start_sim("cpu").await;
    let began = clock::now();
    let (tokens, _) = worker.generate(&worker.request(&[1, 2, 3], 11)).await.unwrap();
    // 3 tokens of a prompt at 1,500 a second, then ten steps of 8.75 ms.
    assert!(clock::now().duration_since(began) >= Duration::from_micros(2_000 + 10 * 8_750), "{tokens:?}");
    worker.shut_down();
    worker.ended().await.unwrap();
}

#[tokio::test]
async fn a_worker_without_a_profile_says_what_to_give() {
    let config = Config { model: fixture("llama"), engine: EngineKind::Sim, sim_profile: "none".into(), ..config() };
    let error =
        crate::load::load(&config).err().map(|error| format!("{error}: {:?}", std::error::Error::source(&error)));
    assert!(error.as_ref().is_some_and(|error| error.contains("none")), "{error:?}");
}

#[tokio::test]
async fn an_engine_publishes_what_its_steps_cost() {
    let text = "block_size = 4\nn_blocks = 64\nmax_running = 4\nprefill_budget = 64\ncontext_length = 200\n\
                [timing]\nprefill_tokens_per_s = 1000\ndecode_base_ms = 10";
    let profile = Profile::parse(text, "test").unwrap();
    let engine = Engine::new(profile.engine_config(HashKey([1; 32]), Fingerprint([2; 16]))).unwrap();
    let id = EngineId { worker: WorkerId::new("w-cost"), incarnation: Incarnation(1), data_rank: DataRank(0) };
    let bounds = Bounds { reader_tokens_max: 1_000, kv_batches_max: 16 };
    let executor = Box::new(SimExecutor::new(Device::new(&profile, 1_000)));
    let (handle, mut thread) = engine_loop::start(id, engine, executor, bounds, None).unwrap();
    let occupancy = handle.occupancy();
    let before = occupancy.borrow().cost;
    assert_eq!((before.prefill_ms(100, 0), before.decode_ms(1, 50)), (0.0, 0.0), "nothing is known yet");
    // Sleeping takes longer than asked for, by how much is the machine's affair.
    let is_fitted = || {
        let cost = occupancy.borrow().cost;
        cost.prefill_ms(30, 0) > 30.0 * 0.9 && cost.decode_ms(1, 40) > 10.0 * 0.9
    };
    let began = clock::now();
    let mut prompts = (0..).map(|i| (0..30).map(|token| token * 7 + i).collect::<Vec<Token>>());
    while !is_fitted() {
        assert!(clock::now().duration_since(began) < DEADLINE, "{:?}", occupancy.borrow());
        let prompt = prompts.next().unwrap();
        let mut reader = handle.submit(request("m".into(), &prompt, 10)).unwrap();
        while let Some(frame) = reader.next().await {
            frame.unwrap();
        }
    }
    handle.stop(contract::error::RequestError::ShuttingDown("the test".to_owned()));
    thread.ended().await.unwrap();
    thread.join();
}
