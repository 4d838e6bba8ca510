//! Every file format becomes the matrix that its blocks stand for.

use kernels::{ComputeDtype, Isa, Ops, RawWeight, Shape, WeightFormat, WeightRole, quant};

use crate::support::{Device, MAIN, Random, assert_close, assert_same, rounded, rounded_int8};

#[test]
fn quantised_matrices_multiply_as_their_dequantised_values() {
    use WeightFormat::*;
    let mut random = Random::new();
    let (n_out, n_in) = (37, 512);
    for format in [F16, Bf16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4K, Q5K, Q6K] {
        // Random bytes that are small wherever a format reads an f16 or bf16: no infinity, no NaN.
        let n = n_out * format.row_bytes(n_in).unwrap();
        let bytes: Vec<u8> = (0..n).map(|_| (random.next() & 0x3f) as u8).collect();
        let mut values = vec![0.0; n_out * n_in];
        quant::dequantize(format, &bytes, &mut values).unwrap();
        let x = random.floats(n_in, 1.0);
        for dtype in [ComputeDtype::F32, ComputeDtype::Bf16] {
            let kept = rounded(&values, dtype);
            for (name, device) in Device::all(dtype) {
                let raw = RawWeight { bytes: &bytes, format, shape: Shape::from([n_out, n_in]) };
                let weight = device.ops.load_weight(raw, WeightRole::Matrix).unwrap();
                let out = device.f32([1, n_out], &vec![0.0; n_out]);
                device.ops.matmul(MAIN, &device.f32([1, n_in], &x), &weight, None, &out).unwrap();
                let x = rounded(&x, dtype);
                let scale = kept.iter().fold(0.0f32, |m, v| m.max(v.abs()));
                let dot =
                    |row: &[f32]| row.iter().zip(&x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum::<f64>() as f32;
                let expected: Vec<f32> = kept.chunks_exact(n_in).map(dot).collect();
                let normal = |v: Vec<f32>| v.into_iter().map(|v| v / scale).collect::<Vec<_>>();
                assert_close(&normal(device.read(&out)), &normal(expected), 1e-4, &format!("{name} {format:?}"));
            }
        }
    }
}

fn quantised() -> impl Iterator<Item = WeightFormat> {
    WeightFormat::ALL.into_iter().filter(|format| format.block_elements() > 1)
}

/// Quantised formats in 8 bits: the matrix is what the blocks stand for, its products those of activations rounded to 8
/// bits in groups of 32.
#[test]
fn quantised_matrices_multiply_with_activations_of_8_bits() {
    let mut random = Random::new();
    for format in quantised() {
        for (n_out, n_in) in [(37, 512), (64, 768), (9, 256)] {
            let (bytes, values) = raw(&mut random, format, n_out, n_in);
            let ids: Vec<u32> = (0..n_out as u32).rev().collect();
            let looked_up = values.chunks_exact(n_in).rev().flatten().copied().collect::<Vec<_>>();
            for (name, device) in Device::all(ComputeDtype::Int8) {
                let raw = RawWeight { bytes: &bytes, format, shape: Shape::from([n_out, n_in]) };
                let weight = device.ops.load_weight(raw, WeightRole::Embedding).unwrap();
                for rows in [1, 3, 23] {
                    let x = random.floats(rows * n_in, 1.0);
                    let out = device.f32([rows, n_out], &vec![0.0; rows * n_out]);
                    device.ops.matmul(MAIN, &device.f32([rows, n_in], &x), &weight, None, &out).unwrap();
                    let kept = rounded_int8(&x, 32);
                    let what = format!("{name} {format:?} {rows} rows of {n_out}x{n_in}");
                    let actual = device.read(&out);
                    for (row, (x, actual)) in kept.chunks_exact(n_in).zip(actual.chunks_exact(n_out)).enumerate() {
                        for (w, actual) in values.chunks_exact(n_in).zip(actual) {
                            let products = || w.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x));
                            let (expected, size) = (products().sum::<f64>(), products().map(f64::abs).sum::<f64>());
                            let error = (f64::from(*actual) - expected).abs();
                            assert!(error <= 3e-5 * size + 1e-30, "{what}: row {row} is {actual}, expected {expected}");
                        }
                    }
                }
                let table = device.f32([n_out, n_in], &vec![0.0; n_out * n_in]);
                device.ops.embed(MAIN, &device.u32(&ids), &weight, 1.0, &table).unwrap();
                assert_eq!(device.read(&table), looked_up, "{name} {format:?} looked up");
            }
        }
    }
}

/// A format as it is stored has the bits of the one that it is computed in: quantised ones those of bf16.
#[test]
fn stored_matrices_have_the_bits_of_what_they_are_computed_in() {
    use WeightFormat::*;
    let mut random = Random::new();
    let in_bf16 = quantised().map(|format| (format, ComputeDtype::Bf16));
    let plain = [(F32, ComputeDtype::F32), (F16, ComputeDtype::F32), (Bf16, ComputeDtype::Bf16)];
    for (format, dtype) in in_bf16.chain(plain) {
        for (n_out, n_in) in [(37, 512), (64, 768), (9, 256), (33, 2304)] {
            let (bytes, _) = raw(&mut random, format, n_out, n_in);
            let ids: Vec<u32> = (0..n_out as u32).rev().collect();
            for isa in Isa::available() {
                for rows in [1, 2, 5, 13, 40] {
                    let x = random.floats(rows * n_in, 1.0);
                    let [stored, converted] = [ComputeDtype::Stored, dtype].map(|dtype| {
                        let device = Device::new(isa, 2, dtype);
                        let raw = RawWeight { bytes: &bytes, format, shape: Shape::from([n_out, n_in]) };
                        let weight = device.ops.load_weight(raw, WeightRole::Embedding).unwrap();
                        let out = device.f32([rows, n_out], &vec![0.0; rows * n_out]);
                        device.ops.matmul(MAIN, &device.f32([rows, n_in], &x), &weight, None, &out).unwrap();
                        let table = device.f32([n_out, n_in], &vec![0.0; n_out * n_in]);
                        device.ops.embed(MAIN, &device.u32(&ids), &weight, 1.0, &table).unwrap();
                        [device.read(&out), device.read(&table)].concat()
                    });
                    assert_same(&stored, &converted, &format!("{isa} {format:?} {rows} rows of {n_out}x{n_in}"));
                }
            }
        }
    }
}

/// What is no number in a file stays so, and infinity too.
#[test]
fn scales_that_are_no_numbers_show_in_results() {
    for format in quantised() {
        for bits in [0x7e00u16, 0x7c00] {
            let n = format.row_bytes(256).unwrap();
            // Every f16 that a format reads has these bits.
            let bytes: Vec<u8> = bits.to_le_bytes().into_iter().cycle().take(n).collect();
            for (name, device) in Device::all(ComputeDtype::Stored) {
                let raw = RawWeight { bytes: &bytes, format, shape: Shape::from([1, 256]) };
                let weight = device.ops.load_weight(raw, WeightRole::Matrix).unwrap();
                let out = device.f32([1, 1], &[0.0]);
                device.ops.matmul(MAIN, &device.f32([1, 256], &[1.0; 256]), &weight, None, &out).unwrap();
                assert!(!device.read(&out)[0].is_finite(), "{name} {format:?} {bits:x}");
            }
        }
    }
}

/// A row has the same bits alone and in any batch.
#[test]
fn products_do_not_depend_on_company() {
    let mut random = Random::new();
    let (n_out, n_in, rows) = (70, 512, 41);
    let stored = WeightFormat::ALL.into_iter().map(|format| (format, ComputeDtype::Stored));
    for (format, dtype) in stored.chain(quantised().map(|format| (format, ComputeDtype::Int8))) {
        let (bytes, _) = raw(&mut random, format, n_out, n_in);
        let x = random.floats(rows * n_in, 1.0);
        for isa in Isa::available() {
            let devices = [1, 2, 3].map(|threads| Device::new(isa, threads, dtype));
            let run = |device: &Device, first: usize, n: usize| {
                let raw = RawWeight { bytes: &bytes, format, shape: Shape::from([n_out, n_in]) };
                let weight = device.ops.load_weight(raw, WeightRole::Matrix).unwrap();
                let out = device.f32([n, n_out], &vec![0.0; n * n_out]);
                let x = device.f32([n, n_in], &x[first * n_in..(first + n) * n_in]);
                device.ops.matmul(MAIN, &x, &weight, None, &out).unwrap();
                device.read(&out)
            };
            let whole = run(&devices[0], 0, rows);
            for round in 0..12 {
                let n = 1 + random.below(20);
                let first = random.below(rows - n + 1);
                let part = run(&devices[round % 3], first, n);
                assert_same(
                    &part,
                    &whole[first * n_out..(first + n) * n_out],
                    &format!("{isa} {format:?} as {dtype:?} {first}+{n}"),
                );
            }
        }
    }
}

/// Random bytes of a format that are small wherever it reads an f16 or bf16 (no infinity, no NaN), and their values.
fn raw(random: &mut Random, format: WeightFormat, n_out: usize, n_in: usize) -> (Vec<u8>, Vec<f32>) {
    let n = n_out * format.row_bytes(n_in).unwrap();
    let mut bytes: Vec<u8> = (0..n).map(|_| (random.next() & 0xff) as u8).collect();
    let (block, halves): (usize, &[usize]) = match format {
        WeightFormat::F32 => (4, &[2]),
        WeightFormat::F16 | WeightFormat::Bf16 => (2, &[0]),
        WeightFormat::Q4_1 | WeightFormat::Q5_1 | WeightFormat::Q4K | WeightFormat::Q5K => {
            (format.block_bytes(), &[0, 2])
        }
        WeightFormat::Q6K => (format.block_bytes(), &[208]),
        _ => (format.block_bytes(), &[0]),
    };
    for block in bytes.chunks_exact_mut(block) {
        halves.iter().for_each(|&at| block[at + 1] &= 0x3f);
    }
    let mut values = vec![0.0; n_out * n_in];
    quant::dequantize(format, &bytes, &mut values).unwrap();
    (bytes, values)
}

#[test]
fn all_formats_load_as_vectors_too() {
    let device = Device::scalar(ComputeDtype::Bf16);
    let raw = RawWeight { bytes: &[0x80, 0x3f], format: WeightFormat::Bf16, shape: Shape::from([1]) };
    assert_eq!(device.ops.load_weight(raw, WeightRole::VECTOR).unwrap().n_bytes(), 4);
}
