//! Writes a step's keys and values into the paged cache, rounded to its format (to nearest, ties to even).
//!
//! # Shapes
//! `k: [tokens, kv_heads, key_dim]`, `v: [tokens, kv_heads, value_dim]` f32; cache regions as in
//! [`cache`](super::attention::cache). Slot `s` is offset `s % block` of block `s / block`.
//!
//! # Formula
//! Int8: `scale = max |x| / 127` over a head's row, `x / scale` rounded. The cache stays finite: what is larger than the
//! format's largest number becomes that, not-a-number the most negative one.

use half::slice::HalfFloatSliceExt;

use crate::cpu::Machine;
use crate::cpu::access::{Access, Shared};
use crate::cpu::dot::{nearest_byte, to_bf16};
use crate::error::{Error, Result};
use crate::op::attention::cache::{self, Layout, Part, SCALE_BYTES, TILE};
use crate::ops::LayerCache;
use crate::step::StepInputs;
use crate::tensor::{DType, Tensor};

/// Writes one head's rows of a step: see [`write_head`].
pub(crate) type WriteHead = unsafe fn(&Write<'_>, usize);

/// Checks the contract and writes.
pub(crate) fn run(
    machine: &mut Machine,
    access: &Access,
    step: &StepInputs,
    [k, v]: [&Tensor; 2],
    cache: &LayerCache,
) -> Result<()> {
    let dims = [k.shape().columns(), v.shape().columns()];
    let (layouts, n_blocks) = cache::layouts(access, cache, dims)?;
    let Layout { kv_heads, block_size, .. } = layouts[0];
    for (name, tensor, dim) in [("k", k, dims[0]), ("v", v, dims[1])] {
        let (n_tokens, fits) = (step.n_tokens(), tensor.dims() == [step.n_tokens(), kv_heads, dim]);
        access.shape(name, tensor, fits, format_args!("[{n_tokens}, {kv_heads}, {dim}]"))?;
    }
    access.index("block size of the step", step.limits().block_size, block_size + 1)?;
    access.index("block size of the cache", block_size, step.limits().block_size + 1)?;
    let slots = step.host().slot_mapping.as_slice();
    slots.iter().try_for_each(|&slot| access.index("slot", slot as usize, n_blocks * block_size))?;
    if cache.keys.overlaps(&cache.values) {
        return Err(Error::Overlap { op: access.op, tensor: "values" });
    }
    let write = |name, rows: &Tensor, target: &Tensor, layout: Layout| {
        let rows = access.read::<f32>(name, rows, DType::F32)?;
        // SAFETY: `k`, `v` and the two regions are all tensors of this call; the regions were found disjoint above.
        let target = unsafe {
            match layout.dtype {
                DType::F32 => Target::F32(Shared::new(access.write("cache", target, DType::F32, &[k, v])?)),
                DType::Bf16 => {
                    let cache = access.write::<half::bf16>("cache", target, DType::Bf16, &[k, v])?;
                    Target::Bf16(Shared::new(cache.reinterpret_cast_mut()))
                }
                DType::F16 => Target::F16(Shared::new(access.write("cache", target, DType::F16, &[k, v])?)),
                _ => Target::Int8(Shared::new(access.write("cache", target, DType::I8, &[k, v])?)),
            }
        };
        Ok(Write { layout, rows, slots, target })
    };
    let writes = [write("k", k, &cache.keys, layouts[0])?, write("v", v, &cache.values, layouts[1])?];
    let (work, write_head) = (slots.len() * kv_heads * (dims[0] + dims[1]), machine.kv.write_head);
    machine.run(work, 2 * kv_heads, &|_, chunk| {
        // SAFETY: the function is that of an instruction set that `Table::of` checked, and each head of each region
        // is one chunk.
        unsafe { write_head(&writes[chunk % 2], chunk / 2) };
    });
    Ok(())
}

/// What is written to one region.
pub(crate) struct Write<'a> {
    layout: Layout,
    /// `[tokens, kv_heads, dim]`
    rows: &'a [f32],
    /// Below the number of slots, as `run` checked.
    slots: &'a [u32],
    target: Target<'a>,
}

enum Target<'a> {
    F32(Shared<'a, f32>),
    Bf16(Shared<'a, u16>),
    F16(Shared<'a, half::f16>),
    Int8(Shared<'a, i8>),
}

/// Writes the rows of one head, whatever the instruction set that it is compiled for.
///
/// # Safety
/// No other thread writes this head.
#[inline(always)]
pub(crate) unsafe fn write_head(write: &Write<'_>, head: usize) {
    let Layout { kv_heads, block_size, dim, .. } = write.layout;
    for (row, &slot) in write.rows.chunks_exact(kv_heads * dim).zip(write.slots) {
        let (block, offset) = (slot as usize / block_size, slot as usize % block_size);
        let (run, len) = (write.layout.run(block, head), write.layout.run_len());
        let row = &row[head * dim..][..dim];
        // SAFETY: runs of different heads are disjoint, and this head is the caller's alone.
        unsafe {
            match &write.target {
                Target::F32(cache) => scatter(&write.layout, cache.part(run, len), offset, row, 1.0),
                Target::Bf16(cache) => scatter(&write.layout, cache.part(run, len), offset, row, 1.0),
                Target::F16(cache) => scatter(&write.layout, cache.part(run, len), offset, row, 1.0),
                Target::Int8(cache) => quantise(&write.layout, cache.part(run, len), offset, row),
            }
        }
    }
}

/// A row as int8, and its scale.
#[inline(always)]
fn quantise(layout: &Layout, run: &mut [i8], offset: usize, row: &[f32]) {
    let mut largest = 0.0f32;
    for &x in row {
        largest = largest.max(bounded(x, f32::MAX).abs());
    }
    // A factor that is infinite belongs to a row of subnormal numbers; they become zeros.
    let factor = 127.0 / largest;
    let (scale, factor) = if factor.is_finite() { (largest / 127.0, factor) } else { (0.0, 0.0) };
    scatter(layout, run, offset, row, factor);
    let bytes = scale.to_ne_bytes().map(u8::cast_signed);
    run[layout.scale(offset)..][..SCALE_BYTES].copy_from_slice(&bytes);
}

/// A row times `factor` to its places in a run.
///
/// Loops instead of closures: those would be compiled without the caller's features.
#[inline(always)]
fn scatter<T: Stored>(layout: &Layout, run: &mut [T], offset: usize, row: &[f32], factor: f32) {
    let group = layout.group();
    for first in (0..layout.dim).step_by(TILE) {
        let n = TILE.min(layout.dim - first);
        let mut x = [0.0; TILE];
        for (x, &value) in x.iter_mut().zip(&row[first..first + n]) {
            *x = bounded(value, T::MAX) * factor;
        }
        let values = T::nearest(&x);
        let places = &mut run[layout.element(offset, first)..];
        if !layout.is_tiled() {
            places[..n].copy_from_slice(&values[..n]);
        } else if layout.part == Part::Value {
            let places = &mut places[..(TILE - 1) * group + 1];
            for i in 0..TILE {
                places[i * group] = values[i];
            }
        } else if group == 2 {
            for (pair, value) in values.as_chunks::<2>().0.iter().enumerate() {
                places[pair * 2 * TILE..][..2].copy_from_slice(value);
            }
        } else {
            for (place, &value) in places.iter_mut().step_by(TILE).zip(&values) {
                *place = value;
            }
        }
    }
}

/// Number formats of a cache.
trait Stored: Copy {
    /// The largest number that may be rounded to this format.
    const MAX: f32;

    /// Nearest numbers, ties to even, of finite ones.
    fn nearest(x: &[f32; TILE]) -> [Self; TILE];
}

impl Stored for f32 {
    const MAX: f32 = f32::MAX;

    #[inline(always)]
    fn nearest(x: &[f32; TILE]) -> [Self; TILE] {
        *x
    }
}

impl Stored for u16 {
    const MAX: f32 = half::bf16::MAX.to_f32_const();

    #[inline(always)]
    fn nearest(x: &[f32; TILE]) -> [Self; TILE] {
        let mut nearest = [0; TILE];
        for (nearest, x) in nearest.iter_mut().zip(x) {
            *nearest = to_bf16(*x);
        }
        nearest
    }
}

impl Stored for half::f16 {
    const MAX: f32 = half::f16::MAX.to_f32_const();

    #[inline(always)]
    fn nearest(x: &[f32; TILE]) -> [Self; TILE] {
        let mut nearest = [half::f16::ZERO; TILE];
        nearest.convert_from_f32_slice(x);
        nearest
    }
}

impl Stored for i8 {
    const MAX: f32 = f32::MAX;

    #[inline(always)]
    fn nearest(x: &[f32; TILE]) -> [Self; TILE] {
        let mut nearest = [0; TILE];
        for (nearest, x) in nearest.iter_mut().zip(x) {
            *nearest = nearest_byte(*x).cast_signed();
        }
        nearest
    }
}

/// The nearest number of at most this magnitude; the most negative for not-a-number.
#[inline(always)]
fn bounded(x: f32, bound: f32) -> f32 {
    let x = if x > -bound { x } else { -bound };
    if x < bound { x } else { bound }
}
