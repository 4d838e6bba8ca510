//! Weights that do not fit the configuration are refused by name, and steps that do not fit the model by reason.
#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs, unreachable_pub, reason = "a test")]

mod support;

use std::sync::Arc;

use contract::kv::{BlockOrder, KvDtype};
use kernels::cpu::{CpuOps, CpuOptions};
use kernels::step::SequenceInputs;
use kernels::{DryRun, Ops, StepInputs, StepLimits, StreamId};
use models::{KvCache, LoadError, LoadOptions, ModelFiles, load};
use support::gguf_writer::{GgufWriter, Meta};
use support::{convert, tiny};

const LIMITS: StepLimits = StepLimits { tokens: 8, sequences: 2, block_entries: 8, logits_rows: 2, block_size: 16 };

fn cpu() -> Arc<dyn Ops> {
    Arc::new(CpuOps::new(&CpuOptions::default()).unwrap())
}

fn open_changed(change: impl FnOnce(&mut GgufWriter)) -> ModelFiles {
    let mut writer = convert::to_gguf(&ModelFiles::open(tiny("qwen3")).unwrap());
    change(&mut writer);
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), writer.bytes()).unwrap();
    ModelFiles::open(file.path()).unwrap()
}

fn load_changed(change: impl FnOnce(&mut GgufWriter)) -> Result<(), LoadError> {
    let options = LoadOptions { limits: LIMITS, positions_max: None };
    load(&open_changed(change), cpu(), options).map(|_| ())
}

#[test]
fn absent_and_misshapen_weights_are_named() {
    let at = |writer: &GgufWriter, name: &str| writer.tensors.iter().position(|tensor| tensor.0 == name).unwrap();
    let error = load_changed(|writer| {
        let index = at(writer, "blk.1.ffn_up.weight");
        writer.tensors.remove(index);
    });
    let error = error.unwrap_err().to_string();
    assert!(error.contains("blk.1.ffn_up.weight"), "{error}");
    let error = load_changed(|writer| {
        let index = at(writer, "blk.0.attn_output.weight");
        writer.tensors[index].1.reverse();
    });
    let error = error.unwrap_err().to_string();
    for part in ["blk.0.attn_output.weight", "[128, 64]", "[64, 128]"] {
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn divisors_must_leave_frequencies_that_turn_every_position() {
    let with = |divisor: f32| {
        let mut divisors = [1.0f32; 16];
        divisors[3] = divisor;
        load_changed(|writer| {
            writer.f32s("rope_freqs.weight", &[16], &divisors);
        })
    };
    // Infinities leave 0, of either sign, which turns nothing.
    for right in [1.0, 8.0, f32::INFINITY, f32::NEG_INFINITY] {
        with(right).unwrap();
    }
    for wrong in [0.0, -1.0, 1e-38, f32::NAN] {
        let error = with(wrong).unwrap_err();
        let LoadError::Value { tensor, index, value, .. } = error else { panic!("{error}") };
        assert_eq!((tensor.as_str(), index, value.to_bits()), ("rope_freqs.weight", 3, wrong.to_bits()));
    }
}

#[test]
fn tables_are_made_for_the_longest_sequence_within_bounds() {
    let context = |writer: &mut GgufWriter| {
        let entry = writer.metadata.iter_mut().find(|entry| entry.0 == "qwen3.context_length").unwrap();
        entry.1 = Meta::U32(1 << 24);
    };
    let files = open_changed(context);
    let load = |positions_max| load(&files, Arc::new(DryRun), LoadOptions { limits: LIMITS, positions_max });
    assert_eq!(load(None).unwrap().positions_max(), 1 << 18);
    assert_eq!(load(Some(100)).unwrap().positions_max(), 100);
    let error = load(Some(usize::MAX)).map(|_| ()).unwrap_err();
    assert!(matches!(error, LoadError::Device(kernels::Error::OutOfMemory { bytes: 0x8000_0000 })), "{error:?}");
}

#[test]
fn steps_beyond_the_model_are_errors() {
    let files = ModelFiles::open(tiny("llama")).unwrap();
    let ops = cpu();
    let mut model = load(&files, Arc::clone(&ops), LoadOptions { limits: LIMITS, positions_max: Some(20) }).unwrap();
    assert_eq!(model.positions_max(), 20);
    assert!(model.weight_bytes() > 0);
    let layout = model.kv_spec().layout(BlockOrder::HeadsFirst, 16, KvDtype::F32);
    let kv = KvCache::allocate(ops.as_ref(), layout, 4).unwrap();
    let mut step = StepInputs::new(ops.as_ref(), LIMITS).unwrap();
    let mut run = |kv: &KvCache, tokens: &[u32], position| {
        step.clear();
        let sequence = SequenceInputs { tokens, position, block_table: &[2, 0], logits_rows: (0, 1) };
        step.push(&sequence).unwrap();
        step.upload(ops.as_ref(), StreamId::MAIN).unwrap();
        model.forward(&step, kv).map(|logits| logits.dims().to_vec())
    };
    assert_eq!(run(&kv, &[5, 6], 18).unwrap(), [1, 256]);
    run(&kv, &[5, 6], 19).expect_err("position 20 is beyond the table");
    run(&kv, &[256], 0).expect_err("token 256 is beyond the vocabulary");
    let other = KvCache::allocate(ops.as_ref(), contract::kv::KvLayout { kv_heads: 1, ..layout }, 4).unwrap();
    run(&other, &[5], 0).expect_err("a cache of another model");
}

#[test]
fn a_step_without_logits_rows_returns_none() {
    let files = ModelFiles::open(tiny("gemma3_text")).unwrap();
    let ops = cpu();
    let mut model = load(&files, Arc::clone(&ops), LoadOptions { limits: LIMITS, positions_max: None }).unwrap();
    let layout = model.kv_spec().layout(BlockOrder::HeadsFirst, 16, KvDtype::Bf16);
    let kv = KvCache::allocate(ops.as_ref(), layout, 4).unwrap();
    let mut step = StepInputs::new(ops.as_ref(), LIMITS).unwrap();
    assert_eq!(model.forward(&step, &kv).unwrap().dims(), [0, 256], "an empty step");
    step.push(&SequenceInputs { tokens: &[3, 4], position: 0, block_table: &[1], logits_rows: (0, 0) }).unwrap();
    step.upload(ops.as_ref(), StreamId::MAIN).unwrap();
    assert_eq!(model.forward(&step, &kv).unwrap().dims(), [0, 256]);
}
