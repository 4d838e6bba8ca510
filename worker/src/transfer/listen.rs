//! The prefill worker's side: takes connections of decode workers and serves their orders, one at a time on each.

use std::pin::pin;
use std::sync::Arc;

use contract::error::RequestError;
use daemon::clock;
use daemon::shutdown::Shutdown;
use daemon::task::Tasks;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{Duration, Instant, sleep, timeout, timeout_at};

use super::endpoint::Endpoint;
use super::link::{Link, LinkError};
use super::message::{Accept, Message, Open, RingOffer, VERSION};
use super::ring::Ring;
use super::send::{Outlet, SendError, Sending};
use super::{Order, PrefillSource, Share, Ticket, Way};

/// Wait before accepting again when the system has no descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Longest deadline and lease that are taken at their word, so that no peer can keep blocks for ever.
const TIME_MAX: Duration = Duration::from_secs(600);

/// Serves orders until `shutdown`; those that run then are served to their end.
pub(crate) async fn listen<S: PrefillSource>(
    endpoint: Arc<Endpoint>,
    listener: TcpListener,
    source: Arc<S>,
    tasks: Tasks,
    shutdown: Shutdown,
) {
    let places = Arc::new(Semaphore::new(endpoint.config.connections_max as usize));
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = shutdown.triggered() => return,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a transfer connection");
                sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let Ok(place) = Arc::clone(&places).try_acquire_owned() else {
            let places = endpoint.config.connections_max;
            tracing::warn!(%peer, places, "all transfer connections are taken (worker.transfer.connections_max)");
            continue;
        };
        let (endpoint, source, shutdown) = (Arc::clone(&endpoint), Arc::clone(&source), shutdown.clone());
        tasks.spawn("kv-transfer", async move {
            let _place = place;
            if let Err(error) = serve(&endpoint, stream, &*source, &shutdown).await {
                tracing::debug!(%error, "a transfer connection ended");
            }
        });
    }
}

async fn serve<S: PrefillSource>(
    endpoint: &Endpoint,
    stream: TcpStream,
    source: &S,
    shutdown: &Shutdown,
) -> Result<(), LinkError> {
    let link = Link::new(stream, endpoint.config.lease())?;
    let theirs = pair(endpoint, &link).await?;
    let mut connection = Paired { link, theirs, ring: None };
    loop {
        let idle = Instant::from_std(clock::now() + endpoint.config.idle_timeout());
        let heard = tokio::select! {
            heard = connection.link.hear(idle) => heard?,
            () = shutdown.triggered() => return Ok(()),
        };
        match heard {
            Message::Ring(offer) => {
                connection.ring = open_ring(endpoint, &offer);
                let answer = Message::RingOpened(connection.ring.is_some());
                connection.link.say(&answer, idle).await?;
            }
            Message::Order(order, way) => serve_order(endpoint, &mut connection, source, (order, way)).await?,
            other => return Err(LinkError::Unexpected(format!("{other:?} instead of an order"))),
        }
    }
}

/// A connection to a decode worker that fits.
struct Paired {
    link: Link,
    /// The decode worker's part.
    theirs: Share,
    ring: Option<Ring>,
}

/// None when it cannot be opened, as between containers; then there are other ways.
fn open_ring(endpoint: &Endpoint, offer: &RingOffer) -> Option<Ring> {
    if !endpoint.config.ways.contains(&Way::Ring) {
        return None;
    }
    let opened = Ring::open(offer);
    opened.inspect_err(|error| tracing::info!(%error, ?offer, "cannot open a peer's ring")).ok()
}

/// Finds out who connects, and takes or refuses them.
async fn pair(endpoint: &Endpoint, link: &Link) -> Result<Share, LinkError> {
    let until = Instant::from_std(clock::now() + endpoint.config.pairing_timeout());
    let open = match link.hear(until).await? {
        Message::Open(open) => open,
        other => return Err(LinkError::Unexpected(format!("{other:?} instead of an introduction"))),
    };
    if let Err(error) = check(endpoint, &open) {
        tracing::warn!(peer = %open.decode, %error, "refused a peer");
        link.say(&Message::Failed(error.clone()), until).await?;
        return Err(LinkError::Unexpected(error.to_string()));
    }
    // Without a proof nobody tries to pull.
    let is_open = endpoint.config.ways.contains(&Way::Pull);
    let accept = Accept {
        share: endpoint.share,
        boot_id: endpoint.host.boot_id.clone(),
        pid: std::process::id(),
        proof: if is_open { endpoint.host.proof.to_vec() } else { Vec::new() },
        proof_address: endpoint.host.proof_address(),
        regions: if is_open { endpoint.memory.addresses().collect() } else { Vec::new() },
        n_blocks: u32::try_from(endpoint.memory.n_blocks()).unwrap_or(u32::MAX),
    };
    link.say(&Message::Accept(accept), until).await?;
    Ok(open.share)
}

fn check(endpoint: &Endpoint, open: &Open) -> Result<(), RequestError> {
    let stale = |text: String| Err(RequestError::StalePlacement(text));
    if open.version != VERSION {
        return stale(format!("transfers speak version {VERSION} here, {} at {}", open.version, open.decode));
    }
    if open.prefill != endpoint.engine {
        return stale(format!("ordered from {}, this is {}", open.prefill, endpoint.engine));
    }
    if let Err(mismatch) = endpoint.identity.check(&open.identity, open.decode.worker.as_str()) {
        return stale(mismatch.to_string());
    }
    // The peer takes the blocks, so "here" is the peer's in what it finds.
    open.share.check_source(&endpoint.share).or_else(|mismatch| stale(format!("at {}: {mismatch}", open.decode)))
}

/// Computes and sends, then keeps the blocks until they are acknowledged or the lease ends.
async fn serve_order<S: PrefillSource>(
    endpoint: &Endpoint,
    connection: &mut Paired,
    source: &S,
    (order, way): (Order, Way),
) -> Result<(), LinkError> {
    let lease = order.lease.min(TIME_MAX);
    // The peer keeps its deadline itself and closes the connection; this is for one that has vanished.
    let until = Instant::from_std(clock::now() + order.deadline.min(TIME_MAX) + lease);
    let Paired { link, theirs, ring } = connection;
    let room = Semaphore::new(ring.as_ref().map_or(0, Ring::n_bytes));
    let ring_bytes = room.available_permits();
    let outlet = match (way, ring) {
        (Way::Tcp, _) if endpoint.config.ways.contains(&Way::Tcp) => Outlet::Tcp,
        (Way::Pull, _) if endpoint.config.ways.contains(&Way::Pull) => Outlet::Pull,
        (Way::Ring, Some(ring)) => Outlet::Ring(ring, &room),
        _ => {
            let error = RequestError::Unsupported(format!("{} transfers by {way:?}", endpoint.engine));
            link.say(&Message::Failed(error), until).await?;
            return acknowledged(link, &room, ring_bytes, until).await;
        }
    };
    // The peer speaks to acknowledge; if it goes away, that ends the work.
    let mut answer = pin!(acknowledged(link, &room, ring_bytes, until + lease));
    let mut held = Held { link, ticket: None, is_acknowledged: false };
    let work = async {
        let ticket = held.ticket.insert(begin(source, &order, until).await?);
        let mut sending =
            Sending { endpoint, link, order: &order, theirs: *theirs, scratch: Vec::new(), outlet, until };
        sending.blocks(ticket).await
    };
    let sent = tokio::select! {
        answer = &mut answer => {
            answer?;
            return Err(LinkError::Unexpected("an acknowledgement before all was sent".to_owned()));
        }
        sent = work => sent,
    };
    let last = match sent {
        Ok(()) => Message::Done,
        Err(SendError::Source(error)) => Message::Failed(error),
        Err(SendError::Link(error)) => return Err(error),
    };
    link.say(&last, until).await?;
    timeout(lease, answer).await.unwrap_or(Err(LinkError::Late))?;
    held.is_acknowledged = true;
    Ok(())
}

/// Hears of room in the ring until the peer acknowledges that it touches no block any more.
async fn acknowledged(link: &Link, room: &Semaphore, ring_bytes: usize, until: Instant) -> Result<(), LinkError> {
    loop {
        match link.hear(until).await? {
            Message::Taken(n_bytes) if n_bytes <= (ring_bytes - room.available_permits()) as u64 => {
                room.add_permits(n_bytes as usize);
            }
            Message::Ack => return Ok(()),
            other => return Err(LinkError::Unexpected(format!("{other:?} instead of an acknowledgement"))),
        }
    }
}

/// Blocks that a peer may be reading: unless it has acknowledged, the connection is closed before they go.
struct Held<'a> {
    link: &'a Link,
    ticket: Option<Ticket>,
    is_acknowledged: bool,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        if !self.is_acknowledged {
            self.link.close();
        }
    }
}

async fn begin<S: PrefillSource>(source: &S, order: &Order, until: Instant) -> Result<Ticket, SendError> {
    match timeout_at(until, source.begin(order.clone())).await {
        Ok(ticket) => Ok(ticket?),
        Err(_) => Err(LinkError::Late.into()),
    }
}
