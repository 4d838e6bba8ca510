//! `tessera bench engine`: one model in this process, without servers.

use std::path::PathBuf;

use anyhow::{Context as _, Result};
use bench::engine::{EngineOptions, engine};
use clap::ValueEnum;
use contract::kv::KvDtype;
use kernels::{ComputeDtype, Isa};

use super::once;
use crate::command::destination::{Destination, report};
use crate::model::{Cache, DEMO_NAME, Source, resolve};
use crate::output;

const EXAMPLES: &str = "\
Examples:
  tessera bench engine                                          The demo model: prefill of 512, decode of 1, 8 and 32
  tessera bench engine --model model.gguf --threads 1           Another model on one thread
  tessera bench engine --prompt 128,512,2048,8192 --batch 1     How prefill grows with the prompt
  tessera bench engine --prompt 512 --batch 1,2,4,8,16,32,64,256 --context 256
                                                                How decode grows with the batch
  tessera bench engine --engine --batch 32                      What a step costs outside model and sampler

Bounds are what weights, cache and arithmetic would take at the read bandwidth and the peak measured in the same run.";

/// What `tessera bench engine` takes.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[arg(help = "A folder, a GGUF file, hf:ORG/NAME[/FILE.gguf][@REVISION], or demo", long, default_value = "demo")]
    model: String,
    /// Compute threads; 0 takes the physical cores that affinity and cgroups allow
    #[arg(long, value_name = "N", default_value_t = 0)]
    threads: usize,
    /// What weights are computed as
    #[arg(long, value_enum, default_value_t = Dtype::default())]
    dtype: Dtype,
    /// Format of cached keys and values [default: f32 with f32 weights, else bf16]
    #[arg(long, value_enum)]
    kv_dtype: Option<Kv>,
    /// Instruction set, such as avx2 [default: the fastest]
    #[arg(long, value_name = "ISA")]
    cpu: Option<Isa>,
    /// Prompt lengths to prefill
    #[arg(long, alias = "prefill", value_name = "N", value_delimiter = ',', default_value = "512")]
    prompt: Vec<usize>,
    /// Tokens of a prompt computed in one step
    #[arg(long, value_name = "N", default_value_t = 512)]
    chunk: usize,
    /// Sequences that decode together
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1,8,32")]
    batch: Vec<usize>,
    /// Tokens of each sequence before it decodes
    #[arg(long, value_name = "N", default_value_t = 128)]
    context: usize,
    /// Tokens that each sequence decodes
    #[arg(long, value_name = "N", default_value_t = 32)]
    decode_steps: usize,
    /// Repetitions of each test, after one to warm up
    #[arg(long, value_name = "N", default_value_t = 5)]
    repetitions: usize,
    /// Decode through the engine and the sampler too
    #[arg(long)]
    engine: bool,
    /// Write the report as JSON; without a file to standard output
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    json: Option<PathBuf>,
}

/// What weights are computed as.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(super) enum Dtype {
    /// As they are stored; quantised ones become bf16 as they are multiplied
    #[default]
    Stored,
    /// Rounded to bf16 at load
    Bf16,
    /// Widened to f32 at load
    F32,
    /// Quantised ones as they are, others rounded to 8 bits; activations rounded to 8 bits
    Int8,
}

/// Formats of the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Kv {
    F32,
    Bf16,
    F16,
    Int8,
}

impl Dtype {
    pub(super) fn compute(self) -> ComputeDtype {
        match self {
            Self::Stored => ComputeDtype::Stored,
            Self::Bf16 => ComputeDtype::Bf16,
            Self::F32 => ComputeDtype::F32,
            Self::Int8 => ComputeDtype::Int8,
        }
    }
}

impl Kv {
    pub(super) fn dtype(self) -> KvDtype {
        match self {
            Self::F32 => KvDtype::F32,
            Self::Bf16 => KvDtype::Bf16,
            Self::F16 => KvDtype::F16,
            Self::Int8 => KvDtype::Int8,
        }
    }
}

/// Loads, times, prints and writes.
pub(super) fn run(args: &Args) -> Result<()> {
    let json = args.json.as_deref().map(Destination::open).transpose()?;
    let name = if args.model == "demo" { DEMO_NAME } else { &args.model };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let runtime = runtime.context("cannot start the async runtime")?;
    let model = runtime.block_on(resolve(name.parse::<Source>()?, Cache::from_environment()?))?;
    drop(runtime);
    let options = EngineOptions {
        model: model.path,
        threads: args.threads,
        dtype: args.dtype.compute(),
        kv_dtype: args.kv_dtype.map_or_else(|| default_kv(args.dtype), Kv::dtype),
        isa: args.cpu,
        prompts: once(&args.prompt),
        chunk: args.chunk,
        batches: once(&args.batch),
        context: args.context,
        decode_steps: args.decode_steps,
        repetitions: args.repetitions,
        through_engine: args.engine,
    };
    let bar = output::spinner();
    let found = engine(&options, &mut |doing| bar.set_message(doing.to_owned()));
    bar.finish_and_clear();
    let found = found?;
    report(&found.text(), json, &found)
}

fn default_kv(dtype: Dtype) -> KvDtype {
    if dtype == Dtype::F32 { KvDtype::F32 } else { KvDtype::Bf16 }
}
