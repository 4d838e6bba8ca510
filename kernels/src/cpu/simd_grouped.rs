//! Products with quantised weights, written over [`Quads`]; see [`crate::cpu::grouped`] for layout and order.
//! Hot path: no allocation, no lock, no log.
//!
//! A format is constants here, so that the inner loops have no branches: `PLANES` planes above nibbles (or [`BYTES`])
//! and a `KIND` of scales.

use std::ops::Range;

use crate::cpu::grouped::{ELEMENTS, Factor, GroupedDot, QUAD, QUADS, SLAB};
use crate::cpu::lanes::Quads;
use crate::cpu::panels::{GROUP, PANEL, STRIP};

/// Rows from which it pays to unpack codes to bytes first, by their planes: nibbles cost less than twice the bytes.
const UNPACK_ROWS: [usize; 3] = [usize::MAX, 64, 20];
/// `PLANES` of codes that are bytes.
pub(crate) const BYTES: usize = usize::MAX;
/// `KIND`s, as [`ScaleKind`].
pub(crate) const CENTRED: u8 = 0;
pub(crate) const MINIMUM: u8 = 1;
pub(crate) const SUPER_MINIMUM: u8 = 2;
pub(crate) const SUPER_HALVES: u8 = 3;

/// Calls a function with the constants of a grouping: its planes (or [`BYTES`]) and kind of scales, behind others.
macro_rules! with_format {
    ($grouping:expr, $run:ident $(::<$($generic:ident),*>)? ($($arg:expr),*)) => {{
        use $crate::cpu::grouped::ScaleKind;
        use $crate::cpu::simd_grouped::{BYTES, CENTRED, MINIMUM, SUPER_HALVES, SUPER_MINIMUM};
        match ($grouping.planes, $grouping.scale) {
            (None, _) => $run::<$($($generic,)*)? BYTES, CENTRED>($($arg),*),
            (Some(0), ScaleKind::Centred { .. }) => $run::<$($($generic,)*)? 0, CENTRED>($($arg),*),
            (Some(_), ScaleKind::Centred { .. }) => $run::<$($($generic,)*)? 1, CENTRED>($($arg),*),
            (Some(0), ScaleKind::Minimum) => $run::<$($($generic,)*)? 0, MINIMUM>($($arg),*),
            (Some(_), ScaleKind::Minimum) => $run::<$($($generic,)*)? 1, MINIMUM>($($arg),*),
            (Some(0), ScaleKind::SuperMinimum) => $run::<$($($generic,)*)? 0, SUPER_MINIMUM>($($arg),*),
            (Some(_), ScaleKind::SuperMinimum) => $run::<$($($generic,)*)? 1, SUPER_MINIMUM>($($arg),*),
            (Some(_), ScaleKind::SuperHalves) => $run::<$($($generic,)*)? 2, SUPER_HALVES>($($arg),*),
        }
    }};
}
pub(crate) use with_format;

/// Multiplies with [`Quads::dot`], or with [`Quads::dot_vnni`].
///
/// # Safety
/// The target features of `V`, and VNNI where it is asked for, are enabled in the caller.
#[inline(always)]
pub(crate) unsafe fn dot<V: Quads, const VNNI: bool>(dot: &mut GroupedDot<'_>) {
    dot.check();
    dot.sums[..dot.rows * PANEL].fill(0.0);
    // SAFETY: features are the caller's promise; the constants are those of the grouping.
    unsafe { with_format!(dot.grouping, stretches::<V, VNNI>(dot)) }
}

/// Few rows take codes as they are; many take a slab of groups unpacked to bytes, which stays in the first-level cache.
#[inline(always)]
unsafe fn stretches<V: Quads, const VNNI: bool, const PLANES: usize, const KIND: u8>(dot: &mut GroupedDot<'_>) {
    // SAFETY: features and constants are the caller's promise.
    unsafe {
        if PLANES == BYTES || dot.rows < UNPACK_ROWS[PLANES] {
            return rows::<V, VNNI, PLANES, KIND>(dot, 0..dot.groups);
        }
        for first in (0..dot.groups).step_by(SLAB) {
            let groups = first..dot.groups.min(first + SLAB);
            unpack_slab::<V, PLANES>(dot, groups.clone());
            dot.grouping.prefetch::<V>(dot.panel, groups.end..groups.end + SLAB);
            rows::<V, VNNI, BYTES, KIND>(dot, groups);
        }
    }
}

#[inline(always)]
unsafe fn unpack_slab<V: Quads, const PLANES: usize>(dot: &mut GroupedDot<'_>, groups: Range<usize>) {
    let grouping = dot.grouping;
    for (index, bytes) in dot.bytes.chunks_exact_mut(ELEMENTS).take(2 * groups.len()).enumerate() {
        let places = grouping.places(groups.start + index / 2, index % 2);
        for pair in 0..QUADS / 2 {
            for lane in (0..STRIP).step_by(V::N) {
                // SAFETY: features are the caller's promise; the panel has this group, and `bytes` its eight quads.
                unsafe {
                    let codes = dot.panel.as_ptr().add(places.codes);
                    let [even, odd] = unpack::<V, PLANES>(codes, lane, pair);
                    let to = bytes.as_mut_ptr().add(2 * pair * QUAD + 4 * lane);
                    to.cast::<V::Codes>().write_unaligned(even);
                    to.add(QUAD).cast::<V::Codes>().write_unaligned(odd);
                }
            }
        }
    }
}

/// All rows, as many at a time as registers hold sums; wide sums are of both strips, which share each activation.
#[inline(always)]
unsafe fn rows<V: Quads, const VNNI: bool, const PLANES: usize, const KIND: u8>(
    dot: &mut GroupedDot<'_>,
    groups: Range<usize>,
) {
    let mut row = 0;
    while row < dot.rows {
        // SAFETY: features are the caller's promise; `check` asserted the extents that the blocks read and write.
        unsafe {
            if V::N < STRIP {
                for column in (0..PANEL).step_by(V::N) {
                    block::<V, VNNI, PLANES, KIND, 1, 1>(dot, &groups, column, row);
                }
                row += 1;
            } else if dot.rows - row >= 4 {
                block::<V, VNNI, PLANES, KIND, 4, 2>(dot, &groups, 0, row);
                row += 4;
            } else {
                block::<V, VNNI, PLANES, KIND, 1, 2>(dot, &groups, 0, row);
                row += 1;
            }
        }
    }
}

/// Scales of a vector of columns in both halves of a group; the second is used only where they differ.
#[derive(Clone, Copy)]
pub(crate) struct Scales<V> {
    pub(crate) halves: [V; 2],
    pub(crate) minimum: V,
}

/// `R` rows times `C` vectors of columns. With [`BYTES`] of a format that has planes, codes are those of the slab.
#[inline(always)]
unsafe fn block<V, const VNNI: bool, const PLANES: usize, const KIND: u8, const R: usize, const C: usize>(
    dot: &mut GroupedDot<'_>,
    groups: &Range<usize>,
    column: usize,
    row: usize,
) where
    V: Quads,
{
    let (lane, zero) = (column % STRIP, dot.grouping.scale.zero());
    // SAFETY: features are the caller's promise; `GroupedDot::check` asserted that these rows, groups and sums exist.
    unsafe {
        let sums_at = dot.sums.as_mut_ptr().add(row * PANEL + column);
        let mut sums = [[V::splat(0.0); C]; R];
        for r in 0..R {
            for c in 0..C {
                sums[r][c] = V::load(sums_at.add(r * PANEL + c * V::N));
            }
        }
        // Whoever reads codes where they lie reads one panel and asks for the next: hardware begins anew with each, and
        // sees nothing to follow while rows go by.
        let asks = R > 1 && row == 0 && (PLANES != BYTES || dot.grouping.planes.is_none());
        for group in groups.clone() {
            if asks {
                dot.grouping.prefetch::<V>(dot.panel, dot.groups + group..dot.groups + group + 1);
            }
            let x = dot.x.as_ptr().add((row * dot.groups + group) * GROUP);
            let factors = dot.factors.as_ptr().add(row * dot.groups + group);
            let (codes, scales) = parts::<V, PLANES, KIND, C>(dot, groups.start, group, column);
            let mut ints = [[V::ints(0); C]; R];
            if KIND == CENTRED || KIND == SUPER_HALVES {
                for r in 0..R {
                    let code_sums = (*factors.add(r * dot.groups)).code_sums;
                    let own = code_sums[0] + if KIND == CENTRED { code_sums[1] } else { 0 };
                    ints[r] = [V::ints(-zero * own); C];
                }
            }
            // A single row waits for memory, so it reads one strip after the other; see `avx512bf16::bf16_block`.
            let together = if R == 1 { 1 } else { C };
            for columns in (0..C).step_by(together).map(|first| first..first + together) {
                for pair in 0..QUADS / 2 {
                    if KIND == SUPER_HALVES && pair == QUADS / 4 {
                        for r in 0..R {
                            let factor = &*factors.add(r * dot.groups);
                            for c in columns.clone() {
                                let scale = scales[c].halves[0].mul(V::splat(factor.scale));
                                sums[r][c] = scale.fma(V::float(ints[r][c]), sums[r][c]);
                                ints[r][c] = V::ints(-zero * factor.code_sums[1]);
                            }
                        }
                    }
                    let mut both = [unpack::<V, PLANES>(codes[columns.start], lane, pair); C];
                    for c in columns.clone().skip(1) {
                        both[c] = unpack::<V, PLANES>(codes[c], lane, pair);
                    }
                    for r in 0..R {
                        let at = x.add(r * dot.groups * GROUP + 8 * pair).cast::<i32>();
                        let (even, odd) = (at.read_unaligned(), at.add(1).read_unaligned());
                        for c in columns.clone() {
                            let ints = &mut ints[r][c];
                            *ints = step::<V, VNNI>(step::<V, VNNI>(*ints, both[c][0], even), both[c][1], odd);
                        }
                    }
                }
            }
            for r in 0..R {
                let factor = &*factors.add(r * dot.groups);
                for c in 0..C {
                    let last = scales[c].halves[usize::from(KIND == SUPER_HALVES)].mul(V::splat(factor.scale));
                    sums[r][c] = last.fma(V::float(ints[r][c]), sums[r][c]);
                    if KIND == MINIMUM || KIND == SUPER_MINIMUM {
                        sums[r][c] = scales[c].minimum.fma(V::splat(factor.sum), sums[r][c]);
                    }
                }
            }
        }
        for r in 0..R {
            for c in 0..C {
                sums[r][c].store(sums_at.add(r * PANEL + c * V::N));
            }
        }
    }
}

/// Where a group's codes of `C` strips lie, and their scales; `first` is the slab's first group.
#[inline(always)]
unsafe fn parts<V: Quads, const PLANES: usize, const KIND: u8, const C: usize>(
    dot: &GroupedDot<'_>,
    first: usize,
    group: usize,
    column: usize,
) -> ([*const u8; C], [Scales<V>; C]) {
    let unpacked = PLANES == BYTES && dot.grouping.planes.is_some();
    let (panel, strip) = (dot.panel.as_ptr(), column / STRIP);
    // SAFETY: features are the caller's promise.
    let zero = unsafe { [V::splat(0.0); 2] };
    let mut codes = [panel; C];
    let mut scales = [Scales { halves: zero, minimum: zero[0] }; C];
    for c in 0..C {
        let places = dot.grouping.places(group, strip + c);
        // SAFETY: features are the caller's promise; `GroupedDot::check` asserted that the panel has this group, and the
        // scratch a slab.
        unsafe {
            codes[c] = match unpacked {
                true => dot.bytes.as_ptr().add(((group - first) * 2 + strip + c) * ELEMENTS),
                false => panel.add(places.codes),
            };
            let (header, super_block) = (panel.add(places.header), panel.add(places.super_block));
            scales[c] = self::scales::<V, KIND>(header, super_block, column % STRIP);
        }
    }
    (codes, scales)
}

/// As [`crate::cpu::grouped::quantize`].
///
/// # Safety
/// The target features of `V` are enabled in the caller.
#[inline(always)]
pub(crate) unsafe fn quantize<V: Quads>(x: &[f32], codes: &mut [i8], factors: &mut [Factor]) {
    for ((x, codes), factor) in x.chunks_exact(GROUP).zip(codes.chunks_exact_mut(GROUP)).zip(factors) {
        // SAFETY: features are the caller's promise; both chunks hold a group, which is a multiple of N.
        unsafe {
            let zero = V::splat(0.0);
            let (mut largest, mut poison) = (zero, zero);
            for i in (0..GROUP).step_by(V::N) {
                let x = V::load(x.as_ptr().add(i));
                largest = x.max(zero.sub(x).max(largest));
                poison = x.fma(zero, poison);
            }
            let largest = largest.largest();
            let inverse = if largest > 0.0 && largest.is_finite() { 127.0 / largest } else { 0.0 };
            let mut code_sums = [0; 2];
            for i in (0..GROUP).step_by(V::N) {
                // Bounded for what is no number.
                let x = V::load(x.as_ptr().add(i)).mul(V::splat(inverse)).max(V::splat(-127.0));
                code_sums[2 * i / GROUP] += x.min(V::splat(127.0)).store_bytes(codes.as_mut_ptr().add(i));
            }
            let scale = largest / 127.0 + poison.sum();
            *factor = Factor { scale, sum: scale * (code_sums[0] + code_sums[1]) as f32, code_sums };
        }
    }
}

/// Codes of two quads.
#[inline(always)]
pub(crate) unsafe fn unpack<V: Quads, const PLANES: usize>(
    codes: *const u8,
    lane: usize,
    pair: usize,
) -> [V::Codes; 2] {
    // SAFETY: features are the caller's promise; a group's codes are as long as the planes say.
    unsafe {
        if PLANES == BYTES {
            let codes = codes.add(2 * pair * QUAD + 4 * lane);
            return [V::codes(codes), V::codes(codes.add(QUAD))];
        }
        let nibbles = V::codes(codes.add(pair * QUAD + 4 * lane));
        let (mut even, mut odd) = (V::low(nibbles), V::high(nibbles));
        for plane in 0..PLANES {
            let bits = codes.add(ELEMENTS / 2 + plane * ELEMENTS / 8 + 2 * pair * QUAD / 8 + lane / 2);
            even = V::with_bits(even, bits, 16 << plane);
            odd = V::with_bits(odd, bits.add(QUAD / 8), 16 << plane);
        }
        [even, odd]
    }
}

#[inline(always)]
unsafe fn step<V: Quads, const VNNI: bool>(sums: V::Ints, codes: V::Codes, x: i32) -> V::Ints {
    // SAFETY: features are the caller's promise.
    unsafe { if VNNI { V::dot_vnni(sums, codes, x) } else { V::dot(sums, codes, x) } }
}

#[inline(always)]
pub(crate) unsafe fn scales<V: Quads, const KIND: u8>(
    header: *const u8,
    super_block: *const u8,
    lane: usize,
) -> Scales<V> {
    // SAFETY: features are the caller's promise; header and super-block are as long as the kind says.
    unsafe {
        let zero = V::splat(0.0);
        let first = V::load_f16(header.add(2 * lane).cast());
        match KIND {
            CENTRED => Scales { halves: [first, zero], minimum: zero },
            MINIMUM => {
                let minimum = V::load_f16(header.add(2 * STRIP + 2 * lane).cast());
                Scales { halves: [first, zero], minimum }
            }
            SUPER_MINIMUM => {
                let d = V::load_f16(super_block.add(2 * lane).cast());
                let m = V::load_f16(super_block.add(2 * STRIP + 2 * lane).cast());
                let minimum = m.mul(V::load_u8(header.add(STRIP + lane))).mul(V::splat(-1.0));
                Scales { halves: [d.mul(V::load_u8(header.add(lane))), zero], minimum }
            }
            _ => {
                let d = V::load_f16(super_block.add(2 * lane).cast());
                let second = d.mul(V::load_i8(header.add(STRIP + lane).cast()));
                Scales { halves: [d.mul(V::load_i8(header.add(lane).cast())), second], minimum: zero }
            }
        }
    }
}
