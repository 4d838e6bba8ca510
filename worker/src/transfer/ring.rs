//! A file in memory that two processes on one host write and read in turn, where neither may read the other's memory.
//!
//! The decode worker makes it and seals its length, so that no access can fail once it is open; nothing is left of it
//! when both processes are gone. Which part holds what is said on the connection: bytes follow one another around the
//! file, and the writer has no more under way than fit.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::FileExt as _;

use kernels::memory::checksum::Checksum;
use kernels::memory::runs::Runs;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, ftruncate, memfd_create};

use super::host::PROOF_BYTES;
use super::message::RingOffer;

/// What keeps a file as long as it is.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// One side's view of the file.
#[derive(Debug)]
pub(super) struct Ring {
    file: File,
    n_bytes: u64,
    /// Bytes that went through so far.
    position: u64,
}

impl Ring {
    /// Makes a ring for the peer to open.
    pub(super) fn create(n_bytes: u64) -> io::Result<(Self, RingOffer)> {
        let file = File::from(memfd_create("tessera-kv-ring", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?);
        ftruncate(&file, n_bytes)?;
        fcntl_add_seals(&file, SEALS | SealFlags::SEAL)?;
        let proof = daemon::random::u128().to_le_bytes();
        file.write_all_at(&proof, 0)?;
        let descriptor = u32::try_from(file.as_raw_fd()).map_err(|_| io::ErrorKind::InvalidInput)?;
        let offer = RingOffer { pid: std::process::id(), descriptor, n_bytes, proof: proof.to_vec() };
        Ok((Self { file, n_bytes, position: 0 }, offer))
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
        Ok(Self { file, n_bytes: offer.n_bytes, position: 0 })
    }

    /// Bytes that fit at once.
    pub(super) fn n_bytes(&self) -> u64 {
        self.n_bytes
    }

    /// Copies runs in; there must be room.
    pub(super) fn put(&mut self, runs: &Runs) -> io::Result<()> {
        let mut at = 0;
        while at < runs.n_bytes() {
            let (offset, room) = self.turn();
            at += self.advance(runs.write_at(self.file.as_fd(), offset, at, room)?)?;
        }
        Ok(())
    }

    /// Copies what follows out into runs, and sums it while it is in the cache.
    pub(super) fn take(&mut self, runs: &Runs) -> io::Result<u64> {
        let (mut at, mut checksum) = (0, Checksum::new());
        while at < runs.n_bytes() {
            let (offset, room) = self.turn();
            let n_bytes = self.advance(runs.read_at(self.file.as_fd(), offset, at, room)?)?;
            runs.sum(at, n_bytes, &mut checksum);
            at += n_bytes;
        }
        Ok(checksum.value())
    }

    /// Passes over bytes that nobody wants.
    pub(super) fn skip(&mut self, n_bytes: u64) {
        self.position = self.position.wrapping_add(n_bytes);
    }

    /// Where it goes on, and how far until it begins again.
    fn turn(&self) -> (u64, usize) {
        let offset = self.position % self.n_bytes;
        (offset, usize::try_from(self.n_bytes - offset).unwrap_or(usize::MAX))
    }

    fn advance(&mut self, n_bytes: usize) -> io::Result<usize> {
        if n_bytes == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.position += n_bytes as u64;
        Ok(n_bytes)
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
