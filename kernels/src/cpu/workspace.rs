//! Memory of matrix kernels: each thread's sums, and weights that it takes apart.

use crate::cpu::grouped;
use crate::cpu::panels::PANEL;
use crate::error::Result;
use crate::memory::Mapping;

/// Most rows that a chunk of work multiplies: their activations stay in the second-level cache.
pub(crate) const ROWS_MAX: usize = 2 * WHOLE_ROWS;
/// Rows that are whole for kernels of 12 rows and of 32.
pub(crate) const WHOLE_ROWS: usize = 96;
/// Inputs that are multiplied at a time: 16 KB of bf16 weights stay in the first-level cache while rows go by.
pub(crate) const SLAB: usize = 256;

/// A thread's memory for one panel.
#[repr(C, align(64))]
pub(crate) struct Local {
    /// Codes of quantised weights as bytes.
    pub(crate) bytes: [u8; grouped::SLAB * 2 * grouped::ELEMENTS],
    /// Quantised weights as bf16.
    pub(crate) bf16: [u16; SLAB * PANEL],
    /// f16 weights as f32.
    pub(crate) f32: [f32; SLAB * PANEL],
    /// Results of one or two panels and of their combination, `[rows, 32]` each.
    pub(crate) sums: [[f32; ROWS_MAX * PANEL]; 3],
    /// Sums of int8 products.
    pub(crate) ints: [i32; ROWS_MAX * PANEL],
}

/// The threads' memory.
pub(crate) struct Locals {
    memory: Mapping,
    threads: usize,
}

impl Locals {
    pub(crate) fn new(threads: usize) -> Result<Self> {
        Ok(Self { memory: Mapping::zeroed(threads * size_of::<Local>())?, threads })
    }

    /// A thread's memory.
    ///
    /// # Safety
    /// No other reference to this thread's memory lives.
    #[expect(clippy::mut_from_ref, reason = "the obligation above makes it exclusive")]
    pub(crate) unsafe fn of(&self, thread: usize) -> &mut Local {
        assert!(thread < self.threads, "a thread of the pool");
        let start: *mut Local = std::ptr::with_exposed_provenance_mut(self.memory.address());
        // SAFETY: mapped for that many, page aligned, zeroed (all bits are values), exclusive by the caller's promise.
        unsafe { &mut *start.add(thread) }
    }
}
