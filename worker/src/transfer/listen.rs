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
use super::message::{Accept, Message, Open, VERSION};
use super::send::{SendError, Sending};
use super::{Order, PrefillSource, Share, Ticket, Way};

/// Wait before accepting again when the system has no descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

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
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a transfer connection");
                sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let Ok(place) = Arc::clone(&places).try_acquire_owned() else {
            tracing::warn!(places = endpoint.config.connections_max, "all transfer connections are taken");
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
    let link = Link::new(stream)?;
    let theirs = pair(endpoint, &link).await?;
    loop {
        let idle = Instant::from_std(clock::now() + endpoint.config.idle_timeout());
        let heard = tokio::select! {
            heard = link.hear(idle) => heard?,
            () = shutdown.triggered() => return Ok(()),
        };
        match heard {
            Message::Order(order, way) => serve_order(endpoint, &link, theirs, source, (order, way)).await?,
            other => return Err(LinkError::Unexpected(format!("{other:?} instead of an order"))),
        }
    }
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
    let accept = Accept {
        share: endpoint.share,
        boot_id: String::new(),
        pid: std::process::id(),
        proof: Vec::new(),
        proof_address: 0,
        regions: Vec::new(),
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
    link: &Link,
    theirs: Share,
    source: &S,
    (order, way): (Order, Way),
) -> Result<(), LinkError> {
    let until = Instant::from_std(clock::now() + order.deadline.min(DEADLINE_MAX));
    if way != Way::Tcp {
        let error = RequestError::Unsupported(format!("transfer by {way:?}"));
        return link.say(&Message::Failed(error), until).await;
    }
    // Nothing but the acknowledgement is said while blocks are sent: anything else, and a peer that is gone, ends it.
    let mut answer = pin!(link.hear(until + order.lease.min(DEADLINE_MAX)));
    let work = async {
        let Ticket { mut progress, guard } = begin(source, &order, until).await?;
        Sending { endpoint, link, order: &order, theirs, until }.blocks(&mut progress).await?;
        link.say(&Message::Done, until).await?;
        Ok(guard)
    };
    let sent = tokio::select! {
        answer = &mut answer => {
            return Err(LinkError::Unexpected(format!("{:?} before all was sent", answer?)));
        }
        sent = work => sent,
    };
    let guard = match sent {
        Ok(guard) => guard,
        Err(SendError::Source(error)) => return link.say(&Message::Failed(error), until).await,
        Err(SendError::Link(error)) => return Err(error),
    };
    let acknowledged = timeout(order.lease, answer).await;
    drop(guard);
    match acknowledged {
        Ok(Ok(Message::Ack)) => Ok(()),
        Ok(Ok(other)) => Err(LinkError::Unexpected(format!("{other:?} instead of an acknowledgement"))),
        Ok(Err(error)) => Err(error),
        Err(_) => Err(LinkError::Late),
    }
}

/// Longest deadline and lease that are taken at their word, so that no peer can keep blocks for ever.
const DEADLINE_MAX: Duration = Duration::from_secs(600);

async fn begin<S: PrefillSource>(source: &S, order: &Order, until: Instant) -> Result<Ticket, SendError> {
    match timeout_at(until, source.begin(order.clone())).await {
        Ok(ticket) => Ok(ticket?),
        Err(_) => Err(LinkError::Late.into()),
    }
}
