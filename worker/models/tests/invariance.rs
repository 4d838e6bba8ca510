//! A token's logits are the same bits alone or in any batch, in any chunks, with or without a prefix hit, on any threads.
//!
//! `SEED=n` replays a run, `TESSERA_FULL=1` tries thousands of batches, `TESSERA_CPU=name` forces one instruction set.
#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs, unreachable_pub, reason = "a test")]

mod support;

use std::process::Command;
use std::sync::Arc;

use kernels::{ComputeDtype, ISA_VARIABLE, Isa, Ops, WeightFormat};
use models::ModelFiles;
use support::company::{Case, Counts, check, check_random_model, plain_cpu};
use support::defect::{Defect, Defective};
use support::mode::{FORMATS, Mode, cpu, modes};
use support::quantise::quantise;
use support::random_model::Length;
use support::{Random, is_full, rotating_seed, seed};

/// Rounds over all formats in the full size, on the fastest instruction set and on each other one.
const ROUNDS_FULL: [usize; 2] = [30, 10];

/// Whether one instruction set is to be tested.
fn is_forced() -> bool {
    std::env::var_os(ISA_VARIABLE).is_some()
}

#[test]
fn tokens_do_not_depend_on_their_company() {
    println!("computed with {}", cpu(ComputeDtype::Stored, 1).numerics());
    let mut random = Random(rotating_seed());
    let (rounds, n_scenarios) = match (is_full(), is_forced()) {
        (true, false) => (ROUNDS_FULL[0], 4),
        (true, true) => (ROUNDS_FULL[1], 4),
        (false, false) => (1, 2),
        (false, true) => (1, 1),
    };
    let mut total = Counts::default();
    for round in 0..rounds {
        for mode in modes() {
            // A slice of the slow instruction sets is a third of the formats, others each time.
            if is_forced() && !is_full() && random.below(3) > 0 {
                continue;
            }
            // Long contexts take most of the time: each format has its turn, on slow instruction sets in the full size.
            let is_long = random.below(6) == 0 && (is_full() || !is_forced());
            let length = if is_long { Length::Long } else { Length::Short };
            let case = Case { mode, length, n_scenarios, n_sequences: None, seed: random.next() };
            match check_random_model(&case, &plain_cpu) {
                Ok(counts) => total += counts,
                Err(difference) => panic!("{difference}"),
            }
        }
        if is_full() {
            println!("round {round}: {total:?}");
        }
    }
    println!("{total:?}");
    let Counts { scenarios, shared_steps, rows, hit_tokens, .. } = total;
    let all_reached = scenarios > 0 && shared_steps > scenarios && rows > scenarios && hit_tokens > 0;
    assert!(all_reached || (is_forced() && !is_full()), "a kind of company never happened: {total:?}");
}

/// The test above in processes of their own, each with another instruction set forced.
#[test]
fn nor_on_any_other_instruction_set() {
    if is_forced() {
        println!("skipped: {ISA_VARIABLE} forces one");
        return;
    }
    let mut random = Random(rotating_seed());
    for isa in Isa::available().filter(|&isa| isa != Isa::best()) {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "tokens_do_not_depend_on_their_company", "--nocapture"]);
        child.env(ISA_VARIABLE, isa.name()).env("SEED", random.next().to_string());
        let output = child.output().unwrap();
        let (out, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        println!("{isa}: {out}");
        assert!(output.status.success(), "with {ISA_VARIABLE}={isa}:\n{out}\n{errors}");
        let used = out.lines().find(|line| line.contains("computed with")).unwrap();
        assert!(used.split(' ').any(|word| word == isa.name()), "{isa} was asked for: {used}");
    }
}

/// The check can fail: it finds an order of summation that depends on rows or threads, and keys that depend on chunks.
#[test]
fn planted_defects_are_found() {
    let mut random = Random(rotating_seed());
    let defects = [
        Defect::RowsAbove(8),
        Defect::RowsAbove(40),
        Defect::Threads(3),
        Defect::LaterChunks,
        Defect::LastBitInCompany,
    ];
    for defect in defects {
        let plant = |case: &Case, threads| -> Arc<dyn Ops> {
            Arc::new(Defective::new(plain_cpu(case, threads), threads, defect))
        };
        let mode = Mode { stored: WeightFormat::Bf16, ..modes()[0] };
        let found = (0..20).find_map(|_| {
            let (length, seed) = (Length::Short, random.next());
            let case = Case { mode, length, n_scenarios: 4, n_sequences: None, seed };
            check_random_model(&case, &plant).err()
        });
        println!("{defect:?}: {}", found.unwrap_or_else(|| panic!("{defect:?} was not found")));
    }
}

/// Batch 32 against alone on a real model.
#[test]
fn smollm2_in_a_batch_of_32_equals_each_sequence_alone() {
    let Some(path) = std::env::var_os("TESSERA_TEST_MODEL") else {
        panic!("TESSERA_TEST_MODEL is not set: run this through `cargo xtask test`, which fetches the model");
    };
    let files = ModelFiles::open(path).unwrap();
    let mut random = Random(rotating_seed());
    let n = if is_full() { 40 } else { 8 };
    let mut draw = |n: usize| (0..n).map(|_| random.below(files.config().vocab_size) as u32).collect::<Vec<u32>>();
    // A quarter of them begins alike, for longer than any block.
    let shared = draw(33);
    let texts: Vec<Vec<u32>> = (0..32)
        .map(|index| {
            let begin = if index % 4 == 0 { shared.clone() } else { Vec::new() };
            [begin, draw(n + index % n)].concat()
        })
        .collect();
    let mode = Mode { stored: WeightFormat::Q4_1, ..modes()[0] };
    let (length, n_sequences, seed) = (Length::Short, Some(32), random.next());
    let case = Case { mode, length, n_scenarios: if is_full() { 4 } else { 1 }, n_sequences, seed };
    match check(&case, &plain_cpu, &files, &texts, &mut random) {
        Ok(counts) => {
            println!("{counts:?}");
            assert!(counts.rows > 100, "too little was compared");
        }
        Err(difference) => panic!("{difference}"),
    }
}

#[test]
fn quantisers_round_to_what_their_format_can_hold() {
    let mut random = Random(seed(11));
    let bounds = [0.0, 3e-4, 3e-3, 6e-3, 0.11, 0.10, 0.055, 0.05, 0.11, 0.055, 0.03];
    for (format, bound) in FORMATS.into_iter().zip(bounds) {
        let values: Vec<f32> = (0..1024).map(|_| random.below(20_001) as f32 / 1e4 - 1.0).collect();
        let mut back = vec![0.0; values.len()];
        kernels::quant::dequantize(format, &quantise(format, &values), &mut back).unwrap();
        let error: f32 = values.iter().zip(&back).map(|(value, back)| (value - back).powi(2)).sum();
        let relative = (error / values.iter().map(|value| value * value).sum::<f32>()).sqrt();
        println!("{format:?}: relative error {relative:.5}");
        assert!(relative <= bound, "{format:?}: {relative}");
        assert!(bound == 0.0 || relative > bound / 8.0, "{format:?}: {relative} is too good for the bound {bound}");
        let zeros = quantise(format, &[0.0; 256]);
        kernels::quant::dequantize(format, &zeros, &mut back[..256]).unwrap();
        assert!(back[..256].iter().all(|&value| value == 0.0), "{format:?} of zeros");
    }
}
