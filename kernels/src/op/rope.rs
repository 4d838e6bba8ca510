//! Rotary position embedding, in place.
//!
//! # Shapes
//! `x: [tokens, heads, dim]` f32, `positions: [tokens]` u32, `table: [positions, 2, rotary / 2]` f32.
//!
//! # Formula
//! A pair `(a, b)` becomes `(a cos - b sin, b cos + a sin)` with the angle of its place and the token's position.
//! Source: Su et al., RoFormer (2021).

use crate::cpu::Machine;
use crate::cpu::access::{Access, Shared};
use crate::error::Result;
use crate::ops::{RopeStyle, RopeTable};
use crate::tensor::{DType, Tensor};

/// Checks the contract and computes.
pub(crate) fn run(
    machine: &mut Machine,
    access: &Access,
    x: &Tensor,
    positions: &Tensor,
    rope: &RopeTable,
) -> Result<()> {
    let [n_positions, _, pairs]: [usize; 3] = rope.table().dims().try_into().unwrap_or_default();
    let [tokens, heads, dim]: [usize; 3] = x.dims().try_into().unwrap_or_default();
    let fits = x.dims().len() == 3 && dim >= 2 * pairs;
    access.shape("x", x, fits, format_args!("[tokens, heads, at least {}]", 2 * pairs))?;
    access.shape("positions", positions, positions.dims() == [tokens], format_args!("[{tokens}]"))?;
    let table = access.read::<f32>("table", rope.table(), DType::F32)?;
    let places = access.read::<u32>("positions", positions, DType::U32)?;
    places.iter().try_for_each(|&place| access.index("position", place as usize, n_positions))?;
    // SAFETY: the other tensors of this call are named.
    let values = unsafe { access.write::<f32>("x", x, DType::F32, &[positions, rope.table()])? };
    if pairs == 0 || values.is_empty() {
        return Ok(());
    }
    let (style, work, rotate) = (rope.style(), values.len(), machine.table.rotate);
    let values = Shared::new(values);
    machine.run(work, tokens, &|_, token| {
        let (cos, sin) = table[places[token] as usize * 2 * pairs..][..2 * pairs].split_at(pairs);
        // SAFETY: each token is one chunk.
        let row = unsafe { values.part(token * heads * dim, heads * dim) };
        for head in row.chunks_exact_mut(dim) {
            // SAFETY: the table was chosen by `Table::of`, which checks that this CPU has its instruction set.
            unsafe { rotate(style, &mut head[..2 * pairs], cos, sin) };
        }
    });
    Ok(())
}

/// The plain form, for every instruction set: the compiler makes vectors of it.
#[inline(always)]
pub(crate) fn rotate(style: RopeStyle, head: &mut [f32], cos: &[f32], sin: &[f32]) {
    match style {
        RopeStyle::HalfSplit => {
            let (first, second) = head.split_at_mut(cos.len());
            for ((a, b), (cos, sin)) in first.iter_mut().zip(second).zip(cos.iter().zip(sin)) {
                (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
            }
        }
        RopeStyle::Interleaved => {
            for (pair, (cos, sin)) in head.chunks_exact_mut(2).zip(cos.iter().zip(sin)) {
                let (a, b) = (pair[0], pair[1]);
                (pair[0], pair[1]) = (a * cos - b * sin, b * cos + a * sin);
            }
        }
    }
}
