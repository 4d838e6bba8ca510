//! What a connection moves blocks with: the first way of the configuration that both sides can go.

use tokio::time::Instant;

use super::Way;
use super::endpoint::Endpoint;
use super::fetch::FetchFailure;
use super::link::{Link, LinkError};
use super::message::{Accept, Message};
use super::ring::Ring;
use super::send::RING_FRAME_BYTES;

/// Frames that fit in a ring at least, so that both sides can copy at the same time.
const RING_FRAMES_MIN: u64 = 2;

/// The decode worker's end of a way.
#[derive(Debug)]
pub(super) enum Means {
    Tcp,
    Pull(Remote),
    Ring(Ring),
}

/// A pool in another process of this host.
#[derive(Debug)]
pub(super) struct Remote {
    pub(super) pid: u32,
    /// Addresses there, by layer and region.
    pub(super) regions: Vec<[u64; 2]>,
    pub(super) n_blocks: u32,
}

impl Means {
    /// Chooses with a peer that accepts.
    pub(super) async fn choose(
        endpoint: &Endpoint,
        link: &Link,
        accept: Accept,
        until: Instant,
    ) -> Result<Self, FetchFailure> {
        for way in &endpoint.config.ways {
            match way {
                Way::Tcp => return Ok(Self::Tcp),
                Way::Pull => {
                    let has_all = accept.regions.len() == endpoint.share.layout.n_layers as usize;
                    if has_all && endpoint.host.can_pull(&accept) {
                        let Accept { pid, regions, n_blocks, .. } = accept;
                        return Ok(Self::Pull(Remote { pid, regions, n_blocks }));
                    }
                }
                Way::Ring => {
                    if endpoint.host.is_also(&accept)
                        && let Some(ring) = offer_ring(endpoint, link, until).await?
                    {
                        return Ok(Self::Ring(ring));
                    }
                }
            }
        }
        Err(FetchFailure::NoWay { ways: endpoint.config.ways.clone() })
    }

    pub(super) fn way(&self) -> Way {
        match self {
            Self::Tcp => Way::Tcp,
            Self::Pull(_) => Way::Pull,
            Self::Ring(_) => Way::Ring,
        }
    }
}

/// Makes a ring and asks the peer to open it; none when either cannot.
async fn offer_ring(endpoint: &Endpoint, link: &Link, until: Instant) -> Result<Option<Ring>, LinkError> {
    let frame_bytes = RING_FRAME_BYTES.max(endpoint.share.block_bytes(&endpoint.share.heads())) as u64;
    let n_bytes = endpoint.config.ring_bytes.max(RING_FRAMES_MIN * frame_bytes);
    let (ring, offer) = match Ring::create(n_bytes) {
        Ok(made) => made,
        Err(error) => {
            tracing::warn!(%error, n_bytes, "cannot make a ring for transfers");
            return Ok(None);
        }
    };
    link.say(&Message::Ring(offer), until).await?;
    match link.hear(until).await? {
        Message::RingOpened(is_open) => Ok(is_open.then_some(ring)),
        other => Err(LinkError::Unexpected(format!("{other:?} instead of an opened ring"))),
    }
}
