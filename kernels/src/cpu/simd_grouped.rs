//! Products with quantised weights, written over [`Quads`]; see [`crate::cpu::grouped`] for layout and order.
//! Hot path: no allocation, no lock, no log.

use crate::cpu::grouped::{ELEMENTS, Factor, GroupedDot, QUAD, ScaleKind};
use crate::cpu::lanes::Quads;
use crate::cpu::panels::{GROUP, PANEL, STRIP};

/// Quads of a group.
const QUADS: usize = GROUP / 4;

/// Multiplies with [`Quads::dot`].
///
/// # Safety
/// The target features of `V` are enabled in the caller.
#[inline(always)]
pub(crate) unsafe fn dot<V: Quads>(dot: &mut GroupedDot<'_>) {
    // SAFETY: features are the caller's promise.
    unsafe { all::<V, false>(dot) };
}

/// Multiplies with [`Quads::dot_vnni`].
///
/// # Safety
/// The target features of `V`, and VNNI, are enabled in the caller.
#[inline(always)]
pub(crate) unsafe fn dot_vnni<V: Quads>(dot: &mut GroupedDot<'_>) {
    // SAFETY: features are the caller's promise.
    unsafe { all::<V, true>(dot) };
}

#[inline(always)]
unsafe fn all<V: Quads, const VNNI: bool>(dot: &mut GroupedDot<'_>) {
    dot.check();
    for column in (0..PANEL).step_by(V::N) {
        let mut row = 0;
        while row < dot.rows {
            // SAFETY: features are the caller's promise; `check` asserted the extents that the blocks read and write.
            let n = unsafe {
                match dot.rows - row {
                    8.. if V::N == 16 => block::<V, VNNI, 8>(dot, column, row),
                    4.. if V::ROWS >= 4 => block::<V, VNNI, 4>(dot, column, row),
                    2.. => block::<V, VNNI, 2>(dot, column, row),
                    _ => block::<V, VNNI, 1>(dot, column, row),
                }
            };
            row += n;
        }
    }
}

/// Scales of a vector of columns in both halves of a group; the second is used only where they differ.
struct Scales<V> {
    halves: [V; 2],
    minimum: V,
}

/// `R` rows times a vector of columns; returns `R`.
#[inline(always)]
unsafe fn block<V: Quads, const VNNI: bool, const R: usize>(
    dot: &mut GroupedDot<'_>,
    column: usize,
    row: usize,
) -> usize {
    let (grouping, strip, lane) = (dot.grouping, column / STRIP, column % STRIP);
    let halves = grouping.scale == ScaleKind::SuperHalves;
    let zero = grouping.scale.zero();
    // SAFETY: features are the caller's promise; `GroupedDot::check` asserted that these rows, groups and sums exist,
    // and `places` stays inside a panel of that many groups.
    unsafe {
        let x = dot.x.as_ptr().add(row * dot.groups * GROUP);
        let factors = dot.factors.as_ptr().add(row * dot.groups);
        let mut sums = [V::splat(0.0); R];
        for group in 0..dot.groups {
            let (header, super_block) = grouping.places(group, strip);
            let codes = dot.panel.as_ptr().add(header + grouping.header_bytes() + 4 * lane);
            let factor = |r: usize| -> &Factor { &*factors.add(r * dot.groups + group) };
            let x = |r: usize, quad: usize| {
                x.add((r * dot.groups + group) * GROUP + 4 * quad).cast::<i32>().read_unaligned()
            };
            let scales =
                scales::<V>(grouping.scale, dot.panel.as_ptr().add(header), dot.panel.as_ptr().add(super_block), lane);
            let mut ints = [V::ints(0); R];
            for (r, ints) in ints.iter_mut().enumerate() {
                let code_sums = factor(r).code_sums;
                let own = if halves { code_sums[0] } else { code_sums[0] + code_sums[1] };
                *ints = V::ints(-zero * own);
            }
            for half in 0..2 {
                for pair in half * QUADS / 4..(half + 1) * QUADS / 4 {
                    let [even, odd] = match grouping.planes {
                        None => [0, 1].map(|i| V::codes(codes.add((2 * pair + i) * QUAD))),
                        Some(planes) => {
                            let nibbles = V::codes(codes.add(pair * QUAD));
                            let mut both = [V::low(nibbles), V::high(nibbles)];
                            for plane in 0..usize::from(planes) {
                                let at = ELEMENTS / 2 + plane * ELEMENTS / 8 + 2 * pair * QUAD / 8;
                                let bits = codes.sub(4 * lane).add(at + lane / 2);
                                let [even, odd] = both;
                                let worth = 16 << plane;
                                both = [V::with_bits(even, bits, worth), V::with_bits(odd, bits.add(QUAD / 8), worth)];
                            }
                            both
                        }
                    };
                    for (r, ints) in ints.iter_mut().enumerate() {
                        *ints = step::<V, VNNI>(step::<V, VNNI>(*ints, even, x(r, 2 * pair)), odd, x(r, 2 * pair + 1));
                    }
                }
                if halves && half == 0 {
                    for (r, (sum, ints)) in sums.iter_mut().zip(&mut ints).enumerate() {
                        *sum = scales.halves[0].mul(V::splat(factor(r).scale)).fma(V::float(*ints), *sum);
                        *ints = V::ints(-zero * factor(r).code_sums[1]);
                    }
                }
            }
            let last = scales.halves[usize::from(halves)];
            for (r, (sum, ints)) in sums.iter_mut().zip(&ints).enumerate() {
                *sum = last.mul(V::splat(factor(r).scale)).fma(V::float(*ints), *sum);
                if matches!(grouping.scale, ScaleKind::Minimum | ScaleKind::SuperMinimum) {
                    *sum = scales.minimum.fma(V::splat(factor(r).sum), *sum);
                }
            }
        }
        for (r, sum) in sums.into_iter().enumerate() {
            sum.store(dot.sums[(row + r) * PANEL + column..][..V::N].as_mut_ptr());
        }
    }
    R
}

#[inline(always)]
unsafe fn step<V: Quads, const VNNI: bool>(sums: V::Ints, codes: V::Codes, x: i32) -> V::Ints {
    // SAFETY: features are the caller's promise.
    unsafe { if VNNI { V::dot_vnni(sums, codes, x) } else { V::dot(sums, codes, x) } }
}

#[inline(always)]
unsafe fn scales<V: Quads>(kind: ScaleKind, header: *const u8, super_block: *const u8, lane: usize) -> Scales<V> {
    // SAFETY: features are the caller's promise; header and super-block are as long as the kind says.
    unsafe {
        let half = |at: *const u8| V::load_f16(at.add(2 * lane).cast());
        let zero = V::splat(0.0);
        match kind {
            ScaleKind::Centred { .. } => Scales { halves: [half(header), zero], minimum: zero },
            ScaleKind::Minimum => Scales { halves: [half(header), zero], minimum: half(header.add(2 * STRIP)) },
            ScaleKind::SuperMinimum => {
                let scale = half(super_block).mul(V::load_u8(header.add(lane)));
                let minimum = half(super_block.add(2 * STRIP)).mul(V::load_u8(header.add(STRIP + lane)));
                Scales { halves: [scale, zero], minimum: minimum.mul(V::splat(-1.0)) }
            }
            ScaleKind::SuperHalves => {
                let d = half(super_block);
                let scale = |at: usize| d.mul(V::load_i8(header.add(at + lane).cast()));
                Scales { halves: [scale(0), scale(STRIP)], minimum: zero }
            }
        }
    }
}
