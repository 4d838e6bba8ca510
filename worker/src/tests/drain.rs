//! Workers that are sent away.

use contract::error::RequestError;
use futures::StreamExt as _;
use proto::status::from_status;
use proto::worker::v1::{DescribeRequest, DrainProgress, DrainRequest};
use tonic::{Status, Streaming};

use super::fake::{Behaviour, answer};
use super::harness::{Gate, Worker, config, start_fake};

async fn start(gate: &Gate) -> Worker {
    start_fake(config(), 64, Behaviour { gate: Some(gate.clone()), ..Behaviour::default() }).await
}

async fn drain(worker: &Worker, grace_ms: Option<u64>) -> Streaming<DrainProgress> {
    worker.client.clone().drain(DrainRequest { grace_ms, incarnation: None }).await.unwrap().into_inner()
}

/// Requests left, as told from here on to the end.
async fn told(progress: Streaming<DrainProgress>) -> Vec<u32> {
    progress.map(|progress| progress.unwrap().requests_left).collect().await
}

#[tokio::test]
async fn a_worker_that_is_sent_away_refuses_what_is_new_finishes_what_runs_and_ends() {
    let gate = Gate::default();
    let worker = start(&gate).await;
    let request = worker.request(&[1, 2, 3], 20);
    let mut running = worker.open(&request).await.unwrap();
    gate.admit(1);
    let mut tokens: Vec<u32> = Vec::new();
    let mut take = |frame: proto::worker::v1::GenerateFrame| tokens.extend(frame.tokens.iter().map(|one| one.token));
    take(running.message().await.unwrap().unwrap());
    let mut progress = drain(&worker, None).await;
    assert_eq!(progress.message().await.unwrap().unwrap().requests_left, 1);
    let refused = loop {
        let refused: Result<_, Status> = async { worker.open(&worker.request(&[9], 1)).await?.message().await }.await;
        if let Err(status) = refused {
            break status;
        }
        gate.admit(1);
    };
    assert!(matches!(from_status(&refused), RequestError::ShuttingDown(_)), "{refused}");
    gate.open();
    while let Some(frame) = running.message().await.unwrap() {
        take(frame);
    }
    assert_eq!(tokens, answer(&request.prompt, 0, 20));
    assert_eq!(told(progress).await.last(), Some(&0));
    drop(running);
    worker.ended().await.unwrap();
}

#[tokio::test]
async fn a_worker_that_is_sent_away_at_once_hands_over_what_runs() {
    let gate = Gate::default();
    let worker = start(&gate).await;
    let mut running = worker.open(&worker.request(&[1, 2, 3], 4000)).await.unwrap();
    gate.admit(1);
    running.message().await.unwrap().unwrap();
    let patient = drain(&worker, Some(3_600_000)).await;
    let hasty = drain(&worker, Some(0)).await;
    let error = running.message().await.unwrap_err();
    assert!(matches!(from_status(&error), RequestError::ShuttingDown(_)), "{error}");
    gate.open();
    assert_eq!((told(patient).await.last(), told(hasty).await.last()), (Some(&0), Some(&0)));
    drop(running);
    worker.ended().await.unwrap();
}

#[tokio::test]
async fn a_wish_that_means_another_life_is_refused() {
    let worker = start(&Gate::default()).await;
    let mut client = worker.client.clone();
    let described = client.describe(DescribeRequest {}).await.unwrap().into_inner();
    let this = described.engines[0].incarnation;
    let wish = |incarnation| DrainRequest { grace_ms: Some(0), incarnation: Some(incarnation) };
    let refused = client.drain(wish(this ^ 1)).await.unwrap_err();
    assert!(matches!(from_status(&refused), RequestError::StalePlacement(_)), "{refused}");
    assert_eq!(told(client.drain(wish(this)).await.unwrap().into_inner()).await.last(), Some(&0));
    worker.ended().await.unwrap();
}
