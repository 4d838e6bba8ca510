//! Which blocks of an order have come, and which frames are wanted.

use contract::ids::{Incarnation, RequestId};

use super::frame::Header;

/// What came of each layer, from the first wanted block on and without a gap.
#[derive(Debug)]
pub struct Received {
    incarnation: Incarnation,
    pairing: u64,
    request: RequestId,
    attempt: u32,
    first_block: u32,
    /// End of the wanted blocks.
    end: u32,
    /// First block that each layer lacks.
    next: Vec<u32>,
}

/// Why a frame is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unwanted {
    /// It is of another life of the peer, of other layouts, or of another request or attempt.
    Stale,
    /// Its blocks are not reserved.
    NotReserved,
    /// Its blocks came already, or follow a gap.
    OutOfOrder,
}

impl Received {
    /// Nothing yet of blocks `first_block..end` in `n_layers`, which frames like `wanted` bring.
    pub fn new(wanted: &Header, end: u32, n_layers: u32) -> Self {
        let Header { incarnation, pairing, request, attempt, first_block, .. } = *wanted;
        Self { incarnation, pairing, request, attempt, first_block, end, next: vec![first_block; n_layers as usize] }
    }

    /// Checks whether a frame's blocks are the next of their layer.
    pub fn check(&self, header: &Header) -> Result<(), Unwanted> {
        let theirs = (header.incarnation, header.pairing, header.request, header.attempt);
        if theirs != (self.incarnation, self.pairing, self.request, self.attempt) {
            return Err(Unwanted::Stale);
        }
        let end = header.first_block.checked_add(header.n_blocks);
        let is_reserved = header.first_block >= self.first_block && end.is_some_and(|end| end <= self.end);
        let Some(&next) = self.next.get(header.layer as usize).filter(|_| is_reserved) else {
            return Err(Unwanted::NotReserved);
        };
        if header.first_block == next { Ok(()) } else { Err(Unwanted::OutOfOrder) }
    }

    /// Counts the blocks of a frame that was checked and has come whole.
    pub fn count(&mut self, header: &Header) {
        debug_assert_eq!(self.check(header), Ok(()));
        self.next[header.layer as usize] += header.n_blocks;
    }

    /// Blocks from the first wanted one on that are there in every layer.
    pub fn n_complete(&self) -> u32 {
        self.next.iter().min().map_or(0, |next| next - self.first_block)
    }

    /// Whether all is there.
    pub fn is_complete(&self) -> bool {
        self.next.iter().all(|&next| next == self.end)
    }
}
