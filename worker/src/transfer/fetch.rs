//! Takes one order's blocks into reserved blocks of the pool.

use std::io;
use std::ops::Range;
use std::time::Duration;

use contract::error::RequestError;
use contract::ids::BlockId;
use daemon::clock;
use kernels::memory::runs::{RemoteRuns, Runs};
use thiserror::Error;
use tokio::task::yield_now;
use tokio::time::Instant;

use super::client::Connection;
use super::endpoint::Endpoint;
use super::frame::{Header, Kind};
use super::link::LinkError;
use super::means::Means;
use super::message::Message;
use super::pull::pull;
use super::receive::Received;
use super::share::ShareMismatch;
use super::{Order, Reservation, Way};

/// Not all blocks came.
#[derive(Debug, Error)]
#[error("transfer ended with {blocks_complete} blocks")]
pub(crate) struct FetchError {
    /// Blocks from the order's first on that are complete in all layers and may be used.
    pub(crate) blocks_complete: u32,
    /// What happened.
    #[source]
    pub(crate) reason: FetchFailure,
}

/// Why not all blocks came.
#[derive(Debug, Error)]
pub(crate) enum FetchFailure {
    /// The peer cannot be reached: another may.
    #[error("cannot connect to {address}")]
    Unreachable {
        /// Where it should listen.
        address: String,
        /// What the system says.
        source: io::Error,
    },
    /// The pools can exchange no blocks, now and later.
    #[error("the peer's blocks do not fit")]
    Mismatch(#[from] ShareMismatch),
    /// No configured way leads from there to here.
    #[error("none of the ways {ways:?} can be used with this peer")]
    NoWay {
        /// Those of the configuration.
        ways: Vec<Way>,
    },
    /// The peer says why it cannot.
    #[error("the peer refuses")]
    Refused(#[source] RequestError),
    /// The connection is lost, and perhaps the peer.
    #[error("the connection is lost")]
    Lost(#[source] LinkError),
    /// The deadline passed.
    #[error("the deadline passed (worker.transfer.deadline_ms)")]
    Late,
    /// The peer stands still, or the way to it.
    #[error("nothing came for {} ms (worker.transfer.silence_ms)", .0.as_millis())]
    Silent(Duration),
    /// Blocks came with another checksum than they were sent with.
    #[error("blocks from {first_block} on of layer {layer} were damaged on their way")]
    Damaged {
        /// The layer.
        layer: u32,
        /// The frame's first block, by index in the sequence.
        first_block: u32,
    },
    /// The peer says that it sent all, and not all came.
    #[error("frames were lost on the way")]
    Incomplete,
    /// The reservation does not fit the order or the pool: a defect of the caller.
    #[error("the reservation cannot hold the order's blocks")]
    Reservation,
}

impl FetchFailure {
    /// As metrics call it.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Unreachable { .. } => "unreachable",
            Self::Mismatch(_) => "mismatch",
            Self::NoWay { .. } => "no_way",
            Self::Refused(RequestError::ShuttingDown(_)) => "leaving",
            Self::Refused(_) => "refused",
            Self::Lost(_) => "lost",
            Self::Late => "late",
            Self::Silent(_) => "silent",
            Self::Damaged { .. } => "damaged",
            Self::Incomplete => "incomplete",
            Self::Reservation => "reservation",
        }
    }
}

impl From<LinkError> for FetchFailure {
    fn from(error: LinkError) -> Self {
        match error {
            LinkError::Late => Self::Late,
            LinkError::Silent(pause) => Self::Silent(pause),
            error => Self::Lost(error),
        }
    }
}

/// One order that is being received.
pub(super) struct Fetch<'a> {
    endpoint: &'a Endpoint,
    connection: &'a mut Connection,
    order: &'a Order,
    reservation: &'a Reservation,
    heads: Range<u32>,
    received: Received,
    runs: Runs,
    remote: RemoteRuns,
    until: Instant,
}

impl<'a> Fetch<'a> {
    pub(super) fn new(
        endpoint: &'a Endpoint,
        connection: &'a mut Connection,
        order: &'a Order,
        reservation: &'a Reservation,
        until: Instant,
    ) -> Self {
        let layout = endpoint.share.layout;
        let wanted = Header {
            incarnation: connection.incarnation,
            pairing: connection.theirs.pairing(&endpoint.share),
            request: order.request,
            attempt: order.attempt,
            first_block: order.first_block,
            ..Header::of_message(&[])
        };
        let end = order.n_tokens().div_ceil(layout.block_size).max(order.first_block);
        let received = Received::new(&wanted, end, layout.n_layers);
        let (heads, runs) = (endpoint.share.heads(), endpoint.memory.runs());
        let remote = RemoteRuns::default();
        Self { endpoint, connection, order, reservation, heads, received, runs, remote, until }
    }

    /// Orders, receives and acknowledges.
    pub(super) async fn run(&mut self) -> Result<(), FetchError> {
        let result = self.exchange().await;
        result.map_err(|reason| FetchError { blocks_complete: self.received.n_complete(), reason })
    }

    async fn exchange(&mut self) -> Result<(), FetchFailure> {
        let message = Message::Order(self.order.clone(), self.connection.means.way());
        self.connection.link.say(&message, self.until).await?;
        let ended = loop {
            let header = self.connection.link.read_header_soon(self.until).await?;
            let began = clock::now();
            match header.kind {
                Kind::Message => match self.connection.link.read_message(&header, self.until).await? {
                    Message::Working => continue,
                    Message::Done if self.received.is_complete() => break Ok(()),
                    Message::Done => return Err(FetchFailure::Incomplete),
                    Message::Failed(error) => break Err(FetchFailure::Refused(error)),
                    other => return Err(unexpected(format!("{other:?}"))),
                },
                Kind::Blocks => self.blocks(&header).await?,
                Kind::Ready => self.ready(&header).await?,
                Kind::InRing => self.in_ring(&header).await?,
            }
            self.endpoint.cost.note(header.payload_bytes, clock::now() - began);
            // Other tasks of this thread have waited for a frame's copying.
            yield_now().await;
        };
        self.connection.link.say(&Message::Ack, self.until).await?;
        ended
    }

    /// Takes blocks from the connection, or reads past what is not wanted.
    async fn blocks(&mut self, header: &Header) -> Result<(), FetchFailure> {
        let is_wanted = self.list(header)?;
        let link = &self.connection.link;
        if !is_wanted {
            return Ok(link.skip(header.payload_bytes, self.until).await?);
        }
        let sum = link.read_blocks(&self.runs, self.until).await?;
        self.take(header, sum)
    }

    /// Pulls blocks out of the peer's memory.
    ///
    /// The peer closes the connection before it lets go of blocks that were not acknowledged. So blocks that were read
    /// while it stood were not given away meanwhile, and its process was not another's.
    async fn ready(&mut self, header: &Header) -> Result<(), FetchFailure> {
        let is_wanted = self.list(header)?;
        let Connection { link, means: Means::Pull(remote), theirs, .. } = &*self.connection else {
            return Err(unexpected("blocks to pull".to_owned()));
        };
        if !is_wanted {
            return Ok(link.skip(4 * u64::from(header.n_blocks), self.until).await?);
        }
        let mut numbers = vec![0; 4 * header.n_blocks as usize];
        link.read(&mut numbers, self.until).await?;
        let numbers = numbers.chunks_exact(4).map(|bytes| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]));
        let blocks: Vec<BlockId> = numbers.map(BlockId).collect();
        let regions = remote.regions.get(header.layer as usize).copied();
        let (Some(regions), true) = (regions, blocks.iter().all(|block| block.0 < remote.n_blocks)) else {
            return Err(unexpected("blocks that the peer's pool does not have".to_owned()));
        };
        theirs.list_remote(&self.heads, regions, &blocks, &mut self.remote);
        if self.remote.n_bytes() != self.runs.n_bytes() || link.is_closed() {
            return Err(LinkError::Closed.into());
        }
        let sum = pull(remote.pid, &self.runs, &self.remote).await.map_err(LinkError::from)?;
        if link.is_closed() {
            return Err(LinkError::Closed.into());
        }
        self.take(header, sum)
    }

    /// Takes blocks out of the ring and tells the peer that there is room again.
    async fn in_ring(&mut self, header: &Header) -> Result<(), FetchFailure> {
        let is_wanted = self.list(header)?;
        let Connection { link, means: Means::Ring(ring), .. } = &mut *self.connection else {
            return Err(unexpected("blocks in a ring".to_owned()));
        };
        let sum = if is_wanted {
            ring.take(&self.runs)
        } else {
            ring.skip(header.payload_bytes);
            header.payload_sum
        };
        link.say(&Message::Taken(header.payload_bytes), self.until).await?;
        if is_wanted { self.take(header, sum) } else { Ok(()) }
    }

    /// Lists where a frame's blocks go; false when they are not wanted.
    fn list(&mut self, header: &Header) -> Result<bool, FetchFailure> {
        if let Err(unwanted) = self.received.check(header) {
            self.endpoint.metrics.dropped(unwanted);
            tracing::debug!(?unwanted, ?header, "dropped a frame");
            return Ok(false);
        }
        let share = self.endpoint.share;
        let expected = u64::from(header.n_blocks) * share.block_bytes(&self.heads) as u64;
        if header.payload_bytes != expected {
            let (n_blocks, n_bytes) = (header.n_blocks, header.payload_bytes);
            return Err(unexpected(format!("{n_blocks} blocks in {n_bytes} bytes instead of {expected}")));
        }
        let start = (header.first_block - self.order.first_block) as usize;
        let blocks = self.reservation.blocks.get(start..start + header.n_blocks as usize);
        let blocks = blocks.ok_or(FetchFailure::Reservation)?;
        let listed = share.list(&self.heads, header.layer, blocks, &mut self.runs);
        listed.map_err(|_| FetchFailure::Reservation)?;
        Ok(true)
    }

    /// Counts blocks that have come whole.
    fn take(&mut self, header: &Header, sum: u64) -> Result<(), FetchFailure> {
        if sum != header.payload_sum {
            let Header { layer, first_block, .. } = *header;
            return Err(FetchFailure::Damaged { layer, first_block });
        }
        self.received.count(header);
        self.endpoint.metrics.received(self.connection.means.way(), header.payload_bytes);
        Ok(())
    }
}

fn unexpected(what: String) -> FetchFailure {
    FetchFailure::Lost(LinkError::Unexpected(what))
}
