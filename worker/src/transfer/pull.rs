//! Blocks out of another process's memory, by `process_vm_readv`: one copy, made by whoever wants them.
//!
//! The system copies page by page, and so at little more than half the speed of a plain copy. Long frames are therefore
//! copied by two threads, each its half.

use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kernels::memory::checksum::Checksum;
use kernels::memory::runs::{RemoteRuns, Runs};
use tokio::task::{JoinHandle, spawn_blocking, yield_now};

/// From so many bytes on a second thread is worth waking: it takes as long as to copy 256 KiB.
const SHARED_BYTES_MIN: usize = 1 << 20;

/// The checksum of blocks that are pulled: that of the checksums of both halves.
pub(super) fn sum_of(runs: &Runs) -> u64 {
    let of_half = |half: Range<usize>| {
        let mut checksum = Checksum::new();
        runs.sum(half.start, half.len(), &mut checksum);
        checksum.value()
    };
    sum_of_halves(halves(runs.n_bytes()).map(of_half))
}

/// Copies from the memory of process `pid` and returns [`sum_of`] what has come.
///
/// Who drops this may let go of the blocks: no thread writes to them any more.
pub(super) async fn pull(pid: u32, runs: &Runs, remote: &RemoteRuns) -> io::Result<u64> {
    let [first, second] = halves(runs.n_bytes());
    let other = (runs.n_bytes() >= SHARED_BYTES_MIN).then(|| Other::begin(pid, runs, remote, second.clone()));
    let first = pull_half(pid, runs, remote, first).await?;
    let second = match other {
        Some(mut other) => (&mut other.copying).await.map_err(io::Error::other)??,
        None => pull_half(pid, runs, remote, second).await?,
    };
    Ok(sum_of_halves([first, second]))
}

async fn pull_half(pid: u32, runs: &Runs, remote: &RemoteRuns, half: Range<usize>) -> io::Result<u64> {
    let mut pulling = Pulling::new(half);
    while pulling.next(pid, runs, remote)? {
        yield_now().await;
    }
    Ok(pulling.checksum.value())
}

/// A half that another thread copies; dropping it waits for the call that it is in, and there is no other.
struct Other {
    /// Held over each call.
    is_wanted: Arc<Mutex<bool>>,
    copying: JoinHandle<io::Result<u64>>,
}

impl Other {
    fn begin(pid: u32, runs: &Runs, remote: &RemoteRuns, half: Range<usize>) -> Self {
        let is_wanted = Arc::new(Mutex::new(true));
        let (wanted, runs, remote) = (Arc::clone(&is_wanted), runs.clone(), remote.clone());
        let copying = spawn_blocking(move || {
            let mut pulling = Pulling::new(half);
            loop {
                let is_wanted = lock(&wanted);
                if !*is_wanted {
                    return Err(io::ErrorKind::Interrupted.into());
                }
                if !pulling.next(pid, &runs, &remote)? {
                    return Ok(pulling.checksum.value());
                }
            }
        });
        Self { is_wanted, copying }
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        *lock(&self.is_wanted) = false;
    }
}

/// How far a half has come.
struct Pulling {
    left: Range<usize>,
    checksum: Checksum,
}

impl Pulling {
    fn new(half: Range<usize>) -> Self {
        Self { left: half, checksum: Checksum::new() }
    }

    /// Copies a piece and sums it while it is in the cache; false when nothing is left.
    fn next(&mut self, pid: u32, runs: &Runs, remote: &RemoteRuns) -> io::Result<bool> {
        if self.left.is_empty() {
            return Ok(false);
        }
        let n_bytes = runs.pull(pid, remote, self.left.clone())?;
        if n_bytes == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        runs.sum(self.left.start, n_bytes, &mut self.checksum);
        self.left.start += n_bytes;
        Ok(true)
    }
}

fn halves(n_bytes: usize) -> [Range<usize>; 2] {
    let middle = n_bytes / 2;
    [0..middle, middle..n_bytes]
}

fn sum_of_halves(sums: [u64; 2]) -> u64 {
    Checksum::of(sums.map(u64::to_le_bytes).as_flattened())
}

fn lock(is_wanted: &Mutex<bool>) -> MutexGuard<'_, bool> {
    is_wanted.lock().unwrap_or_else(PoisonError::into_inner)
}
