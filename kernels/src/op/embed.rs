//! `out[t] = scale * table[ids[t]]`, read from the packed table in its compute format.
//!
//! # Shapes
//! `ids: [tokens]` u32 below `vocab`, `table: [vocab, hidden]`, `out: [tokens, hidden]` f32.

use crate::cpu::access::Access;
use crate::cpu::packed::PanelData;
use crate::cpu::table::PANEL;
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
        let (panel, column) = (id as usize / PANEL, id as usize % PANEL);
        match panels.panel(panel) {
            PanelData::Bf16(data) => pick(data, column, out, |bits| scale * f32::from_bits(u32::from(bits) << 16)),
            PanelData::F32(data) => pick(data, column, out, |value| scale * value),
        }
    }
    Ok(())
}

fn pick<T: Copy>(panel: &[T], column: usize, out: &mut [f32], widen: impl Fn(T) -> f32) {
    out.iter_mut().zip(panel[column..].iter().step_by(PANEL)).for_each(|(out, &value)| *out = widen(value));
}
