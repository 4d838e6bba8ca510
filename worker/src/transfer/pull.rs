//! Blocks out of another process's memory, by `process_vm_readv`: one copy, made by whoever wants them.
//!
//! The system looks up every page, and so one thread copies at little more than half the speed of a plain copy. Two share
//! a long frame, piece by piece: the second takes what it can get, so that nobody waits for it to wake.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kernels::memory::checksum::Checksum;
use kernels::memory::runs::{RemoteRuns, Runs};
use tokio::task::{spawn_blocking, yield_now};

/// Bytes that a thread copies at once: they are summed in its second-level cache, and nobody waits long for the last.
const PIECE_BYTES: usize = 128 << 10;
/// Pieces from which on a second thread is worth waking, which takes as long as to copy one or two.
const SHARED_PIECES_MIN: usize = 8;

/// The checksum of blocks that are pulled: that of the checksums of their pieces.
pub(super) fn sum_of(runs: &Runs) -> u64 {
    let sum_of_piece = |piece: Range<usize>| {
        let mut checksum = Checksum::new();
        runs.sum(piece.start, piece.len(), &mut checksum);
        checksum.value()
    };
    sum_of_sums((0..n_pieces(runs)).map(|index| sum_of_piece(piece(runs, index))))
}

/// Copies from the memory of process `pid` and returns [`sum_of`] what has come.
///
/// Who drops this may let go of the blocks: no thread writes to them any more.
pub(super) async fn pull(pid: u32, runs: &Runs, remote: &RemoteRuns) -> io::Result<u64> {
    let n_pieces = n_pieces(runs);
    let shared = Arc::new(Shared {
        pid,
        runs: runs.clone(),
        remote: remote.clone(),
        next: AtomicUsize::new(0),
        sums: (0..n_pieces).map(|_| AtomicU64::new(0)).collect(),
        is_wanted: AtomicBool::new(true),
        failed: Mutex::new(None),
    });
    let pulling = Pulling(Arc::clone(&shared));
    if n_pieces >= SHARED_PIECES_MIN {
        spawn_blocking(move || shared.help());
    }
    while pulling.0.pull_next()? {
        yield_now().await;
    }
    pulling.end()
}

/// A frame that two threads copy; dropping it waits for the piece that the other one is at, after which there is none.
struct Pulling(Arc<Shared>);

struct Shared {
    pid: u32,
    runs: Runs,
    remote: RemoteRuns,
    /// Piece that nobody has taken yet.
    next: AtomicUsize,
    /// By piece.
    sums: Box<[AtomicU64]>,
    /// Whether the other thread is to take pieces.
    is_wanted: AtomicBool,
    /// Why the other thread stopped; locked while it is at a piece.
    failed: Mutex<Option<io::Error>>,
}

impl Pulling {
    /// Waits for the other thread, which has the last pieces that are not there yet.
    fn end(self) -> io::Result<u64> {
        if let Some(error) = self.0.failed().take() {
            return Err(error);
        }
        Ok(sum_of_sums(self.0.sums.iter().map(|sum| sum.load(Ordering::Relaxed))))
    }
}

impl Drop for Pulling {
    fn drop(&mut self) {
        self.0.is_wanted.store(false, Ordering::Relaxed);
        drop(self.0.failed());
    }
}

impl Shared {
    /// What the second thread does.
    fn help(&self) {
        let mut goes_on = true;
        while goes_on {
            let mut failed = self.failed();
            // Whoever says that it is not wanted locks after that, so that there is no piece after the one it waits for.
            goes_on = self.is_wanted.load(Ordering::Relaxed)
                && self.pull_next().unwrap_or_else(|error| {
                    *failed = Some(error);
                    false
                });
        }
    }

    /// Copies a piece and sums it while it is in the cache; false when none is left.
    fn pull_next(&self) -> io::Result<bool> {
        let index = self.next.fetch_add(1, Ordering::Relaxed);
        let Some(sum) = self.sums.get(index) else { return Ok(false) };
        let (mut left, mut checksum) = (piece(&self.runs, index), Checksum::new());
        while !left.is_empty() {
            let n_bytes = self.runs.pull(self.pid, &self.remote, left.clone())?;
            if n_bytes == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            self.runs.sum(left.start, n_bytes, &mut checksum);
            left.start += n_bytes;
        }
        sum.store(checksum.value(), Ordering::Relaxed);
        Ok(true)
    }

    fn failed(&self) -> MutexGuard<'_, Option<io::Error>> {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn n_pieces(runs: &Runs) -> usize {
    runs.n_bytes().div_ceil(PIECE_BYTES)
}

fn piece(runs: &Runs, index: usize) -> Range<usize> {
    let start = index * PIECE_BYTES;
    start..runs.n_bytes().min(start + PIECE_BYTES)
}

fn sum_of_sums(sums: impl Iterator<Item = u64>) -> u64 {
    let mut checksum = Checksum::new();
    sums.for_each(|sum| checksum.update(&sum.to_le_bytes()));
    checksum.value()
}
