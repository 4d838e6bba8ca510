//! Sends a prompt's blocks as they are ready, layer by layer, while later layers and chunks still compute.

use std::ops::Range;
use std::pin::pin;
use std::sync::Arc;

use contract::error::RequestError;
use contract::ids::BlockId;
use daemon::clock;
use kernels::memory::checksum::Checksum;
use kernels::memory::runs::Runs;
use thiserror::Error;
use tokio::sync::{Semaphore, watch};
use tokio::task::yield_now;
use tokio::time::{Duration, Instant, sleep_until, timeout_at};

use super::endpoint::Endpoint;
use super::frame::{Header, Kind};
use super::link::{Link, LinkError};
use super::message::Message;
use super::ring::Ring;
use super::{Order, Progress, Share, Ticket, Way, pull};

/// Payload of a frame, unless a single block is larger: long enough that headers cost nothing, short enough that what
/// was summed is still in the core's own cache when it is sent, and that a thread's other tasks do not wait long.
const TCP_FRAME_BYTES: usize = 512 << 10;
/// Nothing is copied here, but the peer may have to be woken for each frame, which takes as long as to copy 256 KiB.
const PULL_FRAME_BYTES: usize = 8 << 20;
/// Some of these are in a ring, so that one can be put in while another is taken out.
pub(super) const RING_FRAME_BYTES: usize = 512 << 10;

/// Longest silence towards the peer.
pub const WORKING_INTERVAL: Duration = Duration::from_millis(500);

/// Why not all was sent.
#[derive(Debug, Error)]
pub(super) enum SendError {
    /// The peer cannot be told anything more.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// The peer is to be told this.
    #[error("the prompt cannot be computed")]
    Source(#[from] RequestError),
}

/// One order on its way.
pub(super) struct Sending<'a> {
    pub(super) endpoint: &'a Endpoint,
    pub(super) link: &'a Link,
    pub(super) order: &'a Order,
    /// The decode worker's part.
    pub(super) theirs: Share,
    pub(super) scratch: Vec<u8>,
    pub(super) outlet: Outlet<'a>,
    pub(super) until: Instant,
}

/// The prefill worker's end of a way.
pub(super) enum Outlet<'a> {
    Tcp,
    Pull,
    /// With a permit for each byte of room in it.
    Ring(&'a mut Ring, &'a Semaphore),
}

impl Outlet<'_> {
    fn frame_bytes(&self) -> usize {
        match self {
            Self::Tcp => TCP_FRAME_BYTES,
            Self::Pull => PULL_FRAME_BYTES,
            Self::Ring(..) => RING_FRAME_BYTES,
        }
    }

    fn way_and_kind(&self) -> (Way, Kind) {
        match self {
            Self::Tcp => (Way::Tcp, Kind::Blocks),
            Self::Pull => (Way::Pull, Kind::Ready),
            Self::Ring(..) => (Way::Ring, Kind::InRing),
        }
    }
}

impl Sending<'_> {
    /// Sends every wanted block of every layer.
    pub(super) async fn blocks(&mut self, ticket: &mut Ticket) -> Result<(), SendError> {
        let Ticket { progress, lost, .. } = ticket;
        let block_size = self.endpoint.share.layout.block_size;
        let n_tokens = self.order.n_tokens();
        let heads = self.endpoint.share.shared_heads(&self.theirs);
        let block_bytes = self.endpoint.share.block_bytes(&heads);
        let frame_blocks = (self.outlet.frame_bytes() / block_bytes.max(1)).max(1) as u32;
        let n_blocks = n_tokens.div_ceil(block_size);
        let first = self.order.first_block.min(n_blocks);
        let mut sent = vec![first; self.endpoint.share.layout.n_layers as usize];
        let mut runs = self.endpoint.memory.runs();
        loop {
            // What changes from here on is seen by this pass or by the next.
            let failed = progress.borrow_and_update().failed.clone();
            let mut is_moving = false;
            for (layer, sent) in sent.iter_mut().enumerate() {
                while let Some((table, ready)) = self.ready(progress, layer, *sent, n_tokens) {
                    let blocks = *sent..ready.min(*sent + frame_blocks);
                    *sent = blocks.end;
                    self.frame(layer as u32, blocks, &table, &heads, &mut runs).await?;
                    is_moving = true;
                }
            }
            if sent.iter().all(|&sent| sent == n_blocks) {
                return Ok(());
            }
            // What was ready before it failed is sent; the peer need not compute it again.
            if let Some(error) = failed {
                return Err(error.into());
            }
            if !is_moving {
                self.changed(progress, &mut *lost).await?;
            }
        }
    }

    /// The table and the end of what is ready of a layer, when that is more than was sent.
    fn ready(
        &self,
        progress: &watch::Receiver<Progress>,
        layer: usize,
        sent: u32,
        n_tokens: u32,
    ) -> Option<(Arc<[BlockId]>, u32)> {
        let progress = progress.borrow();
        let block_size = self.endpoint.share.layout.block_size;
        let ready = progress.n_ready(layer, n_tokens, block_size);
        (ready > sent).then(|| (Arc::clone(&progress.table), ready))
    }

    async fn changed(
        &self,
        progress: &mut watch::Receiver<Progress>,
        lost: impl Future<Output = RequestError>,
    ) -> Result<(), SendError> {
        let changed = async {
            tokio::select! {
                changed = progress.changed() => {
                    changed.map_err(|_| RequestError::Internal("the engine dropped a prefill".to_owned()))
                }
                error = lost => Err(error),
            }
        };
        Ok(self.while_working(changed).await??)
    }

    /// Waits, and tells the peer now and then that it lives.
    async fn while_working<T>(&self, wait: impl Future<Output = T>) -> Result<T, LinkError> {
        let mut wait = pin!(wait);
        loop {
            let now = Instant::from_std(clock::now());
            match timeout_at(self.until.min(now + WORKING_INTERVAL), wait.as_mut()).await {
                Ok(value) => return Ok(value),
                Err(_) if Instant::from_std(clock::now()) >= self.until => return Err(LinkError::Late),
                Err(_) => self.link.say(&Message::Working, self.until).await?,
            }
        }
    }

    async fn frame(
        &mut self,
        layer: u32,
        blocks: Range<u32>,
        table: &[BlockId],
        heads: &Range<u32>,
        runs: &mut Runs,
    ) -> Result<(), SendError> {
        let Endpoint { share, engine, throttle, cost, metrics, .. } = self.endpoint;
        let (way, kind) = self.outlet.way_and_kind();
        let table = &table[blocks.start as usize..blocks.end as usize];
        let listed = share.list(heads, layer, table, runs);
        listed.map_err(|error| RequestError::Internal(format!("the engine's table is wrong: {error}")))?;
        let began = clock::now();
        if let Some(passed_at) = throttle.passed_at(runs.n_bytes() as u64, clock::now()) {
            let passed_at = Instant::from_std(passed_at);
            if passed_at > self.until {
                return Err(LinkError::Late.into());
            }
            self.while_working(sleep_until(passed_at)).await?;
        }
        let payload_sum = self.sum(runs).await?;
        let header = Header {
            kind,
            incarnation: engine.incarnation,
            pairing: share.pairing(&self.theirs),
            request: self.order.request,
            attempt: self.order.attempt,
            layer,
            first_block: blocks.start,
            n_blocks: blocks.end - blocks.start,
            payload_bytes: runs.n_bytes() as u64,
            payload_sum,
        };
        self.out(&header, table, runs).await?;
        cost.note(header.payload_bytes, clock::now() - began);
        metrics.sent(way, header.payload_bytes);
        // Other tasks of this thread have waited for a frame's copying.
        yield_now().await;
        Ok(())
    }

    /// The checksum of blocks, which are in the ring then where there is one.
    async fn sum(&mut self, runs: &Runs) -> Result<u64, LinkError> {
        match &mut self.outlet {
            Outlet::Tcp => {
                let mut checksum = Checksum::new();
                runs.sum(0, runs.n_bytes(), &mut checksum);
                Ok(checksum.value())
            }
            Outlet::Pull => Ok(pull::sum_of(runs)),
            Outlet::Ring(ring, room) => {
                let n_bytes = u32::try_from(runs.n_bytes()).unwrap_or(u32::MAX);
                let lease = self.endpoint.config.lease();
                let silent_at = Instant::from_std(clock::now() + lease);
                match timeout_at(self.until.min(silent_at), room.acquire_many(n_bytes)).await {
                    Ok(Ok(permit)) => {
                        permit.forget();
                        Ok(ring.put(runs))
                    }
                    Ok(Err(_)) => Err(LinkError::Closed),
                    Err(_) if silent_at < self.until => Err(LinkError::Silent(lease)),
                    Err(_) => Err(LinkError::Late),
                }
            }
        }
    }

    async fn out(&mut self, header: &Header, blocks: &[BlockId], runs: &Runs) -> Result<(), LinkError> {
        match &mut self.outlet {
            Outlet::Tcp => self.link.write_blocks(header, runs, self.until).await,
            Outlet::Pull => {
                self.scratch.clear();
                self.scratch.extend(header.to_bytes());
                self.scratch.extend(blocks.iter().flat_map(|block| block.0.to_le_bytes()));
                self.link.write(&self.scratch, self.until).await
            }
            Outlet::Ring(..) => self.link.write(&header.to_bytes(), self.until).await,
        }
    }
}
