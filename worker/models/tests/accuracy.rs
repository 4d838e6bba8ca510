//! What each weight format, way to compute and cache format costs on SmolLM2: next tokens and distributions against f32.
//!
//! `TESSERA_FULL=1` measures everything and writes the tables to `accuracy.md` in the target folder.
#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs, unreachable_pub, reason = "a test")]

mod support;

use std::fmt::Write as _;
use std::path::Path;

use contract::kv::KvDtype;
use kernels::{ComputeDtype, WeightFormat};
use models::{ModelFiles, TokenizerSource};
use support::mode::{COMPUTE, FORMATS, KV_DTYPES};
use support::requantise::{fitting, requantise};
use support::runner::{Runner, best};
use support::{english, is_full};

/// Tokens of one step, and so rows of logits at once.
const CHUNK: usize = 128;

/// Least agreement in percent and greatest mean divergence that a format may have: what was measured over 1,379 tokens,
/// and half as much again.
const BOUNDS: [(WeightFormat, Nearness); 11] = [
    (WeightFormat::F32, Nearness { agreement: 98.0, divergence: 0.0004 }),
    (WeightFormat::F16, Nearness { agreement: 98.0, divergence: 0.0004 }),
    (WeightFormat::Bf16, Nearness { agreement: 98.0, divergence: 0.0004 }),
    (WeightFormat::Q8_0, Nearness { agreement: 93.0, divergence: 0.007 }),
    (WeightFormat::Q4_0, Nearness { agreement: 55.0, divergence: 0.7 }),
    (WeightFormat::Q4_1, Nearness { agreement: 75.0, divergence: 0.11 }),
    (WeightFormat::Q5_0, Nearness { agreement: 73.0, divergence: 0.17 }),
    (WeightFormat::Q5_1, Nearness { agreement: 69.0, divergence: 0.25 }),
    (WeightFormat::Q4K, Nearness { agreement: 77.0, divergence: 0.13 }),
    (WeightFormat::Q5K, Nearness { agreement: 70.0, divergence: 0.22 }),
    (WeightFormat::Q6K, Nearness { agreement: 89.0, divergence: 0.02 }),
];

/// What computing in int8 may cost beyond that.
const INT8: Nearness = Nearness { agreement: -18.0, divergence: 0.1 };

/// Texts and what f32 says of each of their tokens: the choice and the logarithms of all probabilities.
struct Reference {
    texts: Vec<Vec<u32>>,
    rows: Vec<Row>,
}

struct Row {
    choice: u32,
    log_probabilities: Vec<f32>,
}

/// How near something is to the reference.
#[derive(Clone, Copy, Debug)]
struct Nearness {
    /// Tokens in a hundred whose likeliest successor is the same.
    agreement: f64,
    /// Mean Kullback-Leibler divergence from the reference, in nats.
    divergence: f64,
}

impl Nearness {
    fn is_within(&self, bound: &Self) -> bool {
        self.agreement >= bound.agreement && self.divergence <= bound.divergence
    }
}

fn bound(format: WeightFormat, dtype: ComputeDtype) -> Nearness {
    let (_, bound) = BOUNDS.into_iter().find(|row| row.0 == format).unwrap();
    match dtype == ComputeDtype::Int8 {
        true => {
            Nearness { agreement: bound.agreement + INT8.agreement, divergence: bound.divergence + INT8.divergence }
        }
        false => bound,
    }
}

fn smollm2() -> ModelFiles {
    let Some(path) = std::env::var_os("TESSERA_TEST_MODEL") else {
        panic!("TESSERA_TEST_MODEL is not set: run this through `cargo xtask test`, which fetches the model");
    };
    ModelFiles::open(path).unwrap()
}

impl Reference {
    /// The shipped file in f32 throughout.
    fn new(files: &ModelFiles) -> Self {
        let TokenizerSource::Gguf(tokenizer) = files.tokenizer() else { panic!("a GGUF tokenizer") };
        let mut texts = english::conversations();
        texts.extend(english::paragraphs(tokenizer));
        if !is_full() {
            texts = vec![texts[0].clone(), texts[texts.len() - 1].clone()];
        }
        let mut reference = Self { texts, rows: Vec::new() };
        let mut rows = Vec::new();
        reference.each_row(files, ComputeDtype::F32, KvDtype::F32, |_, logits| {
            rows.push(Row { choice: best(logits), log_probabilities: log_softmax(logits) });
        });
        reference.rows = rows;
        reference
    }

    /// Calls `visit` with the number and the logits of every token of every text.
    fn each_row(&self, files: &ModelFiles, dtype: ComputeDtype, kv: KvDtype, mut visit: impl FnMut(usize, &[f32])) {
        let longest = self.texts.iter().map(Vec::len).max().unwrap();
        let mut runner = Runner::with(files, dtype, kv, longest, 1);
        let mut index = 0;
        for text in &self.texts {
            runner.restart();
            for chunk in text.chunks(CHUNK) {
                for logits in runner.run(chunk, 0..chunk.len()) {
                    visit(index, &logits);
                    index += 1;
                }
            }
        }
    }

    fn compare(&self, files: &ModelFiles, dtype: ComputeDtype, kv: KvDtype) -> Nearness {
        let (mut n_agreeing, mut divergence) = (0usize, 0.0);
        self.each_row(files, dtype, kv, |index, logits| {
            let row = &self.rows[index];
            n_agreeing += usize::from(best(logits) == row.choice);
            divergence += row.divergence(&log_softmax(logits));
        });
        let n = self.rows.len() as f64;
        Nearness { agreement: 100.0 * n_agreeing as f64 / n, divergence: divergence / n }
    }
}

impl Row {
    fn divergence(&self, other: &[f32]) -> f64 {
        let terms = self.log_probabilities.iter().zip(other);
        terms.map(|(&own, &other)| f64::from(own).exp() * (f64::from(own) - f64::from(other))).sum()
    }
}

fn log_softmax(logits: &[f32]) -> Vec<f32> {
    let largest = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|&logit| (f64::from(logit) - largest).exp()).sum();
    let shift = largest + sum.ln();
    logits.iter().map(|&logit| (f64::from(logit) - shift) as f32).collect()
}

/// The shipped model with its matrices in `format`.
fn stored_in(files: &ModelFiles, format: WeightFormat) -> ModelFiles {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), requantise(files, format).bytes()).unwrap();
    // The map outlives the name.
    ModelFiles::open(file.path()).unwrap()
}

fn cell(nearness: Nearness) -> String {
    format!("{:.2} % {:.2e}", nearness.agreement, nearness.divergence)
}

/// What the cache is kept in unless said otherwise.
fn kv_of(dtype: ComputeDtype) -> KvDtype {
    if dtype == ComputeDtype::F32 { KvDtype::F32 } else { KvDtype::Bf16 }
}

#[test]
fn formats_stay_near_f32() {
    let files = smollm2();
    let reference = Reference::new(&files);
    let slice = [WeightFormat::Q8_0, WeightFormat::Q4K];
    let formats: Vec<WeightFormat> = FORMATS.into_iter().filter(|format| is_full() || slice.contains(format)).collect();
    let mut table = head(&reference);
    let mut wrong = Vec::new();
    for format in formats {
        let files = stored_in(&files, format);
        let columns = files.config().hidden_size;
        let name = match fitting(format, columns) {
            other if other == format => format!("{format:?}"),
            other => format!("{format:?} (rows of {columns}: {other:?})"),
        };
        write!(table, "| {name} | {} |", files_mb(&files)).unwrap();
        for dtype in COMPUTE {
            let nearness = reference.compare(&files, dtype, kv_of(dtype));
            write!(table, " {} |", cell(nearness)).unwrap();
            if !nearness.is_within(&bound(format, dtype)) {
                wrong.push(format!("{format:?} as {dtype:?}: {nearness:?}"));
            }
        }
        table.push('\n');
        println!("{}", table.lines().last().unwrap());
    }
    caches(&files, &reference, &mut table, &mut wrong);
    println!("{table}");
    if is_full() {
        let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
        std::fs::write(target.join("accuracy.md"), &table).unwrap();
    }
    assert!(wrong.is_empty(), "beyond their bounds: {wrong:#?}");
}

fn head(reference: &Reference) -> String {
    let mut table = format!(
        "SmolLM2-135M-Instruct, {} tokens of {} texts, each cell: next tokens that agree with f32, mean KL divergence \
         from f32 in nats.\nThe cache is f32 for f32, else bf16. Weights come from the shipped file, whose layers are Q4_1 and \
         whose embedding is Q8_0, by plain rounding: formats whose steps fall between those of Q4_1 (Q5_1, Q5_K) look \
         worse than they are.\n\n",
        reference.rows.len(),
        reference.texts.len()
    );
    let names = COMPUTE.map(|dtype| format!("{dtype:?}").to_lowercase());
    writeln!(table, "| weights | MB | {} |", names.join(" | ")).unwrap();
    writeln!(table, "|---|---:|{}", "---|".repeat(names.len())).unwrap();
    table
}

/// The shipped file with each cache format.
fn caches(files: &ModelFiles, reference: &Reference, table: &mut String, wrong: &mut Vec<String>) {
    table.push_str("\n| KV cache | f32 weights and activations |\n|---|---|\n");
    for kv in KV_DTYPES {
        let nearness = reference.compare(files, ComputeDtype::F32, kv);
        writeln!(table, "| {} | {} |", format!("{kv:?}").to_lowercase(), cell(nearness)).unwrap();
        let divergence_max = if kv == KvDtype::F32 { 1e-9 } else { 0.01 };
        if nearness.divergence.abs() > divergence_max {
            wrong.push(format!("cache in {kv:?}: {nearness:?}"));
        }
    }
}

fn files_mb(files: &ModelFiles) -> usize {
    let bytes: usize = files.tensor_names().map(|name| files.tensor(name).unwrap().bytes.len()).sum();
    bytes / 1_000_000
}
