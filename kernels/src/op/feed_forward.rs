//! The gated feed-forward layer: `out = (activation(x G^T + g) * (x U^T + u)) D^T + d`.
//!
//! # Shapes
//! See [`FeedForward`].
//!
//! Where a panel's 32 columns are enough to round what gate and up give to the format that `down` takes, that is done while
//! they are in the first-level cache, to the same bits as later, and f32 is not written to memory.

use crate::cpu::Machine;
use crate::cpu::access::{Access, Shared};
use crate::cpu::activations::Places;
use crate::cpu::grouped::Factor;
use crate::cpu::panels::{GROUP, Input, PANEL};
use crate::cpu::results::store;
use crate::error::Result;
use crate::op::matmul::{self, Operand, Prepared, Task, grow};
use crate::ops::{Activation, FeedForward};
use crate::tensor::{DType, Tensor};

/// Checks the contract and computes.
pub(crate) fn run(
    machine: &mut Machine,
    access: &Access,
    x: &Tensor,
    args: &FeedForward<'_>,
    out: &Tensor,
) -> Result<()> {
    let gate_up = [Operand::new(access, x, args.gate, args.gated)?, Operand::new(access, x, args.up, args.gated)?];
    let down = Operand::new(access, args.gated, args.down, out)?;
    let input = access.read::<f32>("x", x, DType::F32)?;
    // SAFETY: these are all tensors that this call makes slices of, and both outputs name the others.
    let (gated, out) = unsafe {
        (
            access.write::<f32>("gated", args.gated, DType::F32, &[x, out])?,
            access.write::<f32>("out", out, DType::F32, &[x, args.gated])?,
        )
    };
    let rows = x.shape().rows();
    let activations = std::mem::take(&mut machine.activations);
    let activations = matmul::prepare(machine, input, &gate_up, activations);
    let x = Prepared { x: input, rows, activations: &activations };
    let (mut middle, depth) = (std::mem::take(&mut machine.gated), down.panels.n_in);
    match down.panels.input {
        Input::Bf16 => {
            let places = Places::bf16(machine.table.order, depth);
            grow(&mut middle.bf16, places.len(rows));
            let target = Shared::new(&mut middle.bf16);
            gate(machine, &x, args.activation, &gate_up, &|task, gated| round(task, gated, places, &target));
        }
        Input::Int8Groups => {
            grow(&mut middle.groups, rows * depth);
            grow(&mut middle.factors, rows * depth / GROUP);
            let (codes, factors) = (Shared::new(&mut middle.groups), Shared::new(&mut middle.factors));
            gate(machine, &x, args.activation, &gate_up, &|task, gated| quantize(task, gated, &codes, &factors, depth));
        }
        Input::F32 | Input::Int8 => {
            let target = Shared::new(&mut *gated);
            gate(machine, &x, args.activation, &gate_up, &|task, gated| {
                store(gated, &task.rows, gate_up[0].columns(task.panel), depth, &target);
            });
            middle = matmul::prepare(machine, gated, &[down], middle);
        }
    }
    let x = Prepared { x: gated, rows, activations: &middle };
    matmul::multiply_prepared(machine, &x, &[down], &[Shared::new(out)]);
    (machine.activations, machine.gated) = (activations, middle);
    Ok(())
}

/// Computes gate and up; `put` takes what their activation makes of a block of rows and a panel, `[rows, 32]`.
fn gate(
    machine: &mut Machine,
    x: &Prepared<'_>,
    activation: Activation,
    gate_up: &[Operand<'_>; 2],
    put: &(dyn Fn(&Task<'_>, &[f32]) + Sync),
) {
    let panels = gate_up[0].panels;
    matmul::each_panel(machine, x, gate_up, panels.n_panels(), &|task, local| {
        for (which, operand) in gate_up.iter().enumerate() {
            task.compute(operand, task.panel, local, which);
        }
        let n = task.rows.len() * PANEL;
        let [gate, up, gated] = &mut local.sums;
        // SAFETY: the table was chosen by `Table::of`, which checks that this CPU has its instruction set.
        unsafe { (task.table.gated_activation)(activation, &gate[..n], &up[..n], &mut gated[..n]) };
        put(task, &gated[..n]);
    });
}

/// A panel is one group of `down`'s inputs; the columns that fill it are 0, as padding has to be.
fn round(task: &Task<'_>, gated: &[f32], places: Places, target: &Shared<'_, u16>) {
    const { assert!(PANEL == GROUP) };
    let together = places.rows_together();
    for (rows, values) in task.rows.clone().step_by(together).zip(gated.chunks(together * PANEL)) {
        // SAFETY: rows that lie together are one chunk's, groups of other panels lie elsewhere, and the table was chosen
        // by `Table::of` for what this CPU has.
        unsafe {
            let group = target.part(places.group(rows, task.panel), values.len());
            (task.table.round)(values, group, GROUP);
        }
    }
}

/// A panel is one group of `down`'s inputs.
fn quantize(task: &Task<'_>, gated: &[f32], codes: &Shared<'_, i8>, factors: &Shared<'_, Factor>, depth: usize) {
    for (row, values) in task.rows.clone().zip(gated.chunks_exact(PANEL)) {
        // SAFETY: no other chunk has this row and panel, and the table was chosen by `Table::of` for what this CPU has.
        unsafe {
            let codes = codes.part(row * depth + task.panel * GROUP, GROUP);
            let factors = factors.part(row * depth / GROUP + task.panel, 1);
            (task.table.quantize_groups)(values, codes, factors);
        }
    }
}
