//! The gate with workers that are a number of free places.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use daemon::telemetry::metrics::scope;
use daemon::telemetry::names;

use super::*;
use crate::admission::{TenantLimits, TenantTable};

/// Places that are taken and given back when dropped.
#[derive(Clone, Default)]
struct Room(Arc<AtomicUsize>);

struct Taken(Room);

impl Drop for Taken {
    fn drop(&mut self) {
        self.0.0.fetch_add(1, Ordering::SeqCst);
    }
}

impl Room {
    fn free(n: usize) -> Self {
        Self(Arc::new(AtomicUsize::new(n)))
    }

    fn n_free(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }

    fn try_place(&self) -> impl FnMut(&&'static str, Turn) -> Attempt<Taken> {
        let room = self.clone();
        move |_, _| match room.n_free() {
            0 => Attempt::NotNow(Duration::from_millis(7)),
            n => {
                room.0.store(n - 1, Ordering::SeqCst);
                Attempt::Placed(Taken(room.clone()), 100)
            }
        }
    }
}

type TestGate = Gate<&'static str, Taken>;

fn gate(change: impl FnOnce(&mut AdmissionSettings)) -> Arc<TestGate> {
    let mut settings = AdmissionSettings::default();
    change(&mut settings);
    let queued =
        scope("router", &format!("gate-{:x}", daemon::random::u64())).gauge(&names::ROUTER_REQUESTS, &["queued"]);
    Arc::new(Gate::new(settings, 77, queued))
}

fn tenant(name: &str) -> Arc<Tenant> {
    let settings = AdmissionSettings {
        tenants: [(name.to_owned(), TenantLimits::default())].into(),
        ..AdmissionSettings::default()
    };
    Arc::clone(TenantTable::new(&settings).unwrap().named(&name.into()))
}

/// Acquires as a tenant with so many milliseconds to its deadline; all prompts have 100 tokens.
async fn acquire_as(
    (gate, room): (&TestGate, &Room),
    name: &str,
    left_ms: u64,
    tokens_per_ms: f64,
) -> Result<Taken, RequestError> {
    let deadline = daemon::clock::now() + Duration::from_millis(left_ms);
    let tenant = tenant(name);
    let claim = Claim { tenant: &tenant, priority: 0, deadline, is_later: false };
    let forecast = Forecast { tokens: 100, prefill_ms: 10.0, first_token_ms: 10.0, tokens_per_ms };
    gate.acquire(claim, "good", room.try_place(), |_| forecast).await
}

async fn acquire(gate: &TestGate, room: &Room) -> Result<Taken, RequestError> {
    acquire_as((gate, room), "a", 60_000, 0.0).await
}

fn pump(gate: &TestGate, try_place: impl FnMut(&&'static str, Turn) -> Attempt<Taken>) -> Option<Duration> {
    gate.pump(daemon::clock::now(), try_place)
}

/// Polls once: what waits has entered the queue.
async fn poll<F: Future + Unpin>(future: &mut F) -> Option<F::Output> {
    tokio::select! {
        biased;
        output = future => Some(output),
        () = std::future::ready(()) => None,
    }
}

#[tokio::test]
async fn a_request_waits_until_room_appears() {
    let (gate, room) = (gate(|_| ()), Room::free(1));
    let first = acquire(&gate, &room).await.unwrap();
    let mut second = Box::pin(acquire(&gate, &room));
    assert!(poll(&mut second).await.is_none());
    gate.entered().await;
    let again = pump(&gate, room.try_place());
    assert_eq!(again, Some(Duration::from_millis(7)));
    assert!(poll(&mut second).await.is_none());
    assert_eq!(gate.queued.get(), 1);
    drop(first);
    assert!(poll(&mut Box::pin(acquire(&gate, &room))).await.is_none(), "none goes past who waits");
    assert_eq!(pump(&gate, room.try_place()), None);
    assert_eq!(gate.queued.get(), 0);
    let second = second.await.unwrap();
    assert_eq!(room.n_free(), 0);
    drop(second);
    assert_eq!(room.n_free(), 1);
}

#[tokio::test]
async fn clients_that_go_away_leave_the_queue_and_their_placement_comes_back() {
    let (gate, room) = (gate(|_| ()), Room::free(0));
    let mut waiting = Box::pin(acquire(&gate, &room));
    assert!(poll(&mut waiting).await.is_none());
    drop(waiting);
    assert_eq!(gate.queued.get(), 0);
    // Placed, but gone before it was told.
    let mut placed = Box::pin(acquire(&gate, &room));
    assert!(poll(&mut placed).await.is_none());
    room.0.store(1, Ordering::SeqCst);
    pump(&gate, room.try_place());
    assert_eq!(room.n_free(), 0);
    drop(placed);
    assert_eq!((room.n_free(), gate.queue().len()), (1, 0));
}

#[tokio::test]
async fn what_can_never_be_placed_is_told_at_once_and_also_when_it_waits() {
    let (gate, room) = (gate(|_| ()), Room::free(0));
    let none = RequestError::NoWorker { model: "m".to_owned() };
    let never = |_: &&'static str, _| Attempt::<Taken>::Never(RequestError::NoWorker { model: "m".to_owned() });
    let tenant = tenant("a");
    let deadline = daemon::clock::now() + Duration::from_secs(60);
    let claim = Claim { tenant: &tenant, priority: 0, deadline, is_later: false };
    let error = gate.acquire(claim, "bad", never, |_| Forecast::default()).await.err();
    assert_eq!(error, Some(none.clone()));
    let mut waiting = Box::pin(acquire(&gate, &room));
    assert!(poll(&mut waiting).await.is_none());
    pump(&gate, never);
    assert_eq!(waiting.await.err(), Some(none));
    assert!(gate.queue().is_empty());
}

#[tokio::test]
async fn a_deadline_and_the_longest_wait_end_the_waiting() {
    let (gate, room) = (gate(|settings| settings.wait_ms_max = 30), Room::free(0));
    let error = acquire(&gate, &room).await.err().unwrap();
    assert!(matches!(error, RequestError::Overloaded { retry_after_ms: 77, .. }), "{error}");
    let error = acquire_as((&gate, &room), "a", 5, 0.0).await.err();
    assert_eq!(error, Some(RequestError::DeadlineExceeded { n_tokens: 0 }));
    assert!(gate.queue().is_empty());
}

#[tokio::test]
async fn later_prompts_of_a_request_are_not_refused_for_what_is_ahead_of_them() {
    let (gate, room) = (gate(|settings| settings.first_token_goal_ms = 100), Room::free(0));
    let (tenant, deadline) = (tenant("a"), daemon::clock::now() + Duration::from_secs(60));
    let forecast = Forecast { tokens: 1_500, prefill_ms: 10.0, first_token_ms: 10.0, tokens_per_ms: 0.5 };
    let enter = |is_later| {
        let claim = Claim { tenant: &tenant, priority: 0, deadline, is_later };
        Box::pin(gate.acquire(claim, "good", room.try_place(), move |_| forecast))
    };
    let mut prompts: Vec<_> = (0..40).map(|index| enter(index > 0)).collect();
    for prompt in &mut prompts {
        assert!(poll(prompt).await.is_none());
    }
    let other = enter(false).await.err().unwrap();
    assert!(matches!(other, RequestError::Overloaded { .. }), "{other}");
    room.0.store(40, Ordering::SeqCst);
    gate.pump(daemon::clock::now(), room.try_place());
    for prompt in prompts {
        assert!(prompt.await.is_ok());
    }
}

#[tokio::test]
async fn a_full_queue_and_a_hopeless_wait_are_refused_with_a_time_from_the_backlog() {
    let (gate, room) = (gate(|settings| settings.queue.n_requests_max = 2), Room::free(0));
    let enter = |name, left_ms| Box::pin(acquire_as((&gate, &room), name, left_ms, 0.5));
    let (mut first, mut second) = (enter("a", 60_000), enter("b", 60_000));
    assert!(poll(&mut first).await.is_none() && poll(&mut second).await.is_none());
    let full = enter("c", 60_000).await.err();
    let reason = "2 requests are waiting".to_owned();
    assert_eq!(full, Some(RequestError::Overloaded { reason, retry_after_ms: 200 }));
    drop(second);
    // 100 tokens are ahead, which take 200 ms.
    let late = enter("b", 100).await.err().unwrap();
    assert!(matches!(late, RequestError::Overloaded { retry_after_ms: 110..=200, .. }), "{late}");
}

#[tokio::test]
async fn waiting_tenants_take_turns() {
    let (gate, room) = (gate(|_| ()), Room::free(0));
    let mut waiting = ["a", "a", "a", "b"].map(|name| (name, Box::pin(acquire_as((&gate, &room), name, 60_000, 0.0))));
    for (_, request) in &mut waiting {
        assert!(poll(request).await.is_none());
    }
    room.0.store(2, Ordering::SeqCst);
    pump(&gate, room.try_place());
    let mut placed = Vec::new();
    for (name, request) in &mut waiting {
        if let Some(taken) = poll(request).await {
            placed.push((*name, taken.unwrap()));
        }
    }
    assert_eq!(placed.iter().map(|(name, _)| *name).collect::<Vec<_>>(), ["a", "b"]);
}
