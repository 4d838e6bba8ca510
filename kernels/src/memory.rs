//! Large, aligned, zeroed memory that the system commits when it is touched, in huge pages where there are any.

pub mod blocks;
pub mod checksum;
pub mod file;
pub mod runs;
pub mod shared;

use std::ptr::NonNull;

use crate::error::{Error, Result};

/// Bytes of a huge page on the machines this runs on.
const HUGE_PAGE: usize = 2 << 20;

/// An anonymous, private mapping: zeroed, page aligned, committed lazily, returned on drop.
pub struct Mapping {
    start: NonNull<u8>,
    len: usize,
    mapped: usize,
}

// SAFETY: a mapping is plain memory owned by this value; whoever reaches into it states how threads share it.
unsafe impl Send for Mapping {}
// SAFETY: `&Mapping` gives an address and a length only.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes, and asks for huge pages when it is worth one.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] when the system refuses.
    pub fn zeroed(len: usize) -> Result<Self> {
        let error = Error::OutOfMemory { bytes: len };
        let huge = len >= HUGE_PAGE;
        let unit = if huge { HUGE_PAGE } else { 4096 };
        // A huge page more than needed, so that the part in use starts at one.
        let mapped =
            len.max(1).checked_next_multiple_of(unit).and_then(|n| n.checked_add(if huge { HUGE_PAGE } else { 0 }));
        let Some(mapped) = mapped.filter(|&n| isize::try_from(n).is_ok()) else { return Err(error) };
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: an anonymous mapping at an address of the system's choice touches no memory of ours.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), mapped, protection, flags | libc::MAP_NORESERVE, -1, 0) };
        if base == libc::MAP_FAILED {
            return Err(error);
        }
        let Some(base) = NonNull::new(base.cast::<u8>()) else { return Err(error) };
        let skip = if huge { base.as_ptr().align_offset(HUGE_PAGE) } else { 0 };
        // SAFETY: `skip` is below HUGE_PAGE, by which the mapping is longer than `len` when huge; else it is 0.
        let start = unsafe { base.add(skip) };
        if skip > 0 {
            // SAFETY: the first `skip` bytes are whole pages of the mapping just made, and nothing refers to them.
            unsafe { libc::munmap(base.as_ptr().cast(), skip) };
        }
        let mapping = Self { start, len, mapped: mapped - skip };
        if huge {
            // SAFETY: the range is our own mapping; advice changes no contents, and refusing it is harmless.
            unsafe { libc::madvise(start.as_ptr().cast(), mapping.mapped, libc::MADV_HUGEPAGE) };
        }
        Ok(mapping)
    }

    /// Address of the first byte; aligned to a page, to a huge page when the mapping is that large.
    pub fn address(&self) -> usize {
        self.start.as_ptr().expose_provenance()
    }

    /// Bytes that may be used.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes, while nobody else can have the address.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: `len` bytes from `start` are mapped, initialised (zero) and borrowed through `&mut self`.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }

    /// Some of the bytes.
    ///
    /// # Safety
    /// Nobody writes them while the slice lives.
    ///
    /// # Panics
    /// When there are fewer.
    pub(crate) unsafe fn part(&self, offset: usize, len: usize) -> &[u8] {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len), "within the mapping");
        // SAFETY: mapped and initialised, as just asserted; the caller keeps writers away.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().add(offset), len) }
    }

    /// Some of the bytes, to be written.
    ///
    /// # Safety
    /// No other slice of them lives.
    ///
    /// # Panics
    /// When there are fewer.
    #[expect(clippy::mut_from_ref, reason = "the obligation above makes it exclusive")]
    pub(crate) unsafe fn part_mut(&self, offset: usize, len: usize) -> &mut [u8] {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len), "within the mapping");
        // SAFETY: mapped and initialised, as just asserted; exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().add(offset), len) }
    }

    /// Gives the whole pages from `offset` on back to the system; they are zero when they are next touched.
    ///
    /// # Safety
    /// No slice of them lives.
    pub(crate) unsafe fn discard_from(&self, offset: usize) {
        let offset = offset.next_multiple_of(4096);
        if offset < self.len {
            // SAFETY: the range is our own mapping from a page on, and nobody looks at it by the caller's promise.
            unsafe { libc::madvise(self.start.as_ptr().add(offset).cast(), self.len - offset, libc::MADV_DONTNEED) };
        }
    }

    /// The bytes, for owners that never write through the address.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: `len` bytes from `start` are mapped and initialised (zero at first).
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: exactly the range this value still owns, which nothing refers to any more.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.mapped) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_and_large_mappings_are_zeroed_and_aligned() {
        for len in [0, 1, 4095, 4097, HUGE_PAGE - 1, HUGE_PAGE, 3 * HUGE_PAGE + 17] {
            let mut mapping = Mapping::zeroed(len).unwrap();
            assert_eq!(mapping.address() % if len >= HUGE_PAGE { HUGE_PAGE } else { 4096 }, 0);
            assert_eq!(mapping.len(), len);
            assert!(mapping.as_slice().iter().all(|&byte| byte == 0));
            mapping.as_mut_slice().fill(7);
        }
    }

    #[test]
    fn what_is_discarded_is_zero_and_what_stands_before_it_is_kept() {
        for len in [5 * 4096 + 17, 2 * HUGE_PAGE + 4097] {
            let mut mapping = Mapping::zeroed(len).unwrap();
            mapping.as_mut_slice().fill(7);
            // SAFETY: no slice of the mapping lives.
            unsafe { mapping.discard_from(4097) };
            let (kept, given_back) = mapping.as_slice().split_at(2 * 4096);
            assert!(kept.iter().all(|&byte| byte == 7) && given_back.iter().all(|&byte| byte == 0));
        }
    }

    #[test]
    fn impossible_sizes_are_refused() {
        for len in [usize::MAX, usize::MAX - HUGE_PAGE, 1 << 60] {
            assert_eq!(Mapping::zeroed(len).err(), Some(Error::OutOfMemory { bytes: len }));
        }
    }
}
