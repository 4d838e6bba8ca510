//! The client of a scheduler's store.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use contract::view::{Member, MemberKey};
use daemon::client::{ChannelOptions, channel};
use daemon::task::Tasks;
use futures::future::BoxFuture;
use futures::{FutureExt as _, StreamExt as _};
use proto::cluster::v1 as wire;
use proto::cluster::v1::membership_client::MembershipClient;
use tonic::transport::Channel;
use tonic::{Code, Status};

use crate::Membership;
use crate::backend::{Backend, Feed, StoreError};
use crate::config::MembershipConfig;
use crate::error::Error;
use crate::lease::{self, Lease};
use crate::watch::{self, WatchEvent, WatchStream};

/// Makes the client.
pub(crate) fn client(config: &MembershipConfig, tasks: &Tasks) -> Result<Embedded, Error> {
    let endpoints = config.endpoints_or_default();
    let options = ChannelOptions::default();
    let channels = endpoints.iter().map(|endpoint| {
        channel(endpoint, &options)
            .map_err(|error| Error::Endpoint { endpoint: endpoint.clone(), reason: error.to_string() })
    });
    let remote = Remote(Arc::new(Schedulers {
        channels: channels.collect::<Result<_, _>>()?,
        endpoints: endpoints.join(","),
        present: AtomicUsize::new(0),
    }));
    Ok(Embedded { remote, grace: config.ttl(), tasks: tasks.clone() })
}

/// Membership in a scheduler's store.
pub(crate) struct Embedded {
    remote: Remote,
    grace: Duration,
    tasks: Tasks,
}

impl Membership for Embedded {
    fn register(&self, member: Member, ttl: Duration) -> BoxFuture<'_, Result<Lease, Error>> {
        async move { lease::start(self.remote.clone(), member, ttl, &self.tasks) }.boxed()
    }

    fn watch(&self) -> BoxFuture<'_, Result<WatchStream, Error>> {
        async move { Ok(watch::start(self.remote.clone(), self.grace, &self.tasks)) }.boxed()
    }
}

/// The configured schedulers, of which one is used until it fails.
#[derive(Clone)]
struct Remote(Arc<Schedulers>);

struct Schedulers {
    channels: Vec<Channel>,
    endpoints: String,
    present: AtomicUsize,
}

impl Remote {
    fn client(&self) -> MembershipClient<Channel> {
        let index = self.0.present.load(Ordering::Relaxed) % self.0.channels.len();
        MembershipClient::new(self.0.channels[index].clone())
    }

    /// What a failure means for leases; the next call goes to the next scheduler unless this one answered.
    fn failed(&self, status: &Status) -> StoreError {
        if status.code() == Code::NotFound {
            return StoreError::Lost;
        }
        if matches!(status.code(), Code::Unavailable | Code::Unknown | Code::Unimplemented) {
            self.0.present.fetch_add(1, Ordering::Relaxed);
        }
        StoreError::Unavailable(describe(status))
    }
}

/// The status with the causes that tonic keeps below it.
fn describe(status: &Status) -> String {
    let mut text = format!("{:?}: {}", status.code(), status.message());
    let mut cause = std::error::Error::source(status);
    while let Some(error) = cause {
        let line = error.to_string();
        if !text.contains(&line) {
            text = format!("{text}: {line}");
        }
        cause = error.source();
    }
    text
}

impl Backend for Remote {
    type Session = (u64, Duration);

    fn endpoints(&self) -> &str {
        &self.0.endpoints
    }

    async fn grant(&self, member: &Member, ttl: Duration) -> Result<Self::Session, StoreError> {
        let ttl_ms = u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX);
        let request = wire::RegisterRequest { member: Some(member.into()), ttl_ms };
        match self.client().register(request).await {
            Ok(response) => Ok((response.into_inner().lease, ttl)),
            Err(status) => Err(self.failed(&status)),
        }
    }

    async fn keep(&self, session: &mut Self::Session) -> Result<(), StoreError> {
        let request = wire::KeepAliveRequest { lease: session.0 };
        self.client().keep_alive(request).await.map(drop).map_err(|status| self.failed(&status))
    }

    async fn put(&self, session: &mut Self::Session, member: &Member) -> Result<(), StoreError> {
        // Registering again with the same epoch replaces the registration and its lease.
        *session = self.grant(member, session.1).await?;
        Ok(())
    }

    async fn end(&self, session: Self::Session) -> Result<(), StoreError> {
        let request = wire::DeregisterRequest { lease: session.0 };
        self.client().deregister(request).await.map(drop).map_err(|status| self.failed(&status))
    }

    async fn open(&self) -> Result<Feed, StoreError> {
        let mut messages = match self.client().watch(wire::WatchRequest {}).await {
            Ok(response) => response.into_inner(),
            Err(status) => return Err(self.failed(&status)),
        };
        let remote = self.clone();
        Ok(async_stream::stream! {
            loop {
                match messages.message().await {
                    Ok(Some(message)) => {
                        for event in events(message) {
                            yield Ok(event);
                        }
                    }
                    Ok(None) => return,
                    Err(status) => {
                        yield Err(remote.failed(&status));
                        return;
                    }
                }
            }
        }
        .boxed())
    }
}

/// The events of one message; what this version cannot read is left out, loudly.
fn events(message: wire::WatchResponse) -> Vec<WatchEvent> {
    let members = message.changed.into_iter().filter_map(|member| {
        Member::try_from(member).inspect_err(|error| tracing::warn!(%error, "a member cannot be read")).ok()
    });
    if message.snapshot {
        return vec![WatchEvent::Snapshot(members.collect())];
    }
    let removed = message.removed.into_iter().filter_map(|key| MemberKey::try_from(key).ok());
    members.map(WatchEvent::Changed).chain(removed.map(WatchEvent::Removed)).collect()
}
