//! `out = x W^T + bias`, one weight or several that share their input, and the gated product of a feed-forward layer.
//!
//! # Shapes
//! `x: [.., in]` f32, weights `[out, in]` packed in [panels](crate::cpu::panels), `bias: [out]` f32,
//! `out: [.., out]` f32.
//!
//! Each element is summed over inputs ascending in f32 (int8: exactly in i32, then scaled), then `+ bias`: one order
//! for an instruction set and format, whatever the number of rows or threads. Activations are rounded row by row to
//! the format that the weight's kernel takes, see [`Input`].

use std::ops::Range;

use crate::cpu::Machine;
use crate::cpu::access::{Access, Shared};
use crate::cpu::dot::Dot;
use crate::cpu::grouped::{DIRECT_ROWS, DirectDot, Factor, GroupedDot, Unpack};
use crate::cpu::panels::{GROUP, GROUP_INT8, Input, Layout, PANEL, Panels, elements};
use crate::cpu::table::Table;
use crate::cpu::workspace::{Activations, Local, ROWS_MAX, SLAB, WHOLE_ROWS};
use crate::error::Result;
use crate::ops::{Activation, Linear};
use crate::tensor::{DType, Tensor};

/// Rows that go through a panel once.
const FEW_ROWS: usize = 12;

/// Activations of a block, half a megabyte of bf16.
const ACTIVATIONS_MAX: usize = 256 << 10;

/// A weight and its bias, checked against its input.
#[derive(Clone, Copy)]
pub(crate) struct Operand<'a> {
    panels: &'a Panels,
    bias: Option<&'a [f32]>,
}

impl<'a> Operand<'a> {
    /// Checks the weight against `x` and `out`.
    pub(crate) fn new(access: &Access, x: &Tensor, linear: Linear<'a>, out: &Tensor) -> Result<Self> {
        let panels = access.panels("weight", linear.weight)?;
        let rows = x.shape().rows();
        access.shape("x", x, x.shape().columns() == panels.n_in, format_args!("[.., {}]", panels.n_in))?;
        let fits = out.shape().columns() == panels.n_out && out.shape().rows() == rows;
        access.shape("out", out, fits, format_args!("[{rows}, {}]", panels.n_out))?;
        let bias = linear.bias.map(|bias| access.vector("bias", bias, panels.n_out)).transpose()?;
        Ok(Self { panels, bias })
    }

    fn columns(&self, panel: usize) -> Range<usize> {
        panel * PANEL..((panel + 1) * PANEL).min(self.panels.n_out)
    }
}

/// Checks the contract and computes.
pub(crate) fn run(machine: &mut Machine, access: &Access, x: &Tensor, linear: Linear<'_>, out: &Tensor) -> Result<()> {
    let operand = Operand::new(access, x, linear, out)?;
    let input = access.read::<f32>("x", x, DType::F32)?;
    // SAFETY: `x` is the only other tensor of this call.
    let output = unsafe { access.write::<f32>("out", out, DType::F32, &[x])? };
    multiply(machine, input, &[operand], &[Shared::new(output)]);
    Ok(())
}

/// `out = activation(x G^T + g) * (x U^T + u)`.
pub(crate) fn run_gated(
    machine: &mut Machine,
    access: &Access,
    x: &Tensor,
    [gate, up]: [Linear<'_>; 2],
    activation: Activation,
    out: &Tensor,
) -> Result<()> {
    let operands = [Operand::new(access, x, gate, out)?, Operand::new(access, x, up, out)?];
    let input = access.read::<f32>("x", x, DType::F32)?;
    // SAFETY: `x` is the only other tensor of this call.
    let output = Shared::new(unsafe { access.write::<f32>("out", out, DType::F32, &[x])? });
    let n_panels = operands[0].panels.n_panels();
    let n_out = operands[0].panels.n_out;
    each_panel(machine, input, &operands, n_panels, &|task, local| {
        for (which, operand) in operands.iter().enumerate() {
            task.compute(operand, task.panel, local, which);
        }
        let n = task.rows.len() * PANEL;
        let [gate, up, gated] = &mut local.sums;
        // SAFETY: the table was chosen by `Table::of`, which checks that this CPU has its instruction set.
        unsafe { (task.table.gated_activation)(activation, &gate[..n], &up[..n], &mut gated[..n]) };
        store(gated, &task.rows, operands[0].columns(task.panel), n_out, &output);
    });
    Ok(())
}

/// Multiplies the same rows with several weights.
pub(crate) fn multiply(machine: &mut Machine, x: &[f32], operands: &[Operand<'_>], outs: &[Shared<'_, f32>]) {
    let n_panels = operands.iter().map(|operand| operand.panels.n_panels()).sum();
    each_panel(machine, x, operands, n_panels, &|task, local| {
        let mut panel = task.panel;
        for (operand, out) in operands.iter().zip(outs) {
            if panel >= operand.panels.n_panels() {
                panel -= operand.panels.n_panels();
                continue;
            }
            task.compute(operand, panel, local, 0);
            return store(&local.sums[0], &task.rows, operand.columns(panel), operand.panels.n_out, out);
        }
    });
}

/// One chunk of work: some rows, one panel.
struct Task<'a> {
    table: &'static Table,
    x: &'a [f32],
    activations: &'a Activations,
    rows: Range<usize>,
    panel: usize,
}

/// Calls `body` for each block of rows and each panel; a thread goes through its panels in order.
fn each_panel(
    machine: &mut Machine,
    x: &[f32],
    operands: &[Operand<'_>],
    n_panels: usize,
    body: &(dyn Fn(&Task<'_>, &mut Local) + Sync),
) {
    let depth = operands[0].panels.n_in;
    let rows = x.len() / depth;
    if n_panels == 0 || rows == 0 {
        return;
    }
    let activations = prepare(machine, x, operands);
    // Blocks of nearly equal size, so that threads that have one each end together.
    let rows_max = rows_max(depth);
    let n_blocks = rows.div_ceil(rows_max);
    let block = rows.div_ceil(n_blocks).next_multiple_of(WHOLE_ROWS).min(rows_max);
    let table = machine.table;
    let work = rows.saturating_mul(depth).saturating_mul(n_panels * PANEL);
    machine.split(work, rows.div_ceil(block) * n_panels, &|locals, thread, chunk| {
        let first = chunk / n_panels * block;
        let rows = first..rows.min(first + block);
        let task = Task { table, x, activations: &activations, rows, panel: chunk % n_panels };
        // SAFETY: each thread has its own.
        body(&task, unsafe { locals.of(thread) });
    });
    machine.activations = activations;
}

/// Most rows of a block: as many as the second-level cache holds beside weights, whole blocks of all kernels.
fn rows_max(depth: usize) -> usize {
    (ACTIVATIONS_MAX / depth.max(1) / WHOLE_ROWS * WHOLE_ROWS).clamp(WHOLE_ROWS, ROWS_MAX)
}

/// Elements from one row of bf16 activations to the next. Rows that are whole half pages apart would share a few lines of the
/// first-level cache, so they get one more line.
fn stride_bf16(depth: usize) -> usize {
    let stride = depth.next_multiple_of(GROUP);
    if stride.is_multiple_of(1024) { stride + GROUP } else { stride }
}

/// Rounds activations to the formats that the weights' kernels take.
fn prepare(machine: &mut Machine, x: &[f32], operands: &[Operand<'_>]) -> Activations {
    let depth = operands[0].panels.n_in;
    let rows = x.len() / depth;
    let mut activations = std::mem::take(&mut machine.activations);
    let any = |input: Input| operands.iter().any(|operand| operand.panels.input == input);
    let table = machine.table;
    if any(Input::Bf16) {
        let stride = stride_bf16(depth);
        grow(&mut activations.bf16, rows * stride);
        let target = Shared::new(&mut activations.bf16);
        machine.split(x.len(), rows, &|_, _, row| {
            // SAFETY: each row is one chunk; the table was chosen by `Table::of` for what this CPU has.
            unsafe {
                let (values, padding) = target.part(row * stride, stride).split_at_mut(depth);
                (table.round)(&x[row * depth..][..depth], values);
                padding.fill(0);
            }
        });
    }
    if any(Input::Int8) {
        let stride = depth.next_multiple_of(GROUP_INT8);
        grow(&mut activations.int8, rows * stride);
        grow(&mut activations.scales, rows);
        let (target, scales) = (Shared::new(&mut activations.int8), Shared::new(&mut activations.scales));
        machine.split(x.len(), rows, &|_, _, row| {
            // SAFETY: each row is one chunk; the table was chosen by `Table::of` for what this CPU has.
            unsafe {
                let (values, padding) = target.part(row * stride, stride).split_at_mut(depth);
                scales.part(row, 1)[0] = (table.quantize)(&x[row * depth..][..depth], values);
                padding.fill(128);
            }
        });
    }
    if any(Input::Int8Groups) {
        let groups = depth / GROUP;
        grow(&mut activations.groups, rows * depth);
        grow(&mut activations.factors, rows * groups);
        let (codes, factors) = (Shared::new(&mut activations.groups), Shared::new(&mut activations.factors));
        machine.split(x.len(), rows, &|_, _, row| {
            // SAFETY: each row is one chunk; the table was chosen by `Table::of` for what this CPU has.
            unsafe {
                let (codes, factors) = (codes.part(row * depth, depth), factors.part(row * groups, groups));
                (table.quantize_groups)(&x[row * depth..][..depth], codes, factors);
            }
        });
    }
    activations
}

fn grow<T: Copy + Default>(memory: &mut Vec<T>, len: usize) {
    if memory.len() < len {
        memory.resize(len, T::default());
    }
}

impl Task<'_> {
    /// Products of the rows with a panel, plus the bias, into `local.sums[which]`.
    fn compute(&self, operand: &Operand<'_>, panel: usize, local: &mut Local, which: usize) {
        self.multiply(operand.panels, panel, local, which);
        if let Some(bias) = operand.bias {
            add_bias(&mut local.sums[which], self.rows.len(), &bias[operand.columns(panel)]);
        }
    }

    fn multiply(&self, panels: &Panels, panel: usize, local: &mut Local, which: usize) {
        let (depth, rows, bytes) = (panels.padded_inputs(), self.rows.len(), panels.panel(panel));
        match panels.layout {
            Layout::Int8 => return self.compute_int8(panels, bytes, local, which),
            Layout::Grouped(grouping) if panels.input == Input::Int8Groups => {
                let (groups, sums) = (depth / GROUP, &mut local.sums[which]);
                let x = &self.activations.groups[self.rows.start * depth..];
                let factors: &[Factor] = &self.activations.factors[self.rows.start * groups..];
                let scratch = &mut local.bytes;
                let mut dot = GroupedDot { grouping, panel: bytes, x, factors, groups, rows, sums, bytes: scratch };
                // SAFETY: the table was chosen by `Table::of`, which checks that this CPU has its instruction set.
                return unsafe { (self.table.dot_grouped)(&mut dot) };
            }
            Layout::Bf16 | Layout::F32 | Layout::F16 | Layout::Grouped(_) => {}
        }
        let sums = &mut local.sums[which][..rows * PANEL];
        sums.fill(0.0);
        if let (Layout::Grouped(grouping), Some(direct), true) =
            (panels.layout, self.table.dot_direct, rows <= DIRECT_ROWS)
        {
            let (groups, stride) = (depth / GROUP, stride_bf16(depth));
            let x = &self.activations.bf16[self.rows.start * stride..];
            // SAFETY: the table was chosen by `Table::of`, which checks that this CPU has its instruction set.
            return unsafe { direct(&mut DirectDot { grouping, panel: bytes, groups, x, stride, rows, sums }) };
        }
        // A panel that is read once need not stay in the cache.
        let is_multiplied_as_it_is = matches!(panels.layout, Layout::Bf16 | Layout::F32);
        let slab = if rows <= FEW_ROWS && is_multiplied_as_it_is { depth } else { SLAB };
        for first in (0..depth).step_by(slab) {
            let inputs = first..depth.min(first + slab);
            // SAFETY: the table was chosen by `Table::of`, which checks that this CPU has its instruction set.
            unsafe {
                match panels.layout {
                    Layout::Bf16 => {
                        let panel = &elements::<u16>(bytes)[first * PANEL..inputs.end * PANEL];
                        (self.table.dot_bf16)(&mut self.dot_bf16(depth, &inputs, panel, sums));
                    }
                    Layout::F32 => {
                        let panel = &elements::<f32>(bytes)[first * PANEL..inputs.end * PANEL];
                        (self.table.dot_f32)(&mut self.dot(self.x, depth, &inputs, panel, sums));
                    }
                    Layout::F16 => {
                        let panel = &elements::<u16>(bytes)[first * PANEL..inputs.end * PANEL];
                        (self.table.widen)(panel, &mut local.f32[..panel.len()]);
                        (self.table.dot_f32)(&mut self.dot(self.x, depth, &inputs, &local.f32, sums));
                    }
                    Layout::Grouped(grouping) => {
                        let groups = first / GROUP..inputs.end / GROUP;
                        let out = &mut local.bf16[..inputs.len() * PANEL];
                        (self.table.unpack)(&mut Unpack { grouping, panel: bytes, groups, out });
                        let panel = &local.bf16[..inputs.len() * PANEL];
                        (self.table.dot_bf16)(&mut self.dot_bf16(depth, &inputs, panel, sums));
                    }
                    Layout::Int8 => unreachable!("computed above"),
                }
            }
        }
    }

    fn dot_bf16<'a>(
        &'a self,
        depth: usize,
        inputs: &Range<usize>,
        panel: &'a [u16],
        sums: &'a mut [f32],
    ) -> Dot<'a, u16, u16, f32> {
        self.dot(&self.activations.bf16, stride_bf16(depth), inputs, panel, sums)
    }

    /// Products of the rows with a stretch of a panel; a row of `x` is `stride` long.
    fn dot<'a, T>(
        &self,
        x: &'a [T],
        stride: usize,
        inputs: &Range<usize>,
        panel: &'a [T],
        sums: &'a mut [f32],
    ) -> Dot<'a, T, T, f32> {
        let x = &x[self.rows.start * stride + inputs.start..];
        Dot { x, stride, rows: self.rows.len(), depth: inputs.len(), panel, sums }
    }

    /// Exact products of 8 bits; `x = s (u - 128)`, so `128 * sum of the column` is taken off before scaling.
    fn compute_int8(&self, panels: &Panels, bytes: &[u8], local: &mut Local, which: usize) {
        let (stride, rows) = (panels.padded_inputs(), self.rows.len());
        let ints = &mut local.ints[..rows * PANEL];
        ints.fill(0);
        let x = &self.activations.int8[self.rows.start * stride..];
        let panel = elements::<i8>(&bytes[..stride * PANEL]);
        // SAFETY: the table was chosen by `Table::of`, which checks that this CPU has its instruction set.
        unsafe { (self.table.dot_int8)(&mut Dot { x, stride, rows, depth: stride, panel, sums: ints }) };
        let (column_sums, column_scales) = panels.int8_tail(bytes);
        let row_scales = &self.activations.scales[self.rows.clone()];
        let lines = local.sums[which].chunks_exact_mut(PANEL).zip(local.ints.chunks_exact(PANEL));
        for ((out, ints), scale) in lines.zip(row_scales) {
            for c in 0..PANEL {
                out[c] = (ints[c] - 128 * column_sums[c]) as f32 * (scale * column_scales[c]);
            }
        }
    }
}

fn add_bias(sums: &mut [f32], rows: usize, bias: &[f32]) {
    for line in sums.chunks_exact_mut(PANEL).take(rows) {
        line.iter_mut().zip(bias).for_each(|(sum, bias)| *sum += bias);
    }
}

/// Copies results of a panel to their columns of the output.
fn store(sums: &[f32], rows: &Range<usize>, columns: Range<usize>, n_out: usize, out: &Shared<'_, f32>) {
    for (row, line) in rows.clone().zip(sums.chunks_exact(PANEL)) {
        // SAFETY: no other chunk has this row and these columns.
        let target = unsafe { out.part(row * n_out + columns.start, columns.len()) };
        target.copy_from_slice(&line[..columns.len()]);
    }
}
