//! `tessera bench router`: what a router adds to the time of a request.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use bench::overhead::{OverheadOptions, overhead};

use crate::command::destination::{Destination, report};
use crate::output;

const EXAMPLES: &str = "\
Examples:
  tessera bench router --router 127.0.0.1:50051 --worker 127.0.0.1:7000    200 requests a second for 10 seconds
  tessera bench router --worker 127.0.0.1:7000 --rate 1000 --time-s 30     More of them, for longer
  tessera bench router --worker 127.0.0.1:7000 --json router.json          For scripts

Requests go in turn straight to the worker, through the router as tokens, and through the router as text, one token out
each. With `tessera worker --engine sim` and a profile whose times are zero, what is left is what the software costs.";

/// What `tessera bench router` takes.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The router's gRPC address
    #[arg(long, value_name = "ADDR", default_value = crate::serve::DEFAULT_GRPC)]
    router: String,
    /// The gRPC address of a worker behind it; the only one, or placement decides where the others go
    #[arg(long, value_name = "ADDR")]
    worker: String,
    /// Requests in a second, over all three ways
    #[arg(long, value_name = "N", default_value_t = 200.0)]
    rate: f64,
    /// Seconds to measure
    #[arg(long, value_name = "S", default_value_t = 10)]
    time_s: u64,
    /// Tokens of a prompt; of texts, words
    #[arg(long, value_name = "N", default_value_t = 128)]
    prompt_tokens: usize,
    /// Makes the load repeatable
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Write the report as JSON; without a file to standard output
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    json: Option<PathBuf>,
}

/// Measures, prints and writes.
pub(super) async fn run(args: Args) -> Result<()> {
    let json = args.json.as_deref().map(Destination::open).transpose()?;
    let options = OverheadOptions {
        router: args.router,
        worker: args.worker,
        rate: args.rate,
        time: Duration::from_secs(args.time_s),
        prompt_tokens: args.prompt_tokens,
        seed: args.seed,
    };
    let bar = output::spinner();
    bar.set_message(format!("{} requests a second for {} s", options.rate, args.time_s));
    let found = overhead(&options).await;
    bar.finish_and_clear();
    let found = found?;
    report(&found.text(), json, &found)
}
