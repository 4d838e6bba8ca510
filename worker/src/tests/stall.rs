//! Engines that stand still beside a worker that lives.

use std::path::Path;

use contract::error::RequestError;
use contract::ids::RequestId;
use contract::request::GenerateRequest;
use proto::status::from_status;
use tokio::time::{sleep, timeout};

use super::fake::{Behaviour, answer};
use super::harness::{DEADLINE, Gate, Worker, config, start_fake, start_model};
use super::model::fixture;
use super::split::on;
use crate::Config;
use crate::config::EngineKind;

/// What a worker's limits are here.
const STALL_MS: u64 = 500;

fn impatient(config: Config) -> Config {
    Config { stall_ms_min: STALL_MS, stall_ms_max: STALL_MS, ..config }
}

/// The tokens of a request that is asked for until it is taken.
async fn generate_when_it_goes_on(worker: &Worker, request: &GenerateRequest) -> Vec<u32> {
    let asking = async {
        loop {
            match worker.generate(&GenerateRequest { id: RequestId(daemon::random::u128()), ..request.clone() }).await {
                Ok((tokens, _)) => return tokens,
                Err(status) => assert!(matches!(from_status(&status), RequestError::WorkerLost { .. }), "{status}"),
            }
            sleep(std::time::Duration::from_millis(10)).await;
        }
    };
    timeout(DEADLINE, asking).await.expect("it goes on")
}

#[tokio::test]
async fn what_runs_ends_and_what_comes_is_refused_until_the_engine_steps_again() {
    let gate = Gate::default();
    let behaviour = Behaviour { gate: Some(gate.clone()), ..Behaviour::default() };
    let worker = start_fake(impatient(config()), 64, behaviour).await;
    let mut running = worker.open(&worker.request(&[1, 2, 3], 50)).await.unwrap();
    gate.admit(1);
    running.message().await.unwrap().unwrap();
    let ended = timeout(DEADLINE, running.message()).await.expect("it ends while the engine hangs").unwrap_err();
    let error = from_status(&ended);
    let says_why = |reason: &str| reason.contains("a step has run for");
    assert!(
        matches!(&error, RequestError::WorkerLost { worker: id, n_tokens: 1, reason } if *id == worker.config.id && says_why(reason)),
        "{error}"
    );
    let request = worker.request(&[4, 5], 5);
    let refused = from_status(&worker.open(&request).await.unwrap_err());
    assert!(matches!(&refused, RequestError::WorkerLost { n_tokens: 0, reason, .. } if says_why(reason)), "{refused}");
    gate.open();
    assert_eq!(generate_when_it_goes_on(&worker, &request).await, answer(&request.prompt, 0, 5));
    drop(running);
    worker.at_rest().await;
    worker.shut_down();
    worker.ended().await.unwrap();
}

/// A simulated worker that hangs while there is `file`, and waits an hour for a prompt.
fn hanging(folder: &Path, file: &Path) -> Config {
    let profile = folder.join("profile.toml");
    let text = "block_size = 16\nn_blocks = 64\nmax_running = 8\nprefill_budget = 64\ncontext_length = 512\n";
    std::fs::write(&profile, format!("{text}hangs_while = {file:?}\n")).unwrap();
    let mut config = Config { model: fixture("llama"), engine: EngineKind::Sim, sim_profile: profile, ..config() };
    config.transfer.deadline_ms = 3_600_000;
    config
}

#[tokio::test]
async fn a_prompt_that_another_engine_does_not_compute_is_computed_where_it_is_needed() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("hang");
    let prefill = start_model(impatient(hanging(folder.path(), &file))).await;
    let decode = start_model(hanging(folder.path(), &folder.path().join("never"))).await;
    let request = decode.request(&(0..100).collect::<Vec<_>>(), 10);
    let alone =
        decode.generate(&GenerateRequest { cache_salt: "another".to_owned(), ..request.clone() }).await.unwrap().0;
    std::fs::write(&file, "").unwrap();
    // The first is under way when the engine is found to stand still, the second is refused.
    for salt in ["", "salt"] {
        let request = on(GenerateRequest { cache_salt: salt.to_owned(), ..request.clone() }, &prefill);
        let split =
            timeout(DEADLINE, decode.generate(&request)).await.expect("it goes on while the other engine hangs");
        assert_eq!(split.unwrap().0, alone);
    }
    std::fs::remove_file(&file).unwrap();
    assert_eq!(generate_when_it_goes_on(&prefill, &request).await, alone);
    for worker in [decode, prefill] {
        worker.at_rest().await;
        worker.shut_down();
        worker.ended().await.unwrap();
    }
}
