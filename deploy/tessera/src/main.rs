//! The one binary: serves a model, runs single roles of a cluster, and talks to them.

mod command;
mod configuration;
mod http;
mod model;
mod output;
mod role;
mod serve;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap::{Parser, Subcommand};

/// Weights and caches are mapped by the kernels, so this serves requests only.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Time for what still blocks a thread when the command is done.
const LINGER: Duration = Duration::from_millis(500);

const EXAMPLES: &str = "\
Examples:
  tessera serve                                    Serve a small model; prints a curl line to try
  tessera serve --model ./Qwen3-0.6B --workers 1   Serve a folder in Hugging Face's layout or a GGUF file
  tessera generate \"The capital of France is\"      Stream a continuation to the terminal
  tessera generate --chat \"Tell me a story\"        Ask as a user, with the model's chat template
  tessera explain --prompt \"Tell me a story\"       Which worker would take it, and why
  tessera bench serve --concurrency 1,8,32         Load a server, with percentiles and plots
  tessera simulate --trace requests.jsonl          What that load would meet on a cluster
  tessera worker --config cluster.toml             Run one role of a cluster
  tessera drain worker-3 --config cluster.toml     Send a worker away; its requests go on elsewhere
  tessera completions bash > /etc/bash_completion.d/tessera

Environment:
  TESSERA_HOME   Model cache, instead of ~/.cache/tessera
  TESSERA_LOG    Log filter, such as debug or router=debug,info
  HF_ENDPOINT, HF_TOKEN, OTEL_EXPORTER_OTLP_ENDPOINT as elsewhere";

/// Serves large language models through a router, a scheduler and workers.
#[derive(Parser)]
#[command(name = "tessera", version, after_help = EXAMPLES)]
pub(crate) struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serve a model: a scheduler, a router and workers on this machine
    Serve(serve::Args),
    /// Continue a prompt, streamed to the terminal
    Generate(command::generate::Args),
    /// Show why a request went to its worker
    Explain(command::explain::Args),
    /// Measure a server, a model or kernels
    Bench(command::bench::Args),
    /// See what a load would meet on a cluster, in virtual time
    Simulate(Box<command::simulate::Args>),
    /// Send a worker away without a client noticing
    Drain(command::drain::Args),
    /// List or fetch models
    Model(command::model::Args),
    /// Run a scheduler of a cluster
    Scheduler(command::role::Args),
    /// Run a router of a cluster
    Router(command::role::Args),
    /// Run a worker of a cluster
    Worker(command::role::WorkerArgs),
    /// Print a shell's completion script
    Completions(command::completions::Args),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(cli.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            output::error(format!("error: {error:#}").trim_end());
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> anyhow::Result<()> {
    // These make the runtimes they need themselves.
    let command = match command {
        Command::Completions(args) => return command::completions::run(&args),
        Command::Bench(args) => return command::bench::run(args),
        Command::Simulate(args) => return command::simulate::run(&args),
        command => command,
    };
    let runtime = runtime().context("cannot start the async runtime")?;
    let result = runtime.block_on(async {
        match command {
            Command::Serve(args) => Box::pin(serve::run(args)).await,
            Command::Generate(args) => command::generate::run(args).await,
            Command::Explain(args) => command::explain::run(args).await,
            Command::Drain(args) => command::drain::run(args).await,
            Command::Model(args) => command::model::run(args).await,
            Command::Scheduler(args) => Box::pin(command::role::run(role::Role::Scheduler, args)).await,
            Command::Router(args) => Box::pin(command::role::run(role::Role::Router, args)).await,
            Command::Worker(args) => Box::pin(command::role::run(role::Role::Worker, args.into_args()?)).await,
            Command::Completions(_) | Command::Bench(_) | Command::Simulate(_) => Ok(()),
        }
    });
    runtime.shutdown_timeout(LINGER);
    result
}

/// With one core there is nobody to hand tasks to, so that one thread does all without a word to others.
fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    let n_cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut builder = match n_cores {
        1 => tokio::runtime::Builder::new_current_thread(),
        _ => tokio::runtime::Builder::new_multi_thread(),
    };
    builder.enable_all().build()
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_consistent_and_teaches_by_example() {
        let mut command = Cli::command();
        command.clone().debug_assert();
        for name in
            ["serve", "generate", "explain", "drain", "bench", "simulate", "model", "scheduler", "router", "worker"]
        {
            let help = command.find_subcommand_mut(name).unwrap().render_long_help().to_string();
            assert!(help.contains("Examples:"), "{name}: {help}");
        }
    }
}
