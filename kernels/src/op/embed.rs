//! `out[t] = scale * table[ids[t]]`, read from the packed table in its compute format.
//!
//! # Shapes
//! `ids: [tokens]` u32 below `vocab`, `table: [vocab, hidden]`, `out: [tokens, hidden]` f32.

use crate::cpu::access::Access;
use crate::error::Result;
use crate::tensor::{DType, Tensor};
use crate::weight::Weight;

/// Checks the contract and copies.
pub(crate) fn run(access: &Access, ids: &Tensor, table: &Weight, scale: f32, out: &Tensor) -> Result<()> {
    let panels = access.panels("table", table)?;
    let expected = [ids.shape().elements(), panels.n_in];
    access.shape("ids", ids, ids.dims().len() == 1, "[tokens]")?;
    access.shape("out", out, out.dims() == expected, &format!("{expected:?}"))?;
    let rows = access.read::<u32>("ids", ids, DType::U32)?;
    rows.iter().try_for_each(|&id| access.index("token id", id as usize, panels.n_out))?;
    // SAFETY: the other tensor of this call is named.
    let output = unsafe { access.write::<f32>("out", out, DType::F32, &[ids])? };
    for (&id, out) in rows.iter().zip(output.chunks_exact_mut(panels.n_in)) {
        panels.row(id as usize, out);
        out.iter_mut().for_each(|value| *value *= scale);
    }
    Ok(())
}
