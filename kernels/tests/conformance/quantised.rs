//! Every file format becomes the matrix that its blocks stand for.

use kernels::{ComputeDtype, Isa, Ops, RawWeight, Shape, WeightFormat, WeightRole, quant};

use crate::support::{Device, MAIN, Random, assert_close, assert_same, rounded};

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

/// Every format as it is stored: the matrix is what the blocks stand for, its products those of the same values as
/// bf16, bit for bit (f16 and f32: of f32).
#[test]
fn stored_matrices_multiply_as_if_unpacked_first() {
    use WeightFormat::*;
    let mut random = Random::new();
    for format in [F32, F16, Bf16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4K, Q5K, Q6K] {
        for (n_out, n_in) in [(37, 512), (64, 768), (9, 256)] {
            let (bytes, values) = raw(&mut random, format, n_out, n_in);
            let unpacked = if matches!(format, F32 | F16) { ComputeDtype::F32 } else { ComputeDtype::Bf16 };
            let ids: Vec<u32> = (0..n_out as u32).rev().collect();
            for rows in [1, 3, 20] {
                let x = random.floats(rows * n_in, 1.0);
                for isa in Isa::available() {
                    let run = |dtype| {
                        let device = Device::new(isa, 2, dtype);
                        let raw = RawWeight { bytes: &bytes, format, shape: Shape::from([n_out, n_in]) };
                        let weight = device.ops.load_weight(raw, WeightRole::Embedding).unwrap();
                        let out = device.f32([rows, n_out], &vec![0.0; rows * n_out]);
                        device.ops.matmul(MAIN, &device.f32([rows, n_in], &x), &weight, None, &out).unwrap();
                        let table = device.f32([n_out, n_in], &vec![0.0; n_out * n_in]);
                        device.ops.embed(MAIN, &device.u32(&ids), &weight, 1.0, &table).unwrap();
                        (device.read(&out), device.read(&table))
                    };
                    let ((stored, table), (reference, _)) = (run(ComputeDtype::Stored), run(unpacked));
                    assert_same(&stored, &reference, &format!("{isa} {format:?} {rows} rows of {n_out}x{n_in}"));
                    let expected = values.chunks_exact(n_in).rev().flatten().copied().collect::<Vec<_>>();
                    assert_eq!(table, expected, "{isa} {format:?} looked up");
                }
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
        WeightFormat::Q4_1 | WeightFormat::Q5_1 | WeightFormat::Q4K | WeightFormat::Q5K => (format.block_bytes(), &[0, 2]),
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
