//! Messages of a transfer connection, and the one place where their wire form is checked.

use std::time::Duration;

use contract::error::RequestError;
use contract::ids::{EngineId, RequestId};
use contract::kv::{BlockOrder, KvDtype, KvLayout};
use contract::model::ModelIdentity;
use prost::Message as _;
use proto::worker::v1 as wire;
use proto::worker::v1::transfer_message::Kind;
use proto::{WireError, status};
use thiserror::Error;

use super::share::{Share, dtype_name, order_name};
use super::{Order, Way};

/// What both sides must speak.
pub(super) const VERSION: u32 = 2;
/// Longest message: an order for a prompt of a million tokens fits.
pub(super) const MESSAGE_BYTES_MAX: u64 = proto::exchange::MESSAGE_BYTES_MAX as u64;

/// Anything that is said in words.
#[derive(Clone, Debug)]
pub(super) enum Message {
    Open(Open),
    Accept(Accept),
    Ring(RingOffer),
    RingOpened(bool),
    Order(Order, Way),
    /// Nothing is ready to be sent.
    Working,
    Done,
    Failed(RequestError),
    Ack,
    Taken(u64),
}

/// The decode worker introduces itself.
#[derive(Clone, Debug)]
pub(super) struct Open {
    pub(super) version: u32,
    pub(super) prefill: EngineId,
    pub(super) decode: EngineId,
    pub(super) identity: ModelIdentity,
    pub(super) share: Share,
}

/// The prefill worker takes it, and tells where its memory lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Accept {
    pub(super) share: Share,
    pub(super) boot_id: String,
    pub(super) pid: u32,
    pub(super) proof: Vec<u8>,
    pub(super) proof_address: u64,
    /// By layer and region.
    pub(super) regions: Vec<[u64; 2]>,
    pub(super) n_blocks: u32,
}

/// A file in memory that the prefill worker may write to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RingOffer {
    pub(super) pid: u32,
    pub(super) descriptor: u32,
    pub(super) n_bytes: u64,
    pub(super) proof: Vec<u8>,
}

/// Bytes are no message.
#[derive(Debug, Error)]
pub(crate) enum MessageError {
    /// Not even protobuf.
    #[error("a message cannot be decoded")]
    Decode(#[from] prost::DecodeError),
    /// A field is wrong.
    #[error("a message is malformed")]
    Wire(#[from] WireError),
    /// A name or number that this version does not know.
    #[error("{field} is {value:?}, which is not known here")]
    Unknown {
        /// Which.
        field: &'static str,
        /// What it is.
        value: String,
    },
}

impl Message {
    pub(super) fn encode(&self) -> Vec<u8> {
        let kind = match self {
            Self::Open(open) => Kind::Open(wire::TransferOpen {
                version: open.version,
                prefill: Some((&open.prefill).into()),
                decode: Some((&open.decode).into()),
                identity: Some((&open.identity).into()),
                share: Some(share_to_wire(&open.share)),
            }),
            Self::Accept(accept) => Kind::Accept(wire::TransferAccept {
                share: Some(share_to_wire(&accept.share)),
                boot_id: accept.boot_id.clone(),
                pid: accept.pid,
                proof: accept.proof.clone(),
                proof_address: accept.proof_address,
                region_addresses: accept.regions.as_flattened().to_vec(),
                n_blocks: accept.n_blocks,
            }),
            Self::Ring(ring) => Kind::Ring(wire::TransferRing {
                pid: ring.pid,
                descriptor: ring.descriptor,
                n_bytes: ring.n_bytes,
                proof: ring.proof.clone(),
            }),
            Self::RingOpened(is_open) => Kind::RingOpened(wire::TransferRingOpened { is_open: *is_open }),
            Self::Order(order, way) => Kind::Order(order_to_wire(order, *way)),
            Self::Working => Kind::Working(wire::TransferWorking {}),
            Self::Done => Kind::Done(wire::TransferDone {}),
            Self::Failed(error) => Kind::Failed(wire::TransferFailed { error: status::to_bytes(error) }),
            Self::Ack => Kind::Ack(wire::TransferAck {}),
            Self::Taken(n_bytes) => Kind::Taken(wire::TransferTaken { n_bytes: *n_bytes }),
        };
        wire::TransferMessage { kind: Some(kind) }.encode_to_vec()
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, MessageError> {
        let kind = required("kind", wire::TransferMessage::decode(bytes)?.kind)?;
        Ok(match kind {
            Kind::Open(open) => Self::Open(Open {
                version: open.version,
                prefill: required("prefill", open.prefill)?.into(),
                decode: required("decode", open.decode)?.into(),
                identity: required("identity", open.identity)?.try_into()?,
                share: share_from_wire(required("share", open.share)?)?,
            }),
            Kind::Accept(accept) => Self::Accept(Accept {
                share: share_from_wire(required("share", accept.share)?)?,
                boot_id: accept.boot_id,
                pid: accept.pid,
                proof: accept.proof,
                proof_address: accept.proof_address,
                regions: accept.region_addresses.chunks_exact(2).map(|pair| [pair[0], pair[1]]).collect(),
                n_blocks: accept.n_blocks,
            }),
            Kind::Ring(wire::TransferRing { pid, descriptor, n_bytes, proof }) => {
                Self::Ring(RingOffer { pid, descriptor, n_bytes, proof })
            }
            Kind::RingOpened(opened) => Self::RingOpened(opened.is_open),
            Kind::Order(order) => {
                let (order, way) = order_from_wire(order)?;
                Self::Order(order, way)
            }
            Kind::Working(wire::TransferWorking {}) => Self::Working,
            Kind::Done(_) => Self::Done,
            Kind::Failed(failed) => Self::Failed(status::from_bytes(&failed.error)),
            Kind::Ack(_) => Self::Ack,
            Kind::Taken(taken) => Self::Taken(taken.n_bytes),
        })
    }
}

fn required<T>(field: &'static str, value: Option<T>) -> Result<T, WireError> {
    value.ok_or(WireError::Missing(field))
}

fn order_to_wire(order: &Order, way: Way) -> wire::TransferOrder {
    let way = match way {
        Way::Tcp => wire::TransferWay::Tcp,
        Way::Pull => wire::TransferWay::Pull,
        Way::Ring => wire::TransferWay::Ring,
    };
    wire::TransferOrder {
        request_id: order.request.0.to_be_bytes().to_vec(),
        attempt: order.attempt,
        prompt: order.prompt.clone(),
        first_block: order.first_block,
        cache_salt: order.cache_salt.clone(),
        adapter: order.adapter.clone(),
        tenant: order.tenant.to_string(),
        priority: order.priority,
        deadline_ms: order.deadline.as_millis().try_into().unwrap_or(u64::MAX),
        lease_ms: order.lease.as_millis().try_into().unwrap_or(u64::MAX),
        way: way.into(),
    }
}

fn order_from_wire(order: wire::TransferOrder) -> Result<(Order, Way), MessageError> {
    let way = match wire::TransferWay::try_from(order.way) {
        Ok(wire::TransferWay::Tcp) => Way::Tcp,
        Ok(wire::TransferWay::Pull) => Way::Pull,
        Ok(wire::TransferWay::Ring) => Way::Ring,
        _ => return Err(WireError::UnknownEnum { field: "way", value: order.way }.into()),
    };
    let id: &[u8] = &order.request_id;
    let length = || WireError::Length { field: "request_id", length: id.len(), expected: 16 };
    let order = Order {
        request: RequestId(u128::from_be_bytes(id.try_into().map_err(|_| length())?)),
        attempt: order.attempt,
        prompt: order.prompt,
        first_block: order.first_block,
        cache_salt: order.cache_salt,
        adapter: order.adapter,
        tenant: order.tenant.into(),
        priority: order.priority,
        deadline: Duration::from_millis(order.deadline_ms),
        lease: Duration::from_millis(order.lease_ms),
    };
    Ok((order, way))
}

fn share_to_wire(share: &Share) -> wire::KvShare {
    let KvLayout { order, n_layers, kv_heads, block_size, key_dim, value_dim, dtype } = share.layout;
    wire::KvShare {
        order: order_name(order).to_owned(),
        n_layers,
        kv_heads,
        block_size,
        key_dim,
        value_dim,
        dtype: dtype_name(dtype).to_owned(),
        first_head: share.first_head,
    }
}

fn share_from_wire(share: wire::KvShare) -> Result<Share, MessageError> {
    let wire::KvShare { order, n_layers, kv_heads, block_size, key_dim, value_dim, dtype, first_head } = share;
    let mut orders = [BlockOrder::HeadsFirst, BlockOrder::TokensFirst].into_iter();
    let order = match orders.find(|&known| order_name(known) == order) {
        Some(order) => order,
        None => return Err(MessageError::Unknown { field: "order in a block", value: order }),
    };
    let mut dtypes = [KvDtype::F32, KvDtype::Bf16, KvDtype::F16, KvDtype::Int8].into_iter();
    let dtype = match dtypes.find(|&known| dtype_name(known) == dtype) {
        Some(dtype) => dtype,
        None => return Err(MessageError::Unknown { field: "format of keys and values", value: dtype }),
    };
    if first_head.checked_add(kv_heads).is_none() {
        return Err(MessageError::Unknown { field: "first head", value: first_head.to_string() });
    }
    let layout = KvLayout { order, n_layers, kv_heads, block_size, key_dim, value_dim, dtype };
    Ok(Share { layout, first_head })
}
