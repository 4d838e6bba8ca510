//! `out = x W^T + bias`: tiles of up to eight rows times panels of 32 output columns.
//!
//! # Shapes
//! `x: [.., in]` f32, `weight: [out, in]` packed bf16 or f32, `bias: [out]` f32, `out: [.., out]` f32.
//!
//! Each element is `((x[0] w[0]) + x[1] w[1]) + ..` over `in` ascending in f32 (fused multiply-add where the
//! instruction set has it), then `+ bias`: one order, whatever the number of rows or threads.

use crate::cpu::Machine;
use crate::cpu::access::{Access, Shared};
use crate::cpu::packed::{PanelData, Panels};
use crate::cpu::table::{Accumulators, MatmulTile, PANEL, TILE_ROWS, Table};
use crate::error::Result;
use crate::tensor::{DType, Tensor};
use crate::weight::Weight;

/// Rows that one chunk of the loop multiplies, so that they stay in the second-level cache.
const CHUNK_ROWS: usize = 64;

/// Checks the contract and computes.
pub(crate) fn run(
    machine: &mut Machine,
    access: &Access,
    x: &Tensor,
    weight: &Weight,
    bias: Option<&Weight>,
    out: &Tensor,
) -> Result<()> {
    let panels = access.panels("weight", weight)?;
    let rows = x.shape().rows();
    access.shape("x", x, x.shape().columns() == panels.n_in, &format!("[.., {}]", panels.n_in))?;
    let fits = out.shape().columns() == panels.n_out && out.shape().rows() == rows;
    access.shape("out", out, fits, &format!("[{rows}, {}]", panels.n_out))?;
    let bias = bias.map(|bias| access.vector("bias", bias, panels.n_out)).transpose()?;
    let input = access.read::<f32>("x", x, DType::F32)?;
    // SAFETY: `x` is the only other tensor of this call.
    let output = unsafe { access.write::<f32>("out", out, DType::F32, &[x])? };
    multiply(machine, input, panels, bias, output);
    Ok(())
}

fn multiply(machine: &mut Machine, x: &[f32], panels: &Panels, bias: Option<&[f32]>, out: &mut [f32]) {
    let (depth, n_out, n_panels) = (panels.n_in, panels.n_out, panels.n_panels());
    let rows = x.len() / depth;
    if n_panels == 0 || rows == 0 {
        return;
    }
    let table = machine.table;
    let out = Shared::new(out);
    let work = rows * depth * n_out;
    machine.run(work, rows.div_ceil(CHUNK_ROWS) * n_panels, &|_, chunk| {
        let (first, panel) = (chunk / n_panels * CHUNK_ROWS, chunk % n_panels);
        let columns = panel * PANEL..((panel + 1) * PANEL).min(n_out);
        let data = panels.panel(panel);
        let mut acc: Accumulators = [0.0; TILE_ROWS * PANEL];
        for row in (first..rows.min(first + CHUNK_ROWS)).step_by(TILE_ROWS) {
            let n = TILE_ROWS.min(rows - row);
            tile(table, &x[row * depth..(row + n) * depth], depth, &data, &mut acc);
            for (r, results) in acc.chunks_exact(PANEL).take(n).enumerate() {
                // SAFETY: no other chunk has this row and these columns.
                let target = unsafe { out.part((row + r) * n_out + columns.start, columns.len()) };
                match bias {
                    Some(bias) => add(target, results, &bias[columns.clone()]),
                    None => target.copy_from_slice(&results[..columns.len()]),
                }
            }
        }
    });
}

fn add(target: &mut [f32], results: &[f32], bias: &[f32]) {
    target.iter_mut().zip(results).zip(bias).for_each(|((target, result), bias)| *target = result + bias);
}

fn tile(table: &Table, x: &[f32], depth: usize, data: &PanelData<'_>, out: &mut Accumulators) {
    // SAFETY: the table was chosen by `Table::of`, which checks that this CPU has its instruction set.
    unsafe {
        match data {
            PanelData::Bf16(panel) => (table.matmul_bf16)(&MatmulTile { x, depth, panel }, out),
            PanelData::F32(panel) => (table.matmul_f32)(&MatmulTile { x, depth, panel }, out),
        }
    }
}

/// The plain tile for bf16 weights.
pub(crate) fn reference_bf16(tile: &MatmulTile<'_, u16>, out: &mut Accumulators) {
    reference(tile, out, |bits| f32::from_bits(u32::from(bits) << 16));
}

/// The plain tile for f32 weights.
pub(crate) fn reference_f32(tile: &MatmulTile<'_, f32>, out: &mut Accumulators) {
    reference(tile, out, |value| value);
}

fn reference<W: Copy>(tile: &MatmulTile<'_, W>, out: &mut Accumulators, widen: impl Fn(W) -> f32) {
    let rows = tile.rows();
    for (x, out) in tile.x.chunks_exact(tile.depth).zip(out.chunks_exact_mut(PANEL)).take(rows) {
        out.fill(0.0);
        for (&x, line) in x.iter().zip(tile.panel.chunks_exact(PANEL)) {
            out.iter_mut().zip(line).for_each(|(out, &w)| *out += x * widen(w));
        }
    }
}
