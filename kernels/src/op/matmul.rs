//! `out = x W^T + bias`, one weight or several that share their input.
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
use crate::cpu::activations::{Activations, Places};
use crate::cpu::dot::{Dot, Order, TILE_ROWS};
use crate::cpu::grouped::{DIRECT_ROWS, DirectDot, Factor, GroupedDot, Unpack};
use crate::cpu::panels::{GROUP, Input, Layout, PANEL, Panels, elements};
use crate::cpu::results::store;
use crate::cpu::table::Table;
use crate::cpu::workspace::{Local, ROWS_MAX, SLAB, WHOLE_ROWS};
use crate::error::Result;
use crate::ops::Linear;
use crate::tensor::{DType, Tensor};

/// Rows that go through a panel once.
const FEW_ROWS: usize = 12;

/// Activations of a block, 640 KB of bf16.
const ACTIVATIONS_MAX: usize = 320 << 10;
/// Activations of blocks that go past a panel together, 1 MB of bf16.
const TOGETHER_MAX: usize = 512 << 10;

/// A weight and its bias, checked against its input.
#[derive(Clone, Copy)]
pub(crate) struct Operand<'a> {
    pub(crate) panels: &'a Panels,
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

    pub(crate) fn columns(&self, panel: usize) -> Range<usize> {
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

/// Multiplies the same rows with several weights.
pub(crate) fn multiply(machine: &mut Machine, x: &[f32], operands: &[Operand<'_>], outs: &[Shared<'_, f32>]) {
    let activations = std::mem::take(&mut machine.activations);
    let activations = prepare(machine, x, operands, activations);
    let rows = x.len() / operands[0].panels.n_in;
    multiply_prepared(machine, &Prepared { x, rows, activations: &activations }, operands, outs);
    machine.activations = activations;
}

/// Rows in the formats that the weights' kernels take.
#[derive(Clone, Copy)]
pub(crate) struct Prepared<'a> {
    /// As they are; kernels for [`Input::F32`] take these.
    pub(crate) x: &'a [f32],
    pub(crate) rows: usize,
    pub(crate) activations: &'a Activations,
}

/// Multiplies the same rows with several weights.
pub(crate) fn multiply_prepared(
    machine: &mut Machine,
    x: &Prepared<'_>,
    operands: &[Operand<'_>],
    outs: &[Shared<'_, f32>],
) {
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
pub(crate) struct Task<'a> {
    pub(crate) table: &'static Table,
    x: &'a Prepared<'a>,
    pub(crate) rows: Range<usize>,
    pub(crate) panel: usize,
    /// Which it is of how many that take the panel one after the other; each asks for its part of the next panel.
    turn: (usize, usize),
}

/// Calls `body` for each block of rows and each of `n_panels` panels of the weights, which share their inputs.
///
/// A thread goes through its panels in order. Blocks whose activations stay in the second-level cache go past a panel
/// together, so that it comes from memory once for all of them.
pub(crate) fn each_panel(
    machine: &mut Machine,
    x: &Prepared<'_>,
    operands: &[Operand<'_>],
    n_panels: usize,
    body: &(dyn Fn(&Task<'_>, &mut Local) + Sync),
) {
    let rows = x.rows;
    if n_panels == 0 || rows == 0 {
        return;
    }
    let (depth, table) = (operands[0].panels.n_in.max(1), machine.table);
    // Blocks of nearly equal size, so that threads that have one each end together.
    let rows_max = rows_max(table, operands);
    let n_blocks = rows.div_ceil(rows_max);
    let block = rows.div_ceil(n_blocks).next_multiple_of(rows_max.min(WHOLE_ROWS)).min(rows_max);
    let n_blocks = rows.div_ceil(block);
    let together = (TOGETHER_MAX / (depth * block)).clamp(1, n_blocks);
    let work = rows.saturating_mul(depth).saturating_mul(n_panels * PANEL);
    machine.split(work, n_blocks * n_panels, &|locals, thread, chunk| {
        let first = chunk / (together * n_panels) * together;
        let (within, n) = (chunk - first * n_panels, together.min(n_blocks - first));
        let turn = (within % n, n);
        let start = (first + turn.0) * block;
        let task = Task { table, x, rows: start..rows.min(start + block), panel: within / n, turn };
        // SAFETY: each thread has its own.
        body(&task, unsafe { locals.of(thread) });
    });
}

/// Most rows of a block. What weights are taken apart for should be many rows, but no more than the second-level cache holds
/// beside weights; else results are few enough to stay in the first-level cache until they are used.
fn rows_max(table: &Table, operands: &[Operand<'_>]) -> usize {
    let at_once = |operand: &Operand<'_>| matches!(operand.panels.layout, Layout::Bf16 | Layout::Int8);
    if table.order == Order::Tiles && operands.iter().all(at_once) {
        return 2 * TILE_ROWS;
    }
    let depth = operands[0].panels.n_in.max(1);
    (ACTIVATIONS_MAX / depth / WHOLE_ROWS * WHOLE_ROWS).clamp(WHOLE_ROWS, ROWS_MAX)
}

/// Rounds activations to the formats that the weights' kernels take.
pub(crate) fn prepare(
    machine: &mut Machine,
    x: &[f32],
    operands: &[Operand<'_>],
    mut activations: Activations,
) -> Activations {
    let depth = operands[0].panels.n_in;
    let rows = x.len() / depth;
    let any = |input: Input| operands.iter().any(|operand| operand.panels.input == input);
    let table = machine.table;
    if any(Input::Bf16) {
        let places = Places::bf16(table.order, depth);
        grow(&mut activations.bf16, places.len(rows));
        each_row(machine, x, depth, places, &mut activations.bf16, &|_, values, row| {
            // SAFETY: the table was chosen by `Table::of` for what this CPU has.
            unsafe { (table.round)(values, row, places.step()) };
            places.pad(row, depth, 0);
        });
    }
    if any(Input::Int8) {
        let places = Places::int8(table.order, depth);
        grow(&mut activations.int8, places.len(rows));
        grow(&mut activations.scales, rows);
        let scales = Shared::new(&mut activations.scales);
        each_row(machine, x, depth, places, &mut activations.int8, &|index, values, row| {
            // SAFETY: each row has its own scale; the table was chosen by `Table::of` for what this CPU has.
            unsafe { scales.part(index, 1)[0] = (table.quantize)(values, row, places.step()) };
            places.pad(row, depth, 128);
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

/// Called with a row's number, its values and its place.
type RowBody<'a, T> = dyn Fn(usize, &[f32], &mut [T]) + Sync + 'a;

/// Calls `body` for each row of `x`, whose first element goes to the first of its place.
fn each_row<T: Copy + Sync + Send>(
    machine: &mut Machine,
    x: &[f32],
    depth: usize,
    places: Places,
    target: &mut [T],
    body: &RowBody<'_, T>,
) {
    let (rows, together, target) = (x.len() / depth, places.rows_together(), Shared::new(target));
    machine.split(x.len(), rows.div_ceil(together), &|_, _, chunk| {
        // SAFETY: rows that lie together are one chunk.
        let target = unsafe { target.part(chunk * places.stride, places.stride) };
        for row in chunk * together..rows.min((chunk + 1) * together) {
            body(row, &x[row * depth..][..depth], &mut target[places.within(row % together)..]);
        }
    });
}

pub(crate) fn grow<T: Copy + Default>(memory: &mut Vec<T>, len: usize) {
    if memory.len() < len {
        memory.resize(len, T::default());
    }
}

impl Task<'_> {
    /// Products of the rows with a panel, plus the bias, into `local.sums[which]`.
    pub(crate) fn compute(&self, operand: &Operand<'_>, panel: usize, local: &mut Local, which: usize) {
        self.multiply(operand.panels, panel, local, which);
        if let Some(bias) = operand.bias {
            add_bias(&mut local.sums[which], self.rows.len(), &bias[operand.columns(panel)]);
        }
    }

    fn multiply(&self, panels: &Panels, panel: usize, local: &mut Local, which: usize) {
        let (depth, rows, bytes) = (panels.padded_inputs(), self.rows.len(), panels.panel(panel));
        match panels.layout {
            Layout::Int8 => return self.compute_int8(panels, panel, local, which),
            Layout::Grouped(grouping) if panels.input == Input::Int8Groups => {
                let (groups, sums) = (depth / GROUP, &mut local.sums[which]);
                let x = &self.x.activations.groups[self.rows.start * depth..];
                let factors: &[Factor] = &self.x.activations.factors[self.rows.start * groups..];
                let scratch = &mut local.bytes;
                let mut dot = GroupedDot { grouping, panel: bytes, x, factors, groups, rows, sums, bytes: scratch };
                // SAFETY: the table was chosen by `Table::of`, which checks that this CPU has its instruction set.
                return unsafe { (self.table.dot_grouped)(&mut dot) };
            }
            Layout::Bf16 | Layout::F32 | Layout::F16 | Layout::Grouped(_) => {}
        }
        let sums = &mut local.sums[which][..rows * PANEL];
        if let (Layout::Grouped(grouping), Some(direct), true) =
            (panels.layout, self.table.dot_direct, rows <= DIRECT_ROWS)
        {
            let (groups, places) = (depth / GROUP, Places::bf16(Order::Rows, depth));
            let (x, stride) = (&self.x.activations.bf16[places.first(&self.rows, &(0..0))..], places.stride);
            sums.fill(0.0);
            // SAFETY: the table was chosen by `Table::of`, which checks that this CPU has its instruction set.
            return unsafe { direct(&mut DirectDot { grouping, panel: bytes, groups, x, stride, rows, sums }) };
        }
        // A panel that is read once need not stay in the cache.
        let slab = match panels.layout {
            Layout::Bf16 if self.table.order == Order::Tiles || rows <= FEW_ROWS => depth,
            Layout::F32 if rows <= FEW_ROWS => depth,
            _ => SLAB,
        };
        for first in (0..depth).step_by(slab) {
            let inputs = first..depth.min(first + slab);
            // SAFETY: the table was chosen by `Table::of`, which checks that this CPU has its instruction set.
            unsafe {
                match panels.layout {
                    Layout::Bf16 => {
                        let panel = &elements::<u16>(bytes)[first * PANEL..inputs.end * PANEL];
                        (self.table.dot_bf16)(&mut self.dot_bf16(depth, &inputs, panel, sums, Some(self.turn)));
                    }
                    Layout::F32 => {
                        let panel = &elements::<f32>(bytes)[first * PANEL..inputs.end * PANEL];
                        (self.table.dot_f32)(&mut self.dot_f32(depth, &inputs, panel, sums));
                    }
                    Layout::F16 => {
                        let panel = &elements::<u16>(bytes)[first * PANEL..inputs.end * PANEL];
                        (self.table.widen)(panel, &mut local.f32[..panel.len()]);
                        (self.table.dot_f32)(&mut self.dot_f32(depth, &inputs, &local.f32, sums));
                    }
                    Layout::Grouped(grouping) => {
                        let groups = first / GROUP..inputs.end / GROUP;
                        let out = &mut local.bf16[..inputs.len() * PANEL];
                        (self.table.unpack)(&mut Unpack { grouping, panel: bytes, groups, out });
                        let panel = &local.bf16[..inputs.len() * PANEL];
                        (self.table.dot_bf16)(&mut self.dot_bf16(depth, &inputs, panel, sums, None));
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
        turn: Option<(usize, usize)>,
    ) -> Dot<'a, u16, u16, f32> {
        let places = Places::bf16(self.table.order, depth);
        let x = &self.x.activations.bf16[places.first(&self.rows, inputs)..];
        let (rows, is_first) = (self.rows.len(), inputs.start == 0);
        Dot { x, stride: places.stride, rows, depth: inputs.len(), panel, sums, is_first, turn }
    }

    /// Products of the rows as they are with a stretch of a panel.
    fn dot_f32<'a>(
        &self,
        depth: usize,
        inputs: &Range<usize>,
        panel: &'a [f32],
        sums: &'a mut [f32],
    ) -> Dot<'a, f32, f32, f32>
    where
        Self: 'a,
    {
        let x = &self.x.x[self.rows.start * depth + inputs.start..];
        let (rows, is_first) = (self.rows.len(), inputs.start == 0);
        Dot { x, stride: depth, rows, depth: inputs.len(), panel, sums, is_first, turn: Some(self.turn) }
    }

    /// Exact products of 8 bits; `x = s (u - 128)`, so `128 * sum of the column` is taken off before scaling.
    fn compute_int8(&self, panels: &Panels, panel: usize, local: &mut Local, which: usize) {
        let bytes = panels.panel(panel);
        let (depth, rows) = (panels.padded_inputs(), self.rows.len());
        let places = Places::int8(self.table.order, depth);
        let sums = &mut local.ints[..rows * PANEL];
        let (x, stride) = (&self.x.activations.int8[places.first(&self.rows, &(0..depth))..], places.stride);
        let panel = elements::<i8>(&bytes[..depth * PANEL]);
        // SAFETY: the table was chosen by `Table::of`, which checks that this CPU has its instruction set.
        unsafe {
            let turn = Some(self.turn);
            (self.table.dot_int8)(&mut Dot { x, stride, rows, depth, panel, sums, is_first: true, turn });
        };
        let (column_sums, column_scales) = panels.int8_tail(bytes);
        let row_scales = &self.x.activations.scales[self.rows.clone()];
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
