//! Membership in etcd, within API 3.4.
//!
//! A member is a key `<prefix>/<kind>/<id>/<incarnation>` that holds its registration as JSON and hangs on a lease.

mod key;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use contract::view::Member;
use daemon::task::Tasks;
use etcd_client::{Client, ConnectOptions, EventType, GetOptions, PutOptions, WatchOptions};
use futures::future::BoxFuture;
use futures::{FutureExt as _, StreamExt as _};
use tokio::sync::OnceCell;
use tonic::Code;
use tonic::transport::Uri;

use crate::Membership;
use crate::backend::{Backend, Feed, StoreError};
use crate::config::MembershipConfig;
use crate::error::Error;
use crate::lease::{self, Lease};
use crate::watch::{self, WatchEvent, WatchStream};

/// Longest time to make a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Time between HTTP/2 pings, and longest wait for the answer to one.
const PING: Duration = Duration::from_secs(5);
/// etcd keeps no lease shorter than this, whatever it is asked for.
const TTL_MIN: Duration = Duration::from_secs(2);

/// Checks endpoints and prefix.
pub(crate) fn check(config: &MembershipConfig) -> Result<(), Error> {
    config.endpoints_or_default().iter().try_for_each(|endpoint| check_endpoint(endpoint))?;
    if !config.prefix.starts_with('/') || config.prefix.ends_with('/') {
        return Err(Error::Prefix { prefix: config.prefix.clone() });
    }
    Ok(())
}

/// Makes the client; it connects later.
pub(crate) fn client(config: &MembershipConfig, tasks: &Tasks) -> Result<Etcd, Error> {
    check(config)?;
    let endpoints = config.endpoints_or_default();
    let names = endpoints.join(",");
    let shared = Shared { endpoints, names, prefix: config.prefix.clone(), client: OnceCell::new() };
    Ok(Etcd { remote: Remote(Arc::new(shared)), grace: config.ttl().max(TTL_MIN), tasks: tasks.clone() })
}

fn check_endpoint(endpoint: &str) -> Result<(), Error> {
    let wrong = |reason: String| Error::Endpoint { endpoint: endpoint.to_owned(), reason };
    let url = if endpoint.contains("://") { endpoint.to_owned() } else { format!("http://{endpoint}") };
    let uri: Uri = url.parse().map_err(|error| wrong(format!("{error}; give http://HOST:PORT")))?;
    match (uri.scheme_str(), uri.port_u16()) {
        (Some("https"), _) => Err(wrong("https is not supported yet; give http://HOST:PORT".to_owned())),
        (Some("http"), Some(_)) => Ok(()),
        _ => Err(wrong("give http://HOST:PORT".to_owned())),
    }
}

/// Membership in etcd.
#[derive(Debug)]
pub(crate) struct Etcd {
    remote: Remote,
    grace: Duration,
    tasks: Tasks,
}

impl Membership for Etcd {
    fn register(&self, member: Member, ttl: Duration) -> BoxFuture<'_, Result<Lease, Error>> {
        async move {
            self.remote.client().await?;
            lease::start(self.remote.clone(), member, ttl.max(TTL_MIN), &self.tasks)
        }
        .boxed()
    }

    fn watch(&self) -> BoxFuture<'_, Result<WatchStream, Error>> {
        async move {
            self.remote.client().await?;
            Ok(watch::start(self.remote.clone(), self.grace, &self.tasks))
        }
        .boxed()
    }
}

/// A client that connects, and reconnects, by itself.
#[derive(Clone, Debug)]
struct Remote(Arc<Shared>);

struct Shared {
    endpoints: Vec<String>,
    names: String,
    prefix: String,
    client: OnceCell<Client>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("endpoints", &self.names).field("prefix", &self.prefix).finish_non_exhaustive()
    }
}

impl Remote {
    /// Gets the client, made at its first use; making it does not wait for etcd.
    async fn client(&self) -> Result<Client, Error> {
        let options = ConnectOptions::new()
            .with_connect_timeout(CONNECT_TIMEOUT)
            .with_keep_alive(PING, PING)
            .with_keep_alive_while_idle(true)
            // A member cut off from its leader fails watches instead of going silent.
            .with_require_leader(true);
        let client = self.0.client.get_or_try_init(|| Client::connect(&self.0.endpoints, Some(options))).await;
        client.cloned().map_err(|error| Error::Endpoint { endpoint: self.0.names.clone(), reason: error.to_string() })
    }

    async fn connected(&self) -> Result<Client, StoreError> {
        self.client().await.map_err(|error| StoreError::Unavailable(error.to_string()))
    }

    /// Follows the changes after `revision`; a compacted revision ends the feed with an error.
    async fn changes_after(&self, revision: i64) -> Result<Feed, StoreError> {
        let options = WatchOptions::new().with_prefix().with_start_revision(revision + 1);
        let prefix = format!("{}/", self.0.prefix);
        let mut stream = self.connected().await?.watch(prefix, Some(options)).await.map_err(unavailable)?;
        let remote = self.clone();
        Ok(async_stream::stream! {
            loop {
                let message = match stream.message().await {
                    Ok(Some(message)) => message,
                    Ok(None) => return,
                    Err(error) => {
                        yield Err(unavailable(error));
                        return;
                    }
                };
                if message.canceled() {
                    let (reason, compacted) = (message.cancel_reason(), message.compact_revision());
                    let text = format!("etcd ended the watch: {reason:?}, compacted up to revision {compacted}");
                    yield Err(StoreError::Unavailable(text));
                    return;
                }
                for event in message.events().iter().filter_map(|event| remote.read(event)) {
                    yield Ok(event);
                }
            }
        }
        .boxed())
    }

    fn read(&self, event: &etcd_client::Event) -> Option<WatchEvent> {
        let pair = event.kv()?;
        match event.event_type() {
            EventType::Put => self.member(pair.key(), pair.value()).map(WatchEvent::Changed),
            EventType::Delete => key::parse(&self.0.prefix, pair.key()).map(WatchEvent::Removed),
        }
    }

    /// Reads a registration; what is none is left out, loudly.
    fn member(&self, key: &[u8], value: &[u8]) -> Option<Member> {
        let shown = String::from_utf8_lossy(key);
        match serde_json::from_slice::<Member>(value) {
            Ok(member) if key::parse(&self.0.prefix, key) == Some(member.key()) => Some(member),
            Ok(_) => {
                tracing::warn!(key = %shown, "the registration in etcd is kept under another member's key; ignored");
                None
            }
            Err(error) => {
                tracing::warn!(key = %shown, %error, "the registration in etcd cannot be read; ignored");
                None
            }
        }
    }
}

impl Backend for Remote {
    /// The lease's id.
    type Session = i64;

    fn endpoints(&self) -> &str {
        &self.0.names
    }

    async fn grant(&self, member: &Member, ttl: Duration) -> Result<i64, StoreError> {
        let seconds = i64::try_from(ttl.as_millis().div_ceil(1_000)).unwrap_or(i64::MAX);
        let mut client = self.connected().await?;
        let mut lease = client.lease_grant(seconds, None).await.map_err(unavailable)?.id();
        self.put(&mut lease, member).await?;
        Ok(lease)
    }

    async fn keep(&self, session: &mut i64) -> Result<(), StoreError> {
        match self.connected().await?.lease_keep_alive(*session).await {
            Ok(_) => Ok(()),
            // etcd's answer to a lease that it does not know is a time to live of 0.
            Err(etcd_client::Error::LeaseKeepAliveError(_)) => Err(StoreError::Lost),
            Err(error) => Err(unavailable(error)),
        }
    }

    async fn put(&self, session: &mut i64, member: &Member) -> Result<(), StoreError> {
        let key = key::of(&self.0.prefix, &member.key());
        let value = serde_json::to_vec(member).map_err(|error| StoreError::Unavailable(error.to_string()))?;
        let options = PutOptions::new().with_lease(*session);
        match self.connected().await?.put(key, value, Some(options)).await {
            Ok(_) => Ok(()),
            Err(etcd_client::Error::GRpcStatus(status)) if status.code() == Code::NotFound => Err(StoreError::Lost),
            Err(error) => Err(unavailable(error)),
        }
    }

    async fn end(&self, session: i64) -> Result<(), StoreError> {
        match self.connected().await?.lease_revoke(session).await {
            Ok(_) => Ok(()),
            Err(etcd_client::Error::GRpcStatus(status)) if status.code() == Code::NotFound => Ok(()),
            Err(error) => Err(unavailable(error)),
        }
    }

    async fn open(&self) -> Result<Feed, StoreError> {
        let prefix = format!("{}/", self.0.prefix);
        let options = GetOptions::new().with_prefix();
        let response = self.connected().await?.get(prefix, Some(options)).await.map_err(unavailable)?;
        let revision = response.header().map_or(0, etcd_client::ResponseHeader::revision);
        let members = response.kvs().iter().filter_map(|pair| self.member(pair.key(), pair.value())).collect();
        let changes = self.changes_after(revision).await?;
        Ok(futures::stream::iter([Ok(WatchEvent::Snapshot(members))]).chain(changes).boxed())
    }
}

fn unavailable(error: etcd_client::Error) -> StoreError {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(&error);
    while let Some(below) = cause {
        let line = below.to_string();
        if !text.contains(&line) {
            text = format!("{text}: {line}");
        }
        cause = below.source();
    }
    StoreError::Unavailable(text)
}
