//! The store over gRPC.

use std::pin::Pin;
use std::time::Duration;

use contract::view::Member;
use daemon::shutdown::Shutdown;
use futures::{Stream, StreamExt as _};
use proto::WireError;
use proto::cluster::v1 as wire;
use proto::cluster::v1::membership_server::{Membership, MembershipServer};
use tonic::{Request, Response, Status};

use super::store::Store;
use super::table::{LeaseId, TableError};
use crate::config::{check_id, check_ttl};
use crate::watch::WatchEvent;

/// Answers `tessera.cluster.v1.Membership` from a store.
#[derive(Clone, Debug)]
pub struct Service {
    store: Store,
    shutdown: Shutdown,
}

impl Service {
    /// Makes the service to mount; its watches end at `shutdown`.
    #[must_use]
    pub fn new(store: Store, shutdown: Shutdown) -> MembershipServer<Self> {
        MembershipServer::new(Self { store, shutdown })
    }
}

#[tonic::async_trait]
impl Membership for Service {
    type WatchStream = Pin<Box<dyn Stream<Item = Result<wire::WatchResponse, Status>> + Send>>;

    async fn register(
        &self,
        request: Request<wire::RegisterRequest>,
    ) -> Result<Response<wire::RegisterResponse>, Status> {
        let request = request.into_inner();
        let member = request.member.ok_or(WireError::Missing("member"))?;
        let member = Member::try_from(member)?;
        let ttl = Duration::from_millis(request.ttl_ms);
        check_id(&member.id).and(check_ttl(ttl)).map_err(|error| Status::invalid_argument(error.to_string()))?;
        let (kind, id, epoch, address) = (member.kind, member.id.clone(), member.epoch, member.address.clone());
        let draining = member.draining;
        let lease = self.store.register(member, ttl).map_err(to_status)?;
        tracing::info!(?kind, id, epoch, address, draining, ttl_ms = request.ttl_ms, "member registered");
        Ok(Response::new(wire::RegisterResponse { lease: lease.0, ttl_ms: request.ttl_ms }))
    }

    async fn keep_alive(
        &self,
        request: Request<wire::KeepAliveRequest>,
    ) -> Result<Response<wire::KeepAliveResponse>, Status> {
        let ttl = self.store.keep_alive(LeaseId(request.into_inner().lease)).map_err(to_status)?;
        let ttl_ms = u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX);
        Ok(Response::new(wire::KeepAliveResponse { ttl_ms }))
    }

    async fn deregister(
        &self,
        request: Request<wire::DeregisterRequest>,
    ) -> Result<Response<wire::DeregisterResponse>, Status> {
        self.store.deregister(LeaseId(request.into_inner().lease)).map_err(to_status)?;
        Ok(Response::new(wire::DeregisterResponse {}))
    }

    async fn watch(&self, _: Request<wire::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let shutdown = self.shutdown.clone();
        let stream = self
            .store
            .feed()
            .map(|event| event.map(to_wire).map_err(|error| Status::unavailable(error.to_string())))
            .take_until(async move { shutdown.triggered().await });
        Ok(Response::new(stream.boxed()))
    }
}

fn to_status(error: TableError) -> Status {
    match error {
        TableError::NoLease => Status::not_found(error.to_string()),
        TableError::OldEpoch { .. } | TableError::LeaseInUse => Status::failed_precondition(error.to_string()),
        TableError::Full(_) => Status::resource_exhausted(error.to_string()),
    }
}

fn to_wire(event: WatchEvent) -> wire::WatchResponse {
    match event {
        WatchEvent::Snapshot(members) => wire::WatchResponse {
            snapshot: true,
            changed: members.iter().map(Into::into).collect(),
            removed: Vec::new(),
        },
        WatchEvent::Changed(member) => {
            wire::WatchResponse { snapshot: false, changed: vec![(&member).into()], removed: Vec::new() }
        }
        WatchEvent::Removed(key) => {
            wire::WatchResponse { snapshot: false, changed: Vec::new(), removed: vec![(&key).into()] }
        }
    }
}
