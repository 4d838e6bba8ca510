//! Where a layer's keys and values lie in its cache, element by element.
//!
//! The elements of one head in one block are a contiguous run. In it, when block and head are whole numbers of
//! sixteen, lie tiles of sixteen positions one after the other, each made of panels of sixteen columns: a key tile is
//! one panel (columns are positions, depth is the head's dimension), a value tile has one panel for every sixteen
//! dimensions (columns are dimensions, depth is the positions). Panels of two-byte and one-byte formats keep two steps
//! of depth beside each other, `[depth / 2][16][2]`, as instructions that multiply pairs want them; the others are
//! `[depth][16]`. Blocks and heads of other sizes lie row by row, `[positions][dimension]`.
//! An int8 run ends with one f32 scale for each position, in the machine's byte order.
//!
//! Whatever writes the cache keeps it finite, so that positions which a query does not see can be multiplied by 0.

use crate::cpu::access::Access;
use crate::error::{Error, Result};
use crate::ops::LayerCache;
use crate::tensor::{DType, Tensor};

/// Positions of a tile, columns of a panel.
pub(crate) const TILE: usize = 16;
/// Bytes that an int8 row has beside its elements: its scale.
pub(crate) const SCALE_BYTES: usize = 4;

/// Cache elements.
#[derive(Clone, Copy)]
pub(crate) enum CacheData<'a> {
    F32(&'a [f32]),
    Bf16(&'a [u16]),
    F16(&'a [u16]),
    Int8(&'a [i8]),
}

/// Which of the two regions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Key,
    Value,
}

/// How one region lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) part: Part,
    pub(crate) dtype: DType,
    pub(crate) kv_heads: usize,
    pub(crate) block_size: usize,
    pub(crate) dim: usize,
}

/// One region: its layout and elements.
#[derive(Clone, Copy)]
pub(crate) struct Region<'a> {
    pub(crate) layout: Layout,
    pub(crate) data: CacheData<'a>,
}

impl Layout {
    /// Whether runs are made of tiles.
    #[inline(always)]
    pub(crate) fn is_tiled(&self) -> bool {
        self.block_size.is_multiple_of(TILE) && self.dim.is_multiple_of(TILE)
    }

    /// Steps of depth that lie beside each other in a panel.
    #[inline(always)]
    pub(crate) fn group(&self) -> usize {
        if matches!(self.dtype, DType::Bf16 | DType::I8) { 2 } else { 1 }
    }

    /// First element of a head's run in a block.
    #[inline(always)]
    pub(crate) fn run(&self, block: usize, kv_head: usize) -> usize {
        (block * self.kv_heads + kv_head) * self.run_len()
    }

    /// Elements of a run, scales counted in elements of one byte.
    #[inline(always)]
    pub(crate) fn run_len(&self) -> usize {
        self.block_size * (self.dim + if self.dtype == DType::I8 { SCALE_BYTES } else { 0 })
    }

    /// Element `d` of the position at `offset` in a block, counted from the run's start.
    #[inline(always)]
    pub(crate) fn element(&self, offset: usize, d: usize) -> usize {
        if !self.is_tiled() {
            return offset * self.dim + d;
        }
        let (tile, j) = (offset / TILE * TILE * self.dim, offset % TILE);
        tile + match self.part {
            Part::Key => panel(self.group(), d, j),
            Part::Value => d / TILE * TILE * TILE + panel(self.group(), j, d % TILE),
        }
    }

    /// First byte of the scale of the position at `offset` in a block, counted from the run's start.
    #[inline(always)]
    pub(crate) fn scale(&self, offset: usize) -> usize {
        self.block_size * self.dim + offset * SCALE_BYTES
    }
}

/// Place of a step of depth and a column in a panel.
#[inline(always)]
fn panel(group: usize, depth: usize, column: usize) -> usize {
    (depth / group * TILE + column) * group + depth % group
}

impl<'a> Region<'a> {
    /// A region whose tensor is `[n_blocks, kv_heads, block, ..]`.
    pub(crate) fn new(access: &'a Access, name: &'static str, tensor: &Tensor, layout: Layout) -> Result<Self> {
        let data = match layout.dtype {
            DType::F32 => CacheData::F32(access.read(name, tensor, DType::F32)?),
            DType::Bf16 => CacheData::Bf16(bits(access.read::<half::bf16>(name, tensor, DType::Bf16)?)),
            DType::F16 => CacheData::F16(bits(access.read::<half::f16>(name, tensor, DType::F16)?)),
            _ => CacheData::Int8(access.read(name, tensor, DType::I8)?),
        };
        Ok(Self { layout, data })
    }

    /// The value of an element; int8 without its scale.
    #[inline(always)]
    pub(crate) fn get(&self, index: usize) -> f32 {
        match self.data {
            CacheData::F32(values) => values[index],
            CacheData::Bf16(values) => half::bf16::from_bits(values[index]).to_f32(),
            CacheData::F16(values) => half::f16::from_bits(values[index]).to_f32(),
            CacheData::Int8(values) => f32::from(values[index]),
        }
    }

    /// The scale of the position at `offset` of the run that starts at `run`; 1 but for int8.
    #[inline(always)]
    pub(crate) fn scale(&self, run: usize, offset: usize) -> f32 {
        let CacheData::Int8(values) = self.data else { return 1.0 };
        let at = run + self.layout.scale(offset);
        let bytes: &[i8; SCALE_BYTES] = values[at..].first_chunk().expect("a run ends with its scales");
        f32::from_ne_bytes(bytes.map(i8::cast_unsigned))
    }
}

fn bits<T>(values: &[T]) -> &[u16]
where
    [T]: half::slice::HalfFloatSliceExt,
{
    half::slice::HalfFloatSliceExt::reinterpret_cast(values)
}

/// The layouts of keys and values and the number of blocks, when the cache is one for heads of these dimensions.
pub(crate) fn layouts(access: &Access, cache: &LayerCache, dims: [usize; 2]) -> Result<([Layout; 2], usize)> {
    let keys: [usize; 4] = cache.keys.dims().try_into().unwrap_or_default();
    let [n_blocks, kv_heads, block_size, _] = keys;
    let dtype = cache.keys.dtype();
    let extra = match dtype {
        DType::F32 | DType::Bf16 | DType::F16 => 0,
        DType::I8 => SCALE_BYTES,
        actual => return Err(Error::Dtype { op: access.op, tensor: "keys", actual }),
    };
    if cache.values.dtype() != dtype {
        return Err(Error::Dtype { op: access.op, tensor: "values", actual: cache.values.dtype() });
    }
    let [key_dim, value_dim] = dims;
    let (key_len, value_len) = (key_dim + extra, value_dim + extra);
    let fits = !keys.contains(&0) && key_dim > 0 && keys[3] == key_len;
    access.shape("keys", &cache.keys, fits, format_args!("[n_blocks, kv_heads, block, {key_len}]"))?;
    let fits = value_dim > 0 && cache.values.dims() == [n_blocks, kv_heads, block_size, value_len];
    access.shape("values", &cache.values, fits, format_args!("[n_blocks, kv_heads, block, {value_len}] like keys"))?;
    let layout = |part, dim| Layout { part, dtype, kv_heads, block_size, dim };
    Ok(([layout(Part::Key, key_dim), layout(Part::Value, value_dim)], n_blocks))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_has_its_own_place_in_the_run() {
        for (dtype, block_size, dim) in [
            (DType::Bf16, 32, 48),
            (DType::F32, 16, 16),
            (DType::I8, 16, 32),
            (DType::Bf16, 5, 7),
            (DType::I8, 16, 9),
            (DType::F16, 48, 16),
        ] {
            for part in [Part::Key, Part::Value] {
                let layout = Layout { part, dtype, kv_heads: 2, block_size, dim };
                let mut seen = vec![0; block_size * dim];
                for offset in 0..block_size {
                    (0..dim).for_each(|d| seen[layout.element(offset, d)] += 1);
                }
                assert!(seen.iter().all(|&n| n == 1), "{layout:?}");
            }
        }
    }
}
