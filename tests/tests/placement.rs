//! What routers know of workers, over real processes: after restarts, and told by `Explain`.

#![allow(
    clippy::disallowed_methods,
    clippy::print_stderr,
    clippy::unwrap_used,
    missing_docs,
    reason = "tests: a failed step panics, and real time is what they measure"
)]

use std::time::Duration;

use proto::inference::v1::explain_request::Subject;
use proto::inference::v1::generate_request::Prompt;
use proto::inference::v1::inference_client::InferenceClient;
use proto::inference::v1::{
    ExplainRequest, ExplainResponse, GenerateRequest, PlacementCandidate, PlacementDecision, TokenIds,
};
use serde_json::{Value, json};
use tests::cluster::{Cluster, Plan, START};
use tests::metrics::Metrics;
use tests::{client, seed, wait};
use tonic::Status;

const N_PROMPT: u32 = 100;
/// Whole blocks of the prompt that leave its last token to be computed.
const N_CACHED: u64 = 96;

fn prompt(seed: u32) -> Vec<u32> {
    (0..N_PROMPT).map(|i| (seed * 31 + i * 7) % 60 + 3).collect()
}

fn completion(prompt: &[u32]) -> Value {
    json!({"model": "tiny", "prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": true})
}

async fn explain(router: &str, subject: Subject) -> Result<ExplainResponse, Status> {
    let mut client = InferenceClient::connect(format!("http://{router}")).await.unwrap();
    Ok(client.explain(ExplainRequest { subject: Some(subject) }).await?.into_inner())
}

/// Where a prompt would go now.
async fn foresee(router: &str, prompt: &[u32]) -> PlacementDecision {
    let prompt = Some(Prompt::Tokens(TokenIds { ids: prompt.to_vec() }));
    let request = GenerateRequest { prompt, ..GenerateRequest::default() };
    explain(router, Subject::Prompt(request)).await.unwrap().decisions.remove(0)
}

/// Waits until a router takes `n` blocks' tokens of a prompt for cached on the worker it would choose.
async fn wait_for_credit(router: &str, prompt: &[u32], n_tokens: u64) -> PlacementCandidate {
    wait::until("credit for a cached prompt", START, async || {
        let chosen = foresee(router, prompt).await.candidates.remove(0);
        if chosen.cached_tokens == n_tokens && chosen.promised_tokens == 0 {
            Ok(chosen)
        } else {
            Err(format!("{chosen:?}"))
        }
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_worker_is_credited_with_nothing_and_a_restarted_router_knows_all() {
    let mut cluster = Cluster::start(Plan { n_workers: 2, ..Plan::default() }).await;
    let prompt = prompt(1);
    let (status, answer) = cluster.post("/v1/completions", &completion(&prompt)).await;
    assert_eq!(status, 200, "{answer}");
    let holder = wait_for_credit(&cluster.routers[0].grpc, &prompt, N_CACHED).await.engine;

    let another = cluster.start_router("router-1");
    wait::until("the new router sees the workers", START, async || {
        let metrics = Metrics::fetch(&another.http).await.map_err(|error| error.to_string())?;
        let seen = metrics.sum("tessera_route_engines", &["state=\"ready\""]);
        if seen == 2.0 { Ok(()) } else { Err(format!("{seen} of 2")) }
    })
    .await;
    let known = wait_for_credit(&another.grpc, &prompt, N_CACHED).await;
    assert_eq!(known.engine, holder, "its directory is what the workers hold");

    let index = cluster.workers.iter().position(|worker| holder.contains(&worker.id)).unwrap();
    let mut before = cluster.workers.remove(index);
    before.process.kill();
    let after = cluster.start_worker_at(&before.id, &before.address);
    assert_eq!(after.address, before.address);
    cluster.workers.push(after);
    for router in [&cluster.routers[0], &another] {
        wait::until("the new life is the one that is placed on", START, async || {
            let decision = foresee(&router.grpc, &prompt).await;
            let mut lives = decision.candidates.iter().filter(|one| one.engine.contains(&before.id));
            match (lives.next(), lives.next()) {
                (Some(one), None) if one.engine != holder => {
                    assert_eq!(one.cached_tokens, 0, "the new life holds nothing of the old one's");
                    Ok(())
                }
                other => Err(format!("{other:?}")),
            }
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_past_request_is_explained_by_the_id_in_its_answer() {
    let cluster = Cluster::start(Plan { n_workers: 2, ..Plan::default() }).await;
    let (status, answer) = cluster.post("/v1/completions", &completion(&prompt(2))).await;
    assert_eq!(status, 200, "{answer}");
    let id = answer["id"].as_str().unwrap();
    let told = explain(&cluster.routers[0].grpc, Subject::RequestId(id.to_owned())).await.unwrap();
    assert_eq!(told.policy, "prefix_latency");
    let [decision] = &told.decisions[..] else { panic!("{told:?}") };
    assert_eq!((decision.candidates.len(), decision.n_candidates), (2, 2));
    assert!(decision.actual_first_token_ms.unwrap() > 0.0, "{decision:?}");
    assert!(decision.candidates[0].first_token_ms > 0.0, "{decision:?}");
    for wrong in ["cmpl-12", "cmpl-00000000000000000000000000000000", ""] {
        let refused = explain(&cluster.routers[0].grpc, Subject::RequestId(wrong.to_owned())).await.unwrap_err();
        assert_eq!(refused.code(), tonic::Code::InvalidArgument, "{wrong}: {refused}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn strange_models_and_tenants_make_no_series() {
    let n_requests = if seed::is_full() { 10_000 } else { 400 };
    let cluster = Cluster::start(Plan::default()).await;
    let router = &cluster.routers[0].http;
    let ask = async |n: u64| {
        let model = if n.is_multiple_of(4) { "tiny".to_owned() } else { format!("model-{n:x}") };
        let body = json!({"model": model, "prompt": [5, 6, 7], "max_tokens": 1, "user": format!("user-{n}")});
        let request = client::http().post(format!("http://{router}/v1/completions")).json(&body);
        let answer = request.bearer_auth(format!("key-{n}")).header("x-tenant", format!("tenant-{n}")).send().await;
        let status = answer.unwrap().status().as_u16();
        assert_eq!(status, if n.is_multiple_of(4) { 200 } else { 404 }, "{body}");
    };
    for n in 0..40 {
        ask(n).await;
    }
    let before = Metrics::fetch(router).await.unwrap().n_series();
    for n in 40..n_requests {
        ask(n).await;
    }
    assert_eq!(Metrics::fetch(router).await.unwrap().n_series(), before);
    cluster.wait_for_rest(Duration::from_secs(20)).await;
}
