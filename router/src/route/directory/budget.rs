//! Bytes that structures may take together.

use std::sync::atomic::{AtomicUsize, Ordering};

/// A bound, and what is taken of it.
#[derive(Debug)]
pub(super) struct Budget {
    bytes: AtomicUsize,
    /// Left to others.
    bytes_reserved: AtomicUsize,
    bytes_max: usize,
}

impl Budget {
    pub(super) fn new(bytes_max: usize) -> Self {
        Self { bytes: AtomicUsize::new(0), bytes_reserved: AtomicUsize::new(0), bytes_max }
    }

    /// Takes `bytes` unless that exceeds the bound.
    pub(super) fn claim(&self, bytes: usize) -> bool {
        let bytes_max = self.bytes_max.saturating_sub(self.bytes_reserved.load(Ordering::Relaxed));
        let fits = |taken: usize| taken.checked_add(bytes).filter(|&sum| sum <= bytes_max);
        self.bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_ok()
    }

    /// Leaves `bytes` of the bound to others, from the next claim on.
    pub(super) fn reserve(&self, bytes: usize) {
        self.bytes_reserved.store(bytes, Ordering::Relaxed);
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
