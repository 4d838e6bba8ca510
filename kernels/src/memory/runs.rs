//! Scattered parts of a pool moved as one string of bytes: to and from sockets, shared memory and another process.
//! Hot path: no allocation, no lock, no log.

use std::fmt;
use std::io;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::{AsRawFd as _, BorrowedFd};

use libc::{c_ulong, iovec};

use crate::cpu::lanes::LINE;
use crate::error::Result;
use crate::memory::blocks::{BlockMemory, Region};
use crate::memory::checksum::Checksum;
use crate::memory::shared::SharedMemory;

/// Most bytes that one call moves, so that none holds up its thread for long (0.25 ms at 2 GB/s).
pub const CALL_BYTES_MAX: usize = 512 << 10;
/// Bytes that are copied and summed together: both find them in the fastest cache.
const PIECE_BYTES: usize = 4 << 10;
/// Most parts that one call names.
const PARTS_MAX: usize = 256;

/// Runs of bytes in a pool, in the order in which they travel.
///
/// Each call moves a part of the string that the runs make and says how long it was, as sockets do; `at` is where in the
/// string it begins. Who guarantees that nobody else writes meanwhile is told at [`BlockMemory`].
#[derive(Clone)]
pub struct Runs {
    memory: BlockMemory,
    runs: Vec<Run>,
    n_bytes: usize,
}

/// Addresses in another process, in the order in which they are read.
#[derive(Clone, Debug, Default)]
pub struct RemoteRuns {
    runs: Vec<Run>,
    n_bytes: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    address: usize,
    len: usize,
}

impl Runs {
    pub(crate) fn new(memory: BlockMemory) -> Self {
        Self { memory, runs: Vec::new(), n_bytes: 0 }
    }

    /// Forgets all runs and keeps their list's capacity.
    pub fn clear(&mut self) {
        self.runs.clear();
        self.n_bytes = 0;
    }

    /// Adds `len` bytes of a region, `offset` bytes from its start.
    ///
    /// # Errors
    /// [`Error::Index`](crate::Error::Index) when the layer does not exist or the region is shorter; nothing is added.
    pub fn push(&mut self, layer: usize, region: Region, offset: usize, len: usize) -> Result<()> {
        let address = self.memory.locate(layer, region, offset, len)?;
        push(&mut self.runs, Run { address, len });
        self.n_bytes += len;
        Ok(())
    }

    /// Bytes of all runs.
    #[must_use]
    pub fn n_bytes(&self) -> usize {
        self.n_bytes
    }

    /// Adds `n_bytes` of the string from `at` on to a checksum.
    ///
    /// # Panics
    /// When the string is shorter.
    pub fn sum(&self, at: usize, n_bytes: usize, checksum: &mut Checksum) {
        let mut add = |run: Run| {
            let source = std::ptr::with_exposed_provenance::<u8>(run.address);
            // SAFETY: a part of a run, which `push` checked; the pool is mapped while `memory` lives, and the blocks are
            // held or reserved by whoever moves them, so that nobody writes to them now.
            checksum.update(unsafe { std::slice::from_raw_parts(source, run.len) });
        };
        let mut last = None;
        self.small_pieces(at, n_bytes, |run| {
            ask_for(run);
            if let Some(before) = last.replace(run) {
                add(before);
            }
        });
        if let Some(last) = last {
            add(last);
        }
    }

    /// Sends what follows `at` in `head` and the runs after it to a socket, without waiting and without a signal.
    ///
    /// # Errors
    /// What the system says; `WouldBlock` when the socket takes nothing now.
    pub fn send(&self, socket: BorrowedFd<'_>, head: &[u8], at: usize) -> io::Result<usize> {
        let mut parts = Parts::new();
        if let Some(rest) = head.get(at..) {
            parts.push(Run { address: rest.as_ptr().expose_provenance(), len: rest.len() });
        }
        parts.fill(&self.runs, at.saturating_sub(head.len()), CALL_BYTES_MAX);
        // SAFETY: zero is a valid message header: null pointers with zero lengths.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = parts.as_mut_ptr();
        message.msg_iovlen = parts.len as _;
        // SAFETY: the parts are bytes of `head`, borrowed here, and of runs, mapped while `memory` lives.
        let sent =
            unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT) };
        moved(sent)
    }

    /// Receives from a socket into the runs, without waiting; 0 when the peer has closed it.
    ///
    /// # Errors
    /// What the system says; `WouldBlock` when there is nothing now.
    pub fn receive(&self, socket: BorrowedFd<'_>, at: usize) -> io::Result<usize> {
        let mut parts = Parts::new();
        parts.fill(&self.runs, at, CALL_BYTES_MAX);
        // SAFETY: zero is a valid message header: null pointers with zero lengths.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = parts.as_mut_ptr();
        message.msg_iovlen = parts.len as _;
        // SAFETY: the parts are of runs, mapped for writing while `memory` lives.
        moved(unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) })
    }

    /// Copies `n_bytes` of the string, from `at` on, into shared memory at `position`, and sums them on their way.
    ///
    /// # Panics
    /// When the string or the memory is shorter.
    pub fn put(&self, memory: &mut SharedMemory, mut position: usize, at: usize, n_bytes: usize, sum: &mut Checksum) {
        self.small_pieces(at, n_bytes, |run| {
            let source = std::ptr::with_exposed_provenance::<u8>(run.address);
            // SAFETY: a part of a run, which `push` checked; the pool is mapped while `memory` lives, and the blocks are
            // held by whoever moves them, so that nobody writes to them now.
            unsafe {
                sum.update(std::slice::from_raw_parts(source, run.len));
                memory.write(position, source, run.len);
            }
            position += run.len;
        });
        memory.publish();
    }

    /// Copies `n_bytes` from `position` of shared memory into the runs, from `at` on, and sums what has come.
    ///
    /// # Panics
    /// When the string or the memory is shorter.
    pub fn take(&self, memory: &SharedMemory, mut position: usize, at: usize, n_bytes: usize, sum: &mut Checksum) {
        self.small_pieces(at, n_bytes, |run| {
            let target = std::ptr::with_exposed_provenance_mut::<u8>(run.address);
            // SAFETY: a part of a run, which `push` checked; the pool is mapped while `memory` lives, and the blocks are
            // reserved for whoever moves them, so that nobody else reads or writes them now. They are summed where they
            // went, for the memory may change under the sum.
            unsafe {
                memory.read(position, target, run.len);
                sum.update(std::slice::from_raw_parts(target, run.len));
            }
            position += run.len;
        });
    }

    /// Copies a first part of `within` from another process's memory into the runs, and says how long it was.
    ///
    /// # Errors
    /// What the system says: `PermissionDenied` when this process may not read that one, an error without a kind when
    /// it is gone (`ESRCH`) or has unmapped what is asked for (`EFAULT`).
    pub fn pull(&self, pid: u32, remote: &RemoteRuns, within: Range<usize>) -> io::Result<usize> {
        let mut theirs = Parts::new();
        theirs.fill(&remote.runs, within.start, within.len().min(CALL_BYTES_MAX));
        let mut ours = Parts::new();
        ours.fill(&self.runs, within.start, theirs.n_bytes);
        if ours.n_bytes < theirs.n_bytes {
            theirs = Parts::new();
            theirs.fill(&remote.runs, within.start, ours.n_bytes);
        }
        vm_read(pid, &mut ours, &mut theirs)
    }

    /// Calls `take` for pieces of at most [`PIECE_BYTES`] that make up `n_bytes` from `at` on.
    fn small_pieces(&self, at: usize, n_bytes: usize, mut take: impl FnMut(Run)) {
        self.check(at, n_bytes);
        pieces(&self.runs, at, n_bytes, |run| {
            for offset in (0..run.len).step_by(PIECE_BYTES) {
                take(Run { address: run.address + offset, len: PIECE_BYTES.min(run.len - offset) });
            }
            true
        });
    }

    fn check(&self, at: usize, n_bytes: usize) {
        assert!(at.checked_add(n_bytes).is_some_and(|end| end <= self.n_bytes), "within the string");
    }
}

impl fmt::Debug for Runs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} runs of {} bytes in {:?}", self.runs.len(), self.n_bytes, self.memory)
    }
}

impl RemoteRuns {
    /// Forgets all runs and keeps their list's capacity.
    pub fn clear(&mut self) {
        self.runs.clear();
        self.n_bytes = 0;
    }

    /// Adds `len` bytes at an address of the other process; only that process's memory is read, whatever it is.
    pub fn push(&mut self, address: u64, len: usize) {
        push(&mut self.runs, Run { address: address as usize, len });
        self.n_bytes += len;
    }

    /// Bytes of all runs.
    #[must_use]
    pub fn n_bytes(&self) -> usize {
        self.n_bytes
    }
}

/// Copies `target.len()` bytes from an address of another process.
///
/// # Errors
/// As for [`Runs::pull`], and `UnexpectedEof` when fewer can be read.
pub fn pull_bytes(pid: u32, address: u64, target: &mut [u8]) -> io::Result<()> {
    let (mut ours, mut theirs) = (Parts::new(), Parts::new());
    ours.push(Run { address: target.as_mut_ptr().expose_provenance(), len: target.len() });
    theirs.push(Run { address: address as usize, len: target.len() });
    let n_read = vm_read(pid, &mut ours, &mut theirs)?;
    if n_read == target.len() { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

/// Both name memory of the same length: `ours` is writable memory of this process, `theirs` is checked by the system.
fn vm_read(pid: u32, ours: &mut Parts, theirs: &mut Parts) -> io::Result<usize> {
    let pid = libc::pid_t::try_from(pid).map_err(|_| io::ErrorKind::InvalidInput)?;
    let (n_ours, n_theirs) = (ours.len as c_ulong, theirs.len as c_ulong);
    // SAFETY: what is written are parts of runs or of a borrowed slice; the system checks the other process's addresses.
    moved(unsafe { libc::process_vm_readv(pid, ours.as_mut_ptr(), n_ours, theirs.as_mut_ptr(), n_theirs, 0) })
}

/// Asks the second-level cache for a piece that is read next: sums go as fast as memory then, and not half as fast.
#[cfg(target_arch = "x86_64")]
fn ask_for(run: Run) {
    use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
    for line in (0..run.len).step_by(LINE) {
        let line = std::ptr::with_exposed_provenance::<i8>(run.address + line);
        // SAFETY: SSE is part of x86-64, and a prefetch may name any address.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(line) };
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn ask_for(_run: Run) {}

fn moved(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// Adds a run; one that follows the last in memory makes it longer.
fn push(runs: &mut Vec<Run>, run: Run) {
    match runs.last_mut() {
        Some(last) if last.address.wrapping_add(last.len) == run.address => last.len += run.len,
        _ => runs.push(run),
    }
}

/// Calls `take` for the pieces of runs that hold `n_bytes` from `at` on, until it has enough.
fn pieces(runs: &[Run], mut at: usize, mut n_bytes: usize, mut take: impl FnMut(Run) -> bool) {
    for run in runs {
        if at >= run.len {
            at -= run.len;
            continue;
        }
        let len = (run.len - at).min(n_bytes);
        if len == 0 || !take(Run { address: run.address.wrapping_add(at), len }) {
            return;
        }
        n_bytes -= len;
        at = 0;
    }
}

/// What a system call takes: addresses and lengths.
struct Parts {
    parts: [MaybeUninit<iovec>; PARTS_MAX],
    len: usize,
    n_bytes: usize,
}

impl Parts {
    fn new() -> Self {
        Self { parts: [const { MaybeUninit::uninit() }; PARTS_MAX], len: 0, n_bytes: 0 }
    }

    /// Adds a part and says whether there is room for more.
    fn push(&mut self, run: Run) -> bool {
        let base = std::ptr::with_exposed_provenance_mut(run.address);
        self.parts[self.len].write(iovec { iov_base: base, iov_len: run.len });
        self.len += 1;
        self.n_bytes += run.len;
        self.len < PARTS_MAX
    }

    fn fill(&mut self, runs: &[Run], at: usize, n_bytes: usize) {
        pieces(runs, at, n_bytes, |run| self.push(run));
    }

    /// The first `len` are initialised.
    fn as_mut_ptr(&mut self) -> *mut iovec {
        self.parts.as_mut_ptr().cast()
    }
}

#[cfg(test)]
mod tests;
