//! The decode worker's side: connections to prefill workers, kept for the next order.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use contract::ids::Incarnation;
use daemon::clock;
use tokio::net::TcpStream;
use tokio::time::{Instant as Deadline, sleep, timeout_at};

use super::endpoint::Endpoint;
use super::fetch::{Fetch, FetchError, FetchFailure};
use super::link::{Link, LinkError};
use super::means::Means;
use super::message::{Message, Open, VERSION};
use super::{Order, Peer, Reservation, Share};

/// How often idle connections are looked at.
const TIDY_INTERVAL: Duration = Duration::from_secs(5);
/// Peers to whom idle connections are kept; beyond it none is kept to another.
const PEERS_MAX: usize = 256;

/// A connection to a peer that has agreed to be one.
pub(super) struct Connection {
    pub(super) link: Link,
    /// The peer's life.
    pub(super) incarnation: Incarnation,
    /// The peer's part.
    pub(super) theirs: Share,
    pub(super) means: Means,
    used_at: Instant,
}

/// Orders prompts from prefill workers.
pub(crate) struct Client {
    endpoint: Arc<Endpoint>,
    idle: Mutex<HashMap<Peer, Vec<Connection>>>,
}

impl Client {
    /// Orders for the engine that `endpoint` describes.
    pub(crate) fn new(endpoint: Arc<Endpoint>) -> Self {
        Self { endpoint, idle: Mutex::default() }
    }

    /// Has `peer` compute a prompt and takes its blocks into `reservation`, within the order's deadline.
    ///
    /// Once this future has returned or was dropped, nothing of the transfer touches the reserved blocks any more. To cancel is to drop it; the peer learns by the closed connection.
    /// Until then the engine must not give the blocks away, nor the pool's memory go.
    ///
    /// # Errors
    /// What happened, and how many leading blocks are complete and may be used.
    pub(crate) async fn fetch(&self, peer: &Peer, order: &Order, reservation: &Reservation) -> Result<(), FetchError> {
        let result = self.fetch_uncounted(peer, order, reservation).await;
        self.endpoint.metrics.fetched(result.as_ref().map_or_else(|error| error.reason.name(), |()| "ok"));
        result
    }

    async fn fetch_uncounted(&self, peer: &Peer, order: &Order, reservation: &Reservation) -> Result<(), FetchError> {
        let until = Deadline::from_std(clock::now() + order.deadline);
        if let Some(connection) = self.idle_connection(peer) {
            let result = self.fetch_on(connection, peer, (order, reservation), until).await;
            let is_closed = matches!(
                &result,
                Err(FetchError { blocks_complete: 0, reason: FetchFailure::Lost(LinkError::Closed) })
            );
            // The peer may have given up the connection just before the order came to it.
            if !is_closed {
                return result;
            }
        }
        let connected = self.connect(peer, until).await;
        let connection = connected.map_err(|reason| FetchError { blocks_complete: 0, reason })?;
        self.fetch_on(connection, peer, (order, reservation), until).await
    }

    async fn fetch_on(
        &self,
        mut connection: Connection,
        peer: &Peer,
        (order, reservation): (&Order, &Reservation),
        until: Deadline,
    ) -> Result<(), FetchError> {
        let result = Fetch::new(&self.endpoint, &mut connection, order, reservation, until).run().await;
        // After any other error it is unknown what comes next on the connection.
        if matches!(&result, Ok(()) | Err(FetchError { reason: FetchFailure::Refused(_), .. })) {
            self.keep(peer, connection);
        }
        result
    }

    async fn connect(&self, peer: &Peer, until: Deadline) -> Result<Connection, FetchFailure> {
        let Endpoint { engine, identity, share, config, .. } = &*self.endpoint;
        let until = until.min(Deadline::from_std(clock::now() + config.pairing_timeout()));
        let connected = match timeout_at(until, TcpStream::connect(&peer.address)).await {
            Ok(connected) => connected.and_then(|stream| Link::new(stream, config.silence())),
            Err(_) => Err(io::ErrorKind::TimedOut.into()),
        };
        let link = connected.map_err(|source| FetchFailure::Unreachable { address: peer.address.clone(), source })?;
        let open = Open {
            version: VERSION,
            prefill: peer.engine.clone(),
            decode: engine.clone(),
            identity: identity.clone(),
            share: *share,
        };
        link.say(&Message::Open(open), until).await?;
        let accept = match link.hear(until).await? {
            Message::Accept(accept) => accept,
            Message::Failed(error) => return Err(FetchFailure::Refused(error)),
            other => return Err(LinkError::Unexpected(format!("{other:?} instead of an acceptance")).into()),
        };
        share.check_source(&accept.share)?;
        let (incarnation, theirs) = (peer.engine.incarnation, accept.share);
        let means = Means::choose(&self.endpoint, &link, accept, until).await?;
        Ok(Connection { link, incarnation, theirs, means, used_at: clock::now() })
    }

    /// Takes the connection to a peer that was used last, if one still stands.
    fn idle_connection(&self, peer: &Peer) -> Option<Connection> {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = idle.get_mut(peer)?;
        let now = clock::now();
        let found = std::iter::from_fn(|| kept.pop()).find(|connection| self.is_good(connection, now));
        if kept.is_empty() {
            idle.remove(peer);
        }
        found
    }

    /// Gives up connections that nobody uses or whose peer has gone, now and then; never returns.
    pub(crate) async fn tidy(&self) {
        loop {
            sleep(TIDY_INTERVAL).await;
            self.give_up();
        }
    }

    fn give_up(&self) {
        let now = clock::now();
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        idle.retain(|_, kept| {
            kept.retain(|connection| self.is_good(connection, now));
            !kept.is_empty()
        });
    }

    /// Whether an idle connection can be used: the other side closes it later than this one gives it up, and says nothing
    /// but that it has closed it.
    fn is_good(&self, connection: &Connection, now: Instant) -> bool {
        let age_max = self.endpoint.config.idle_timeout() / 2;
        now.duration_since(connection.used_at) < age_max && !connection.link.has_input()
    }

    fn keep(&self, peer: &Peer, connection: Connection) {
        self.give_up();
        let now = clock::now();
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() >= PEERS_MAX && !idle.contains_key(peer) {
            return;
        }
        let kept = idle.entry(peer.clone()).or_default();
        if kept.len() < self.endpoint.config.idle_per_peer_max as usize {
            kept.push(Connection { used_at: now, ..connection });
        }
    }
}
