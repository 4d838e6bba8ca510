//! Workers that leave and lend what they have cached to those that take over.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use contract::error::RequestError;
use contract::ids::Token;
use contract::request::GenerateRequest;
use daemon::telemetry::metrics;
use proto::status::from_status;
use proto::worker::v1::DrainRequest;

use super::harness::{Worker, start_model};
use super::split::{on, simulated};

const N_PROMPT: u32 = 100;

fn prompt(seed: u32) -> Vec<Token> {
    (0..N_PROMPT).map(|i| (i * 11 + seed * 7) % 250).collect()
}

/// A worker that decodes a token in some milliseconds.
async fn start() -> Worker {
    start_model(simulated("cpu")).await
}

async fn drain(worker: &Worker, grace_ms: u64) {
    worker.client.clone().drain(DrainRequest { grace_ms: Some(grace_ms), incarnation: None }).await.unwrap();
}

/// Waits until a worker refuses what is new, because it leaves.
async fn until_leaving(worker: &Worker) {
    loop {
        match worker.generate(&worker.request(&[1], 1)).await {
            Ok(_) => tokio::task::yield_now().await,
            Err(status) => {
                return assert!(matches!(from_status(&status), RequestError::ShuttingDown(_)), "{status}");
            }
        }
    }
}

/// Bytes of keys and values that a worker has got from others.
fn n_received(worker: &Worker) -> u64 {
    let page = metrics::render();
    let (name, instance) = ("tessera_kv_transfer_moved_bytes_total{", format!("instance=\"{}\"", worker.config.id));
    let of_worker = |line: &&str| line.starts_with(name) && line.contains(&instance) && line.contains("received");
    page.lines().filter(of_worker).filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).sum()
}

/// The same request where nobody has anything cached.
fn alone(request: &GenerateRequest) -> GenerateRequest {
    GenerateRequest { cache_salt: "another".to_owned(), prefill_on: Vec::new(), ..request.clone() }
}

#[tokio::test]
async fn a_worker_that_leaves_lends_what_is_cached_and_computes_nothing() {
    let (decode, leaving) = (start().await, start().await);
    let cached = leaving.request(&prompt(1), 4);
    let (tokens, _) = leaving.generate(&cached).await.unwrap();
    let running = leaving.open(&leaving.request(&[5], 2_000)).await.unwrap();
    drain(&leaving, 3_600_000).await;
    until_leaving(&leaving).await;
    let computed = on(decode.request(&prompt(2), 4), &leaving);
    assert_eq!(decode.generate(&computed).await.unwrap(), decode.generate(&alone(&computed)).await.unwrap());
    assert_eq!(n_received(&decode), 0, "it computes nothing for others");
    assert_eq!(decode.generate(&on(cached, &leaving)).await.unwrap().0, tokens);
    let n_first = n_received(&decode);
    assert!(n_first > 0, "what is cached is lent");
    let longer = [prompt(1), prompt(3)].concat();
    let longer = GenerateRequest { cache_salt: String::new(), ..on(decode.request(&longer, 4), &leaving) };
    assert_eq!(decode.generate(&longer).await.unwrap().0, decode.generate(&alone(&longer)).await.unwrap().0);
    assert_eq!(n_received(&decode), n_first, "what comes behind it is computed by the borrower");
    drop(running);
    leaving.ended().await.unwrap();
    decode.at_rest().await;
}

/// A request whose worker is sent away goes on at another.
async fn hand_over(send_away: impl AsyncFn(&Worker)) {
    let mut config = simulated("cpu");
    config.server.grace_ms = 1_000;
    let (decode, leaving) = (start().await, start_model(config).await);
    let request = decode.request(&prompt(1), 200);
    let mut running = leaving.open(&request).await.unwrap();
    let mut generated = Vec::new();
    while generated.len() < 40 {
        let frame = running.message().await.unwrap().unwrap();
        generated.extend(frame.tokens.iter().map(|sampled| sampled.token));
    }
    send_away(&leaving).await;
    let error = loop {
        match running.message().await {
            Ok(frame) => generated.extend(frame.unwrap().tokens.iter().map(|sampled| sampled.token)),
            Err(status) => break from_status(&status),
        }
    };
    assert!(matches!(error, RequestError::ShuttingDown(_)), "{error}");
    let resumed = GenerateRequest { generated, attempt: 1, ..on(request, &leaving) };
    let (tokens, _) = decode.generate(&resumed).await.unwrap();
    let n_tokens = N_PROMPT as usize + resumed.generated.len();
    let n_bytes = 4 * 64 * (n_tokens / 16 - 1) as u64;
    assert!(n_received(&decode) >= n_bytes, "{} of {n_bytes} bytes came", n_received(&decode));
    assert_eq!(tokens, decode.generate(&alone(&resumed)).await.unwrap().0);
    drop(running);
    leaving.ended().await.unwrap();
    decode.at_rest().await;
}

#[tokio::test]
async fn what_is_handed_over_at_once_goes_on_elsewhere_with_its_keys_and_values() {
    hand_over(async |leaving| drain(leaving, 0).await).await;
}

#[tokio::test]
async fn what_is_handed_over_after_a_signal_goes_on_elsewhere_with_its_keys_and_values() {
    hand_over(async |leaving| leaving.shut_down()).await;
}

#[tokio::test]
async fn readers_that_do_not_stop_keep_no_worker_from_leaving() {
    let (decode, leaving) = (start().await, start().await);
    let request = on(decode.request(&prompt(1), 1), &leaving);
    leaving.generate(&leaving.request(&prompt(1), 1)).await.unwrap();
    let has_left = Arc::new(AtomicBool::new(false));
    drain(&leaving, 3_600_000).await;
    let reading = async {
        let mut n = 0_u32;
        while !has_left.load(Ordering::Relaxed) {
            n += 1;
            let id = contract::ids::RequestId(daemon::random::u128());
            decode.generate(&GenerateRequest { id, cache_salt: n.to_string(), ..request.clone() }).await.unwrap();
        }
    };
    let ending = async {
        leaving.ended().await.unwrap();
        has_left.store(true, Ordering::Relaxed);
    };
    let began = daemon::clock::now();
    tokio::join!(reading, ending);
    let took = daemon::clock::now() - began;
    assert!(took < std::time::Duration::from_secs(5), "{took:?}");
    decode.at_rest().await;
}
