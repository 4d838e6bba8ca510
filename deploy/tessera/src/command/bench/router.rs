//! `tessera bench router`: what a router adds to the time of a request.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, bail};
use bench::overhead::{OverheadOptions, OverheadReport, WayResult, overhead};

use crate::command::destination::{Destination, report};
use crate::output;

const EXAMPLES: &str = "\
Examples:
  tessera bench router --router 127.0.0.1:50051 --worker 127.0.0.1:7000    200 requests a second for 10 seconds
  tessera bench router --worker 127.0.0.1:7000 --rate 1000 --time-s 30     More of them, for longer
  tessera bench router --worker 127.0.0.1:7000 --json router.json          For scripts

Requests go in turn straight to the worker, through the router as tokens, and through the router as text, one token out
each. With `tessera worker --engine sim` and a profile whose times are zero, what is left is what the software costs.";

/// Most requests in a second: each is a task of this process.
const RATE_MAX: f64 = 100_000.0;
/// Longest prompt, as of `tessera bench serve`.
const TOKENS_MAX: i64 = 1 << 24;

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
    #[arg(long, value_name = "N", default_value_t = 200.0, value_parser = rate, allow_negative_numbers = true)]
    rate: f64,
    /// Seconds to measure
    #[arg(long, value_name = "S", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    time_s: u64,
    /// Tokens of a prompt; of texts, words
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=TOKENS_MAX))]
    prompt_tokens: u32,
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
        prompt_tokens: args.prompt_tokens as usize,
        seed: args.seed,
    };
    let bar = output::spinner();
    bar.set_message(format!("{} requests a second for {} s", options.rate, args.time_s));
    let found = overhead(&options).await;
    bar.finish_and_clear();
    let found = found?;
    report(&found.text(), json, &found)?;
    judge(&found)
}

/// Fails when most requests of a way failed: its times are those of nothing, or of a lucky few.
fn judge(found: &OverheadReport) -> Result<()> {
    match found.results.iter().find(|result| result.n_failed > result.ms.n) {
        Some(WayResult { way, ms, n_failed, failure }) => {
            let failure = failure.as_deref().unwrap_or("for no known reason");
            bail!("{n_failed} of {} requests of the way {way:?} failed: {failure}", n_failed + ms.n)
        }
        None => Ok(()),
    }
}

fn rate(text: &str) -> Result<f64, String> {
    let value: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    if value > 0.0 && value <= RATE_MAX { Ok(value) } else { Err(format!("give more than 0 and at most {RATE_MAX}")) }
}

#[cfg(test)]
mod tests {
    use bench::overhead::Way;
    use bench::statistics::Distribution;

    use super::*;
    use crate::command::parse;

    #[test]
    fn fails_when_most_requests_of_a_way_failed() {
        let result = |way, n, n_failed| WayResult {
            way,
            ms: Distribution::of(&mut vec![1.0; n]),
            n_failed,
            failure: (n_failed > 0).then(|| "no worker".to_owned()),
        };
        let report = |n_routed, n_failed| OverheadReport {
            bench: "router",
            rate: 200.0,
            prompt_tokens: 128,
            results: vec![result(Way::Worker, 10, 0), result(Way::Tokens, n_routed, n_failed)],
        };
        assert!(judge(&report(10, 3)).is_ok());
        let error = judge(&report(0, 10)).unwrap_err().to_string();
        assert_eq!(error, "10 of 10 requests of the way Tokens failed: no worker");
    }

    #[test]
    fn the_load_has_bounds() {
        let args = |flags: &[&str]| parse::<Args>(&[&["--worker", "127.0.0.1:7000"], flags].concat());
        for flags in [
            ["--rate", "1e9"],
            ["--rate", "nan"],
            ["--rate", "-1"],
            ["--time-s", "0"],
            ["--prompt-tokens", "0"],
            ["--prompt-tokens", "4294967295"],
        ] {
            assert!(args(&flags).is_err(), "{flags:?}");
        }
        assert!(args(&["--rate", "100000", "--prompt-tokens", "16777216"]).is_ok());
    }
}
