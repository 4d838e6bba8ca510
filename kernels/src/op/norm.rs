//! Root-mean-square norms: `x / sqrt(mean(x^2) + epsilon) * weight` over the last dimension.
//!
//! # Shapes
//! `x, residual, out: [.., hidden]` f32, `weight: [hidden]` f32. Heads: `[tokens, heads, dim]` with weight `[dim]`.
//! Source: Zhang and Sennrich, Root Mean Square Layer Normalization (2019), in the order Hugging Face computes it.

use crate::cpu::Machine;
use crate::cpu::access::{Access, Shared};
use crate::cpu::table::Table;
use crate::error::Result;
use crate::ops::Norm;
use crate::tensor::{DType, Tensor};

/// `out = norm(x)`.
pub(crate) fn run(machine: &mut Machine, access: &Access, x: &Tensor, norm: &Norm, out: &Tensor) -> Result<()> {
    let weight = access.vector("weight", &norm.weight, x.shape().columns())?;
    access.shape("out", out, out.shape() == x.shape(), "the shape of x")?;
    let input = access.read::<f32>("x", x, DType::F32)?;
    // SAFETY: `x` is the only other tensor of this call.
    let output = unsafe { access.write::<f32>("out", out, DType::F32, &[x])? };
    let (table, hidden) = (machine.table, weight.len());
    let output = Shared::new(output);
    each_row(machine, input.len(), hidden, &|row| {
        let x = &input[row * hidden..(row + 1) * hidden];
        // SAFETY: each row is one chunk.
        let out = unsafe { output.part(row * hidden, hidden) };
        row_norm(table, x, weight, norm.epsilon, out);
    });
    Ok(())
}

/// `residual += x; out = norm(residual)`.
pub(crate) fn run_add(
    machine: &mut Machine,
    access: &Access,
    residual: &Tensor,
    x: &Tensor,
    norm: &Norm,
    out: &Tensor,
) -> Result<()> {
    let weight = access.vector("weight", &norm.weight, x.shape().columns())?;
    access.shape("residual", residual, residual.shape() == x.shape(), "the shape of x")?;
    access.shape("out", out, out.shape() == x.shape(), "the shape of x")?;
    let input = access.read::<f32>("x", x, DType::F32)?;
    // SAFETY: `x`, `residual` and `out` are all tensors of this call, and each output names the two others.
    let (sum, output) = unsafe {
        let sum = access.write::<f32>("residual", residual, DType::F32, &[x, out])?;
        (sum, access.write::<f32>("out", out, DType::F32, &[x, residual])?)
    };
    let (table, hidden) = (machine.table, weight.len());
    let (sum, output) = (Shared::new(sum), Shared::new(output));
    each_row(machine, input.len(), hidden, &|row| {
        let x = &input[row * hidden..(row + 1) * hidden];
        // SAFETY: each row is one chunk.
        let (sum, out) = unsafe { (sum.part(row * hidden, hidden), output.part(row * hidden, hidden)) };
        // SAFETY: the table was chosen by `Table::of`, which checks that this CPU has its instruction set.
        unsafe { (table.add)(sum, x) };
        row_norm(table, sum, weight, norm.epsilon, out);
    });
    Ok(())
}

/// `x = norm(x)` over the last dimension, in place.
pub(crate) fn run_heads(machine: &mut Machine, access: &Access, x: &Tensor, norm: &Norm) -> Result<()> {
    access.shape("x", x, x.dims().len() == 3, "[tokens, heads, dim]")?;
    let weight = access.vector("weight", &norm.weight, x.shape().columns())?;
    // SAFETY: `x` is the only tensor of this call.
    let values = unsafe { access.write::<f32>("x", x, DType::F32, &[])? };
    let (table, dim, len) = (machine.table, weight.len(), values.len());
    let values = Shared::new(values);
    each_row(machine, len, dim, &|row| {
        // SAFETY: each row is one chunk.
        let x = unsafe { values.part(row * dim, dim) };
        let inverse = inverse_rms(table, x, norm.epsilon);
        x.iter_mut().zip(weight).for_each(|(x, weight)| *x = *x * inverse * weight);
    });
    Ok(())
}

/// Calls `body` for each row, several rows to a chunk.
fn each_row(machine: &mut Machine, len: usize, hidden: usize, body: &(dyn Fn(usize) + Sync)) {
    let rows = len.checked_div(hidden).unwrap_or(0);
    let group = 4096usize.checked_div(hidden).unwrap_or(0).max(1);
    machine.run(len, rows.div_ceil(group), &|_, chunk| {
        (chunk * group..rows.min((chunk + 1) * group)).for_each(body);
    });
}

fn row_norm(table: &Table, x: &[f32], weight: &[f32], epsilon: f32, out: &mut [f32]) {
    // SAFETY: the table was chosen by `Table::of`, which checks that this CPU has its instruction set.
    unsafe { (table.normalize)(x, inverse_rms(table, x, epsilon), weight, out) };
}

fn inverse_rms(table: &Table, x: &[f32], epsilon: f32) -> f32 {
    // SAFETY: the table was chosen by `Table::of`, which checks that this CPU has its instruction set.
    let squares = unsafe { (table.sum_squares)(x) };
    1.0 / (squares / x.len() as f32 + epsilon).sqrt()
}

/// The plain scaling of a row, for every instruction set: the compiler makes vectors of it.
#[inline(always)]
pub(crate) fn normalize(x: &[f32], factor: f32, weight: &[f32], out: &mut [f32]) {
    for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
        *out = x * factor * weight;
    }
}

/// The plain sum of squares, accumulated in f64: what all others approximate.
pub(crate) fn reference_sum_squares(x: &[f32]) -> f32 {
    x.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>() as f32
}
