//! Bytes that structures may take together.

use std::sync::atomic::{AtomicUsize, Ordering};

/// A bound, and what is taken of it.
#[derive(Debug)]
pub(super) struct Budget {
    bytes: AtomicUsize,
    bytes_max: usize,
}

impl Budget {
    pub(super) fn new(bytes_max: usize) -> Self {
        Self { bytes: AtomicUsize::new(0), bytes_max }
    }

    /// Takes `bytes` unless that exceeds the bound.
    pub(super) fn claim(&self, bytes: usize) -> bool {
        let fits = |taken: usize| taken.checked_add(bytes).filter(|&sum| sum <= self.bytes_max);
        self.bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_ok()
    }

    /// Takes `bytes` whatever the bound, for what soon gives back more.
    pub(super) fn take(&self, bytes: usize) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Gives `bytes` back.
    pub(super) fn release(&self, bytes: usize) {
        let before = self.bytes.fetch_sub(bytes, Ordering::Relaxed);
        debug_assert!(before >= bytes, "released {bytes} bytes of {before}");
    }

    /// Bytes taken.
    pub(super) fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }
}
