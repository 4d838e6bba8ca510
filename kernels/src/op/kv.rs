//! Writes a step's keys and values into the paged cache, rounded to its format (to nearest, ties to even).
//!
//! # Shapes
//! `k: [tokens, kv_heads, key_dim]`, `v: [tokens, kv_heads, value_dim]` f32; cache regions
//! `[n_blocks, kv_heads, block, dim]` in f32, bf16 or f16. Slot `s` is offset `s % block` of block `s / block`.

use half::slice::HalfFloatSliceExt;

use crate::cpu::access::Access;
use crate::error::{Error, Result};
use crate::op::attention::cache_dims;
use crate::ops::LayerCache;
use crate::step::StepInputs;
use crate::tensor::{DType, Tensor};

/// Checks the contract and writes.
pub(crate) fn run(access: &Access, step: &StepInputs, k: &Tensor, v: &Tensor, cache: &LayerCache) -> Result<()> {
    let ([n_blocks, kv_heads, block_size, key_dim], value_dim) = cache_dims(access, cache)?;
    let n_tokens = step.n_tokens();
    let expected = |dim| format!("[{n_tokens}, {kv_heads}, {dim}]");
    access.shape("k", k, k.dims() == [n_tokens, kv_heads, key_dim], &expected(key_dim))?;
    access.shape("v", v, v.dims() == [n_tokens, kv_heads, value_dim], &expected(value_dim))?;
    access.index("block size of the step", step.limits().block_size, block_size + 1)?;
    access.index("block size of the cache", block_size, step.limits().block_size + 1)?;
    let slots = &step.host().slot_mapping;
    slots.iter().try_for_each(|&slot| access.index("slot", slot as usize, n_blocks * block_size))?;
    if cache.keys.overlaps(&cache.values) {
        return Err(Error::Overlap { op: access.op, tensor: "values" });
    }
    for (source, target, dim) in [(k, &cache.keys, key_dim), (v, &cache.values, value_dim)] {
        let rows = access.read::<f32>("k or v", source, DType::F32)?;
        let layout = Layout { kv_heads, block_size, dim };
        // SAFETY: `k`, `v` and the two regions are all tensors of this call; the regions were found disjoint above.
        unsafe {
            match target.dtype() {
                DType::F32 => {
                    let cache = access.write::<f32>("cache", target, DType::F32, &[k, v])?;
                    layout.scatter(rows, slots, cache, |to, from| to.copy_from_slice(from));
                }
                DType::Bf16 => {
                    let cache = access.write::<half::bf16>("cache", target, DType::Bf16, &[k, v])?;
                    layout.scatter(rows, slots, cache, |to, from| to.convert_from_f32_slice(from));
                }
                DType::F16 => {
                    let cache = access.write::<half::f16>("cache", target, DType::F16, &[k, v])?;
                    layout.scatter(rows, slots, cache, |to, from| to.convert_from_f32_slice(from));
                }
                actual => return Err(Error::Dtype { op: access.op, tensor: "cache", actual }),
            }
        }
    }
    Ok(())
}

struct Layout {
    kv_heads: usize,
    block_size: usize,
    dim: usize,
}

impl Layout {
    fn scatter<T>(&self, rows: &[f32], slots: &[u32], cache: &mut [T], convert: impl Fn(&mut [T], &[f32])) {
        let Self { kv_heads, block_size, dim } = *self;
        for (row, &slot) in rows.chunks_exact(kv_heads * dim).zip(slots) {
            let (block, offset) = (slot as usize / block_size, slot as usize % block_size);
            for (head, from) in row.chunks_exact(dim).enumerate() {
                let start = ((block * kv_heads + head) * block_size + offset) * dim;
                convert(&mut cache[start..start + dim], from);
            }
        }
    }
}
