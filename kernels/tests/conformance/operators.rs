//! Norms, rotations, activations and element-wise operators against their formulas.

use kernels::{Activation, ComputeDtype, DType, Error, Norm, Ops, RopeStyle, RopeTable, WeightRole};

use crate::support::{Device, MAIN, Random, assert_close, assert_same};

fn normed(x: &[f32], weight: &[f32], epsilon: f32) -> Vec<f32> {
    x.chunks_exact(weight.len())
        .flat_map(|row| {
            let mean = row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / row.len() as f64;
            let inverse = 1.0 / (mean + f64::from(epsilon)).sqrt();
            row.iter().zip(weight).map(move |(x, w)| (f64::from(*x) * inverse * f64::from(*w)) as f32)
        })
        .collect()
}

#[test]
fn norms_equal_the_formula() {
    let mut random = Random::new();
    for (name, device) in Device::all(ComputeDtype::F32) {
        for [rows, hidden] in [[1, 1], [3, 7], [5, 16], [2, 33], [129, 576]] {
            let (x, y, w) =
                (random.floats(rows * hidden, 2.0), random.floats(rows * hidden, 2.0), random.floats(hidden, 1.0));
            let weight = device.weight([hidden], &w, WeightRole::Vector { offset: 1.0 });
            let w: Vec<f32> = w.iter().map(|w| w + 1.0).collect();
            let norm = Norm { weight, epsilon: 1e-5 };
            let (input, other) = (device.f32([rows, hidden], &x), device.f32([rows, hidden], &y));
            let out = device.zeros([rows, hidden], DType::F32);
            device.ops.rms_norm(MAIN, &input, &norm, &out).unwrap();
            assert_close(&device.read(&out), &normed(&x, &w, 1e-5), 1e-5, &name);

            device.ops.add_rms_norm(MAIN, &input, &other, &norm, &out).unwrap();
            let sum: Vec<f32> = x.iter().zip(&y).map(|(x, y)| x + y).collect();
            assert_same(&device.read(&input), &sum, &name);
            assert_close(&device.read(&out), &normed(&sum, &w, 1e-5), 1e-5, &name);

            let heads = device.f32([rows, 1, hidden], &x);
            device.ops.head_rms_norm(MAIN, &heads, &norm).unwrap();
            assert_close(&device.read(&heads), &normed(&x, &w, 1e-5), 1e-5, &name);
        }
    }
}

#[test]
fn rotations_turn_the_right_pairs() {
    let mut random = Random::new();
    let frequencies = [1.0f32, 0.1, 0.01];
    let positions = [0u32, 5, 2, 99];
    for style in [RopeStyle::HalfSplit, RopeStyle::Interleaved] {
        for (name, device) in Device::all(ComputeDtype::F32) {
            let (heads, dim) = (3, 8);
            let x = random.floats(positions.len() * heads * dim, 1.0);
            let tensor = device.f32([positions.len(), heads, dim], &x);
            let table = RopeTable::build(&device.ops, &frequencies, 1.5, 100, style).unwrap();
            device.ops.rope(MAIN, &tensor, &device.u32(&positions), &table).unwrap();
            let mut expected = x.clone();
            for (row, head) in expected.chunks_exact_mut(dim).enumerate() {
                for (pair, frequency) in frequencies.iter().enumerate() {
                    let (a, b) = match style {
                        RopeStyle::HalfSplit => (pair, pair + 3),
                        RopeStyle::Interleaved => (2 * pair, 2 * pair + 1),
                    };
                    let (sin, cos) = (positions[row / heads] as f32 * frequency).sin_cos();
                    (head[a], head[b]) = (1.5 * (head[a] * cos - head[b] * sin), 1.5 * (head[b] * cos + head[a] * sin));
                }
            }
            assert_close(&device.read(&tensor), &expected, 1e-6, &format!("{name} {style:?}"));
        }
    }
}

#[test]
fn activations_equal_the_formula_from_tiny_to_saturated() {
    let mut random = Random::new();
    for (name, device) in Device::all(ComputeDtype::F32) {
        for n in [1, 15, 16, 17, 1000, 9001] {
            let (mut gate, up) = (random.floats(n, 12.0), random.floats(n, 2.0));
            for (target, value) in gate.iter_mut().zip([0.0, -0.0, 1e-6, -120.0, 120.0, 88.5, -88.5, 1e4]) {
                *target = value;
            }
            for activation in [Activation::Silu, Activation::GeluTanh] {
                let formula = |x: f64| match activation {
                    Activation::Silu => x / (1.0 + (-x).exp()),
                    Activation::GeluTanh => {
                        0.5 * x * (1.0 + (0.797_884_560_802_865_4 * (x + 0.044715 * x.powi(3))).tanh())
                    }
                };
                let out = device.zeros([n], DType::F32);
                let (g, u) = (device.f32([n], &gate), device.f32([n], &up));
                device.ops.gated_activation(MAIN, activation, &g, &u, &out).unwrap();
                let expected: Vec<f32> =
                    gate.iter().zip(&up).map(|(g, u)| (formula(f64::from(*g)) * f64::from(*u)) as f32).collect();
                assert_close(&device.read(&out), &expected, 2e-6, &format!("{name} {activation:?} {n}"));
            }
        }
    }
}

#[test]
fn not_a_number_is_not_hidden() {
    for (name, device) in Device::all(ComputeDtype::F32) {
        let (g, u) = (device.f32([20], &[f32::NAN; 20]), device.f32([20], &[1.0; 20]));
        let out = device.zeros([20], DType::F32);
        device.ops.gated_activation(MAIN, Activation::Silu, &g, &u, &out).unwrap();
        assert!(device.read(&out).iter().all(|value| value.is_nan()), "{name}");
    }
}

#[test]
fn elementwise_operators_equal_the_formula() {
    let mut random = Random::new();
    for (name, device) in Device::all(ComputeDtype::F32) {
        for n in [1, 100, 40_001] {
            let (x, y) = (random.floats(n, 50.0), random.floats(n, 50.0));
            let map = |f: &dyn Fn(f32, f32) -> f32| x.iter().zip(&y).map(|(x, y)| f(*x, *y)).collect::<Vec<_>>();
            let fresh = || device.f32([n], &x);
            let tensor = fresh();
            device.ops.add(MAIN, &tensor, &device.f32([n], &y)).unwrap();
            assert_same(&device.read(&tensor), &map(&|x, y| x + y), &name);
            let tensor = fresh();
            device.ops.scale(MAIN, &tensor, 0.3).unwrap();
            assert_same(&device.read(&tensor), &map(&|x, _| x * 0.3), &name);
            let tensor = fresh();
            device.ops.soft_cap(MAIN, &tensor, 30.0).unwrap();
            assert_close(&device.read(&tensor), &map(&|x, _| 30.0 * (x / 30.0).tanh()), 1e-6, &name);
            let copy = device.zeros([n], DType::F32);
            device.ops.copy(MAIN, &tensor, &copy).unwrap();
            assert_same(&device.read(&copy), &device.read(&tensor), &name);
        }
    }
}

#[test]
fn rows_are_gathered_in_the_order_asked_for() {
    let device = Device::scalar(ComputeDtype::F32);
    let x: Vec<f32> = (0..15).map(|i| i as f32).collect();
    let out = device.zeros([3, 3], DType::F32);
    device.ops.gather_rows(MAIN, &device.f32([5, 3], &x), &device.u32(&[4, 0, 4]), &out).unwrap();
    assert_eq!(device.read(&out), [12.0, 13.0, 14.0, 0.0, 1.0, 2.0, 12.0, 13.0, 14.0]);
}

#[test]
fn rotary_tables_are_bounded_and_made_in_parts() {
    let bytes = |n_positions: usize, pairs: usize| n_positions * pairs * 8;
    let build = |ops: &dyn Ops, n_positions, pairs| {
        let frequencies: Vec<f32> = (0..pairs).map(|pair| 0.5f32.powi(pair as i32 % 30)).collect();
        RopeTable::build(ops, &frequencies, 1.0, n_positions, RopeStyle::HalfSplit)
    };
    let device = Device::scalar(ComputeDtype::F32);
    for (n_positions, pairs) in [(1 << 24, 32), ((1 << 20) + 1, 128), (usize::MAX, 1), (1 << 10, 1 << 18)] {
        let error = build(&device.ops, n_positions, pairs).err();
        let bytes = if n_positions == usize::MAX { usize::MAX } else { bytes(n_positions, pairs) };
        assert_eq!(error, Some(Error::OutOfMemory { bytes }));
    }
    // Rows of one part and more, and a row that is larger than a part.
    for (n_positions, pairs) in [(3000, 32), (1024, 32), (5, 40_000), (0, 4), (4, 0)] {
        let table = build(&device.ops, n_positions, pairs).unwrap();
        assert_eq!(table.table().dims(), [n_positions, 2, pairs]);
        for (index, value) in device.read(table.table()).into_iter().enumerate() {
            let (position, pair) = (index / (2 * pairs), index % pairs);
            let (sin, cos) = (position as f32 * 0.5f32.powi(pair as i32 % 30)).sin_cos();
            let expected = if index / pairs % 2 == 0 { cos } else { sin };
            assert_eq!(value.to_bits(), expected.to_bits(), "position {position}, pair {pair}");
        }
    }
}
