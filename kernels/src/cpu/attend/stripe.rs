//! A stripe of positions: where its tiles are, and its tiles in the format that a kernel multiplies.
//! Hot path: no allocation, no lock, no log.

use std::ops::Range;

use crate::cpu::attend::product::{Element as _, Product};
use crate::cpu::lanes::Lanes;
use crate::op::attention::cache::{CacheData, Layout, Region, TILE};
use crate::op::attention::unit::{Unit, Work};
use crate::op::attention::{PARTITION, STRIPE};

/// Tiles of a stripe.
pub(crate) const TILES: usize = STRIPE / TILE;
const _: () = assert!(STRIPE.is_multiple_of(TILE) && PARTITION.is_multiple_of(STRIPE));

/// Positions between a tile and the one that is asked for while it is used: with two threads at work, memory answers later
/// than a stripe takes.
const AHEAD: usize = 2 * STRIPE;

/// Tiles of a stripe that hold positions which some row of a unit sees.
pub(crate) struct Stripe<E> {
    /// Those positions.
    pub(crate) positions: Range<usize>,
    /// First position of the stripe.
    pub(crate) start: usize,
    /// Tiles in use, counted in the stripe.
    pub(crate) tiles: Range<usize>,
    /// One panel of `key_stride` steps of depth for each tile in use.
    pub(crate) keys: [*const E; TILES],
    /// `value_stride / 16` panels of sixteen steps of depth for each tile in use.
    pub(crate) values: [*const E; TILES],
    /// What to ask for while a tile is used: that of [`AHEAD`] positions later, of this or of the following unit, if there is one
    /// in the cache, else the same.
    pub(crate) next_keys: [*const E; TILES],
    pub(crate) next_values: [*const E; TILES],
}

impl<E: Copy> Stripe<E> {
    /// Finds the tiles in the cache where they are as `P` wants them, else brings them into scratch; sets factors.
    ///
    /// # Safety
    /// As for [`Product`]. The stripe must not outlive the cache, nor be used when `work` holds another.
    #[inline(always)]
    pub(crate) unsafe fn load<P: Product<Element = E>>(
        unit: &Unit<'_>,
        work: &mut Work<'_>,
        positions: Range<usize>,
    ) -> Self {
        let start = positions.start / STRIPE * STRIPE;
        let tiles = (positions.start - start) / TILE..(positions.end - start).div_ceil(TILE);
        let nowhere = [std::ptr::null(); TILES];
        let mut stripe =
            Self { positions, start, tiles, keys: nowhere, values: nowhere, next_keys: nowhere, next_values: nowhere };
        for tile in stripe.tiles.clone() {
            let first = start + tile * TILE;
            let seen = stripe.positions.start.max(first)..stripe.positions.end.min(first + TILE);
            let (keys, values) = (TILE * unit.dims.key_stride(), TILE * unit.dims.value_stride());
            // SAFETY: features are the caller's promise.
            unsafe {
                let scratch = &mut work.keys[tile * keys..][..keys];
                stripe.keys[tile] = tile_of::<P>(unit, &unit.keys, &seen, scratch);
                let scratch = &mut work.values[tile * values..][..values];
                stripe.values[tile] = tile_of::<P>(unit, &unit.values, &seen, scratch);
            }
            stripe.next_keys[tile] = later::<P>(unit, &unit.keys, first + AHEAD).unwrap_or(stripe.keys[tile]);
            stripe.next_values[tile] = later::<P>(unit, &unit.values, first + AHEAD).unwrap_or(stripe.values[tile]);
            if matches!(unit.keys.data, CacheData::Int8(_)) {
                load_scales(unit, work, &seen, start);
            }
        }
        stripe
    }
}

/// A region's tile that holds the positions `seen`, in the cache or in scratch.
#[inline(always)]
unsafe fn tile_of<P: Product>(
    unit: &Unit<'_>,
    region: &Region<'_>,
    seen: &Range<usize>,
    scratch: &mut [f32],
) -> *const P::Element {
    if !region.layout.is_tiled() {
        return gather::<P>(unit, region, seen, scratch);
    }
    if let Some(tile) = in_cache::<P>(unit, region, seen.start) {
        return tile;
    }
    let Range { start: at, end } = tile_at(unit, region, seen.start);
    match region.data {
        CacheData::F32(_) | CacheData::Bf16(_) => unreachable!("in the cache as they are wanted"),
        CacheData::F16(values) => {
            let values = &values[at..end];
            for (target, values) in scratch.chunks_exact_mut(TILE).zip(values.chunks_exact(TILE)) {
                for i in (0..TILE).step_by(<P::V as Lanes>::N) {
                    // SAFETY: features are the caller's promise; both chunks hold sixteen elements, a multiple of N.
                    unsafe { P::V::load_f16(values.as_ptr().add(i)).store(target.as_mut_ptr().add(i)) };
                }
            }
            scratch.as_ptr().cast()
        }
        CacheData::Int8(values) => {
            let target = elements_of::<P>(scratch);
            let values = &values[at..end];
            for (target, &value) in target.iter_mut().zip(values) {
                *target = P::Element::integer(value);
            }
            target.as_ptr()
        }
    }
}

/// Where in a tiled region the tile of a position lies.
#[inline(always)]
fn tile_at(unit: &Unit<'_>, region: &Region<'_>, position: usize) -> Range<usize> {
    let (run, offset) = unit.place(region, position);
    let len = TILE * region.layout.dim;
    let at = run + offset / TILE * len;
    at..at + len
}

/// The tile of a position, where the cache has it as `P` wants it.
#[inline(always)]
fn in_cache<P: Product>(unit: &Unit<'_>, region: &Region<'_>, position: usize) -> Option<*const P::Element> {
    if !region.layout.is_tiled() {
        return None;
    }
    // The kernel was chosen by the format, so that elements are what they are cast to.
    match region.data {
        CacheData::F32(values) => Some(values[tile_at(unit, region, position)].as_ptr().cast()),
        CacheData::Bf16(values) => Some(values[tile_at(unit, region, position)].as_ptr().cast()),
        CacheData::F16(_) | CacheData::Int8(_) => None,
    }
}

/// The tile of a position that comes later, if there is one and the cache has it as `P` wants it.
#[inline(always)]
fn later<P: Product>(unit: &Unit<'_>, region: &Region<'_>, position: usize) -> Option<*const P::Element> {
    let (unit, position) = unit.later(position)?;
    in_cache::<P>(unit, region, position)
}

/// Brings a tile from a region that lies row by row into scratch, padded with zeros.
#[inline(always)]
fn gather<P: Product>(
    unit: &Unit<'_>,
    region: &Region<'_>,
    seen: &Range<usize>,
    scratch: &mut [f32],
) -> *const P::Element {
    let dim = region.layout.dim.next_multiple_of(TILE);
    let tile = Layout { block_size: TILE, dim, ..region.layout };
    let target = &mut elements_of::<P>(scratch)[..TILE * dim];
    target.fill(P::Element::nearest(0.0));
    for position in seen.clone() {
        let (run, offset) = unit.place(region, position);
        for d in 0..region.layout.dim {
            let value = region.get(run + region.layout.element(offset, d));
            target[tile.element(position % TILE, d)] = P::Element::nearest(value);
        }
    }
    target.as_ptr()
}

/// Scratch as elements of panels.
#[inline(always)]
fn elements_of<P: Product>(scratch: &mut [f32]) -> &mut [P::Element] {
    const { assert!(size_of::<P::Element>() <= size_of::<f32>()) };
    // SAFETY: elements are plain numbers, f32 or u16 (`Product` has no others), not larger or more aligned than f32.
    unsafe { std::slice::from_raw_parts_mut(scratch.as_mut_ptr().cast(), scratch.len()) }
}

/// Sets the factors of an int8 tile's positions.
#[inline(always)]
fn load_scales(unit: &Unit<'_>, work: &mut Work<'_>, seen: &Range<usize>, start: usize) {
    let (first, factor) = (seen.start - start, unit.score_factor());
    if unit.keys.layout.block_size.is_multiple_of(TILE) {
        // The tile is of one block.
        let (keys, values) = (unit.place(&unit.keys, seen.start), unit.place(&unit.values, seen.start));
        for i in 0..seen.len() {
            work.key_factors[first + i] = factor * unit.keys.scale(keys.0, keys.1 + i);
            work.value_factors[first + i] = unit.values.scale(values.0, values.1 + i);
        }
        return;
    }
    for (i, position) in seen.clone().enumerate() {
        let (keys, values) = (unit.place(&unit.keys, position), unit.place(&unit.values, position));
        work.key_factors[first + i] = factor * unit.keys.scale(keys.0, keys.1);
        work.value_factors[first + i] = unit.values.scale(values.0, values.1);
    }
}
