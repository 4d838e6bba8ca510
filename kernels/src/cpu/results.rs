//! Results of a panel on their way to the output.
//! Hot path: no allocation, no lock, no log.

use std::ops::Range;

use crate::cpu::access::Shared;
use crate::cpu::lanes::LINE;
use crate::cpu::panels::PANEL;

/// Bytes from which an output goes past the caches, which would read each line before it is written, and would not hold
/// it until it is read.
const LARGE: usize = 2 << 20;

/// Copies results of some rows and a panel to their columns of the output, whose rows have `n_out` columns.
pub(crate) fn store(sums: &[f32], rows: &Range<usize>, columns: Range<usize>, n_out: usize, out: &Shared<'_, f32>) {
    let is_large = size_of::<f32>() * out.len() >= LARGE;
    for (row, line) in rows.clone().zip(sums.as_chunks::<PANEL>().0) {
        // SAFETY: no other chunk has this row and these columns.
        let target = unsafe { out.part(row * n_out + columns.start, columns.len()) };
        match target.as_mut_array::<PANEL>() {
            Some(target) if is_large && target.as_ptr().addr().is_multiple_of(LINE) => past_caches(line, target),
            Some(target) => *target = *line,
            None => target.copy_from_slice(&line[..columns.len()]),
        }
    }
    if is_large {
        fence();
    }
}

/// Copies two aligned cache lines.
#[cfg(target_arch = "x86_64")]
fn past_caches(from: &[f32; PANEL], to: &mut [f32; PANEL]) {
    use std::arch::x86_64::{_mm_loadu_ps, _mm_stream_ps};
    for (from, to) in from.as_chunks::<4>().0.iter().zip(to.as_chunks_mut::<4>().0) {
        // SAFETY: SSE2 is part of x86-64; both are four floats, and `to` is aligned as the lines are.
        unsafe { _mm_stream_ps(to.as_mut_ptr(), _mm_loadu_ps(from.as_ptr())) };
    }
}

/// Such stores are seen by other threads in order with what follows only after a fence.
#[cfg(target_arch = "x86_64")]
fn fence() {
    // SAFETY: SSE is part of x86-64.
    unsafe { std::arch::x86_64::_mm_sfence() };
}

#[cfg(not(target_arch = "x86_64"))]
fn past_caches(from: &[f32; PANEL], to: &mut [f32; PANEL]) {
    *to = *from;
}

#[cfg(not(target_arch = "x86_64"))]
fn fence() {}
