//! What the tests of both stores share.

use std::time::Duration;

use contract::ids::Incarnation;
use contract::view::{Member, MemberKey, MemberKind};
use tokio::time::timeout;

use crate::{Lease, LeaseState, WatchEvent, WatchStream};

/// Far longer than anything here takes; reached only by a defect.
pub(crate) const DEADLINE: Duration = Duration::from_secs(30);

pub(crate) fn worker(id: &str) -> Member {
    Member {
        kind: MemberKind::Worker,
        id: id.to_owned(),
        incarnation: Incarnation(daemon::random::u64()),
        address: "127.0.0.1:1".to_owned(),
        n_data_ranks: 1,
        identity: None,
        draining: false,
        role: None,
        epoch: 0,
    }
}

pub(crate) async fn next(stream: &mut WatchStream) -> WatchEvent {
    timeout(DEADLINE, stream.next()).await.expect("an event comes").expect("the watch goes on")
}

/// Skips to the event that `is_wanted` and returns everything before it too.
pub(crate) async fn until(stream: &mut WatchStream, is_wanted: impl Fn(&WatchEvent) -> bool) -> Vec<WatchEvent> {
    let mut seen = Vec::new();
    loop {
        let event = match timeout(DEADLINE, stream.next()).await {
            Ok(event) => event.expect("the watch goes on"),
            Err(_) => panic!("nothing within {DEADLINE:?} after {seen:?}"),
        };
        let is_last = is_wanted(&event);
        seen.push(event);
        if is_last {
            return seen;
        }
    }
}

/// Skips to the event that shows `key` with `epoch`, and checks that nobody was removed on the way.
pub(crate) async fn until_epoch(stream: &mut WatchStream, key: &MemberKey, epoch: u64) {
    let has = |member: &Member| member.key() == *key && member.epoch == epoch;
    let seen = until(stream, |event| match event {
        WatchEvent::Snapshot(members) => members.iter().any(has),
        WatchEvent::Changed(member) => has(member),
        WatchEvent::Removed(_) => false,
    })
    .await;
    for event in &seen {
        match event {
            WatchEvent::Removed(gone) => panic!("{gone:?} was removed by an outage: {seen:?}"),
            WatchEvent::Snapshot(members) => {
                assert!(members.iter().any(|member| member.key() == *key), "forgotten by an outage: {seen:?}");
            }
            WatchEvent::Changed(_) => {}
        }
    }
}

pub(crate) async fn until_state(lease: &Lease, is_wanted: impl FnMut(&LeaseState) -> bool) -> LeaseState {
    let mut state = lease.state();
    *timeout(DEADLINE, state.wait_for(is_wanted)).await.expect("the state comes").expect("the lease is kept")
}
