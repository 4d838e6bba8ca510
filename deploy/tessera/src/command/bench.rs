//! `tessera bench`: load on a server, timings of a model in this process, timings of single kernels.

mod engine;
mod kernels;
mod router;
mod serve;

use anyhow::{Context as _, Result};
use clap::Subcommand;

const EXAMPLES: &str = "\
Examples:
  tessera bench serve --concurrency 1,8,32           Load `tessera serve` or any OpenAI-compatible server
  tessera bench engine                               Prefill and decode of one model in this process
  tessera bench kernels --kernel matmul --format bf16  Each kernel beside what the machine could do
  tessera bench router --worker 127.0.0.1:7000       What a router adds to its worker's time

Each has more examples in its own --help.";

/// What `tessera bench` takes.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Load a server and measure what its clients see
    Serve(Box<serve::Args>),
    /// Time one model in this process: prefill and decode
    Engine(engine::Args),
    /// Time each kernel alone, beside its bound
    Kernels(kernels::Args),
    /// Measure what a router adds to its worker's time
    Router(router::Args),
}

/// Measures and reports; makes the runtimes it needs itself.
pub(crate) fn run(args: Args) -> Result<()> {
    match args.command {
        Command::Serve(args) => runtime()?.block_on(serve::run(*args)),
        Command::Router(args) => runtime()?.block_on(router::run(args)),
        Command::Engine(args) => engine::run(&args),
        Command::Kernels(args) => kernels::run(&args),
    }
}

/// One thread: the cores belong to the server that is measured.
fn runtime() -> Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot start the async runtime")
}

/// Values without those that came before.
fn once<T: Copy + PartialEq>(values: &[T]) -> Vec<T> {
    let mut once = Vec::with_capacity(values.len());
    values.iter().for_each(|value| {
        if !once.contains(value) {
            once.push(*value)
        }
    });
    once
}
