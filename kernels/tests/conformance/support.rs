//! Devices to judge, seeded numbers, and comparisons.

use kernels::tensor::{as_bytes, as_bytes_mut};
use kernels::{ComputeDtype, CpuOps, CpuOptions, DType, Isa, Ops, RawWeight, Shape, StreamId, Tensor, Weight};
use kernels::{WeightFormat, WeightRole};

pub const MAIN: StreamId = StreamId::MAIN;

/// A device and shorthand to fill and read it.
pub struct Device {
    pub ops: CpuOps,
}

impl Device {
    pub fn new(isa: Isa, threads: usize, dtype: ComputeDtype) -> Self {
        Self { ops: CpuOps::new(&CpuOptions { dtype, threads, isa: Some(isa) }).unwrap() }
    }

    pub fn scalar(dtype: ComputeDtype) -> Self {
        Self::new(Isa::Scalar, 1, dtype)
    }

    /// Every instruction set that this CPU has, on one to three threads.
    pub fn all(dtype: ComputeDtype) -> impl Iterator<Item = (String, Self)> {
        Isa::available().flat_map(move |isa| {
            (1..=3).map(move |threads| (format!("{isa} on {threads} threads"), Self::new(isa, threads, dtype)))
        })
    }

    pub fn zeros(&self, shape: impl Into<Shape>, dtype: DType) -> Tensor {
        self.ops.alloc(shape.into(), dtype).unwrap()
    }

    pub fn f32(&self, shape: impl Into<Shape>, values: &[f32]) -> Tensor {
        let tensor = self.zeros(shape, DType::F32);
        self.ops.upload(MAIN, as_bytes(values), &tensor).unwrap();
        tensor
    }

    pub fn u32(&self, values: &[u32]) -> Tensor {
        let tensor = self.zeros([values.len()], DType::U32);
        self.ops.upload(MAIN, as_bytes(values), &tensor).unwrap();
        tensor
    }

    pub fn read(&self, tensor: &Tensor) -> Vec<f32> {
        let mut values = vec![0.0f32; tensor.shape().elements()];
        self.ops.read_back(MAIN, tensor, as_bytes_mut(&mut values)).unwrap();
        values
    }

    pub fn weight(&self, shape: impl Into<Shape>, values: &[f32], role: WeightRole) -> Weight {
        let raw = RawWeight { bytes: as_bytes(values), format: WeightFormat::F32, shape: shape.into() };
        self.ops.load_weight(raw, role).unwrap()
    }
}

/// SplitMix64, seeded by SEED when it is set.
pub struct Random(u64);

impl Random {
    pub fn new() -> Self {
        let seed = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(20_261_129);
        eprintln!("SEED={seed}");
        Self(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    /// Uniform in -scale..scale.
    pub fn floats(&mut self, n: usize, scale: f32) -> Vec<f32> {
        (0..n).map(|_| ((self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0) * scale).collect()
    }

    pub fn shuffled(&mut self, n: usize) -> Vec<u32> {
        let mut order: Vec<u32> = (0..n as u32).collect();
        for i in (1..n).rev() {
            order.swap(i, self.below(i + 1));
        }
        order
    }
}

/// Fails unless all values are within `tolerance * (1 + |expected|)`.
#[track_caller]
pub fn assert_close(actual: &[f32], expected: &[f32], tolerance: f32, what: &str) {
    assert_eq!(actual.len(), expected.len(), "{what}");
    for (i, (a, e)) in actual.iter().zip(expected).enumerate() {
        assert!((a - e).abs() <= tolerance * (1.0 + e.abs()), "{what}: value {i} is {a}, expected {e}");
    }
}

/// Fails unless all bits are equal.
#[track_caller]
pub fn assert_same(actual: &[f32], expected: &[f32], what: &str) {
    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    assert!(bits(actual) == bits(expected), "{what}: bits differ");
}

/// What activations and plain matrix elements become where `dtype` computes with them, from f32.
pub fn rounded(values: &[f32], dtype: ComputeDtype) -> Vec<f32> {
    let round = |&value: &f32| match dtype {
        ComputeDtype::F32 | ComputeDtype::Stored => value,
        ComputeDtype::Bf16 => half::bf16::from_f32(value).to_f32(),
        ComputeDtype::Int8 => unreachable!("rounded by rows"),
    };
    values.iter().map(round).collect()
}

/// Each row of `len` rounded to 8 bits, the largest magnitude to 127.
pub fn rounded_int8(values: &[f32], len: usize) -> Vec<f32> {
    let row = |row: &[f32]| {
        let largest = row.iter().fold(0.0f32, |m, v| m.max(v.abs()));
        let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
        row.iter().map(|v| (v * inverse).round_ties_even() * (largest / 127.0)).collect::<Vec<_>>()
    };
    values.chunks(len).flat_map(row).collect()
}
