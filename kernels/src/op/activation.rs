//! `out = activation(gate) * up`, the middle of a gated feed-forward layer.
//!
//! # Shapes
//! `gate, up, out`: equal shapes, f32, disjoint.
//! Source: Shazeer, GLU Variants Improve Transformer (2020); gelu in the tanh form of Hendrycks and Gimpel (2016).

use crate::cpu::Machine;
use crate::cpu::access::{Access, Shared};
use crate::error::Result;
use crate::ops::Activation;
use crate::tensor::{DType, Tensor};

/// Elements of one chunk.
const CHUNK: usize = 4096;

/// Checks the contract and computes.
pub(crate) fn run(
    machine: &mut Machine,
    access: &Access,
    activation: Activation,
    [gate, up, out]: [&Tensor; 3],
) -> Result<()> {
    access.shape("up", up, up.shape() == gate.shape(), "the shape of gate")?;
    access.shape("out", out, out.shape() == gate.shape(), "the shape of gate")?;
    let g = access.read::<f32>("gate", gate, DType::F32)?;
    let u = access.read::<f32>("up", up, DType::F32)?;
    // SAFETY: the other tensors of this call are named.
    let o = unsafe { access.write::<f32>("out", out, DType::F32, &[gate, up])? };
    let (table, len) = (machine.table, o.len());
    let o = Shared::new(o);
    machine.run(len * 8, len.div_ceil(CHUNK), &|_, chunk| {
        let range = chunk * CHUNK..((chunk + 1) * CHUNK).min(len);
        // SAFETY: chunks are disjoint, and the table was chosen by `Table::of` for what this CPU has.
        unsafe {
            let out = o.part(range.start, range.len());
            (table.gated_activation)(activation, &g[range.clone()], &u[range], out);
        }
    });
    Ok(())
}

/// The plain form.
pub(crate) fn reference(activation: Activation, gate: &[f32], up: &[f32], out: &mut [f32]) {
    for ((out, &x), up) in out.iter_mut().zip(gate).zip(up) {
        let y = match activation {
            Activation::Silu => x / (1.0 + (-x).exp()),
            Activation::GeluTanh => 0.5 * x * (1.0 + (0.797_884_6 * (x + 0.044_715 * x * x * x)).tanh()),
        };
        *out = y * up;
    }
}
