//! `tessera bench kernels`: each operator alone, beside its bound.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use bench::operators::{FORMATS, Operator, OperatorOptions, operators};
use clap::ValueEnum;
use kernels::{Isa, WeightFormat};

use super::engine::{Dtype, Kv};
use super::once;
use crate::command::destination::{Destination, report};
use crate::output;

const EXAMPLES: &str = "\
Examples:
  tessera bench kernels                                      Everything, on all cores
  tessera bench kernels --kernel matmul --format bf16,q4_1   Matrix products of two formats
  tessera bench kernels --kernel attention --threads 1       Attention on one thread
  tessera bench kernels --cpu avx2 --json avx2.json          Another instruction set, for scripts
  tessera bench kernels --kernel matmul --spread-mb 0        With one weight that stays in the caches

Bounds are the read bandwidth and the peak of this machine, measured in the same run. Weights and caches are spread over
more memory than the processor's caches hold, as in a model; small operators and --spread-mb 0 may exceed the bound.";

/// What `tessera bench kernels` takes.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Compute threads; 0 takes the physical cores that affinity and cgroups allow
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=1024))]
    threads: u32,
    /// What weights are computed as
    #[arg(long, value_enum, default_value_t = Dtype::default())]
    dtype: Dtype,
    /// Format of cached keys and values
    #[arg(long, value_enum, default_value_t = Kv::Bf16)]
    kv_dtype: Kv,
    /// Instruction set, such as avx2 [default: the fastest]
    #[arg(long, value_name = "ISA")]
    cpu: Option<Isa>,
    /// Only these kernels
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Kernel::value_variants().to_vec(), hide_default_value = true)]
    kernel: Vec<Kernel>,
    /// Only weights stored in these formats, of f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1, q4_k, q5_k, q6_k
    #[arg(long, value_name = "FORMAT", value_delimiter = ',', value_parser = format)]
    format: Vec<WeightFormat>,
    /// Rows that weights are multiplied with
    #[arg(long, value_name = "M", value_delimiter = ',', default_value = "1,2,4,8,16,32,64,128,512,2048", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    rows: Vec<u32>,
    /// Longest context of attention
    #[arg(long, value_name = "N", default_value_t = 8192, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    context_max: u32,
    /// Memory that weights and caches of one test are spread over; 0 takes one of each
    #[arg(long, value_name = "MB", default_value_t = 192, value_parser = clap::value_parser!(u32).range(0..=1 << 16))]
    spread_mb: u32,
    /// Time for one test; each runs at least three times
    #[arg(long, value_name = "MS", default_value_t = 50, value_parser = clap::value_parser!(u64).range(0..=60_000))]
    time_ms: u64,
    /// Write the report as JSON; without a file to standard output
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    json: Option<PathBuf>,
}

/// Kernels to choose from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Kernel {
    Matmul,
    Attention,
    RmsNorm,
    Rope,
    GatedActivation,
}

impl Kernel {
    fn operator(self) -> Operator {
        match self {
            Self::Matmul => Operator::Matmul,
            Self::Attention => Operator::Attention,
            Self::RmsNorm => Operator::RmsNorm,
            Self::Rope => Operator::Rope,
            Self::GatedActivation => Operator::GatedActivation,
        }
    }
}

/// Times, prints and writes.
pub(super) fn run(args: &Args) -> Result<()> {
    let json = args.json.as_deref().map(Destination::open).transpose()?;
    let formats = if args.format.is_empty() { FORMATS.map(|(_, format)| format).to_vec() } else { once(&args.format) };
    let options = OperatorOptions {
        threads: args.threads as usize,
        dtype: args.dtype.compute(),
        kv_dtype: args.kv_dtype.dtype(),
        isa: args.cpu,
        operators: once(&args.kernel).into_iter().map(|kernel| kernel.operator()).collect(),
        formats,
        rows: once(&args.rows).into_iter().map(|rows| rows as usize).collect(),
        context_max: args.context_max as usize,
        spread_bytes: (args.spread_mb as usize) << 20,
        time: Duration::from_millis(args.time_ms),
    };
    let bar = output::spinner();
    let found = operators(&options, &mut |doing| bar.set_message(doing.to_owned()));
    bar.finish_and_clear();
    let found = found?;
    report(&found.text(), json, &found)
}

fn format(name: &str) -> Result<WeightFormat, String> {
    let known = FORMATS.map(|(name, _)| name).join(", ");
    let found = FORMATS.iter().find(|(known, _)| *known == name);
    found.map(|(_, format)| *format).ok_or_else(|| format!("give one of {known}"))
}
