//! Store, service and client over loopback.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use daemon::clock;
use daemon::server::{Listener, Server, ServerConfig};
use daemon::shutdown::{Shutdown, Trigger};
use daemon::task::Tasks;
use tonic::service::Routes;

use super::{Service, Store};
use crate::testing::{DEADLINE, next, until, until_epoch, until_state, worker};
use crate::{Error, Membership, MembershipConfig, WatchEvent, connect};

/// A store being served.
struct Host {
    address: SocketAddr,
    trigger: Trigger,
    tasks: Tasks,
}

impl Host {
    fn start(address: &str) -> Self {
        let listener = Listener::bind(address).unwrap();
        let address = listener.local_addr();
        let (trigger, shutdown) = Shutdown::pair();
        let (store, tasks) = (Store::new(), Tasks::new());
        let routes = Routes::new(Service::new(store.clone(), shutdown.clone()));
        let expiring = shutdown.clone();
        tasks.spawn("store", async move { store.run(expiring).await });
        let server = Server::new("scheduler", ServerConfig::default()).grpc(routes);
        tasks.spawn("server", async move { server.serve(listener, shutdown).await.unwrap() });
        Self { address, trigger, tasks }
    }

    async fn stop(self) -> String {
        self.trigger.fire();
        self.tasks.join(DEADLINE).await.unwrap();
        self.address.to_string()
    }
}

fn client(address: &str, ttl_ms: u64, tasks: &Tasks) -> Arc<dyn Membership> {
    let config = MembershipConfig { endpoints: vec![address.to_owned()], ttl_ms, ..MembershipConfig::default() };
    connect(&config, tasks).unwrap()
}

#[tokio::test]
async fn members_are_seen_joining_changing_and_leaving() {
    let host = Host::start("127.0.0.1:0");
    let tasks = Tasks::new();
    let membership = client(&host.address.to_string(), 5_000, &tasks);
    let mut watch = membership.watch().await.unwrap();
    assert_eq!(next(&mut watch).await, WatchEvent::Snapshot(vec![]));
    let mut member = worker("w0");
    let lease = membership.register(member.clone(), Duration::from_secs(5)).await.unwrap();
    member.epoch = 1;
    assert_eq!(next(&mut watch).await, WatchEvent::Changed(member.clone()));
    assert_eq!(until_state(&lease, |state| state.held).await.epoch, 1);
    member.draining = true;
    lease.update(member.clone()).unwrap();
    assert_eq!(next(&mut watch).await, WatchEvent::Changed(member.clone()));
    assert!(matches!(lease.update(worker("w0")), Err(Error::OtherMember { .. })));
    lease.revoke().await;
    assert_eq!(next(&mut watch).await, WatchEvent::Removed(member.key()));
    assert!(watch.is_connected());
    drop(watch);
    tasks.join(DEADLINE).await.unwrap();
    host.stop().await;
}

#[tokio::test]
async fn whoever_stops_keeping_its_lease_alive_leaves_within_it() {
    let host = Host::start("127.0.0.1:0");
    let tasks = Tasks::new();
    let ttl = Duration::from_millis(600);
    let membership = client(&host.address.to_string(), 600, &tasks);
    let mut watch = membership.watch().await.unwrap();
    let stays = membership.register(worker("stays"), ttl).await.unwrap();
    let dies = worker("dies");
    let lease = membership.register(dies.clone(), ttl).await.unwrap();
    until_state(&lease, |state| state.held).await;
    until_state(&stays, |state| state.held).await;
    drop(lease);
    let dropped = clock::now();
    until(&mut watch, |event| *event == WatchEvent::Removed(dies.key())).await;
    let took = clock::now() - dropped;
    assert!(took < ttl + Duration::from_millis(400), "{took:?}");
    assert!(stays.is_held() && stays.epoch() == 1);
}

#[tokio::test]
async fn a_scheduler_restart_removes_nobody_and_leases_are_made_anew() {
    let host = Host::start("127.0.0.1:0");
    let tasks = Tasks::new();
    let membership = client(&host.address.to_string(), 2_000, &tasks);
    let mut watch = membership.watch().await.unwrap();
    let member = worker("w0");
    let lease = membership.register(member.clone(), Duration::from_secs(2)).await.unwrap();
    until(&mut watch, |event| matches!(event, WatchEvent::Changed(_))).await;
    let mut connected = watch.connected();
    let address = host.stop().await;
    connected.wait_for(|connected| !connected).await.unwrap();
    let again = Host::start(&address);
    until_epoch(&mut watch, &member.key(), 2).await;
    assert_eq!(until_state(&lease, |state| state.held && state.epoch > 1).await.epoch, 2);
    again.stop().await;
}

#[tokio::test]
async fn a_scheduler_that_is_down_at_start_is_waited_for() {
    let address = Listener::bind("127.0.0.1:0").unwrap().local_addr().to_string();
    let tasks = Tasks::new();
    let membership = client(&address, 2_000, &tasks);
    let mut watch = membership.watch().await.unwrap();
    let lease = membership.register(worker("w0"), Duration::from_secs(2)).await.unwrap();
    assert!(!lease.is_held() && !watch.is_connected());
    let host = Host::start(&address);
    until_state(&lease, |state| state.held).await;
    assert!(matches!(next(&mut watch).await, WatchEvent::Snapshot(_)));
    host.stop().await;
}

#[tokio::test]
async fn the_second_scheduler_is_used_when_the_first_is_down() {
    let down = Listener::bind("127.0.0.1:0").unwrap().local_addr().to_string();
    let host = Host::start("127.0.0.1:0");
    let tasks = Tasks::new();
    let endpoints = vec![down, host.address.to_string()];
    let membership = connect(&MembershipConfig { endpoints, ..MembershipConfig::default() }, &tasks).unwrap();
    let lease = membership.register(worker("w0"), Duration::from_secs(2)).await.unwrap();
    until_state(&lease, |state| state.held).await;
    host.stop().await;
}

#[tokio::test]
async fn what_no_retry_cures_is_a_typed_error() {
    let tasks = Tasks::new();
    let config = MembershipConfig { endpoints: vec!["no address".to_owned()], ..MembershipConfig::default() };
    assert!(matches!(connect(&config, &tasks), Err(Error::Endpoint { .. })));
    let membership = client("127.0.0.1:1", 1_000, &tasks);
    let refused = membership.register(worker("a/b"), Duration::from_secs(1)).await;
    assert!(matches!(refused, Err(Error::Id { .. })));
    let refused = membership.register(worker("w0"), Duration::ZERO).await;
    assert!(matches!(refused, Err(Error::Ttl { .. })));
}
