//! Every file format becomes the matrix that its blocks stand for.

use kernels::{ComputeDtype, Ops, RawWeight, Shape, WeightFormat, WeightRole, quant};

use crate::support::{Device, MAIN, Random, assert_close, rounded};

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

#[test]
fn all_formats_load_as_vectors_too() {
    let device = Device::scalar(ComputeDtype::Bf16);
    let raw = RawWeight { bytes: &[0x80, 0x3f], format: WeightFormat::Bf16, shape: Shape::from([1]) };
    assert_eq!(device.ops.load_weight(raw, WeightRole::VECTOR).unwrap().n_bytes(), 4);
}
