//! `out[t] = scale * table[ids[t]]`, read from the packed table in its compute format.
//!
//! # Shapes
//! `ids: [tokens]` u32 below `vocab`, `table: [vocab, hidden]`, `out: [tokens, hidden]` f32.

use crate::cpu::Machine;
use crate::cpu::access::{Access, Shared};
use crate::error::Result;
use crate::tensor::{DType, Tensor};
use crate::weight::Weight;

/// Elementary operations that an element is worth: each lies on a cache line of its own.
const LOAD_WORK: usize = 16;

/// Checks the contract and copies.
pub(crate) fn run(
    machine: &mut Machine,
    access: &Access,
    ids: &Tensor,
    table: &Weight,
    scale: f32,
    out: &Tensor,
) -> Result<()> {
    let panels = access.panels("table", table)?;
    let expected = [ids.shape().elements(), panels.n_in];
    access.shape("ids", ids, ids.dims().len() == 1, "[tokens]")?;
    access.shape("out", out, out.dims() == expected, format_args!("{expected:?}"))?;
    let rows = access.read::<u32>("ids", ids, DType::U32)?;
    rows.iter().try_for_each(|&id| access.index("token id", id as usize, panels.n_out))?;
    // SAFETY: the other tensor of this call is named.
    let output = unsafe { access.write::<f32>("out", out, DType::F32, &[ids])? };
    let (work, n_in) = (output.len() * LOAD_WORK, panels.n_in);
    let output = Shared::new(output);
    machine.split(work, rows.len(), &|_, _, row| {
        // SAFETY: each row is one chunk.
        let out = unsafe { output.part(row * n_in, n_in) };
        panels.row(rows[row] as usize, out);
        out.iter_mut().for_each(|value| *value *= scale);
    });
    Ok(())
}
