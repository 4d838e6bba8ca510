//! A broken executor, and the end of a worker.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use contract::error::RequestError;
use contract::ids::{DataRank, EngineId, Incarnation, WorkerId};
use engine::Engine;
use futures::StreamExt as _;
use proto::status::from_status;

use super::fake::{Behaviour, Fake, answer};
use super::harness::{Gate, config, engine_config, request, start_fake};
use crate::Error;
use crate::engine_loop::{Bounds, assemble};

async fn break_with(choose: impl Fn(&Behaviour) -> Arc<AtomicBool>, says: &str) {
    let gate = Gate::default();
    let behaviour = Behaviour { gate: Some(gate.clone()), ..Behaviour::default() };
    let broken = choose(&behaviour);
    let worker = start_fake(config(), 64, behaviour).await;
    let mut running = worker.open(&worker.request(&[1, 2, 3], 50)).await.unwrap();
    gate.admit(2);
    running.message().await.unwrap().expect("a first token");
    let mut queued = worker.open(&worker.request(&[4], 50)).await.unwrap();
    broken.store(true, Ordering::Relaxed);
    gate.open();
    for stream in [&mut running, &mut queued] {
        let error = loop {
            match stream.message().await {
                Ok(frame) => assert!(frame.is_some(), "ends with an error"),
                Err(status) => break from_status(&status),
            }
        };
        assert!(matches!(&error, RequestError::Internal(message) if message.contains(says)), "{error}");
    }
    drop((running, queued));
    let ended = worker.ended().await;
    assert!(matches!(&ended, Err(Error::Failed(failure)) if failure.to_string().contains(says)), "{ended:?}");
}

#[tokio::test]
async fn a_failing_executor_ends_all_requests_and_then_the_worker() {
    break_with(|behaviour| Arc::clone(&behaviour.fails), "planted failure").await;
}

#[tokio::test]
async fn a_panicking_executor_ends_all_requests_and_then_the_worker() {
    break_with(|behaviour| Arc::clone(&behaviour.panics), "planted panic").await;
}

#[tokio::test]
async fn a_shutdown_lets_running_requests_finish_and_takes_no_new_ones() {
    let gate = Gate::default();
    let worker = start_fake(config(), 64, Behaviour { gate: Some(gate.clone()), ..Behaviour::default() }).await;
    let request = worker.request(&[1, 2, 3], 20);
    let mut running = worker.open(&request).await.unwrap();
    gate.admit(1);
    let mut tokens: Vec<u32> = Vec::new();
    let first = running.message().await.unwrap().unwrap();
    tokens.extend(first.tokens.iter().map(|sampled| sampled.token));
    worker.shut_down();
    let refused = loop {
        // Until the shutdown is noticed requests are taken.
        match worker.open(&worker.request(&[9], 1)).await {
            Err(status) => break status,
            Ok(stream) => {
                gate.admit(1);
                let mut stream = stream;
                if let Err(status) = stream.message().await {
                    break status;
                }
            }
        }
    };
    assert!(
        matches!(from_status(&refused), RequestError::ShuttingDown(_) | RequestError::WorkerLost { .. }),
        "{refused}"
    );
    gate.open();
    while let Some(frame) = running.message().await.unwrap() {
        tokens.extend(frame.tokens.iter().map(|sampled| sampled.token));
    }
    assert_eq!(tokens, answer(&request.prompt, 0, 20));
    drop(running);
    worker.ended().await.unwrap();
}

#[tokio::test]
async fn before_the_end_of_grace_what_runs_is_handed_over_with_a_typed_error() {
    let mut config = config();
    config.server.grace_ms = 1_000;
    let gate = Gate::default();
    let worker = start_fake(config, 64, Behaviour { gate: Some(gate.clone()), ..Behaviour::default() }).await;
    let mut running = worker.open(&worker.request(&[1, 2, 3], 4000)).await.unwrap();
    gate.admit(1);
    running.message().await.unwrap();
    worker.shut_down();
    let error = running.message().await.unwrap_err();
    assert!(matches!(from_status(&error), RequestError::ShuttingDown(_)), "{error}");
    gate.open();
    drop(running);
    worker.ended().await.unwrap();
}

#[tokio::test]
async fn requests_before_and_after_a_stop_are_told_why() {
    let id = EngineId { worker: WorkerId::new("stopped"), incarnation: Incarnation(1), data_rank: DataRank(0) };
    let executor = Box::new(Fake::new(8, Behaviour::default()));
    let bounds = Bounds { reader_tokens_max: 64, kv_batches_max: 1 };
    let (handle, engine_loop) = assemble(id, Engine::new(engine_config(64)).unwrap(), executor, bounds, None).unwrap();
    let why = RequestError::ShuttingDown("the worker".to_owned());
    // All of it is one batch, for nothing runs yet.
    let before = handle.submit(request("fake".into(), &[1, 2], 9)).unwrap();
    handle.stop(why.clone());
    let after = handle.submit(request("fake".into(), &[3, 4], 9)).unwrap();
    engine_loop.run().unwrap();
    for mut reader in [before, after] {
        assert_eq!(reader.next().await, Some(Err(why.clone())));
    }
    assert_eq!(handle.submit(request("fake".into(), &[5], 9)).err(), Some(why));
}
