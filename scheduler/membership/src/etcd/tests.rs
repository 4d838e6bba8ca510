//! Against a real etcd.

use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use daemon::clock;
use tempfile::TempDir;

use super::*;
use crate::testing::{DEADLINE, next, until, until_epoch, until_state, worker};
use crate::{Kind, connect};

const TTL: Duration = Duration::from_secs(2);

/// An etcd server, killed when dropped.
struct Server {
    child: Option<Child>,
    data: TempDir,
    ports: (u16, u16),
}

fn binary() -> PathBuf {
    if let Some(path) = std::env::var_os("TESSERA_TEST_ETCD") {
        return path.into();
    }
    let folders = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&folders)
        .map(|folder| folder.join("etcd"))
        .find(|path| path.is_file())
        .expect("no etcd found through TESSERA_TEST_ETCD or PATH: run `cargo xtask test`, which installs one")
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

impl Server {
    /// Chooses ports, but starts nothing.
    fn down() -> Self {
        Self { child: None, data: TempDir::new().unwrap(), ports: (free_port(), free_port()) }
    }

    async fn up() -> Self {
        let mut server = Self::down();
        server.start().await;
        server
    }

    fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.ports.0)
    }

    async fn start(&mut self) {
        let (endpoint, peer) = (self.endpoint(), format!("http://127.0.0.1:{}", self.ports.1));
        let mut command = Command::new(binary());
        command.args(["--name", "t0", "--logger", "zap", "--log-level", "error", "--data-dir"]).arg(self.data.path());
        command.args(["--listen-client-urls", &endpoint, "--advertise-client-urls", &endpoint]);
        command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
        command.args(["--initial-cluster", &format!("t0={peer}")]);
        self.child = Some(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
        let started = clock::now();
        loop {
            let answered = tokio::time::timeout(Duration::from_secs(1), self.client().await.status()).await;
            match answered {
                Ok(Ok(_)) => return,
                _ => assert!(clock::now() - started < DEADLINE, "etcd does not start"),
            }
        }
    }

    fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    fn lose_data(&mut self) {
        assert!(self.child.is_none());
        self.data = TempDir::new().unwrap();
    }

    async fn client(&self) -> Client {
        Client::connect([self.endpoint()], None).await.unwrap()
    }

    fn config(&self) -> MembershipConfig {
        let ttl_ms = u64::try_from(TTL.as_millis()).unwrap();
        let endpoints = vec![self.endpoint()];
        MembershipConfig { kind: Kind::Etcd, endpoints, ttl_ms, ..MembershipConfig::default() }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

#[tokio::test]
async fn members_are_seen_joining_changing_and_leaving() {
    let server = Server::up().await;
    let tasks = Tasks::new();
    let membership = connect(&server.config(), &tasks).unwrap();
    let mut watch = membership.watch().await.unwrap();
    assert_eq!(next(&mut watch).await, WatchEvent::Snapshot(vec![]));
    let mut member = worker("w0");
    let lease = membership.register(member.clone(), TTL).await.unwrap();
    member.epoch = 1;
    assert_eq!(next(&mut watch).await, WatchEvent::Changed(member.clone()));
    let mut late = membership.watch().await.unwrap();
    assert_eq!(next(&mut late).await, WatchEvent::Snapshot(vec![member.clone()]));
    member.draining = true;
    lease.update(member.clone()).unwrap();
    assert_eq!(next(&mut watch).await, WatchEvent::Changed(member.clone()));
    lease.revoke().await;
    assert_eq!(next(&mut watch).await, WatchEvent::Removed(member.key()));
    drop((watch, late));
    tasks.join(DEADLINE).await.unwrap();
}

#[tokio::test]
async fn whoever_stops_keeping_its_lease_alive_leaves_within_it() {
    let server = Server::up().await;
    let tasks = Tasks::new();
    let membership = connect(&server.config(), &tasks).unwrap();
    let mut watch = membership.watch().await.unwrap();
    let (stays, dies) = (worker("stays"), worker("dies"));
    let kept = membership.register(stays.clone(), TTL).await.unwrap();
    let lease = membership.register(dies.clone(), TTL).await.unwrap();
    until_state(&lease, |state| state.held).await;
    drop(lease);
    let dropped = clock::now();
    until(&mut watch, |event| *event == WatchEvent::Removed(dies.key())).await;
    // etcd looks for leases that ran out twice a second.
    let took = clock::now() - dropped;
    assert!(took < TTL * 2, "{took:?}");
    assert_eq!(until_state(&kept, |state| state.held).await.epoch, 1);
}

#[tokio::test]
async fn a_restart_with_data_loses_no_lease() {
    let mut server = Server::up().await;
    let tasks = Tasks::new();
    let membership = connect(&server.config(), &tasks).unwrap();
    let mut watch = membership.watch().await.unwrap();
    let member = worker("w0");
    let lease = membership.register(member.clone(), TTL).await.unwrap();
    until_epoch_from_start(&mut watch, &member).await;
    let mut connected = watch.connected();
    server.kill();
    connected.wait_for(|connected| !connected).await.unwrap();
    server.start().await;
    until(&mut watch, |event| matches!(event, WatchEvent::Snapshot(members) if members.len() == 1)).await;
    assert_eq!(until_state(&lease, |state| state.held).await.epoch, 1);
    // The kept lease is a real one: ending it is seen.
    lease.revoke().await;
    assert_eq!(next(&mut watch).await, WatchEvent::Removed(member.key()));
}

#[tokio::test]
async fn a_restart_without_data_removes_nobody_and_leases_are_made_anew() {
    let mut server = Server::up().await;
    let tasks = Tasks::new();
    let membership = connect(&server.config(), &tasks).unwrap();
    let mut watch = membership.watch().await.unwrap();
    let member = worker("w0");
    let lease = membership.register(member.clone(), TTL).await.unwrap();
    until_epoch_from_start(&mut watch, &member).await;
    // Watchers may hear of a lease before its holder does; one that its holder never held is made again as the first.
    until_state(&lease, |state| state.held).await;
    server.kill();
    server.lose_data();
    server.start().await;
    until_epoch(&mut watch, &member.key(), 2).await;
    assert_eq!(until_state(&lease, |state| state.held && state.epoch > 1).await.epoch, 2);
}

#[tokio::test]
async fn a_compacted_revision_ends_the_feed_and_the_watch_goes_on() {
    let server = Server::up().await;
    let tasks = Tasks::new();
    let etcd = client(&server.config(), &tasks).unwrap();
    let mut watch = etcd.watch().await.unwrap();
    let member = worker("w0");
    let lease = etcd.register(member.clone(), TTL).await.unwrap();
    until_epoch_from_start(&mut watch, &member).await;
    let mut raw = server.client().await;
    let mut revision = 0;
    for n in 0..3 {
        revision = raw.put("/other", n.to_string(), None).await.unwrap().header().unwrap().revision();
    }
    raw.compact(revision, None).await.unwrap();
    let mut feed = etcd.remote.changes_after(0).await.unwrap();
    match tokio::time::timeout(DEADLINE, feed.next()).await.unwrap() {
        Some(Err(StoreError::Unavailable(reason))) => assert!(reason.contains("compacted"), "{reason}"),
        other => panic!("{other:?}"),
    }
    lease.update(Member { draining: true, ..member.clone() }).unwrap();
    until(&mut watch, |event| matches!(event, WatchEvent::Changed(member) if member.draining)).await;
}

#[tokio::test]
async fn an_etcd_that_is_down_at_start_is_waited_for() {
    let mut server = Server::down();
    let tasks = Tasks::new();
    let membership = connect(&server.config(), &tasks).unwrap();
    let mut watch = membership.watch().await.unwrap();
    let lease = membership.register(worker("w0"), TTL).await.unwrap();
    assert!(!lease.is_held() && !watch.is_connected());
    server.start().await;
    until_state(&lease, |state| state.held).await;
    assert!(matches!(next(&mut watch).await, WatchEvent::Snapshot(_)));
}

#[tokio::test]
async fn registrations_that_cannot_be_read_are_left_out() {
    let server = Server::up().await;
    let tasks = Tasks::new();
    let mut raw = server.client().await;
    let good = Member { epoch: 1, ..worker("good") };
    let other = key::of("/tessera/v1/members", &worker("other").key());
    raw.put("/tessera/v1/members/worker/bad/00", "{", None).await.unwrap();
    raw.put(other, serde_json::to_vec(&good).unwrap(), None).await.unwrap();
    raw.put(key::of("/tessera/v1/members", &good.key()), serde_json::to_vec(&good).unwrap(), None).await.unwrap();
    let mut watch = connect(&server.config(), &tasks).unwrap().watch().await.unwrap();
    assert_eq!(next(&mut watch).await, WatchEvent::Snapshot(vec![good]));
}

#[tokio::test]
async fn endpoints_that_no_client_can_be_made_for_are_typed_errors() {
    for endpoint in ["no address", "https://127.0.0.1:2379", "ftp://127.0.0.1:2379", "http://127.0.0.1", ""] {
        let endpoints = vec![endpoint.to_owned()];
        let config = MembershipConfig { kind: Kind::Etcd, endpoints, ..MembershipConfig::default() };
        assert!(matches!(connect(&config, &Tasks::new()), Err(Error::Endpoint { .. })), "{endpoint:?}");
    }
    let config = MembershipConfig { kind: Kind::Etcd, prefix: "x/".to_owned(), ..MembershipConfig::default() };
    assert!(matches!(connect(&config, &Tasks::new()), Err(Error::Prefix { .. })));
}

async fn until_epoch_from_start(watch: &mut WatchStream, member: &Member) {
    let has = |seen: &Member| seen.key() == member.key() && seen.epoch == 1;
    until(watch, |event| match event {
        WatchEvent::Snapshot(members) => members.iter().any(has),
        WatchEvent::Changed(seen) => has(seen),
        WatchEvent::Removed(_) => false,
    })
    .await;
}
