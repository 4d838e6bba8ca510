//! Workers that are lost, refuse, join, leave or disagree, and clients that go away.

use std::sync::atomic::Ordering;

use contract::model::{Fingerprint, ModelIdentity};
use daemon::shutdown::Shutdown;
use daemon::task::Tasks;
use membership::embedded::{Service, Store};
use proto::cluster::v1::membership_server::MembershipServer;
use serde_json::json;

use crate::client::{post, stream};
use crate::place::{Place, until};

const COMPLETIONS: &str = "/v1/completions";

/// The store of members, as the scheduler hosts it.
pub fn store(tasks: &Tasks, shutdown: &Shutdown) -> MembershipServer<Service> {
    let store = Store::new();
    let (expiring, until) = (store.clone(), shutdown.clone());
    tasks.spawn("store", async move { expiring.run(until).await });
    Service::new(store, shutdown.clone())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_ends_the_workers_stream() {
    let place = Place::start(1).await;
    let state = &place.workers[0].state;
    state.hold_after.store(2, Ordering::SeqCst);
    let mut reply = stream(place.http, COMPLETIONS, &json!({"prompt": [5], "max_tokens": 9, "n": 2})).await;
    reply.event().await.expect("a first token");
    until("both choices run", async || state.n_streams.load(Ordering::SeqCst) == 2).await;
    drop(reply);
    until("both are dropped", async || state.n_streams.load(Ordering::SeqCst) == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_refuses_or_is_gone_is_passed_over_before_the_first_token() {
    let place = Place::start_with(2, |config| config.policy = "round_robin".to_owned()).await;
    place.workers[0].state.is_stale.store(true, Ordering::SeqCst);
    for _ in 0..4 {
        let (status, answer) = post(place.http, COMPLETIONS, &json!({"prompt": [5], "max_tokens": 2})).await;
        assert_eq!(status, 200, "{answer}");
    }
    assert_eq!((place.workers[0].n_requests(), place.workers[1].n_requests()), (0, 4));
    let replaced = place.metric("tessera_route_decisions_total{").await;
    assert!(replaced >= 6.0, "{replaced} decisions, two of them a second time");
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_join_leave_and_die_without_a_restart() {
    let mut place = Place::start(1).await;
    place.join().await;
    place.until_ready(2).await;
    place.workers[0].kill();
    place.until_ready(1).await;
    let (status, answer) = post(place.http, COMPLETIONS, &json!({"prompt": [5], "max_tokens": 2})).await;
    assert_eq!((status, place.workers[1].n_requests()), (200, 1), "{answer}");
    place.leave(1).await;
    place.until_ready(0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_whose_lease_is_lost_is_used_as_long_as_it_answers() {
    let mut place = Place::start(2).await;
    place.forget(1).await;
    // A newcomer is seen after what was forgotten.
    place.join().await;
    until("the newcomer is seen", async || place.n_workers().await >= 3).await;
    place.workers[1].kill();
    place.until_ready(2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_of_another_tokenizer_is_counted_and_not_used() {
    let mut place = Place::start(1).await;
    let other = ModelIdentity { tokenizer: Fingerprint([9; 16]), ..place.identity.clone() };
    place.join_as(&other).await;
    until("it is refused", async || place.metric("tessera_route_identity_mismatches_total{").await > 0.0).await;
    assert_eq!(place.n_workers().await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn equal_prompts_follow_each_other_and_others_use_idle_workers() {
    let place = Place::start(3).await;
    place.workers.iter().for_each(|worker| worker.state.hold_after.store(1, Ordering::SeqCst));
    let prompt: Vec<u32> = (0..400).map(|i| i % 200 + 3).collect();
    let mut held = Vec::new();
    for prompt in [&prompt[..], &prompt[..], &[3, 3, 3, 3, 3, 3], &[4, 4, 4, 4, 4, 4]] {
        let mut reply = stream(place.http, COMPLETIONS, &json!({"prompt": prompt, "max_tokens": 9})).await;
        reply.event().await.expect("a first token");
        held.push(reply);
    }
    let mut n: Vec<usize> = place.workers.iter().map(|worker| worker.n_requests()).collect();
    n.sort_unstable();
    assert_eq!(n, [1, 1, 2], "the promise keeps the second with the first; short ones go where nothing runs");
}
