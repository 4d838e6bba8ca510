//! Softmax over one partition, stripe after stripe, for a tile of rows.
//! Hot path: no allocation, no lock, no log.
#![expect(clippy::needless_range_loop, reason = "indices that constants bound unroll; iterators over parts do not")]

use std::marker::PhantomData;
use std::ops::Range;

use crate::cpu::attend::product::{Product, Sums, add_products, with_rows};
use crate::cpu::attend::stripe::{Stripe, TILES};
use crate::cpu::attend::vector::Vector;
use crate::cpu::lanes::Lanes;
use crate::op::attention::STRIPE;
use crate::op::attention::cache::{CacheData, TILE};
use crate::op::attention::softmax::Softmax;
use crate::op::attention::unit::{Kernel, Unit, Work};

/// Attention with one kind of product.
pub(crate) struct Online<P>(PhantomData<P>);

impl<P: Product> Kernel for Online<P> {
    #[inline(always)]
    unsafe fn begin(unit: &Unit<'_>, work: &mut Work<'_>) {
        let words = query_words::<P>(unit);
        for (row, target) in work.query.chunks_exact_mut(words).take(unit.n_rows()).enumerate() {
            // SAFETY: features are the caller's promise.
            unsafe { P::pack(unit.query(row), target) };
        }
        work.key_factors.fill(unit.score_factor());
    }

    #[inline(always)]
    unsafe fn partition(unit: &Unit<'_>, positions: Range<usize>, work: &mut Work<'_>, state: &mut Softmax<'_>) {
        state.clear();
        work.sums.fill(0.0);
        let mut start = positions.start;
        while start < positions.end {
            let end = positions.end.min((start / STRIPE + 1) * STRIPE);
            let rows = unit.rows_that_see(&(start..end));
            // SAFETY: features are the caller's promise; the stripe is used before `work` gets another.
            unsafe {
                let stripe = Stripe::load::<P>(unit, work, start..end);
                P::score(unit, work, &stripe, rows.clone());
                weigh_rows::<P>(unit, work, &stripe, rows.clone(), state);
                P::mix(unit, work, &stripe, rows, state);
            }
            start = end;
        }
        for (sum, lanes) in state.sum.iter_mut().zip(work.sums.chunks_exact(TILE)) {
            *sum = lanes.iter().sum();
        }
    }
}

/// Numbers of scratch that a packed query takes.
#[inline(always)]
fn query_words<P: Product>(unit: &Unit<'_>) -> usize {
    unit.dims.key_stride() / P::GROUP * P::WORDS
}

/// [`Product::score`] in registers.
///
/// # Safety
/// As for [`Product`].
#[inline(always)]
pub(crate) unsafe fn score<P: Product>(
    unit: &Unit<'_>,
    work: &mut Work<'_>,
    stripe: &Stripe<P::Element>,
    rows: Range<usize>,
) {
    let keys = (unit.dims.key_stride() / P::GROUP, query_words::<P>(unit));
    for row in rows.clone().step_by(P::ROWS) {
        let n = P::ROWS.min(rows.end - row);
        let mut tile = stripe.tiles.start;
        while tile < stripe.tiles.end {
            // SAFETY: features are the caller's promise.
            unsafe {
                match (stripe.tiles.end - tile).min(P::PANELS) {
                    4 => with_rows!(n, score_block::<P, 4>(work, stripe, row, tile, keys)),
                    2.. => with_rows!(n, score_block::<P, 2>(work, stripe, row, tile, keys)),
                    _ => with_rows!(n, score_block::<P, 1>(work, stripe, row, tile, keys)),
                }
            }
            tile += panels::<P>(stripe.tiles.end - tile);
        }
    }
}

/// Panels that are multiplied at once when so many are left.
#[inline(always)]
fn panels<P: Product>(left: usize) -> usize {
    match left.min(P::PANELS) {
        4 => 4,
        2.. => 2,
        _ => 1,
    }
}

#[inline(always)]
unsafe fn score_block<P: Product, const R: usize, const C: usize>(
    work: &mut Work<'_>,
    stripe: &Stripe<P::Element>,
    row: usize,
    tile: usize,
    (groups, words): (usize, usize),
) {
    // SAFETY: features are the caller's promise; `R` queries of `words` numbers are there, and key panels are
    // `key_stride` deep.
    unsafe {
        let mut sums: Sums<P::V, R, C> = [[[P::V::splat(0.0); 2]; C]; R];
        let mut panels = [stripe.keys[tile]; C];
        panels.copy_from_slice(&stripe.keys[tile..tile + C]);
        let mut ahead = [stripe.next_keys[tile]; C];
        ahead.copy_from_slice(&stripe.next_keys[tile..tile + C]);
        let queries = &work.query[row * words..][..R * words];
        add_products::<P, R, C>(&mut sums, (queries.as_ptr(), words), panels, ahead, groups);
        for (r, sums) in sums.iter().enumerate() {
            let scores = &mut work.weights[(row + r) * STRIPE + tile * TILE..][..C * TILE];
            for (c, sums) in sums.iter().enumerate() {
                for v in 0..TILE / P::V::N {
                    sums[v].store(scores.as_mut_ptr().add(c * TILE + v * P::V::N));
                }
            }
        }
    }
}

/// Rows that are weighed side by side, where registers hold the scores of so many: a row by itself waits for its largest
/// score, then for its factor.
const ABREAST: usize = 2;

/// [`weigh`] for all rows.
#[inline(always)]
unsafe fn weigh_rows<P: Product>(
    unit: &Unit<'_>,
    work: &mut Work<'_>,
    stripe: &Stripe<P::Element>,
    rows: Range<usize>,
    state: &mut Softmax<'_>,
) {
    let mut row = rows.start;
    // SAFETY: features are the caller's promise; these rows are there.
    unsafe {
        while P::V::N == TILE && row + ABREAST <= rows.end {
            weigh::<P, ABREAST>(unit, work, stripe, row, state);
            row += ABREAST;
        }
        while row < rows.end {
            weigh::<P, 1>(unit, work, stripe, row, state);
            row += 1;
        }
    }
}

/// From the dot products of `R` rows to their weights, and what they do to their sums and their earlier values.
#[inline(always)]
unsafe fn weigh<P: Product, const R: usize>(
    unit: &Unit<'_>,
    work: &mut Work<'_>,
    stripe: &Stripe<P::Element>,
    row: usize,
    state: &mut Softmax<'_>,
) {
    let n = P::V::N;
    let used = stripe.tiles.start * TILE..stripe.tiles.end * TILE;
    // The first of the rows sees least at the end, the last least at the beginning.
    let (first, last) = (unit.visible(row), unit.visible(row + R - 1));
    let is_masked = last.start > stripe.start + used.start || first.end < stripe.start + used.end;
    let scaled = matches!(unit.values.data, CacheData::Int8(_));
    // Where one factor above 0 serves all scores, the largest of them is found first, and a weight takes one instruction less.
    let at_once = !scaled && unit.soft_cap.is_none() && unit.score_factor() > 0.0;
    let factor = if at_once { unit.score_factor() } else { 1.0 };
    let weights = work.weights[row * STRIPE..][..R * STRIPE].as_mut_ptr();
    let sums = work.sums[row * TILE..][..R * TILE].as_mut_ptr();
    // SAFETY: features are the caller's promise; positions up to `used.end` lie within the STRIPE numbers of each
    // array, whatever is added to them within the twice as many of the bounds.
    unsafe {
        let factor = P::V::splat(factor);
        let mut scores = [[P::V::splat(0.0); STRIPE / 4]; R];
        let (mut before, mut largest) = ([P::V::splat(0.0); R], [P::V::splat(f32::NEG_INFINITY); R]);
        for v in used.start / n..used.end / n {
            for r in 0..R {
                let mut score = P::V::load(weights.add(r * STRIPE + v * n));
                if !at_once {
                    score = score.mul(P::V::load(work.key_factors.as_ptr().add(v * n)));
                }
                if let Some(cap) = unit.soft_cap {
                    score = score.tanh().mul(P::V::splat(cap * std::f32::consts::LOG2_E));
                }
                if is_masked {
                    let visible = unit.visible(row + r);
                    let (from, to) = (visible.start.saturating_sub(stripe.start), visible.end - stripe.start);
                    score = score.min(P::V::load(FROM.as_ptr().add(STRIPE - from.min(STRIPE) + v * n)));
                    score = score.min(P::V::load(TO.as_ptr().add(STRIPE - to.min(STRIPE) + v * n)));
                }
                scores[r][v] = score;
                largest[r] = largest[r].max(score);
            }
        }
        for r in 0..R {
            before[r] = P::V::splat(state.largest[row + r]);
            largest[r] = before[r].max(largest[r].mul(factor));
        }
        let (mut minus_largest, mut all) = ([P::V::splat(0.0); R], [[P::V::splat(0.0); TILE / 4]; R]);
        for r in 0..R {
            largest[r] = largest[r].spread_largest();
            minus_largest[r] = largest[r].mul(P::V::splat(-1.0));
            let alpha = before[r].add(minus_largest[r]).exp2();
            for i in 0..TILE / n {
                all[r][i] = P::V::load(sums.add(r * TILE + i * n)).mul(alpha);
            }
            state.largest[row + r] = first_lane(largest[r]);
            work.alpha[row + r] = first_lane(alpha);
        }
        for tile in stripe.tiles.clone() {
            for i in 0..TILE / n {
                let v = tile * (TILE / n) + i;
                for r in 0..R {
                    let mut weight = scores[r][v].fma(factor, minus_largest[r]).exp2();
                    all[r][i] = all[r][i].add(weight);
                    if scaled {
                        weight = weight.mul(P::V::load(work.value_factors.as_ptr().add(v * n)));
                    }
                    P::store_weights(weight, weights.add(r * STRIPE), v * n);
                }
            }
        }
        for r in 0..R {
            for i in 0..TILE / n {
                all[r][i].store(sums.add(r * TILE + i * n));
            }
        }
    }
}

/// Negative infinity for positions before a bound, which is at the middle.
static FROM: [f32; 2 * STRIPE] = bounds(f32::NEG_INFINITY, f32::INFINITY);
/// Negative infinity for positions from a bound on, which is at the middle.
static TO: [f32; 2 * STRIPE] = bounds(f32::INFINITY, f32::NEG_INFINITY);

const fn bounds(before: f32, after: f32) -> [f32; 2 * STRIPE] {
    let mut bounds = [before; 2 * STRIPE];
    let mut i = STRIPE;
    while i < 2 * STRIPE {
        bounds[i] = after;
        i += 1;
    }
    bounds
}

/// [`Product::mix`] in registers.
///
/// # Safety
/// As for [`Product`].
#[inline(always)]
pub(crate) unsafe fn mix<P: Product>(
    unit: &Unit<'_>,
    work: &Work<'_>,
    stripe: &Stripe<P::Element>,
    rows: Range<usize>,
    state: &mut Softmax<'_>,
) {
    let n_panels = unit.dims.value_stride() / TILE;
    for row in rows.clone().step_by(P::ROWS) {
        let n = P::ROWS.min(rows.end - row);
        let mut panel = 0;
        while panel < n_panels {
            // SAFETY: features are the caller's promise.
            unsafe {
                match (n_panels - panel).min(P::PANELS) {
                    4 => with_rows!(n, mix_block::<P, 4>(work, stripe, row, panel, state)),
                    2.. => with_rows!(n, mix_block::<P, 2>(work, stripe, row, panel, state)),
                    _ => with_rows!(n, mix_block::<P, 1>(work, stripe, row, panel, state)),
                }
            }
            panel += panels::<P>(n_panels - panel);
        }
    }
}

#[inline(always)]
unsafe fn mix_block<P: Product, const R: usize, const C: usize>(
    work: &Work<'_>,
    stripe: &Stripe<P::Element>,
    row: usize,
    panel: usize,
    state: &mut Softmax<'_>,
) {
    let (stride, n) = (state.stride(), P::V::N);
    let acc = &mut state.acc[row * stride..][..R * stride];
    let weights = &work.weights[row * STRIPE..][..R * STRIPE];
    assert!((panel + C) * TILE <= stride, "panels of a row");
    // SAFETY: features are the caller's promise; `C` panels of sixteen positions are in each tile from `panel` on, and
    // their columns in each row of `acc`, as asserted.
    unsafe {
        let mut sums: Sums<P::V, R, C> = [[[P::V::splat(0.0); 2]; C]; R];
        for r in 0..R {
            let alpha = P::V::splat(work.alpha[row + r]);
            for c in 0..C {
                for v in 0..TILE / n {
                    let at = acc.as_ptr().add(r * stride + (panel + c) * TILE + v * n);
                    sums[r][c][v] = P::V::load(at).mul(alpha);
                }
            }
        }
        for tile in stripe.tiles.clone() {
            let weights = weights.as_ptr().add(tile * TILE / P::GROUP * P::WORDS);
            let mut panels = [stripe.values[tile]; C];
            let mut ahead = [stripe.next_values[tile]; C];
            for (c, (place, ahead)) in panels.iter_mut().zip(&mut ahead).enumerate() {
                *place = place.add((panel + c) * TILE * TILE);
                *ahead = ahead.wrapping_add((panel + c) * TILE * TILE);
            }
            add_products::<P, R, C>(&mut sums, (weights, STRIPE), panels, ahead, TILE / P::GROUP);
        }
        for r in 0..R {
            for c in 0..C {
                for v in 0..TILE / n {
                    let at = acc.as_mut_ptr().add(r * stride + (panel + c) * TILE + v * n);
                    sums[r][c][v].store(at);
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn first_lane<V: Vector>(v: V) -> f32 {
    let mut lanes = [0.0f32; 16];
    // SAFETY: the array holds N <= 16 floats; features are the caller's promise.
    unsafe { v.store(lanes.as_mut_ptr()) };
    lanes[0]
}

const _: () = assert!(TILES == 4, "blocks of at most four panels");
