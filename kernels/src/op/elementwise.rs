//! Operators that touch each element once: add, scale, soft cap, copy and gather.
//!
//! The plain forms are the only ones: rounding is the same at any width.

use crate::cpu::Machine;
use crate::cpu::access::{Access, Shared};
use crate::error::Result;
use crate::tensor::{DType, Tensor};

/// Elements of one chunk.
const CHUNK: usize = 16_384;

/// `x += y`.
pub(crate) fn add(machine: &mut Machine, access: &Access, x: &Tensor, y: &Tensor) -> Result<()> {
    access.shape("y", y, y.shape() == x.shape(), "the shape of x")?;
    let addend = access.read::<f32>("y", y, DType::F32)?;
    // SAFETY: the other tensor of this call is named.
    let values = unsafe { access.write::<f32>("x", x, DType::F32, &[y])? };
    let add = machine.table.add;
    each_chunk(machine, values, &|start, x| {
        // SAFETY: the table was chosen by `Table::of`, which checks that this CPU has its instruction set.
        unsafe { add(x, &addend[start..start + x.len()]) };
    });
    Ok(())
}

/// The plain sum, for every instruction set: the compiler makes vectors of it.
#[inline(always)]
pub(crate) fn add_to(x: &mut [f32], y: &[f32]) {
    for (x, y) in x.iter_mut().zip(y) {
        *x += y;
    }
}

/// `x *= factor`.
pub(crate) fn scale(machine: &mut Machine, access: &Access, x: &Tensor, factor: f32) -> Result<()> {
    // SAFETY: `x` is the only tensor of this call.
    let values = unsafe { access.write::<f32>("x", x, DType::F32, &[])? };
    each_chunk(machine, values, &|_, x| x.iter_mut().for_each(|x| *x *= factor));
    Ok(())
}

/// `x = cap * tanh(x / cap)`.
pub(crate) fn soft_cap(machine: &mut Machine, access: &Access, x: &Tensor, cap: f32) -> Result<()> {
    // SAFETY: `x` is the only tensor of this call.
    let values = unsafe { access.write::<f32>("x", x, DType::F32, &[])? };
    each_chunk(machine, values, &|_, x| x.iter_mut().for_each(|x| *x = cap * (*x / cap).tanh()));
    Ok(())
}

/// `out[i] = x[rows[i]]`.
pub(crate) fn gather_rows(access: &Access, x: &Tensor, rows: &Tensor, out: &Tensor) -> Result<()> {
    let n = rows.shape().elements();
    let expected = [n, x.shape().columns()];
    access.shape("x", x, x.dims().len() == 2, "[tokens, hidden]")?;
    access.shape("rows", rows, rows.dims().len() == 1, "[n]")?;
    access.shape("out", out, out.dims() == expected, format_args!("{expected:?}"))?;
    let hidden = expected[1];
    let input = access.read::<f32>("x", x, DType::F32)?;
    let indices = access.read::<u32>("rows", rows, DType::U32)?;
    indices.iter().try_for_each(|&row| access.index("row", row as usize, x.dims()[0]))?;
    // SAFETY: the other tensors of this call are named.
    let output = unsafe { access.write::<f32>("out", out, DType::F32, &[x, rows])? };
    for (&row, out) in indices.iter().zip(output.chunks_exact_mut(hidden.max(1))) {
        out.copy_from_slice(&input[row as usize * hidden..][..hidden]);
    }
    Ok(())
}

fn each_chunk(machine: &mut Machine, values: &mut [f32], body: &(dyn Fn(usize, &mut [f32]) + Sync)) {
    let len = values.len();
    let values = Shared::new(values);
    machine.run(len, len.div_ceil(CHUNK), &|_, chunk| {
        let start = chunk * CHUNK;
        // SAFETY: chunks are disjoint.
        body(start, unsafe { values.part(start, CHUNK.min(len - start)) });
    });
}
