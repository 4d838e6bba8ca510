//! Tiny checkpoints answer what Hugging Face transformers computed for them, however the prompt is cut up.
#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs, unreachable_pub, reason = "a test")]

mod support;

use models::ModelFiles;
use support::runner::Runner;
use support::{Golden, Random, convert, golden, seed, tiny};

const TOKENS_MAX: usize = 80;
/// Greatest absolute error of a logit in f32.
const ERROR_MAX: f32 = 1e-3;

fn check(name: &str, files: &ModelFiles) {
    let golden = golden(name);
    let mut runner = Runner::new(files, true, TOKENS_MAX, seed(3));
    let n = golden.prompt.len();
    let all = runner.run(&golden.prompt, 0..n);
    assert_near(name, "first", &all[0], &golden.first_logits);
    assert_near(name, "last", &all[n - 1], &golden.last_logits);
    assert_eq!(runner.greedy(all[n - 1].clone(), golden.greedy.len()), golden.greedy, "{name}");
    for chunk in [7, 16, 1] {
        check_chunked(name, &mut runner, &golden, chunk, &all[n - 1]);
    }
}

/// Chunks change nothing, to the bit.
fn check_chunked(name: &str, runner: &mut Runner, golden: &Golden, chunk: usize, whole: &[f32]) {
    runner.restart();
    let last = runner.run_in_chunks(&golden.prompt, chunk);
    assert_near(name, &format!("last, in chunks of {chunk},"), &last, &golden.last_logits);
    assert_eq!(last, whole, "{name}: chunks of {chunk} and the whole prompt give different bits");
    assert_eq!(runner.greedy(last, golden.greedy.len()), golden.greedy, "{name} in chunks of {chunk}");
}

fn assert_near(name: &str, which: &str, actual: &[f32], expected: &[f32]) {
    assert_eq!(actual.len(), expected.len());
    let error = actual.iter().zip(expected).map(|(a, e)| (a - e).abs()).fold(0.0, f32::max);
    println!("{name}: greatest error of the {which} logits {error:e}");
    assert!(error <= ERROR_MAX, "{name}: {which} logits are off by {error}");
}

macro_rules! checkpoints {
    ($($name:ident),*) => { $(
        #[test]
        fn $name() {
            check(stringify!($name), &ModelFiles::open(tiny(stringify!($name))).unwrap());
        }
    )* };
}
checkpoints!(llama, llama3_rope, llama_bias, mistral, qwen2, qwen2_yarn, qwen3, gemma3_text);

/// Conversion permutes llama's rows and adds one to gemma's norms; the answers stay.
#[test]
fn the_same_weights_as_gguf_give_the_same_answers() {
    let folder = tempfile::TempDir::new().unwrap();
    for name in ["llama", "mistral", "qwen2", "qwen3", "gemma3_text"] {
        let path = folder.path().join(format!("{name}.gguf"));
        let source = ModelFiles::open(tiny(name)).unwrap();
        std::fs::write(&path, convert::to_gguf(&source).bytes()).unwrap();
        check(name, &ModelFiles::open(&path).unwrap());
    }
}

/// Neighbours in a step, of whatever length, change no bit of anybody's logits.
#[test]
fn neighbours_in_a_step_change_nothing() {
    let seed = seed(9);
    for (name, f32_mode) in [("qwen3", true), ("gemma3_text", false), ("mistral", false)] {
        let files = ModelFiles::open(tiny(name)).unwrap();
        let mut runner = Runner::new(&files, f32_mode, TOKENS_MAX, seed);
        let mut random = Random(seed);
        let texts: Vec<Vec<u32>> =
            (0..3).map(|_| (0..20 + random.below(40)).map(|_| random.below(256) as u32).collect()).collect();
        let alone: Vec<Vec<f32>> = texts
            .iter()
            .map(|text| {
                runner.restart();
                runner.run(text, text.len() - 1..text.len()).remove(0)
            })
            .collect();
        runner.restart();
        let mut done = [0; 3];
        while (0..3).any(|index| done[index] < texts[index].len()) {
            let mut parts = Vec::new();
            for (index, text) in texts.iter().enumerate() {
                let n = random.below(20).min(text.len() - done[index]);
                let part = &text[done[index]..done[index] + n];
                done[index] += n;
                let is_last = n > 0 && done[index] == text.len();
                parts.push((index, part, if is_last { n - 1..n } else { 0..0 }));
            }
            parts.retain(|part| !part.1.is_empty());
            let finished: Vec<usize> = parts.iter().filter(|part| !part.2.is_empty()).map(|part| part.0).collect();
            for (index, logits) in finished.into_iter().zip(runner.run_together(&parts)) {
                assert!(logits == alone[index], "{name}: sequence {index} differs beside others");
            }
        }
    }
}

/// GGUF has llama3's scaling as divisors of the frequencies.
#[test]
fn rope_divisors_of_gguf_scale_frequencies() {
    let source = ModelFiles::open(tiny("llama3_rope")).unwrap();
    let scaled = source.config().rope_full.frequencies();
    let plain = models::rope::RopeConfig::plain(500_000.0, source.config().rope_full.rotary_dim).frequencies();
    let divisors: Vec<f32> = plain.iter().zip(&scaled).map(|(plain, scaled)| plain / scaled).collect();
    assert!(divisors.iter().any(|&divisor| divisor > 1.5));
    let mut writer = convert::to_gguf(&source);
    writer.f32s("rope_freqs.weight", &[divisors.len()], &divisors);
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), writer.bytes()).unwrap();
    check("llama3_rope", &ModelFiles::open(file.path()).unwrap());
}
