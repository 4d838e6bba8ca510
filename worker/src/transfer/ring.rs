//! A file in memory that two processes on one host write and read in turn, where neither may read the other's memory.
//!
//! The decode worker makes it with room for all its pages and seals its length, so that no access can fail once it is
//! open; nothing is left of it when both processes are gone. Which part holds what is said on the connection: bytes
//! follow one another around the file, and the writer has no more under way than fit.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;

use kernels::memory::checksum::Checksum;
use kernels::memory::runs::Runs;
use kernels::memory::shared::SharedMemory;
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::fs::{fallocate, fcntl_add_seals, fcntl_get_seals, memfd_create};

use super::host::PROOF_BYTES;
use super::message::RingOffer;

/// What keeps a file as long as it is.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// One side's view of the file.
#[derive(Debug)]
pub(super) struct Ring {
    memory: SharedMemory,
    /// What the peer opens.
    _file: File,
    /// Bytes that went through so far.
    position: u64,
}

impl Ring {
    /// Makes a ring for the peer to open.
    pub(super) fn create(n_bytes: u64) -> io::Result<(Self, RingOffer)> {
        let file = File::from(memfd_create("tessera-kv-ring", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?);
        fallocate(&file, FallocateFlags::empty(), 0, n_bytes)?;
        fcntl_add_seals(&file, SEALS | SealFlags::SEAL)?;
        let proof = daemon::random::u128().to_le_bytes();
        file.write_all_at(&proof, 0)?;
        let descriptor = u32::try_from(file.as_raw_fd()).map_err(|_| io::ErrorKind::InvalidInput)?;
        let offer = RingOffer { pid: std::process::id(), descriptor, n_bytes, proof: proof.to_vec() };
        Ok((Self { memory: SharedMemory::map(&file)?, _file: file, position: 0 }, offer))
    }

    /// Opens the ring that a peer offers, and makes sure that it is that and stays as long as it is.
    pub(super) fn open(offer: &RingOffer) -> io::Result<Self> {
        let path = format!("/proc/{}/fd/{}", offer.pid, offer.descriptor);
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        let mut proof = [0; PROOF_BYTES];
        file.read_exact_at(&mut proof, 0)?;
        let is_whole = file.metadata()?.len() == offer.n_bytes && fcntl_get_seals(&file)?.contains(SEALS);
        if proof != *offer.proof || !is_whole {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the file is not the ring that was offered"));
        }
        Ok(Self { memory: SharedMemory::map(&file)?, _file: file, position: 0 })
    }

    /// Bytes that fit at once.
    pub(super) fn n_bytes(&self) -> usize {
        self.memory.len()
    }

    /// Copies runs in, for which there must be room, and returns their checksum.
    pub(super) fn put(&mut self, runs: &Runs) -> u64 {
        self.around(runs.n_bytes(), |memory, position, at, n_bytes, sum| runs.put(memory, position, at, n_bytes, sum))
    }

    /// Copies what follows out into runs, and returns the checksum of what has come.
    pub(super) fn take(&mut self, runs: &Runs) -> u64 {
        self.around(runs.n_bytes(), |memory, position, at, n_bytes, sum| runs.take(memory, position, at, n_bytes, sum))
    }

    /// Passes over bytes that nobody wants.
    pub(super) fn skip(&mut self, n_bytes: u64) {
        self.position = self.position.wrapping_add(n_bytes);
    }

    /// Moves the next `n_bytes`, in parts where it begins again: position in the file, position in what moves, bytes.
    fn around(
        &mut self,
        n_bytes: usize,
        mut part: impl FnMut(&mut SharedMemory, usize, usize, usize, &mut Checksum),
    ) -> u64 {
        let (mut at, mut checksum) = (0, Checksum::new());
        while at < n_bytes {
            let position = (self.position % self.memory.len() as u64) as usize;
            let len = (self.memory.len() - position).min(n_bytes - at);
            part(&mut self.memory, position, at, len, &mut checksum);
            self.position = self.position.wrapping_add(len as u64);
            at += len;
        }
        checksum.value()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_ring_that_was_offered_is_opened() {
        let (_ring, offer) = Ring::create(1 << 20).unwrap();
        assert_eq!(Ring::open(&offer).unwrap().n_bytes(), 1 << 20);
        let wrong = [
            RingOffer { proof: vec![0; PROOF_BYTES], ..offer.clone() },
            RingOffer { n_bytes: 1 << 19, ..offer.clone() },
            RingOffer { descriptor: 1 << 20, ..offer.clone() },
            RingOffer { pid: u32::MAX, ..offer },
        ];
        assert!(wrong.iter().all(|offer| Ring::open(offer).is_err()));
    }
}
