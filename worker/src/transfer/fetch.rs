//! Takes one order's blocks into reserved blocks of the pool.

use std::io;
use std::ops::Range;

use contract::error::RequestError;
use kernels::memory::runs::Runs;
use thiserror::Error;
use tokio::time::Instant;

use super::client::Connection;
use super::endpoint::Endpoint;
use super::frame::{Header, Kind};
use super::link::LinkError;
use super::message::Message;
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
    #[error("the deadline passed")]
    Late,
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
            Self::Refused(_) => "refused",
            Self::Lost(_) => "lost",
            Self::Late => "late",
            Self::Damaged { .. } => "damaged",
            Self::Incomplete => "incomplete",
            Self::Reservation => "reservation",
        }
    }
}

impl From<LinkError> for FetchFailure {
    fn from(error: LinkError) -> Self {
        if matches!(error, LinkError::Late) { Self::Late } else { Self::Lost(error) }
    }
}

/// One order that is being received.
pub(super) struct Fetch<'a> {
    endpoint: &'a Endpoint,
    connection: &'a Connection,
    order: &'a Order,
    reservation: &'a Reservation,
    heads: Range<u32>,
    received: Received,
    runs: Runs,
    until: Instant,
}

impl<'a> Fetch<'a> {
    pub(super) fn new(
        endpoint: &'a Endpoint,
        connection: &'a Connection,
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
        Self { endpoint, connection, order, reservation, heads, received, runs, until }
    }

    /// Orders, receives and acknowledges.
    pub(super) async fn run(&mut self) -> Result<(), FetchError> {
        let result = self.exchange().await;
        result.map_err(|reason| FetchError { blocks_complete: self.received.n_complete(), reason })
    }

    async fn exchange(&mut self) -> Result<(), FetchFailure> {
        let link = &self.connection.link;
        link.say(&Message::Order(self.order.clone(), self.connection.way), self.until).await?;
        loop {
            let header = link.read_header(self.until).await?;
            match header.kind {
                Kind::Blocks => self.blocks(&header).await?,
                Kind::Message => match link.read_message(&header, self.until).await? {
                    Message::Done if self.received.is_complete() => break,
                    Message::Done => return Err(FetchFailure::Incomplete),
                    Message::Failed(error) => return Err(FetchFailure::Refused(error)),
                    other => return Err(unexpected(format!("{other:?}"))),
                },
                other => return Err(unexpected(format!("{other:?}"))),
            }
        }
        Ok(link.say(&Message::Ack, self.until).await?)
    }

    /// Takes blocks from the connection, or reads past what is not wanted.
    async fn blocks(&mut self, header: &Header) -> Result<(), FetchFailure> {
        let link = &self.connection.link;
        if !self.list(header)? {
            return Ok(link.skip(header.payload_bytes, self.until).await?);
        }
        let sum = link.read_blocks(&self.runs, self.until).await?;
        self.take(header, sum)
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
        self.endpoint.metrics.received(self.connection.way, header.payload_bytes);
        Ok(())
    }
}

fn unexpected(what: String) -> FetchFailure {
    FetchFailure::Lost(LinkError::Unexpected(what))
}
