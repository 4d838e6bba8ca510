//! Matrix products: every format at SmolLM2's shapes and a large square one, from one row to thousands.

use kernels::tensor::as_bytes;
use kernels::{DType, Error, Ops, RawWeight, Shape, StreamId, Tensor, Weight, WeightFormat, WeightRole};

use super::{Bench, Cost, FORMATS, OperatorResult};
use crate::random::Random;
use crate::roofline::arithmetic;

/// Inputs and outputs: SmolLM2-135M's matrices and output head, and a square one.
const SHAPES: [[usize; 2]; 5] = [[576, 1536], [1536, 576], [576, 576], [576, 49_152], [2048, 2048]];

/// Longest test; rows that would take longer, judged by fewer rows, are left out.
const SECONDS_MAX: f64 = 2.0;

/// Most copies of one weight.
const COPIES_MAX: usize = 512;

pub(super) fn run(bench: &mut Bench<'_>) -> Result<(), Error> {
    for format in bench.options.formats.clone() {
        for [k, n] in SHAPES {
            // A row must be whole blocks of the format.
            if format.row_bytes(k).is_ok() {
                shape(bench, format, [k, n])?;
            }
        }
    }
    Ok(())
}

fn shape(bench: &mut Bench<'_>, format: WeightFormat, [k, n]: [usize; 2]) -> Result<(), Error> {
    let ops = bench.ops;
    let name = FORMATS.iter().find(|(_, known)| *known == format).map_or("", |(name, _)| name);
    (bench.progress)(&format!("matmul {name} {k} x {n}"));
    let weights = weights(bench, format, [k, n])?;
    let mut rows = bench.options.rows.clone();
    rows.sort_unstable();
    let mut seconds_per_row = 0.0;
    for m in rows {
        if seconds_per_row * m as f64 > SECONDS_MAX {
            break;
        }
        let (x, out) = (random(ops, [m, k])?, zeros(ops, [m, n])?);
        let arithmetic = arithmetic(bench.options.dtype, format);
        let cost = Cost { bytes: weights[0].n_bytes() as f64, flops: 2.0 * (m * k * n) as f64, arithmetic };
        let what = OperatorResult {
            kernel: "matmul",
            format: Some(name),
            m,
            k: Some(k),
            n: Some(n),
            ..OperatorResult::default()
        };
        let call = |number: usize| ops.matmul(StreamId::MAIN, &x, &weights[number % weights.len()], None, &out);
        seconds_per_row = bench.note(what, cost, |_| Ok(()), call)? / m as f64;
    }
    Ok(())
}

/// Copies of one random weight, so many that reading them one after the other goes to memory.
fn weights(bench: &Bench<'_>, format: WeightFormat, [k, n]: [usize; 2]) -> Result<Vec<Weight>, Error> {
    let shape = Shape::from([n, k]);
    let bytes = weight_bytes(format, n * k);
    let raw = RawWeight { bytes: &bytes, format, shape };
    let first = bench.ops.load_weight(raw, WeightRole::Matrix)?;
    let n_copies = bench.options.spread_bytes.div_ceil(first.n_bytes().max(1)).clamp(1, COPIES_MAX);
    let copies = (1..n_copies).map(|_| bench.ops.load_weight(raw, WeightRole::Matrix));
    std::iter::once(Ok(first)).chain(copies).collect()
}

/// Random bytes of a format whose scales are small finite numbers.
fn weight_bytes(format: WeightFormat, elements: usize) -> Vec<u8> {
    let mut random = Random::new(0, 2);
    let n_blocks = elements / format.block_elements();
    let mut bytes = Vec::with_capacity(n_blocks * format.block_bytes());
    while bytes.len() < n_blocks * format.block_bytes() {
        bytes.extend_from_slice(&random.next().to_le_bytes());
    }
    bytes.truncate(n_blocks * format.block_bytes());
    // 0.01 in f16; bf16 and f32 get exponents of small numbers below.
    let scale = 0x211fu16.to_le_bytes();
    for block in bytes.chunks_exact_mut(format.block_bytes()) {
        match format {
            // Sign and a fixed exponent stay, the mantissa is random.
            WeightFormat::F32 => block[3] = block[3] & 0x80 | 0x3c,
            WeightFormat::Bf16 => block[1] = block[1] & 0x80 | 0x3c,
            WeightFormat::F16 => block[1] = block[1] & 0x80 | 0x20,
            WeightFormat::Q8_0 | WeightFormat::Q4_0 | WeightFormat::Q5_0 => block[..2].copy_from_slice(&scale),
            WeightFormat::Q4_1 | WeightFormat::Q5_1 | WeightFormat::Q4K | WeightFormat::Q5K => {
                block[..2].copy_from_slice(&scale);
                block[2..4].copy_from_slice(&scale);
            }
            WeightFormat::Q6K => block[208..210].copy_from_slice(&scale),
        }
    }
    bytes
}

/// A tensor of numbers in -1..1.
pub(super) fn random<const N: usize>(ops: &dyn Ops, dims: [usize; N]) -> Result<Tensor, Error> {
    let tensor = zeros(ops, dims)?;
    let mut random = Random::new(0, 3);
    let values: Vec<f32> = (0..dims.iter().product()).map(|_| (random.unit() * 2.0 - 1.0) as f32).collect();
    ops.upload(StreamId::MAIN, as_bytes(&values), &tensor)?;
    Ok(tensor)
}

/// A tensor of zeros.
pub(super) fn zeros<const N: usize>(ops: &dyn Ops, dims: [usize; N]) -> Result<Tensor, Error> {
    let shape = Shape::new(&dims).ok_or(Error::OutOfMemory { bytes: usize::MAX })?;
    ops.alloc(shape, DType::F32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_weights_of_every_format_are_small_and_finite() {
        for (_, format) in FORMATS {
            let mut values = vec![0.0; 1024];
            kernels::quant::dequantize(format, &weight_bytes(format, 1024), &mut values).unwrap();
            let largest = values.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
            assert!(
                values.iter().all(|value| value.is_finite()) && largest > 0.0 && largest < 1000.0,
                "{format:?}: {largest}"
            );
        }
    }
}
