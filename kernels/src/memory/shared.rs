//! A file in memory that two processes have mapped: one copies bytes in, the other copies them out.
//! Hot path: no allocation, no lock, no log.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::ptr::NonNull;

/// Bytes that a core moves past its cache at once.
const LINE_BYTES: usize = 64;

/// A shared mapping of a whole file that cannot become shorter, so that no access fails.
///
/// No reference to its bytes is made, since the other process may write them at any time. That neither writes what the
/// other still reads is agreed elsewhere; where that were broken, bytes would be wrong, and their checksum with them.
#[derive(Debug)]
pub struct SharedMemory {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping is plain memory owned by this value, and is only copied to and from.
unsafe impl Send for SharedMemory {}
// SAFETY: as above; writing takes a unique borrow.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Maps a file that is sealed against shrinking and for whose pages there is room.
    ///
    /// # Errors
    /// `InvalidInput` when it may become shorter, else what the system says.
    pub fn map(file: &File) -> io::Result<Self> {
        // SAFETY: asks about a descriptor that is borrowed here.
        let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
        if seals < 0 || seals & libc::F_SEAL_SHRINK == 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the file is not sealed against shrinking"));
        }
        let len = usize::try_from(file.metadata()?.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_POPULATE);
        // SAFETY: a mapping at an address of the system's choice touches no memory of ours.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, file.as_raw_fd(), 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, len })
    }

    /// Bytes of the file.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies in, past this core's cache. What is written is seen by others after [`Self::publish`].
    ///
    /// # Safety
    /// `source` has `len` bytes that nobody writes meanwhile.
    ///
    /// # Panics
    /// When the memory is shorter.
    pub(crate) unsafe fn write(&mut self, position: usize, source: *const u8, len: usize) {
        let target = self.at(position, len);
        // SAFETY: `at` checked the target, a mapping of its own; the source is the caller's promise.
        unsafe { copy_past_cache(source, target, len) };
    }

    /// Copies out.
    ///
    /// # Safety
    /// `target` has `len` bytes that nobody else reads or writes meanwhile.
    ///
    /// # Panics
    /// When the memory is shorter.
    pub(crate) unsafe fn read(&self, position: usize, target: *mut u8, len: usize) {
        let source = self.at(position, len);
        // SAFETY: `at` checked the source, a mapping of its own; the target is the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(source, target, len) };
    }

    /// Has everything written so far seen before what this thread does next.
    pub(crate) fn publish(&mut self) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: orders stores and touches nothing; every such processor has SSE.
        unsafe {
            std::arch::x86_64::_mm_sfence();
        }
        std::sync::atomic::fence(std::sync::atomic::Ordering::Release);
    }

    fn at(&self, position: usize, len: usize) -> *mut u8 {
        assert!(position.checked_add(len).is_some_and(|end| end <= self.len), "within the shared memory");
        self.start.as_ptr().wrapping_add(position)
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: exactly the range that was mapped, which nothing refers to any more.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// Copies without leaving the target in this core's cache. Another core that reads it next takes it from memory, where
/// its prefetchers help; from another core's cache it comes line by line, at a third of that rate.
///
/// # Safety
/// As for [`std::ptr::copy_nonoverlapping`].
#[cfg(target_arch = "x86_64")]
unsafe fn copy_past_cache(source: *const u8, target: *mut u8, len: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
    let head = target.align_offset(LINE_BYTES).min(len);
    let end = head + (len - head) / LINE_BYTES * LINE_BYTES;
    // SAFETY: all offsets are below `len`; lines of the target are aligned, and every such processor has SSE2.
    unsafe {
        std::ptr::copy_nonoverlapping(source, target, head);
        for line in (head..end).step_by(LINE_BYTES) {
            let (from, to) = (source.add(line).cast::<__m128i>(), target.add(line).cast::<__m128i>());
            let quarters = [0, 1, 2, 3].map(|i| _mm_loadu_si128(from.add(i)));
            for (i, quarter) in quarters.into_iter().enumerate() {
                _mm_stream_si128(to.add(i), quarter);
            }
        }
        std::ptr::copy_nonoverlapping(source.add(end), target.add(end), len - end);
    }
}

/// As above, where no instruction for it is known.
///
/// # Safety
/// As for [`std::ptr::copy_nonoverlapping`].
#[cfg(not(target_arch = "x86_64"))]
unsafe fn copy_past_cache(source: *const u8, target: *mut u8, len: usize) {
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(source, target, len) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_may_become_shorter_is_refused() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        assert_eq!(SharedMemory::map(&file).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }
}
