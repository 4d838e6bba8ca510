//! Products of rows with panels of sixteen columns, in registers, for each number format.
//! Hot path: no allocation, no lock, no log.
#![expect(clippy::needless_range_loop, reason = "indices that constants bound unroll; iterators over parts do not")]

use std::marker::PhantomData;
use std::ops::Range;

use crate::cpu::attend::online;
use crate::cpu::attend::stripe::Stripe;
use crate::cpu::attend::vector::Vector;
use crate::cpu::dot::to_bf16;
use crate::cpu::lanes::Lanes;
use crate::op::attention::cache::TILE;
use crate::op::attention::softmax::Softmax;
use crate::op::attention::unit::{Unit, Work};

/// How one instruction set multiplies rows with panels of one format.
///
/// # Safety
/// As for [`Lanes`](crate::cpu::lanes::Lanes).
pub(crate) trait Product: Sized {
    /// Sums.
    type V: Vector;
    /// Element of a panel.
    type Element: Element;
    /// A register of a panel: N columns, [`Product::GROUP`] steps of depth.
    type Line: Copy;
    /// The same steps of one row, in all lanes.
    type Factor: Copy;

    /// Steps of depth that lie beside each other in a panel.
    const GROUP: usize;
    /// Numbers of scratch that a row takes for a group.
    const WORDS: usize;
    /// Rows that are multiplied at once.
    const ROWS: usize;
    /// Panels that are multiplied at once, where there are as many.
    const PANELS: usize;

    unsafe fn line(from: *const Self::Element) -> Self::Line;
    unsafe fn factor(from: *const f32) -> Self::Factor;
    /// `sum + factor * line`.
    unsafe fn add_product(factor: Self::Factor, line: Self::Line, sum: Self::V) -> Self::V;
    /// Brings a row into scratch, padded with 0.
    unsafe fn pack(from: &[f32], to: &mut [f32]);
    /// Stores weights of N positions in the row of scratch that starts at `row`, the first at `position` in it.
    unsafe fn store_weights(weights: Self::V, row: *mut f32, position: usize);

    /// Dot products of rows and keys, to `work.weights`.
    #[inline(always)]
    unsafe fn score(unit: &Unit<'_>, work: &mut Work<'_>, stripe: &Stripe<Self::Element>, rows: Range<usize>) {
        // SAFETY: the caller's obligation is the same.
        unsafe { online::score::<Self>(unit, work, stripe, rows) }
    }

    /// Weighted values, added to what earlier stripes gave times `work.alpha`.
    #[inline(always)]
    unsafe fn mix(
        unit: &Unit<'_>,
        work: &Work<'_>,
        stripe: &Stripe<Self::Element>,
        rows: Range<usize>,
        state: &mut Softmax<'_>,
    ) {
        // SAFETY: the caller's obligation is the same.
        unsafe { online::mix::<Self>(unit, work, stripe, rows, state) }
    }
}

/// f32 by f32.
pub(crate) struct F32<V>(PhantomData<V>);

impl<V: Vector> Product for F32<V> {
    type V = V;
    type Element = f32;
    type Line = V;
    type Factor = V;

    const GROUP: usize = 1;
    const WORDS: usize = 1;
    const ROWS: usize = if V::N == 16 { 6 } else { 4 };
    const PANELS: usize = if V::N == 16 { 2 } else { 1 };

    #[inline(always)]
    unsafe fn line(from: *const f32) -> V {
        // SAFETY: the caller's obligation is the same.
        unsafe { V::load(from) }
    }
    #[inline(always)]
    unsafe fn factor(from: *const f32) -> V {
        // SAFETY: the caller's obligation is the same.
        unsafe { V::splat(*from) }
    }
    #[inline(always)]
    unsafe fn add_product(factor: V, line: V, sum: V) -> V {
        // SAFETY: the caller's obligation is the same.
        unsafe { factor.fma(line, sum) }
    }
    #[inline(always)]
    unsafe fn pack(from: &[f32], to: &mut [f32]) {
        to[..from.len()].copy_from_slice(from);
        to[from.len()..].fill(0.0);
    }
    #[inline(always)]
    unsafe fn store_weights(weights: V, row: *mut f32, position: usize) {
        // SAFETY: the caller's obligation is the same.
        unsafe { weights.store(row.add(position)) }
    }
}

/// bf16 by bf16 in f32 arithmetic; rows are kept as f32 that are bf16 values.
pub(crate) struct Widened<V>(PhantomData<V>);

impl<V: Vector> Product for Widened<V> {
    type V = V;
    type Element = u16;
    type Line = (V, V);
    type Factor = (V, V);

    const GROUP: usize = 2;
    const WORDS: usize = 2;
    const ROWS: usize = if V::N == 16 { 6 } else { 4 };
    const PANELS: usize = if V::N == 16 { 2 } else { 1 };

    #[inline(always)]
    unsafe fn line(from: *const u16) -> (V, V) {
        // SAFETY: the caller's obligation is the same.
        unsafe { V::load_pairs(from) }
    }
    #[inline(always)]
    unsafe fn factor(from: *const f32) -> (V, V) {
        // SAFETY: the caller's obligation is the same.
        unsafe { (V::splat(*from), V::splat(*from.add(1))) }
    }
    #[inline(always)]
    unsafe fn add_product(factor: (V, V), line: (V, V), sum: V) -> V {
        // SAFETY: the caller's obligation is the same.
        unsafe { factor.1.fma(line.1, factor.0.fma(line.0, sum)) }
    }
    #[inline(always)]
    unsafe fn pack(from: &[f32], to: &mut [f32]) {
        for (to, &x) in to.iter_mut().zip(from) {
            *to = f32::from_bits(bf16_bits(x));
        }
        to[from.len()..].fill(0.0);
    }
    #[inline(always)]
    unsafe fn store_weights(weights: V, row: *mut f32, position: usize) {
        // SAFETY: the caller's obligation is the same.
        unsafe { weights.round_bf16().store(row.add(position)) }
    }
}

/// The f32 whose upper half is the nearest bf16, ties to even, and whose lower half is 0.
#[inline(always)]
pub(crate) fn bf16_bits(x: f32) -> u32 {
    u32::from(to_bf16(x)) << 16
}

/// An element of a panel.
pub(crate) trait Element: Copy {
    /// The nearest to a value, ties to even.
    fn nearest(value: f32) -> Self;
    /// A small integer, exactly.
    fn integer(value: i8) -> Self;
}

impl Element for f32 {
    #[inline(always)]
    fn nearest(value: f32) -> Self {
        value
    }
    #[inline(always)]
    fn integer(value: i8) -> Self {
        Self::from(value)
    }
}

/// The bits of a bf16.
impl Element for u16 {
    #[inline(always)]
    fn nearest(value: f32) -> Self {
        to_bf16(value)
    }
    #[inline(always)]
    fn integer(value: i8) -> Self {
        // Seven bits and a sign are in the upper half.
        (f32::from(value).to_bits() >> 16) as Self
    }
}

/// Sums of `R` rows and `C` panels.
pub(crate) type Sums<V, const R: usize, const C: usize> = [[[V; 2]; C]; R];

/// Adds the products of `R` rows, `stride` numbers apart, with `C` panels over `groups` groups of depth.
///
/// Meanwhile it asks for the panels `ahead`, one after the other: panels that are only read side by side come at a third
/// of the bandwidth (Zen 4).
///
/// # Safety
/// As for [`Product`]; rows hold `groups * WORDS` numbers, panels `groups * GROUP` times sixteen elements.
#[inline(always)]
pub(crate) unsafe fn add_products<P: Product, const R: usize, const C: usize>(
    sums: &mut Sums<P::V, R, C>,
    rows: (*const f32, usize),
    panels: [*const P::Element; C],
    ahead: [*const P::Element; C],
    groups: usize,
) {
    let part = groups / C;
    // SAFETY: extents are the caller's promise; a prefetch may name any address.
    unsafe {
        for (c, ahead) in ahead.into_iter().enumerate() {
            for group in 0..part {
                for line in 0..C {
                    P::V::prefetch(ahead.wrapping_add((group * C + line) * TILE * P::GROUP).cast());
                }
                add_group::<P, R, C>(sums, rows, panels, c * part + group);
            }
        }
        for group in C * part..groups {
            add_group::<P, R, C>(sums, rows, panels, group);
        }
    }
}

/// One group of depth of [`add_products`].
#[inline(always)]
unsafe fn add_group<P: Product, const R: usize, const C: usize>(
    sums: &mut Sums<P::V, R, C>,
    (rows, stride): (*const f32, usize),
    panels: [*const P::Element; C],
    group: usize,
) {
    let n = <P::V as Lanes>::N;
    // SAFETY: extents are the caller's promise.
    unsafe {
        let mut lines = [[P::line(panels[0].add(group * TILE * P::GROUP)); 2]; C];
        for c in 0..C {
            for v in 0..TILE / n {
                lines[c][v] = P::line(panels[c].add((group * TILE + v * n) * P::GROUP));
            }
        }
        for r in 0..R {
            let factor = P::factor(rows.add(r * stride + group * P::WORDS));
            for c in 0..C {
                for v in 0..TILE / n {
                    sums[r][c][v] = P::add_product(factor, lines[c][v], sums[r][c][v]);
                }
            }
        }
    }
}

/// Calls `$f::<$P, R, C>` with as many rows as there are (at most 6), all of them at once.
macro_rules! with_rows {
    ($n:expr, $f:ident::<$P:ty, $C:literal>($($arg:expr),* $(,)?)) => {
        match $n {
            1 => $f::<$P, 1, $C>($($arg),*),
            2 => $f::<$P, 2, $C>($($arg),*),
            3 => $f::<$P, 3, $C>($($arg),*),
            4 => $f::<$P, 4, $C>($($arg),*),
            5 => $f::<$P, 5, $C>($($arg),*),
            _ => $f::<$P, 6, $C>($($arg),*),
        }
    };
}
pub(crate) use with_rows;
