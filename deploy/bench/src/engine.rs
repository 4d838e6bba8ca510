//! Times one model in this process: prefill and decode, against what the machine could do at best.

mod batching;
mod direct;
mod work;

use std::path::PathBuf;
use std::sync::Arc;

use contract::kv::KvDtype;
use daemon::clock;
use kernels::{ComputeDtype, CpuOps, CpuOptions, Isa, Ops};
use models::ModelFiles;
use serde::Serialize;
use thiserror::Error;

use crate::roofline::Roofline;
use crate::statistics::Spread;
use crate::table::{Table, number};

/// Tokens in a KV block, as workers have them.
const BLOCK_SIZE: u32 = 16;

/// What `tessera bench engine` is told.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineOptions {
    /// A folder in Hugging Face's layout or a GGUF file.
    pub model: PathBuf,
    /// Compute threads; 0 takes the physical cores that affinity and cgroups allow.
    pub threads: usize,
    /// Format of weights in memory.
    pub dtype: ComputeDtype,
    /// Format of cached keys and values.
    pub kv_dtype: KvDtype,
    /// Instruction set; none takes the fastest.
    pub isa: Option<Isa>,
    /// Prompt lengths in tokens; empty measures no prefill.
    pub prompts: Vec<usize>,
    /// Tokens of a prompt computed in one step.
    pub chunk: usize,
    /// Sequences that decode together; empty measures no decode.
    pub batches: Vec<usize>,
    /// Tokens of each sequence before it decodes.
    pub context: usize,
    /// Tokens that each sequence decodes in one repetition.
    pub decode_steps: usize,
    /// Repetitions of each test, of which median, smallest and largest are told.
    pub repetitions: usize,
    /// Whether decode is also measured through the engine and the sampler.
    pub through_engine: bool,
}

/// Why a model cannot be timed.
#[derive(Debug, Error)]
pub enum EngineError {
    /// The files cannot be opened.
    #[error("cannot open the model")]
    Open(#[from] models::OpenError),
    /// The weights cannot be loaded.
    #[error("cannot load the model")]
    Load(#[from] models::LoadError),
    /// The device refused.
    #[error("the device refused")]
    Device(#[from] kernels::Error),
    /// More tokens than the model has positions for.
    #[error("{what} of {n_tokens} tokens is longer than the model's context of {context_length}; give less")]
    TooLong {
        /// What is too long.
        what: &'static str,
        /// Its tokens.
        n_tokens: usize,
        /// Tokens there may be.
        context_length: usize,
    },
    /// More than fits into memory.
    #[error(
        "the cache of {n_tokens} tokens takes {cache_mb} MB beside {weight_mb} MB of weights, and {available_mb} MB are available; give a smaller --batch, --context or --prompt"
    )]
    Memory {
        /// Tokens that are kept.
        n_tokens: usize,
        /// What they take.
        cache_mb: usize,
        /// What the weights have taken.
        weight_mb: usize,
        /// What is left.
        available_mb: usize,
    },
    /// A number that makes nothing to measure or more than there can be.
    #[error("{what} is {value}; give {least} to {most}")]
    Range {
        /// What it is.
        what: &'static str,
        /// Its value.
        value: usize,
        /// Smallest that works.
        least: usize,
        /// Largest that works.
        most: usize,
    },
    /// The engine refused its bounds.
    #[error("the engine refused its bounds")]
    Bounds(#[from] engine::ConfigError),
    /// The engine refused a request, or ended one.
    #[error("the engine refused a request: {0}")]
    Request(contract::error::RequestError),
    /// A step failed.
    #[error("a step failed")]
    Step(#[from] worker::executor::ExecutorError),
    /// The engine refused a step's output.
    #[error("the engine refused the output of a step")]
    Apply(#[from] engine::ApplyError),
}

/// All that `tessera bench engine` found; its JSON is described in the crate's documentation.
#[derive(Clone, Debug, Serialize)]
pub struct EngineReport {
    /// Always `"engine"`.
    pub bench: &'static str,
    /// The model's path.
    pub model: PathBuf,
    /// Compute threads.
    pub threads: usize,
    /// Device, instruction set and formats.
    pub numerics: String,
    /// Format of the cache.
    pub kv_dtype: String,
    /// Bytes of weights in memory.
    pub weight_bytes: usize,
    /// Bytes of keys and values of one token.
    pub kv_bytes_per_token: usize,
    /// Seconds to load the model.
    pub load_s: f64,
    /// What the machine can do at best.
    #[serde(flatten)]
    pub roofline: Roofline,
    /// Tokens of a prompt computed in one step.
    pub chunk: usize,
    /// Tokens of each sequence before it decodes.
    pub context: usize,
    /// Tokens that each sequence decodes.
    pub decode_steps: usize,
    /// One entry for each test.
    pub results: Vec<EngineResult>,
}

/// One test.
#[derive(Clone, Debug, Serialize)]
pub struct EngineResult {
    /// `prefill`, `decode` or `engine_decode`.
    pub test: &'static str,
    /// Tokens of the prompt, of a prefill.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens: Option<usize>,
    /// Sequences that decode together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub batch: Option<usize>,
    /// Tokens per second of all sequences.
    pub tokens_per_s: Spread,
    /// Tokens per second that weights, cache and arithmetic would allow.
    pub bound_tokens_per_s: f64,
    /// Part of the bound that the median reaches.
    pub of_bound: f64,
    /// Mean time of a step, in microseconds, by repetition.
    pub step_us: Spread,
    /// Mean time of a step outside model and sampler, in microseconds; only of `engine_decode`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub overhead_us: Option<Spread>,
}

/// Times of one repetition.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Repetition {
    pub(crate) seconds: f64,
    pub(crate) n_steps: usize,
    pub(crate) n_tokens: usize,
    /// Seconds outside model and sampler.
    pub(crate) outside: Option<f64>,
}

/// Loads the model and runs every test; `progress` is told the name of each before it runs.
///
/// # Errors
/// When the model cannot be loaded or has no room for what is asked.
pub fn engine(options: &EngineOptions, progress: &mut dyn FnMut(&str)) -> Result<EngineReport, EngineError> {
    check(options)?;
    let threads = worker::cores::or_allowed(options.threads);
    progress("loading the model");
    let ops = Arc::new(CpuOps::new(&CpuOptions { dtype: options.dtype, threads, isa: options.isa })?);
    let files = ModelFiles::open(&options.model)?;
    let began = clock::now();
    let mut direct = direct::Direct::load(&files, &ops, options)?;
    let load_s = clock::now().duration_since(began).as_secs_f64();
    progress("measuring the machine");
    let roofline = Roofline::measure(ops.isa(), threads)?;
    let dtypes = (options.dtype, options.kv_dtype);
    let work = work::Work::new(files.config(), dtypes, direct.weight_bytes(), direct.kv_bytes_per_token());
    let mut results = Vec::new();
    for &tokens in &options.prompts {
        progress(&format!("prefill of {tokens} tokens"));
        let repetitions = repeat(options, || direct.prefill(tokens, options.chunk))?;
        let bound = work.prefill_seconds(&roofline, tokens, options.chunk);
        results.push(EngineResult::new("prefill", (Some(tokens), None), &repetitions, tokens as f64 / bound));
    }
    direct.fill(options.batches.iter().copied().max().unwrap_or(0), options.context, options.chunk)?;
    let bound =
        |batch| batch as f64 / work.decode_seconds(&roofline, batch, options.context + options.decode_steps / 2);
    for &batch in &options.batches {
        progress(&format!("decode of {batch} sequences"));
        let repetitions = repeat(options, || direct.decode(batch, options.context, options.decode_steps))?;
        results.push(EngineResult::new("decode", (None, Some(batch)), &repetitions, bound(batch)));
    }
    let (weight_bytes, kv_bytes_per_token) = (direct.weight_bytes(), direct.kv_bytes_per_token());
    if options.through_engine && !options.batches.is_empty() {
        let mut batching = batching::Batching::new(&files, direct.into_parts(), options)?;
        for &batch in &options.batches {
            progress(&format!("decode of {batch} sequences through the engine"));
            let repetitions = repeat(options, || batching.decode(batch, options.context, options.decode_steps))?;
            results.push(EngineResult::new("engine_decode", (None, Some(batch)), &repetitions, bound(batch)));
        }
    }
    Ok(EngineReport {
        bench: "engine",
        model: options.model.clone(),
        threads,
        numerics: ops.numerics(),
        kv_dtype: format!("{:?}", options.kv_dtype).to_lowercase(),
        weight_bytes,
        kv_bytes_per_token,
        load_s,
        roofline,
        chunk: options.chunk,
        context: options.context,
        decode_steps: options.decode_steps,
        results,
    })
}

/// Runs once to warm up, then as often as asked.
fn repeat(
    options: &EngineOptions,
    mut test: impl FnMut() -> Result<Repetition, EngineError>,
) -> Result<Vec<Repetition>, EngineError> {
    test()?;
    (0..options.repetitions).map(|_| test()).collect()
}

fn check(options: &EngineOptions) -> Result<(), EngineError> {
    let within = |what, value: usize, least, most| match (least..=most).contains(&value) {
        true => Ok(()),
        false => Err(EngineError::Range { what, value, least, most }),
    };
    within("threads", options.threads, 0, 1024)?;
    within("chunk", options.chunk, 1, 1 << 17)?;
    within("repetitions", options.repetitions, 1, 1000)?;
    within("decode steps", options.decode_steps, 1, 1 << 20)?;
    within("context", options.context, 1, 1 << 24)?;
    options.prompts.iter().try_for_each(|&n| within("prompt", n, 1, 1 << 24))?;
    options.batches.iter().try_for_each(|&n| within("batch", n, 1, 4096))
}

impl EngineOptions {
    /// Tokens that a sequence may decode beside those that are timed: through the engine the first prompts to be
    /// computed decode while the others are.
    fn slack(&self) -> usize {
        let n_prompts = if self.through_engine { self.batches.iter().copied().max().unwrap_or(0) } else { 0 };
        (n_prompts * self.context).div_ceil(self.chunk) + 2
    }
}

impl EngineResult {
    fn new(
        test: &'static str,
        (tokens, batch): (Option<usize>, Option<usize>),
        repetitions: &[Repetition],
        bound_tokens_per_s: f64,
    ) -> Self {
        let spread = |value: &dyn Fn(&Repetition) -> f64| Spread::of(repetitions.iter().map(value).collect());
        let tokens_per_s = spread(&|repetition| repetition.n_tokens as f64 / repetition.seconds);
        let step_us = |seconds: f64, repetition: &Repetition| seconds * 1e6 / repetition.n_steps as f64;
        let has_outside = repetitions.iter().all(|repetition| repetition.outside.is_some());
        Self {
            test,
            tokens,
            batch,
            tokens_per_s,
            bound_tokens_per_s,
            of_bound: tokens_per_s.median / bound_tokens_per_s,
            step_us: spread(&|repetition| step_us(repetition.seconds, repetition)),
            overhead_us: has_outside
                .then(|| spread(&|repetition| step_us(repetition.outside.unwrap_or_default(), repetition))),
        }
    }
}

impl EngineReport {
    /// The tables for people.
    #[must_use]
    pub fn text(&self) -> String {
        let mut table = Table::new(&["test", "tokens/s", "min", "max", "bound", "of bound", "ms a step", "us outside"]);
        for result in &self.results {
            let size = match (result.tokens, result.batch) {
                (Some(tokens), _) => format!("{} {tokens} tokens", result.test),
                (None, batch) => format!("{} batch {}", result.test, batch.unwrap_or_default()),
            };
            let Spread { median, min, max } = result.tokens_per_s;
            table.row(vec![
                size,
                number(median),
                number(min),
                number(max),
                number(result.bound_tokens_per_s),
                format!("{:.0}%", 100.0 * result.of_bound),
                number(result.step_us.median / 1e3),
                result.overhead_us.map_or_else(String::new, |overhead| number(overhead.median)),
            ]);
        }
        let Self { model, threads, numerics, kv_dtype, weight_bytes, load_s, roofline, .. } = self;
        format!(
            "{} on {threads} threads: {numerics}, kv {kv_dtype}, {:.1} MB of weights loaded in {load_s:.2} s\n\
             this machine now: {}\ndecode after {} tokens of context\n\n{}",
            model.display(),
            *weight_bytes as f64 / 1e6,
            roofline.text(),
            self.context,
            table.render()
        )
    }
}
