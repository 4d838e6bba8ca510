//! Operators that do little with each number: bounded by memory, or by the caches when what they touch fits.

use kernels::bound::Arithmetic;
use kernels::tensor::as_bytes;
use kernels::{
    Activation, DType, Error, Norm, Ops, RawWeight, RopeStyle, RopeTable, Shape, StreamId, WeightFormat, WeightRole,
};

use super::matmul::{random, zeros};
use super::{Bench, Cost, OperatorResult};

/// SmolLM2-135M's sizes.
const HIDDEN: usize = 576;
const INNER: usize = 1536;
const HEADS: usize = 9;
const DIM: usize = 64;
/// Tokens of a step.
const ROWS: [usize; 3] = [1, 32, 512];
const THETA: f32 = 100_000.0;

pub(super) fn rms_norm(bench: &mut Bench<'_>) -> Result<(), Error> {
    let ops = bench.ops;
    let ones = [1.0f32; HIDDEN];
    let raw = RawWeight { bytes: as_bytes(&ones), format: WeightFormat::F32, shape: Shape::from([HIDDEN]) };
    let norm = Norm { weight: ops.load_weight(raw, WeightRole::VECTOR)?, epsilon: 1e-5 };
    for m in ROWS {
        let (x, out) = (random(ops, [m, HIDDEN])?, zeros(ops, [m, HIDDEN])?);
        let call = |_| ops.rms_norm(StreamId::MAIN, &x, &norm, &out);
        note(bench, ("rms_norm", m, HIDDEN), (2.0, 4.0), call)?;
    }
    Ok(())
}

pub(super) fn rope(bench: &mut Bench<'_>) -> Result<(), Error> {
    let ops = bench.ops;
    let frequency = |pair: usize| THETA.powf(-2.0 * pair as f32 / DIM as f32);
    let frequencies: Vec<f32> = (0..DIM / 2).map(frequency).collect();
    let table = RopeTable::build(ops, &frequencies, 1.0, ROWS[2], RopeStyle::HalfSplit)?;
    for m in ROWS {
        let x = random(ops, [m, HEADS, DIM])?;
        let positions: Vec<u32> = (0..m as u32).collect();
        let on_device = ops.alloc(Shape::from([m]), DType::U32)?;
        ops.upload(StreamId::MAIN, as_bytes(&positions), &on_device)?;
        let call = |_| ops.rope(StreamId::MAIN, &x, &on_device, &table);
        note(bench, ("rope", m, HEADS * DIM), (2.0, 3.0), call)?;
    }
    Ok(())
}

pub(super) fn gated_activation(bench: &mut Bench<'_>) -> Result<(), Error> {
    let ops = bench.ops;
    for m in ROWS {
        let (gate, up, out) = (random(ops, [m, INNER])?, random(ops, [m, INNER])?, zeros(ops, [m, INNER])?);
        let call = |_| ops.gated_activation(StreamId::MAIN, Activation::Silu, &gate, &up, &out);
        // The exponential is counted as ten operations.
        note(bench, ("gated_activation", m, INNER), (3.0, 13.0), call)?;
    }
    Ok(())
}

/// Times `call`, which touches `touched` f32 tensors of `m` times `n` and does `flops` operations for each element.
fn note(
    bench: &mut Bench<'_>,
    (kernel, m, n): (&'static str, usize, usize),
    (touched, flops): (f64, f64),
    call: impl FnMut(usize) -> Result<(), Error>,
) -> Result<(), Error> {
    (bench.progress)(&format!("{kernel} {m} x {n}"));
    let elements = (m * n) as f64;
    let cost = Cost { bytes: 4.0 * touched * elements, flops: flops * elements, arithmetic: Arithmetic::F32 };
    let what = OperatorResult { kernel, m, n: Some(n), ..OperatorResult::default() };
    bench.note(what, cost, |_| Ok(()), call).map(drop)
}
