//! Paged attention against a full softmax, and the same bits however a sequence is cut and whoever is beside it.

use std::ops::Range;

use kernels::step::SequenceInputs;
use kernels::tensor::as_bytes;
use kernels::{Attention, ComputeDtype, DType, Error, Isa, LayerCache, Ops, StepInputs, StepLimits};

use crate::support::{Device, MAIN, Random, assert_close, assert_same};

#[derive(Clone, Debug)]
struct Case {
    heads: usize,
    kv_heads: usize,
    key_dim: usize,
    value_dim: usize,
    block: usize,
    dtype: DType,
    window: Option<u32>,
    soft_cap: Option<f32>,
}

const PLAIN: Case = Case {
    heads: 6,
    kv_heads: 2,
    key_dim: 16,
    value_dim: 16,
    block: 16,
    dtype: DType::F32,
    window: None,
    soft_cap: None,
};

/// Queries, keys and values of a sequence, and where its blocks lie.
struct Sequence {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    blocks: Vec<u32>,
}

/// Some tokens of some sequences in one step.
type Step = Vec<(usize, Range<usize>)>;

impl Case {
    fn sequences(&self, random: &mut Random, lens: &[usize]) -> Vec<Sequence> {
        let n_blocks: usize = lens.iter().map(|len| len.div_ceil(self.block)).sum();
        let mut free = random.shuffled(n_blocks);
        let mut sequence = |&len: &usize| Sequence {
            q: random.floats(len * self.heads * self.key_dim, 2.0),
            k: random.floats(len * self.kv_heads * self.key_dim, 2.0),
            v: random.floats(len * self.kv_heads * self.value_dim, 2.0),
            blocks: free.split_off(free.len() - len.div_ceil(self.block)),
        };
        lens.iter().map(&mut sequence).collect()
    }

    /// Runs steps one after the other, and returns each sequence's rows.
    fn run(&self, device: &Device, sequences: &[Sequence], steps: &[Step]) -> Vec<Vec<f32>> {
        let n_blocks = sequences.iter().map(|sequence| sequence.blocks.len()).sum();
        let cache = self.cache(device, n_blocks);
        let row = self.heads * self.value_dim;
        let mut outputs: Vec<Vec<f32>> =
            sequences.iter().map(|s| vec![f32::NAN; s.q.len() / (self.heads * self.key_dim) * row]).collect();
        for step in steps {
            let results = self.step(device, sequences, &cache, step);
            let mut rest = results.as_slice();
            for (sequence, range) in step {
                let (these, others) = rest.split_at(range.len() * row);
                outputs[*sequence][range.start * row..range.end * row].copy_from_slice(these);
                rest = others;
            }
        }
        outputs
    }

    fn cache(&self, device: &Device, n_blocks: usize) -> LayerCache {
        let extra = if self.dtype == DType::I8 { 4 } else { 0 };
        let region = |dim| device.zeros([n_blocks, self.kv_heads, self.block, dim + extra], self.dtype);
        LayerCache { keys: region(self.key_dim), values: region(self.value_dim) }
    }

    fn step(&self, device: &Device, sequences: &[Sequence], cache: &LayerCache, step: &Step) -> Vec<f32> {
        let n: usize = step.iter().map(|(_, range)| range.len()).sum();
        let block_entries = sequences.iter().map(|sequence| sequence.blocks.len()).sum();
        let limits =
            StepLimits { tokens: n, sequences: step.len(), block_entries, logits_rows: 0, block_size: self.block };
        let mut inputs = StepInputs::new(&device.ops, limits).unwrap();
        let (mut q, mut k, mut v) = (Vec::new(), Vec::new(), Vec::new());
        for (index, range) in step {
            let sequence = &sequences[*index];
            let (tokens, position) = (vec![0; range.len()], range.start as u32);
            let block_table = &sequence.blocks;
            inputs.push(&SequenceInputs { tokens: &tokens, position, block_table, logits_rows: (0, 0) }).unwrap();
            let part = |values: &[f32], row: usize| values[range.start * row..range.end * row].to_vec();
            q.extend(part(&sequence.q, self.heads * self.key_dim));
            k.extend(part(&sequence.k, self.kv_heads * self.key_dim));
            v.extend(part(&sequence.v, self.kv_heads * self.value_dim));
        }
        inputs.upload(&device.ops, MAIN).unwrap();
        let k = device.f32([n, self.kv_heads, self.key_dim], &k);
        let v = device.f32([n, self.kv_heads, self.value_dim], &v);
        device.ops.write_kv(MAIN, &inputs, &k, &v, cache).unwrap();
        let query = device.f32([n, self.heads, self.key_dim], &q);
        let out = device.zeros([n, self.heads, self.value_dim], DType::F32);
        let (window, soft_cap) = (self.window, self.soft_cap);
        let args = Attention { query: &query, cache, scale: 0.4, window, soft_cap, out: &out };
        device.ops.paged_attention(MAIN, &inputs, &args).unwrap();
        device.read(&out)
    }

    /// Rows as the cache keeps them.
    fn kept(&self, values: &[f32], dim: usize) -> Vec<f64> {
        let row = |row: &[f32]| {
            let scale = row.iter().fold(0.0f32, |largest, x| largest.max(x.abs())) / 127.0;
            let kept = |&x: &f32| match self.dtype {
                DType::Bf16 => half::bf16::from_f32(x).to_f64(),
                DType::F16 => half::f16::from_f32(x).to_f64(),
                DType::I8 => f64::from((x / scale).round_ties_even()) * f64::from(scale),
                _ => f64::from(x),
            };
            row.iter().map(kept).collect::<Vec<_>>()
        };
        values.chunks_exact(dim).flat_map(row).collect()
    }

    /// Whether queries and weights are rounded to bf16.
    fn rounds(&self) -> bool {
        matches!(self.dtype, DType::Bf16 | DType::I8)
    }

    /// What an output may differ from a full softmax: the rounding of weights, 2^-9 each, of values up to 2.
    fn tolerance(&self) -> f32 {
        if self.rounds() { 4e-3 } else { 2e-5 }
    }

    /// A full softmax in f64 over the queries as they are multiplied and the values as the cache keeps them.
    fn naive(&self, sequence: &Sequence) -> Vec<f32> {
        let (k, v) = (self.kept(&sequence.k, self.key_dim), self.kept(&sequence.v, self.value_dim));
        let q = |&x: &f32| if self.rounds() { half::bf16::from_f32(x).to_f32() } else { x };
        let q: Vec<f32> = sequence.q.iter().map(q).collect();
        let rows = q.chunks_exact(self.key_dim).enumerate();
        rows.flat_map(|(row, q)| {
            let (position, kv_head) = (row / self.heads, row % self.heads * self.kv_heads / self.heads);
            let first = self.window.map_or(0, |window| (position + 1).saturating_sub(window as usize));
            let line = |j: usize| j * self.kv_heads + kv_head;
            let score = |j: usize| {
                let key = &k[line(j) * self.key_dim..][..self.key_dim];
                let score = 0.4 * q.iter().zip(key).map(|(q, k)| f64::from(*q) * k).sum::<f64>();
                self.soft_cap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
            };
            let weights: Vec<f64> = (first..=position).map(|j| score(j).exp()).collect();
            let sum: f64 = weights.iter().sum();
            let value = |d: usize| {
                let terms = weights.iter().enumerate();
                terms.map(|(i, w)| w * v[line(first + i) * self.value_dim + d]).sum::<f64>() / sum
            };
            (0..self.value_dim).map(value).map(|value| value as f32).collect::<Vec<_>>()
        })
        .collect()
    }
}

fn cases() -> Vec<Case> {
    vec![
        PLAIN,
        Case { dtype: DType::Bf16, ..PLAIN },
        Case { dtype: DType::F16, heads: 9, kv_heads: 3, key_dim: 64, value_dim: 64, ..PLAIN },
        Case { window: Some(5), ..PLAIN },
        Case { window: Some(16), dtype: DType::Bf16, heads: 4, kv_heads: 1, key_dim: 32, value_dim: 32, ..PLAIN },
        Case { soft_cap: Some(3.0), ..PLAIN },
        Case { heads: 1, kv_heads: 1, key_dim: 8, value_dim: 5, dtype: DType::Bf16, ..PLAIN },
        Case { heads: 8, kv_heads: 2, key_dim: 24, value_dim: 16, block: 8, dtype: DType::F16, ..PLAIN },
        Case { heads: 2, kv_heads: 2, key_dim: 80, value_dim: 80, block: 32, ..PLAIN },
        Case { heads: 40, kv_heads: 1, key_dim: 16, value_dim: 16, block: 5, ..PLAIN },
        Case { heads: 1, kv_heads: 1, key_dim: 256, value_dim: 256, block: 128, window: Some(33), ..PLAIN },
        Case { dtype: DType::Bf16, heads: 9, kv_heads: 3, key_dim: 64, value_dim: 64, ..PLAIN },
        Case { dtype: DType::Bf16, heads: 4, kv_heads: 1, key_dim: 96, value_dim: 80, block: 64, ..PLAIN },
        Case { dtype: DType::Bf16, key_dim: 128, value_dim: 48, block: 1, window: Some(20), ..PLAIN },
        Case { dtype: DType::Bf16, key_dim: 80, value_dim: 80, block: 32, soft_cap: Some(2.0), ..PLAIN },
        Case { dtype: DType::I8, heads: 9, kv_heads: 3, key_dim: 64, value_dim: 64, ..PLAIN },
        Case { dtype: DType::I8, key_dim: 17, value_dim: 33, block: 5, soft_cap: Some(3.0), ..PLAIN },
        Case { dtype: DType::I8, key_dim: 256, value_dim: 16, block: 32, window: Some(40), ..PLAIN },
        Case { dtype: DType::F16, heads: 7, kv_heads: 1, key_dim: 96, value_dim: 96, window: Some(7), ..PLAIN },
        Case { dtype: DType::F16, heads: 98, kv_heads: 2, key_dim: 16, value_dim: 24, ..PLAIN },
    ]
}

/// Cuts every sequence into random chunks and deals them to steps at random.
fn random_steps(random: &mut Random, lens: &[usize]) -> Vec<Step> {
    let mut done = vec![0; lens.len()];
    let mut steps = Vec::new();
    while (0..lens.len()).any(|i| done[i] < lens[i]) {
        let mut step = Step::new();
        for i in random.shuffled(lens.len()) {
            let (i, left) = (i as usize, lens[i as usize] - done[i as usize]);
            if left > 0 && random.below(3) > 0 {
                let n = if random.below(2) == 0 { 1 } else { 1 + random.below(left) };
                step.push((i, done[i]..done[i] + n));
                done[i] += n;
            }
        }
        if !step.is_empty() {
            steps.push(step);
        }
    }
    steps
}

/// Cases for contexts of several partitions.
fn long_cases() -> Vec<Case> {
    vec![
        Case { heads: 2, kv_heads: 1, ..PLAIN },
        Case { dtype: DType::Bf16, heads: 3, kv_heads: 1, ..PLAIN },
        Case { dtype: DType::I8, heads: 4, kv_heads: 2, block: 32, window: Some(600), ..PLAIN },
        Case { dtype: DType::F16, heads: 1, kv_heads: 1, block: 5, window: Some(70), ..PLAIN },
    ]
}

fn assert_is_softmax(case: &Case, lens: &[usize], random: &mut Random) {
    let sequences = case.sequences(random, lens);
    let expected: Vec<Vec<f32>> = sequences.iter().map(|sequence| case.naive(sequence)).collect();
    for (name, device) in Device::all(ComputeDtype::F32) {
        let step = lens.iter().enumerate().map(|(i, len)| (i, 0..*len)).collect();
        let actual = case.run(&device, &sequences, &[step]);
        for (actual, expected) in actual.iter().zip(&expected) {
            assert_close(actual, expected, case.tolerance(), &format!("{name} {case:?}"));
        }
    }
}

#[test]
fn attention_equals_a_full_softmax_on_every_instruction_set() {
    let mut random = Random::new();
    for case in cases() {
        assert_is_softmax(&case, &[1, 17, 70, 16, 150], &mut random);
    }
}

#[test]
fn attention_over_several_partitions_equals_a_full_softmax() {
    let mut random = Random::new();
    for case in long_cases() {
        assert_is_softmax(&case, &[513, 1100], &mut random);
    }
}

/// Fails unless random cuts give the bits that each sequence alone in one step gives.
fn assert_same_bits_in_any_cut(case: &Case, lens: &[usize], rounds: usize, random: &mut Random) {
    let sequences = case.sequences(random, lens);
    for isa in Isa::available() {
        let device = Device::new(isa, 1, ComputeDtype::F32);
        let alone: Vec<Step> = lens.iter().enumerate().map(|(i, len)| vec![(i, 0..*len)]).collect();
        let expected = case.run(&device, &sequences, &alone);
        for round in 0..rounds {
            let device = Device::new(isa, 1 + round % 3, ComputeDtype::F32);
            let steps = random_steps(random, lens);
            for (actual, expected) in case.run(&device, &sequences, &steps).iter().zip(&expected) {
                assert_same(actual, expected, &format!("{isa} {case:?} {steps:?}"));
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_in_any_chunks_beside_anyone_on_any_threads() {
    let mut random = Random::new();
    for case in cases() {
        assert_same_bits_in_any_cut(&case, &[1, 37, 90, 16, 130], 4, &mut random);
    }
}

#[test]
fn a_row_has_the_same_bits_across_partitions_however_they_are_shared() {
    let mut random = Random::new();
    for case in long_cases() {
        assert_same_bits_in_any_cut(&case, &[530, 1030, 64, 1], 3, &mut random);
    }
}

#[test]
fn one_long_decode_row_has_the_same_bits_on_any_number_of_threads() {
    let mut random = Random::new();
    let len = 2100;
    for case in [
        Case { dtype: DType::Bf16, heads: 3, kv_heads: 1, key_dim: 64, value_dim: 64, ..PLAIN },
        Case { dtype: DType::I8, heads: 6, kv_heads: 2, key_dim: 32, value_dim: 32, window: Some(1500), ..PLAIN },
    ] {
        let sequences = case.sequences(&mut random, &[len]);
        for isa in Isa::available().filter(|&isa| isa != Isa::Scalar) {
            let run = |threads, steps: &[Step]| {
                case.run(&Device::new(isa, threads, ComputeDtype::F32), &sequences, steps).remove(0)
            };
            let expected = run(1, &[vec![(0, 0..len)]]);
            for threads in [2, 5] {
                let actual = run(threads, &[vec![(0, 0..len - 1)], vec![(0, len - 1..len)]]);
                assert_same(&actual, &expected, &format!("{isa} on {threads} threads {case:?}"));
            }
        }
    }
}

#[test]
fn what_a_query_does_not_see_does_not_matter_whatever_it_is() {
    let mut random = Random::new();
    for dtype in [DType::F32, DType::Bf16, DType::F16, DType::I8] {
        for block in [16, 5] {
            let case = Case { dtype, block, window: Some(9), ..PLAIN };
            let mut sequences = case.sequences(&mut random, &[40, 12]);
            let expected: Vec<Vec<f32>> = sequences.iter().map(|sequence| case.naive(sequence)).collect();
            let rows = |from: usize| from * case.kv_heads * case.key_dim;
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX] {
                // Keys and values have equal dimensions here.
                sequences[0].k[rows(10)..rows(11)].fill(bad);
                sequences[0].v[rows(10)..rows(11)].fill(bad);
                sequences[0].k[rows(39)..].fill(bad);
                sequences[0].v[rows(39)..].fill(bad);
                for (name, device) in Device::all(ComputeDtype::F32) {
                    let outputs = case.run(&device, &sequences, &[vec![(0, 0..40), (1, 0..12)]]);
                    let row = case.heads * case.value_dim;
                    for seen in [0..10 * row, 19 * row..39 * row] {
                        let (actual, expected) = (&outputs[0][seen.clone()], &expected[0][seen]);
                        assert_close(actual, expected, case.tolerance(), &format!("{name} {bad} {case:?}"));
                    }
                    assert_close(&outputs[1], &expected[1], case.tolerance(), &format!("{name} {bad} {case:?}"));
                }
            }
        }
    }
}

#[test]
fn blocks_beyond_the_cache_and_short_tables_are_refused() {
    let device = Device::scalar(ComputeDtype::F32);
    let limits = StepLimits { tokens: 4, sequences: 2, block_entries: 2, logits_rows: 1, block_size: 2 };
    let mut step = StepInputs::new(&device.ops, limits).unwrap();
    let sequence = SequenceInputs { tokens: &[0, 0], position: 1, block_table: &[0, 7], logits_rows: (1, 2) };
    assert!(matches!(
        step.push(&SequenceInputs { block_table: &[0], ..sequence }),
        Err(Error::Index { what: "context length", value: 3, bound: 3, .. })
    ));
    let rows = step.push(&SequenceInputs { logits_rows: (0, 3), ..sequence });
    assert!(matches!(rows, Err(Error::Index { what: "logits row", .. })));
    step.push(&sequence).unwrap();
    assert_eq!((step.host().slot_mapping.as_slice(), step.host().logits_rows.as_slice()), (&[1, 14][..], &[1][..]));
    let full = step.push(&SequenceInputs { logits_rows: (0, 0), ..sequence });
    assert_eq!(full, Err(Error::StepTooLarge { what: "block-table entries", value: 4, bound: 2 }));

    let cache =
        LayerCache { keys: device.zeros([7, 1, 2, 4], DType::F32), values: device.zeros([7, 1, 2, 4], DType::F32) };
    let (x, out) = (device.zeros([2, 1, 4], DType::F32), device.zeros([2, 1, 4], DType::F32));
    let written = device.ops.write_kv(MAIN, &step, &x, &x, &cache);
    assert!(matches!(written, Err(Error::Index { what: "slot", value: 14, bound: 14, .. })));
    let args = Attention { query: &x, cache: &cache, scale: 1.0, window: None, soft_cap: None, out: &out };
    let attended = device.ops.paged_attention(MAIN, &step, &args);
    assert!(matches!(attended, Err(Error::Index { what: "block", value: 7, bound: 7, .. })));
}

#[test]
fn step_inputs_reach_the_device() {
    let device = Device::scalar(ComputeDtype::F32);
    let limits = StepLimits { tokens: 8, sequences: 3, block_entries: 8, logits_rows: 3, block_size: 4 };
    let mut step = StepInputs::new(&device.ops, limits).unwrap();
    for _ in 0..2 {
        step.clear();
        let first = SequenceInputs { tokens: &[5, 6], position: 3, block_table: &[9, 2], logits_rows: (1, 2) };
        step.push(&first).unwrap();
        step.push(&SequenceInputs { tokens: &[7], position: 0, block_table: &[4], logits_rows: (0, 1) }).unwrap();
    }
    step.upload(&device.ops, MAIN).unwrap();
    let read = |tensor: kernels::Tensor| {
        let mut bytes = vec![0u8; tensor.n_bytes()];
        device.ops.read_back(MAIN, &tensor, &mut bytes).unwrap();
        bytes.chunks_exact(4).map(|b| u32::from_ne_bytes(b.try_into().unwrap())).collect::<Vec<_>>()
    };
    assert_eq!(read(step.token_ids().unwrap()), [5, 6, 7]);
    assert_eq!(read(step.positions().unwrap()), [3, 4, 0]);
    assert_eq!(read(step.slot_mapping().unwrap()), [39, 8, 16]);
    assert_eq!(read(step.query_starts().unwrap()), [0, 2, 3]);
    assert_eq!(read(step.context_lens().unwrap()), [5, 1]);
    assert_eq!(read(step.block_tables().unwrap()), [9, 2, 4]);
    assert_eq!(read(step.block_table_starts().unwrap()), [0, 2, 3]);
    assert_eq!(read(step.logits_rows().unwrap()), [1, 2]);
    assert_eq!(as_bytes(&[1u32]).len(), 4);
}
