//! Checksum of bytes on their way between workers: XXH3, 64 bits.

use std::fmt;
use std::hash::Hasher as _;

use twox_hash::xxhash3_64::Hasher;

/// Sums up bytes as they pass; equal bytes give equal sums however they are cut.
///
/// It finds what links and memories corrupt, not what an adversary forges.
pub struct Checksum(Hasher);

impl Checksum {
    /// The sum of no bytes yet.
    #[must_use]
    pub fn new() -> Self {
        Self(Hasher::new())
    }

    /// Adds bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.write(bytes);
    }

    /// The sum of all bytes so far.
    #[must_use]
    pub fn value(&self) -> u64 {
        self.0.finish()
    }

    /// The sum of these bytes.
    #[must_use]
    pub fn of(bytes: &[u8]) -> u64 {
        Hasher::oneshot(bytes)
    }
}

impl Default for Checksum {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Checksum({:016x})", self.value())
    }
}
