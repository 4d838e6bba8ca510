//! Streams: what comes, in which order, and what is left when a client goes.

use std::time::Duration;

use contract::error::RequestError;
use contract::ids::Incarnation;
use contract::stream::FinishReason;
use proto::status::from_status;
use proto::worker::v1 as wire;

use super::fake::{Behaviour, answer};
use super::harness::{DEADLINE, Gate, config, start_fake};
use crate::sampler::philox::philox;

#[tokio::test]
async fn concurrent_streams_each_get_their_own_tokens() {
    let worker = start_fake(config(), 200, Behaviour::default()).await;
    let requests: Vec<_> = (0..24_u32)
        .map(|index| {
            let prompt: Vec<u32> = (0..=index).map(|i| (i * 31 + index) % 1000).collect();
            let mut request = worker.request(&prompt, 20 + index);
            request.sampling.seed = index.into();
            request
        })
        .collect();
    let answers = futures::future::join_all(requests.iter().map(|request| worker.generate(request))).await;
    for (request, answered) in requests.iter().zip(answers) {
        let expected = answer(&request.prompt, request.sampling.seed, request.stop.max_tokens as usize);
        assert_eq!(answered.unwrap().0, expected);
    }
    worker.at_rest().await;
    worker.shut_down();
    worker.ended().await.unwrap();
}

#[tokio::test]
async fn streams_end_with_a_reason_and_a_second_prompt_hits_the_cache() {
    let worker = start_fake(config(), 200, Behaviour::default()).await;
    let prompt: Vec<u32> = (0..41).collect();
    let mut request = worker.request(&prompt, 9);
    assert_eq!(worker.generate(&request).await.unwrap().1, 0);
    let expected = answer(&prompt, 0, 9);
    let again = worker.request(&prompt, 9);
    assert_eq!(worker.generate(&again).await.unwrap(), (expected.clone(), 40));
    request = worker.request(&prompt, 9);
    request.stop.token_ids = vec![expected[4]];
    let mut stream = worker.open(&request).await.unwrap();
    let mut last = wire::GenerateFrame::default();
    while let Some(frame) = stream.message().await.unwrap() {
        last = frame;
    }
    assert_eq!(contract::stream::GenerateFrame::try_from(last).unwrap().finish, Some(FinishReason::Stop));
    worker.at_rest().await;
}

#[tokio::test]
async fn a_request_that_comes_while_a_step_runs_is_in_the_step_after_it() {
    let gate = Gate::default();
    let worker = start_fake(config(), 64, Behaviour { gate: Some(gate.clone()), ..Behaviour::default() }).await;
    let mut first = worker.open(&worker.request(&[1, 2, 3], 9)).await.unwrap();
    worker.until_running(1).await;
    // The first step stands at the gate and the second is planned; the newcomer joins that.
    let mut second = worker.open(&worker.request(&[4, 5], 9)).await.unwrap();
    worker.until_running(2).await;
    gate.admit(1);
    assert_eq!(first.message().await.unwrap().unwrap().tokens.len(), 1, "told while the next step runs");
    gate.admit(1);
    for stream in [&mut first, &mut second] {
        let frame = tokio::time::timeout(DEADLINE, stream.message()).await.expect("its token is in the second step");
        assert_eq!(frame.unwrap().unwrap().tokens.len(), 1);
    }
    drop((first, second));
    gate.open();
    worker.at_rest().await;
}

#[tokio::test]
async fn a_resumed_request_goes_on_where_it_was() {
    let worker = start_fake(config(), 200, Behaviour::default()).await;
    let expected = answer(&[5, 6, 7], 3, 12);
    let mut request = worker.request(&[5, 6, 7], 12);
    (request.attempt, request.sampling.seed) = (1, 3);
    request.generated = expected[..5].to_vec();
    assert_eq!(worker.generate(&request).await.unwrap().0, expected[5..]);
}

#[tokio::test]
async fn wrong_requests_get_typed_errors() {
    let worker = start_fake(config(), 8, Behaviour::default()).await;
    let good = worker.request(&[1], 4);
    let error = async |change: &dyn Fn(&mut contract::request::GenerateRequest)| {
        let mut request = good.clone();
        change(&mut request);
        from_status(&worker.generate(&request).await.unwrap_err())
    };
    assert!(matches!(error(&|r| r.model = "other".into()).await, RequestError::UnknownModel { .. }));
    assert!(matches!(error(&|r| r.adapter = "a".into()).await, RequestError::Unsupported(_)));
    assert!(matches!(error(&|r| r.prompt_logprobs = Some(1)).await, RequestError::Unsupported(_)));
    assert!(matches!(error(&|r| r.prompt = vec![]).await, RequestError::InvalidArgument { .. }));
    assert!(matches!(error(&|r| r.prompt = vec![5000]).await, RequestError::InvalidArgument { .. }));
    assert!(matches!(error(&|r| r.prompt = vec![1; 5000]).await, RequestError::PromptTooLong { .. }));
    assert!(matches!(error(&|r| r.prompt = vec![1; 40]).await, RequestError::PromptTooLong { .. }), "8 blocks of 4");
    assert!(matches!(error(&|r| r.sampling.temperature = -1.0).await, RequestError::InvalidArgument { .. }));
    let mut elsewhere = worker.engine.clone();
    elsewhere.incarnation = Incarnation(elsewhere.incarnation.0 ^ 1);
    let message = wire::GenerateRequest::new(&good, &elsewhere);
    let status = worker.client.clone().generate(message).await.unwrap_err();
    assert!(matches!(from_status(&status), RequestError::StalePlacement(_)), "{status}");
    let status = worker.client.clone().generate(wire::GenerateRequest::default()).await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::InvalidArgument);
    worker.at_rest().await;
}

#[tokio::test]
async fn a_deadline_that_passes_ends_the_request() {
    let gate = Gate::default();
    let worker = start_fake(config(), 2000, Behaviour { gate: Some(gate.clone()), ..Behaviour::default() }).await;
    let mut request = worker.request(&[1, 2], 4000);
    request.deadline = Some(Duration::from_millis(30));
    let mut stream = worker.open(&request).await.unwrap();
    // Steps go on one by one for as long as it takes the deadline to pass.
    let mut n_tokens = 0;
    let error = loop {
        gate.admit(1);
        match stream.message().await {
            Ok(frame) => n_tokens += frame.expect("ends with an error").tokens.len(),
            Err(status) => break from_status(&status),
        }
    };
    assert_eq!(error, RequestError::DeadlineExceeded { n_tokens: n_tokens as u32 });
    gate.open();
    worker.at_rest().await;
}

#[tokio::test]
async fn disconnects_at_any_stage_leave_no_block() {
    let seed = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or_else(daemon::random::u64);
    println!("SEED={seed}");
    let gate = Gate::default();
    let worker = start_fake(config(), 64, Behaviour { gate: Some(gate.clone()), ..Behaviour::default() }).await;
    let mut streams = Vec::new();
    for index in 0..300_u32 {
        let random = philox([index, 0, 0, 0], [seed as u32, (seed >> 32) as u32]);
        let prompt: Vec<u32> = (0..1 + random[0] % 60).map(|i| (i + random[1]) % 1000).collect();
        match worker.open(&worker.request(&prompt, 1 + random[2] % 60)).await {
            Ok(stream) => streams.push(stream),
            Err(status) => assert!(matches!(from_status(&status), RequestError::Overloaded { .. }), "{status}"),
        }
        gate.admit(1);
        // Queued ones, those in prefill and those in decode: any of them goes.
        if streams.len() > 12 {
            drop(streams.swap_remove(random[3] as usize % streams.len()));
        }
    }
    drop(streams);
    gate.open();
    worker.at_rest().await;
    let prompt = [1, 2, 3];
    assert_eq!(worker.generate(&worker.request(&prompt, 5)).await.unwrap().0, answer(&prompt, 0, 5), "still serves");
    worker.shut_down();
    worker.ended().await.unwrap();
}

#[tokio::test]
async fn a_reader_that_stops_reading_is_aborted() {
    let mut config = config();
    config.reader_tokens_max = 16;
    let worker = start_fake(config, 1000, Behaviour::default()).await;
    let mut request = worker.request(&[1, 2], 3900);
    // Large frames fill the connection's window soon.
    request.logprobs = Some(128);
    let mut stream = worker.open(&request).await.unwrap();
    worker.at_rest_after_start().await;
    let mut n_tokens = 0;
    let error = loop {
        match stream.message().await {
            Ok(Some(frame)) => n_tokens += frame.tokens.len(),
            Ok(None) => panic!("the stream ended well after {n_tokens} tokens"),
            Err(status) => break from_status(&status),
        }
    };
    assert!(matches!(error, RequestError::SlowReader(17..)), "{error}");
    assert!(n_tokens < 3900);
}
