//! Matrix products and embeddings: close to the formula, and the same bits in any company.

use kernels::{Activation, ComputeDtype, FeedForward, Isa, Linear, Ops, WeightRole};

use crate::support::{Device, MAIN, Random, assert_close, assert_same, rounded, rounded_int8};

const SHAPES: [[usize; 3]; 11] = [
    [1, 1, 1],
    [1, 33, 5],
    [3, 31, 17],
    [5, 64, 16],
    [8, 32, 576],
    [9, 70, 96],
    [13, 1, 40],
    [67, 95, 33],
    [130, 192, 64],
    [2, 40, 1100],
    [300, 33, 260],
];

const DTYPES: [ComputeDtype; 3] = [ComputeDtype::F32, ComputeDtype::Bf16, ComputeDtype::Int8];

/// Activations and weights as they are multiplied.
fn kept(x: &[f32], w: &[f32], n_in: usize, dtype: ComputeDtype) -> (Vec<f32>, Vec<f32>) {
    match dtype {
        ComputeDtype::Int8 => (rounded_int8(x, n_in), rounded_int8(w, n_in)),
        _ => (rounded(x, dtype), rounded(w, dtype)),
    }
}

fn product(x: &[f32], w: &[f32], bias: Option<&[f32]>, [rows, n_out, n_in]: [usize; 3]) -> Vec<f32> {
    let element = |i: usize| {
        let (x, w) = (&x[i / n_out * n_in..][..n_in], &w[i % n_out * n_in..][..n_in]);
        let dot: f64 = x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
        (dot + bias.map_or(0.0, |bias| f64::from(bias[i % n_out]))) as f32
    };
    (0..rows * n_out).map(element).collect()
}

#[test]
fn products_equal_the_formula_on_every_instruction_set() {
    let mut random = Random::new();
    for dtype in DTYPES {
        for (name, device) in Device::all(dtype) {
            for [rows, n_out, n_in] in SHAPES {
                let (x, w) = (random.floats(rows * n_in, 1.0), random.floats(n_out * n_in, 1.0));
                let (kept_x, kept_w) = kept(&x, &w, n_in, dtype);
                let bias = random.floats(n_out, 1.0);
                let weight = device.weight([n_out, n_in], &w, WeightRole::Matrix);
                let bias_weight = device.weight([n_out], &bias, WeightRole::VECTOR);
                let (input, out) = (device.f32([rows, n_in], &x), device.f32([rows, n_out], &vec![7.0; rows * n_out]));
                for bias in [None, Some(bias.as_slice())] {
                    device.ops.matmul(MAIN, &input, &weight, bias.map(|_| &bias_weight), &out).unwrap();
                    let expected = product(&kept_x, &kept_w, bias, [rows, n_out, n_in]);
                    let what = format!("{name} {dtype:?} {rows}x{n_out}x{n_in}");
                    assert_close(&device.read(&out), &expected, 4e-5, &what);
                }
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_alone_and_in_any_batch_on_any_threads() {
    let mut random = Random::new();
    let (n_out, n_in, rows) = (97, 147, 83);
    let (x, w) = (random.floats(rows * n_in, 1.0), random.floats(n_out * n_in, 1.0));
    for dtype in DTYPES {
        for isa in Isa::available() {
            let run = |threads: usize, first: usize, n: usize| {
                let device = Device::new(isa, threads, dtype);
                let weight = device.weight([n_out, n_in], &w, WeightRole::Matrix);
                let input = device.f32([n, n_in], &x[first * n_in..(first + n) * n_in]);
                let out = device.f32([n, n_out], &vec![0.0; n * n_out]);
                device.ops.matmul(MAIN, &input, &weight, None, &out).unwrap();
                device.read(&out)
            };
            let whole = run(1, 0, rows);
            for _ in 0..30 {
                let n = 1 + random.below(20);
                let first = random.below(rows - n + 1);
                let part = run(1 + random.below(3), first, n);
                let expected = &whole[first * n_out..(first + n) * n_out];
                assert_same(&part, expected, &format!("{isa} {dtype:?} rows {first}+{n}"));
            }
            assert_same(&run(3, 0, rows), &whole, "threads");
        }
    }
}

#[test]
fn embedding_rows_are_looked_up_scaled_and_can_be_multiplied() {
    let mut random = Random::new();
    let (vocab, hidden) = (71, 24);
    let table = random.floats(vocab * hidden, 1.0);
    let ids = [0, 70, 3, 3, 32, 31, 64];
    for dtype in [ComputeDtype::F32, ComputeDtype::Bf16] {
        let kept = rounded(&table, dtype);
        for (name, device) in Device::all(dtype) {
            let weight = device.weight([vocab, hidden], &table, WeightRole::Embedding);
            let out = device.f32([ids.len(), hidden], &vec![0.0; ids.len() * hidden]);
            device.ops.embed(MAIN, &device.u32(&ids), &weight, 3.0, &out).unwrap();
            let expected: Vec<f32> =
                ids.iter().flat_map(|&id| kept[id as usize * hidden..][..hidden].iter().map(|v| v * 3.0)).collect();
            assert_same(&device.read(&out), &expected, &name);

            let logits = device.f32([ids.len(), vocab], &vec![0.0; ids.len() * vocab]);
            device.ops.matmul(MAIN, &out, &weight, None, &logits).unwrap();
            let expected = product(&rounded(&expected, dtype), &kept, None, [ids.len(), vocab, hidden]);
            assert_close(&device.read(&logits), &expected, 4e-5, &name);
        }
    }
}

#[test]
fn a_feed_forward_layer_has_the_bits_of_its_parts() {
    let mut random = Random::new();
    for dtype in DTYPES {
        for (name, device) in Device::all(dtype) {
            for [rows, n_out, n_in] in [[1, 40, 33], [7, 96, 64], [40, 33, 70], [130, 1024, 64]] {
                let x = device.f32([rows, n_in], &random.floats(rows * n_in, 1.0));
                let mut matrix = || device.weight([n_out, n_in], &random.floats(n_out * n_in, 1.0), WeightRole::Matrix);
                let (gate, up) = (matrix(), matrix());
                let down = device.weight([n_in, n_out], &random.floats(n_out * n_in, 1.0), WeightRole::Matrix);
                let bias = device.weight([n_out], &random.floats(n_out, 1.0), WeightRole::VECTOR);
                let out = || device.f32([rows, n_out], &vec![0.0; rows * n_out]);
                let (g, u, gated) = (out(), out(), out());
                let [apart, fused] = [0, 1].map(|_| device.f32([rows, n_in], &vec![0.0; rows * n_in]));
                for activation in [Activation::Silu, Activation::GeluTanh] {
                    device.ops.matmul(MAIN, &x, &gate, Some(&bias), &g).unwrap();
                    device.ops.matmul(MAIN, &x, &up, None, &u).unwrap();
                    device.ops.gated_activation(MAIN, activation, &g, &u, &gated).unwrap();
                    device.ops.matmul(MAIN, &gated, &down, None, &apart).unwrap();
                    let linear = |weight, bias| Linear { weight, bias };
                    let [gate, up, down] = [linear(&gate, Some(&bias)), linear(&up, None), linear(&down, None)];
                    let args = FeedForward { gate, up, down, activation, gated: &gated };
                    device.ops.feed_forward(MAIN, &x, &args, &fused).unwrap();
                    assert_same(&device.read(&fused), &device.read(&apart), &format!("{name} {dtype:?}"));
                }
            }
        }
    }
}
