//! Quantised weights to bf16, written over [`Quads`]; see [`crate::cpu::grouped`] for where codes and scales lie.
//! Hot path: no allocation, no lock, no log.
//!
//! A value is what its block stands for, rounded once to f32 and once to bf16: the same bits on every instruction set,
//! and those that packing the dequantised row as bf16 gives.

use crate::cpu::grouped::{QUADS, Unpack};
use crate::cpu::lanes::Quads;
use crate::cpu::panels::{GROUP, STRIP};
use crate::cpu::simd_grouped::{MINIMUM, SUPER_HALVES, SUPER_MINIMUM, Scales, scales, unpack, with_format};

/// Unpacks with [`Quads::store_pairs`], or with [`Quads::store_pairs_bf16`].
///
/// # Safety
/// The target features of `V`, and AVX512-BF16 where it is `NATIVE`, are enabled in the caller.
#[inline(always)]
pub(crate) unsafe fn to_bf16<V: Quads, const NATIVE: bool>(work: &mut Unpack<'_>) {
    work.check();
    // SAFETY: features are the caller's promise; the constants are those of the grouping.
    unsafe { with_format!(work.grouping, groups::<V, NATIVE>(work)) }
}

#[inline(always)]
unsafe fn groups<V: Quads, const NATIVE: bool, const PLANES: usize, const KIND: u8>(work: &mut Unpack<'_>) {
    let parts = work.out.chunks_exact_mut(GROUP * STRIP).take(2 * work.groups.len());
    // What comes next is asked for, as nothing is read while rows go by.
    let next = work.groups.end..work.groups.end + work.groups.len();
    // SAFETY: features are the caller's promise.
    unsafe { work.grouping.prefetch::<V>(work.panel, next) };
    for (index, part) in parts.enumerate() {
        let places = work.grouping.places(work.groups.start + index / 2, index % 2);
        // SAFETY: features are the caller's promise; `Unpack::check` asserted that the panel has this group, and a part
        // has room for eight quads of two pairs.
        unsafe {
            let panel = work.panel.as_ptr();
            let (header, super_block) = (panel.add(places.header), panel.add(places.super_block));
            let zero = V::splat(work.grouping.scale.zero() as f32);
            for lane in (0..STRIP).step_by(V::N) {
                let scales = scales::<V, KIND>(header, super_block, lane);
                for pair in 0..QUADS / 2 {
                    let values = values::<V, PLANES, KIND>(panel.add(places.codes), lane, pair, &scales, zero);
                    for (odd, [a, b, c, d]) in values.into_iter().enumerate() {
                        let to = part.as_mut_ptr().add((2 * pair + odd) * 4 * STRIP + 2 * lane);
                        if NATIVE {
                            V::store_pairs_bf16(a, b, to);
                            V::store_pairs_bf16(c, d, to.add(2 * STRIP));
                        } else {
                            V::store_pairs(a, b, to);
                            V::store_pairs(c, d, to.add(2 * STRIP));
                        }
                    }
                }
            }
        }
    }
}

/// Values of two quads of a vector of columns: the four inputs of each.
///
/// # Safety
/// The target features of `V` are enabled in the caller; the group's codes are as long as the planes say.
#[inline(always)]
pub(crate) unsafe fn values<V: Quads, const PLANES: usize, const KIND: u8>(
    codes: *const u8,
    lane: usize,
    pair: usize,
    scales: &Scales<V>,
    zero: V,
) -> [[V; 4]; 2] {
    // SAFETY: as the caller promises.
    unsafe {
        let scale = scales.halves[usize::from(KIND == SUPER_HALVES && pair >= QUADS / 4)];
        let [even, odd] = unpack::<V, PLANES>(codes, lane, pair);
        let mut values = [V::bytes(even), V::bytes(odd)];
        for value in values.as_flattened_mut() {
            *value = match KIND {
                // Products are exact, so a fused addition rounds like one that is not.
                MINIMUM | SUPER_MINIMUM => scale.fma(*value, scales.minimum),
                _ => scale.mul(value.sub(zero)),
            };
        }
        values
    }
}
