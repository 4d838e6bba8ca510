//! Times each operator alone, against what the machine could do at best.

mod attention;
mod elementwise;
mod matmul;
mod timing;

use contract::kv::KvDtype;
use kernels::bound::Arithmetic;
use kernels::{ComputeDtype, CpuOps, CpuOptions, Isa, Ops, WeightFormat};
use serde::Serialize;

use crate::roofline::Roofline;
use crate::table::{Table, number};

/// Formats by the names that options and reports have.
pub const FORMATS: [(&str, WeightFormat); 11] = [
    ("bf16", WeightFormat::Bf16),
    ("f16", WeightFormat::F16),
    ("f32", WeightFormat::F32),
    ("q8_0", WeightFormat::Q8_0),
    ("q4_0", WeightFormat::Q4_0),
    ("q4_1", WeightFormat::Q4_1),
    ("q5_0", WeightFormat::Q5_0),
    ("q5_1", WeightFormat::Q5_1),
    ("q4_k", WeightFormat::Q4K),
    ("q5_k", WeightFormat::Q5K),
    ("q6_k", WeightFormat::Q6K),
];

/// What `tessera bench kernels` is told.
#[derive(Clone, Debug, PartialEq)]
pub struct OperatorOptions {
    /// Compute threads; 0 takes the physical cores that affinity and cgroups allow.
    pub threads: usize,
    /// Format that weights are computed in.
    pub dtype: ComputeDtype,
    /// Format of cached keys and values.
    pub kv_dtype: KvDtype,
    /// Instruction set; none takes the fastest.
    pub isa: Option<Isa>,
    /// Which operators.
    pub operators: Vec<Operator>,
    /// Formats that weights are stored in.
    pub formats: Vec<WeightFormat>,
    /// Rows of the left matrix.
    pub rows: Vec<usize>,
    /// Tokens of attention's contexts at most.
    pub context_max: usize,
    /// Memory that weights, and caches, of one test are spread over, so that no cache of the processor holds them.
    pub spread_bytes: usize,
    /// Time for one test; it runs at least three times.
    pub time: std::time::Duration,
}

/// Operators that can be timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operator {
    /// `x W^T`.
    Matmul,
    /// Paged attention, prefill and decode.
    Attention,
    /// Root-mean-square norm.
    RmsNorm,
    /// Rotary embedding.
    Rope,
    /// `activation(gate) * up`.
    GatedActivation,
}

/// All that `tessera bench kernels` found; its JSON is described in the crate's documentation.
#[derive(Clone, Debug, Serialize)]
pub struct OperatorReport {
    /// Always `"kernels"`.
    pub bench: &'static str,
    /// Compute threads.
    pub threads: usize,
    /// Device, instruction set and formats.
    pub numerics: String,
    /// What the machine can do at best with all these threads.
    #[serde(flatten)]
    pub roofline: Roofline,
    /// What it can do at best with one.
    pub one_thread: Roofline,
    /// One entry for each test.
    pub results: Vec<OperatorResult>,
}

/// One test.
#[derive(Clone, Debug, Default, Serialize)]
pub struct OperatorResult {
    /// `matmul`, `attention_prefill`, `attention_decode`, `rms_norm`, `rope` or `gated_activation`.
    pub kernel: &'static str,
    /// Format that the weight is stored in, of a matmul.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub format: Option<&'static str>,
    /// Rows: tokens of a step, or sequences that decode.
    pub m: usize,
    /// Inputs of a matmul.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub k: Option<usize>,
    /// Outputs of a matmul; width of the others.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub n: Option<usize>,
    /// Tokens of each sequence's context, of attention.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub context: Option<usize>,
    /// Median time of a call, in microseconds.
    pub us: f64,
    /// Multiplications and additions in a nanosecond.
    pub gflops: f64,
    /// Bytes of weights or cache, or of inputs and outputs of the others, in a nanosecond.
    pub gbytes_per_s: f64,
    /// The same multiplications and additions in the shortest possible time.
    pub bound_gflops: f64,
    /// Part of the bound: shortest possible time over the median. Above 1 when a cache held what was read.
    pub of_bound: f64,
}

/// What a test reads and computes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cost {
    pub(crate) bytes: f64,
    pub(crate) flops: f64,
    pub(crate) arithmetic: Arithmetic,
}

/// Runs every test; `progress` is told the name of each before it runs.
///
/// # Errors
/// What the device says.
pub fn operators(options: &OperatorOptions, progress: &mut dyn FnMut(&str)) -> Result<OperatorReport, kernels::Error> {
    let threads = worker::cores::or_allowed(options.threads);
    progress("measuring the machine");
    let ops = CpuOps::new(&CpuOptions { dtype: options.dtype, threads, isa: options.isa })?;
    let one_thread = Roofline::measure(ops.isa(), 1)?;
    let roofline = match threads {
        1 => one_thread.clone(),
        _ => Roofline::measure(ops.isa(), threads)?,
    };
    let mut bench = Bench { ops: &ops, options, roofline: &roofline, progress, results: Vec::new() };
    for operator in &options.operators {
        match operator {
            Operator::Matmul => matmul::run(&mut bench)?,
            Operator::Attention => attention::run(&mut bench)?,
            Operator::RmsNorm => elementwise::rms_norm(&mut bench)?,
            Operator::Rope => elementwise::rope(&mut bench)?,
            Operator::GatedActivation => elementwise::gated_activation(&mut bench)?,
        }
    }
    let results = bench.results;
    Ok(OperatorReport { bench: "kernels", threads, numerics: ops.numerics(), roofline, one_thread, results })
}

/// What all tests share.
pub(crate) struct Bench<'a> {
    pub(crate) ops: &'a CpuOps,
    pub(crate) options: &'a OperatorOptions,
    roofline: &'a Roofline,
    pub(crate) progress: &'a mut dyn FnMut(&str),
    results: Vec<OperatorResult>,
}

impl Bench<'_> {
    /// Times `call`, which is told the number of the repetition, and notes it under `what` with what it costs.
    pub(crate) fn note(
        &mut self,
        what: OperatorResult,
        cost: Cost,
        prepare: impl FnMut(usize) -> Result<(), kernels::Error>,
        call: impl FnMut(usize) -> Result<(), kernels::Error>,
    ) -> Result<f64, kernels::Error> {
        let seconds = timing::median(self.options.time, prepare, call)?;
        let bound = self.roofline.seconds(cost.bytes, &[(cost.flops, cost.arithmetic)]);
        self.results.push(OperatorResult {
            us: seconds * 1e6,
            gflops: cost.flops / seconds / 1e9,
            gbytes_per_s: cost.bytes / seconds / 1e9,
            bound_gflops: cost.flops / bound / 1e9,
            of_bound: bound / seconds,
            ..what
        });
        Ok(seconds)
    }
}

impl OperatorReport {
    /// The tables for people.
    #[must_use]
    pub fn text(&self) -> String {
        let mut table = Table::new(&["kernel", "shape", "us", "GFLOP/s", "bound", "GB/s", "of bound"]);
        for result in &self.results {
            let kernel = match result.format {
                Some(format) => format!("{} {format}", result.kernel),
                None => result.kernel.to_owned(),
            };
            let sizes = [Some(result.m), result.k, result.n].into_iter().flatten();
            let mut shape = sizes.map(|size| size.to_string()).collect::<Vec<_>>().join(" x ");
            if let Some(context) = result.context {
                shape = format!("{shape} at {context}");
            }
            let numbers = [result.us, result.gflops, result.bound_gflops, result.gbytes_per_s].map(number);
            let percent = format!("{:.0}%", 100.0 * result.of_bound);
            table.row([vec![kernel, shape], numbers.to_vec(), vec![percent]].concat());
        }
        format!(
            "{} on {} threads\nthis machine now: {}\n       one thread: {}\n\n{}",
            self.numerics,
            self.threads,
            self.roofline.text(),
            self.one_thread.text(),
            table.render()
        )
    }
}
