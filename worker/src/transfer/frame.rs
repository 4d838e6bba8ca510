//! The header that stands before everything on a transfer connection.
//!
//! 80 bytes, numbers little-endian: magic, kind, incarnation, pairing, request id, attempt, layer, first block, blocks,
//! payload bytes, payload checksum, checksum of all before it.

use contract::ids::{Incarnation, RequestId};
use kernels::memory::checksum::Checksum;
use thiserror::Error;

/// Bytes of a header.
pub(super) const HEADER_BYTES: usize = 80;
/// "tskv" as a little-endian number.
const MAGIC: u32 = u32::from_le_bytes(*b"tskv");
const SUMMED_BYTES: usize = HEADER_BYTES - 8;

/// What follows a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A message, `payload_bytes` long.
    Message = 1,
    /// Keys, then values of blocks, `payload_bytes` long.
    Blocks = 2,
    /// The numbers of blocks in the prefill worker's pool, four bytes each; `payload_bytes` can be pulled from them.
    Ready = 3,
    /// Nothing: `payload_bytes` are in the ring.
    InRing = 4,
}

/// What a frame is about. Messages use only kind, payload bytes and checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What follows.
    pub kind: Kind,
    /// Life of the prefill worker.
    pub incarnation: Incarnation,
    /// Fingerprint of both layouts.
    pub pairing: u64,
    /// The request.
    pub request: RequestId,
    /// Counts its placements.
    pub attempt: u32,
    /// Of the model.
    pub layer: u32,
    /// Index in the sequence.
    pub first_block: u32,
    /// Blocks from there on.
    pub n_blocks: u32,
    /// Bytes of the blocks' keys and values, or of the message.
    pub payload_bytes: u64,
    /// Checksum of those bytes.
    pub payload_sum: u64,
}

/// Bytes are no header: the connection carries nonsense from here on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub(crate) enum HeaderError {
    /// It does not begin as headers do.
    #[error("a frame begins with {0:08x} and not with its magic")]
    Magic(u32),
    /// Its checksum is not that of its bytes.
    #[error("a frame header has checksum {stated:016x} and not {actual:016x}")]
    Checksum {
        /// What it says.
        stated: u64,
        /// What it should say.
        actual: u64,
    },
    /// This version does not know its kind.
    #[error("a frame is of the unknown kind {0}")]
    Kind(u32),
}

impl Header {
    /// The header of a message.
    pub(super) fn of_message(bytes: &[u8]) -> Self {
        Self {
            kind: Kind::Message,
            incarnation: Incarnation(0),
            pairing: 0,
            request: RequestId(0),
            attempt: 0,
            layer: 0,
            first_block: 0,
            n_blocks: 0,
            payload_bytes: bytes.len() as u64,
            payload_sum: Checksum::of(bytes),
        }
    }

    pub(super) fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        let mut at = 0;
        let mut put = |field: &[u8]| {
            bytes[at..at + field.len()].copy_from_slice(field);
            at += field.len();
        };
        put(&MAGIC.to_le_bytes());
        put(&(self.kind as u32).to_le_bytes());
        put(&self.incarnation.0.to_le_bytes());
        put(&self.pairing.to_le_bytes());
        put(&self.request.0.to_le_bytes());
        for number in [self.attempt, self.layer, self.first_block, self.n_blocks] {
            put(&number.to_le_bytes());
        }
        put(&self.payload_bytes.to_le_bytes());
        put(&self.payload_sum.to_le_bytes());
        let sum = Checksum::of(&bytes[..SUMMED_BYTES]);
        bytes[SUMMED_BYTES..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    pub(super) fn from_bytes(bytes: &[u8; HEADER_BYTES]) -> Result<Self, HeaderError> {
        let mut rest = Fields(bytes);
        let magic = u32::from_le_bytes(rest.take());
        if magic != MAGIC {
            return Err(HeaderError::Magic(magic));
        }
        let (stated, actual) =
            (u64::from_le_bytes(Fields(&bytes[SUMMED_BYTES..]).take()), Checksum::of(&bytes[..SUMMED_BYTES]));
        if stated != actual {
            return Err(HeaderError::Checksum { stated, actual });
        }
        let kind = match u32::from_le_bytes(rest.take()) {
            1 => Kind::Message,
            2 => Kind::Blocks,
            3 => Kind::Ready,
            4 => Kind::InRing,
            other => return Err(HeaderError::Kind(other)),
        };
        Ok(Self {
            kind,
            incarnation: Incarnation(u64::from_le_bytes(rest.take())),
            pairing: u64::from_le_bytes(rest.take()),
            request: RequestId(u128::from_le_bytes(rest.take())),
            attempt: u32::from_le_bytes(rest.take()),
            layer: u32::from_le_bytes(rest.take()),
            first_block: u32::from_le_bytes(rest.take()),
            n_blocks: u32::from_le_bytes(rest.take()),
            payload_bytes: u64::from_le_bytes(rest.take()),
            payload_sum: u64::from_le_bytes(rest.take()),
        })
    }
}

/// Takes fields off a header's front.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let (field, rest) = self.0.split_first_chunk().expect("a header holds its fields");
        self.0 = rest;
        *field
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Header {
        Header {
            kind: Kind::Blocks,
            incarnation: Incarnation(2),
            pairing: 3,
            request: RequestId(4 << 100),
            attempt: 5,
            layer: 6,
            first_block: 7,
            n_blocks: 8,
            payload_bytes: 9 << 40,
            payload_sum: 10,
        }
    }

    #[test]
    fn a_header_survives_its_bytes() {
        for kind in [Kind::Message, Kind::Blocks, Kind::Ready, Kind::InRing] {
            let header = Header { kind, ..header() };
            assert_eq!(Header::from_bytes(&header.to_bytes()), Ok(header));
        }
    }

    #[test]
    fn no_flipped_bit_goes_unnoticed() {
        let bytes = header().to_bytes();
        for bit in 0..8 * HEADER_BYTES {
            let mut flipped = bytes;
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(Header::from_bytes(&flipped).is_err(), "bit {bit}");
        }
    }
}
