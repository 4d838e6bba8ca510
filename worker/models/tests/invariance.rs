//! A token's logits are the same bits alone or in any batch, in any chunks, with or without a prefix hit, on any threads.
//!
//! `SEED=n` replays a run, `TESSERA_FULL=1` tries thousands of batches, `TESSERA_CPU=name` forces one instruction set.
#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs, unreachable_pub, reason = "a test")]

mod support;

use std::sync::Arc;

use kernels::{Ops, WeightFormat};
use models::ModelFiles;
use support::company::{Case, Counts, check, check_random_model, plain_cpu};
use support::defect::{Defect, Defective};
use support::mode::{FORMATS, Mode, isas, modes};
use support::quantise::quantise;
use support::random_model::Length;
use support::{Random, is_full, rotating_seed, seed};

/// Rounds over all formats and instruction sets in the full size.
const ROUNDS_FULL: usize = 40;

#[test]
fn tokens_do_not_depend_on_their_company() {
    let mut random = Random(rotating_seed());
    let (rounds, n_scenarios) = if is_full() { (ROUNDS_FULL, 4) } else { (1, 2) };
    let mut total = Counts::default();
    for round in 0..rounds {
        for mode in modes() {
            for isa in isas() {
                // Long contexts take most of the time: each format has its turn.
                let length = if random.below(6) == 0 { Length::Long } else { Length::Short };
                let case = Case { mode, isa, length, n_scenarios, seed: random.next() };
                match check_random_model(&case, &plain_cpu) {
                    Ok(counts) => total += counts,
                    Err(difference) => panic!("{difference}"),
                }
            }
        }
        if is_full() {
            println!("round {round}: {total:?}");
        }
    }
    println!("{total:?}");
    let Counts { scenarios, shared_steps, rows, hit_tokens, restarts } = total;
    let all_reached = scenarios > 0 && shared_steps > scenarios && rows > scenarios && hit_tokens > 0;
    assert!(all_reached && (restarts > 0 || !is_full()), "a kind of company never happened: {total:?}");
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
            let case = Case { mode, isa: None, length: Length::Short, n_scenarios: 4, seed: random.next() };
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
    let mut texts: Vec<Vec<u32>> = Vec::new();
    for index in 0..32 {
        let shared = if index % 4 == 3 { texts[index - 1][..n / 2].to_vec() } else { Vec::new() };
        let own = (shared.len()..n + random.below(n)).map(|_| random.below(files.config().vocab_size) as u32);
        texts.push(shared.iter().copied().chain(own).collect());
    }
    let mode = Mode { stored: WeightFormat::Q4_1, ..modes()[0] };
    let case = Case { mode, isa: None, length: Length::Short, n_scenarios: 1, seed: random.next() };
    match check(&case, &plain_cpu, &files, &texts, &mut random) {
        Ok(counts) => println!("{counts:?}"),
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
