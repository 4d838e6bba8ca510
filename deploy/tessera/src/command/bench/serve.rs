//! `tessera bench serve`: a load generator for OpenAI-compatible servers and for our gRPC.

use std::fs::File;
use std::io::BufReader;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use bench::serve::{
    Amount, Goals, Lengths, Load, PointReport, PromptKind, ServeOptions, ServeReport, Target, TraceEntry, read_trace,
    serve,
};
use daemon::shutdown::Shutdown;

use crate::command::destination::{Destination, page, report};
use crate::output;

const EXAMPLES: &str = "\
Examples:
  tessera bench serve                                              One request to `tessera serve` on this machine
  tessera bench serve --concurrency 1,8,32 --html report.html      A burst of each size, with plots
  tessera bench serve --concurrency 8 --requests-per-slot 5        Five rounds of eight at once
  tessera bench serve --url http://127.0.0.1:8000 --rate 4 --duration 60 --goal-ttft-ms 500 --goal-tpot-ms 50
                                                                   Poisson arrivals; how much of it is good
  tessera bench serve --grpc 127.0.0.1:50051 --shared-prefix 512 --input-len 16 --warmup 1
                                                                   Prompts that share a prefix which is cached
  tessera bench serve --trace conversation.jsonl --speed 0.1 --trace-input-max 4000
                                                                   Real arrivals, slowed down

Without --num-requests, --requests-per-slot or --duration each point is one burst of as many requests as run at once,
or ten seconds of arrivals, or the whole trace.
TTFT is the time to the first part with tokens, TPOT the time per token after it, ITL the time between parts with
tokens, E2E the time to the end. Ctrl-C ends early and still reports.";

/// What `tessera bench serve` takes.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// OpenAI-compatible server
    #[arg(long, default_value = concat!("http://", "127.0.0.1:8080"), conflicts_with = "grpc")]
    url: String,
    /// A Tessera router's gRPC address, instead of --url
    #[arg(long, value_name = "ADDR")]
    grpc: Option<String>,
    /// Bearer token for --url
    #[arg(long, value_name = "KEY", env = "OPENAI_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
    /// Model to ask for [default: the first that the server lists]
    #[arg(long)]
    model: Option<String>,
    /// Ask chats of random words instead of completions of random token ids
    #[arg(long)]
    chat: bool,
    /// Ask completions of random words, for servers that take no token ids
    #[arg(long, conflicts_with = "chat")]
    text: bool,
    #[command(flatten)]
    load: LoadArgs,
    #[command(flatten)]
    lengths: LengthArgs,
    /// Requests before the first point that are not counted
    #[arg(long, value_name = "N", default_value_t = 0)]
    warmup: usize,
    /// Time to first token that a good request reaches
    #[arg(long, value_name = "MS", value_parser = positive, allow_negative_numbers = true)]
    goal_ttft_ms: Option<f64>,
    /// Time per output token that a good request reaches
    #[arg(long, value_name = "MS", value_parser = positive, allow_negative_numbers = true)]
    goal_tpot_ms: Option<f64>,
    /// Seconds that one request may take
    #[arg(long, value_name = "S", default_value_t = 600.0, value_parser = positive, allow_negative_numbers = true)]
    timeout: f64,
    /// Requests at once at most, whatever arrives
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = at_least_one)]
    max_connections: usize,
    /// Makes prompts and arrivals repeatable
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Write the report as JSON; without a file, or with -, to standard output
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    json: Option<PathBuf>,
    /// Write the report as one HTML page with plots
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

/// How much load.
#[derive(clap::Args)]
struct LoadArgs {
    /// Requests at any time, one point for each number given
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = at_least_one)]
    concurrency: Vec<usize>,
    /// Requests per second with Poisson arrivals, one point for each number given
    #[arg(long, value_name = "R", value_delimiter = ',', value_parser = positive, allow_negative_numbers = true, conflicts_with = "concurrency")]
    rate: Vec<f64>,
    /// Copy lengths, shared blocks and, without --concurrency or --rate, times of a Mooncake (JSON lines) or Azure (CSV) trace
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// How much faster than the trace requests arrive
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0, value_parser = positive, allow_negative_numbers = true, requires = "trace")]
    speed: f64,
    /// Requests of each point
    #[arg(long, value_name = "N", group = "amount", value_parser = at_least_one)]
    num_requests: Option<usize>,
    /// Requests of each point for each that runs at once, one after the other
    #[arg(long, value_name = "N", group = "amount", value_parser = at_least_one, conflicts_with = "rate")]
    requests_per_slot: Option<usize>,
    /// Seconds within which requests of a point start
    #[arg(long, value_name = "S", group = "amount", value_parser = positive, allow_negative_numbers = true)]
    duration: Option<f64>,
}

/// How long prompts and outputs are.
#[derive(clap::Args)]
struct LengthArgs {
    /// Tokens of a prompt
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = tokens)]
    input_len: u32,
    /// Tokens generated
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = tokens)]
    output_len: u32,
    /// Lengths vary evenly by up to this part of them: 0.2 of 100 is 80 to 120
    #[arg(long, value_name = "PART", default_value_t = 0.0, value_parser = part, allow_negative_numbers = true)]
    spread: f64,
    /// Tokens that every prompt begins with, before those of --input-len
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = prefix)]
    shared_prefix: u32,
    /// Random token ids are below it
    #[arg(long, value_name = "N", default_value_t = NonZeroU32::new(32_000).expect("not zero"))]
    vocab_size: NonZeroU32,
    /// End at the model's end-of-sequence token, and send only fields that OpenAI's API has
    #[arg(long)]
    stop_at_eos: bool,
    /// Cut longer prompts of a trace
    #[arg(long, value_name = "N", default_value_t = TOKENS_MAX, hide_default_value = true, value_parser = tokens, requires = "trace")]
    trace_input_max: u32,
    /// Cut longer outputs of a trace
    #[arg(long, value_name = "N", default_value_t = TOKENS_MAX, hide_default_value = true, value_parser = tokens, requires = "trace")]
    trace_output_max: u32,
}

/// Longest prompt or output.
const TOKENS_MAX: u32 = 1 << 24;

/// Most requests at once and in a point.
const REQUESTS_MAX: usize = 1 << 20;

/// Arrivals without a bound of their own last this long.
const ARRIVALS: Duration = Duration::from_secs(10);

/// Loads, prints and writes.
pub(super) async fn run(args: Args) -> Result<()> {
    let options = args.options()?;
    let (json, html) = Destination::open_both(args.json.as_deref(), args.html.as_deref())?;
    let shutdown = Shutdown::on_signals().context("cannot listen for signals")?;
    if let (Some(trace), Some(n)) = (&options.trace, args.load.num_requests)
        && trace.len() < n
    {
        output::error(&format!("the trace has {} requests, so {} are sent and not {n}", trace.len(), trace.len()));
    }
    let found = serve(&options, &shutdown).await?;
    report(&found.text(), json, &found)?;
    page(html, || found.html())?;
    judge(&found)
}

/// Fails when most requests failed, or nothing at all was answered, though someone waited for it.
fn judge(found: &ServeReport) -> Result<()> {
    let sum = |count: fn(&PointReport) -> usize| found.points.iter().map(count).sum::<usize>();
    let (n_completed, n_failed) = (sum(|point| point.completed), sum(PointReport::n_errors));
    if n_failed > n_completed {
        bail!("{n_failed} of {} requests failed", n_completed + n_failed);
    }
    if n_completed == 0 && !found.interrupted {
        bail!("no request was answered");
    }
    Ok(())
}

impl Args {
    fn options(&self) -> Result<ServeOptions> {
        let trace = self.load.trace.as_ref().map(|path| self.trace(path)).transpose()?;
        let target = match &self.grpc {
            Some(address) => Target::Grpc(address.clone()),
            None => Target::Http { url: self.url.clone(), api_key: self.api_key.clone() },
        };
        let prompt = match (self.chat, self.text) {
            (true, _) => PromptKind::Chat,
            (false, true) => PromptKind::Text,
            (false, false) => PromptKind::Tokens { vocab_size: self.lengths.vocab_size },
        };
        Ok(ServeOptions {
            target,
            model: self.model.clone(),
            prompt,
            lengths: self.lengths.lengths(),
            points: self.load.points(),
            amount: self.load.amount(),
            trace,
            trace_name: self.load.trace.as_ref().map(|path| path.display().to_string()),
            warmup: self.warmup.min(REQUESTS_MAX),
            timeout: seconds(self.timeout),
            connections_max: self.max_connections,
            goals: Goals { ttft_ms: self.goal_ttft_ms, tpot_ms: self.goal_tpot_ms },
            seed: self.seed,
        })
    }

    fn trace(&self, path: &PathBuf) -> Result<Vec<TraceEntry>> {
        let what = || format!("cannot use {}", path.display());
        let file = File::open(path).with_context(what)?;
        read_trace(BufReader::new(file), self.load.num_requests.unwrap_or(REQUESTS_MAX)).with_context(what)
    }
}

impl LoadArgs {
    fn points(&self) -> Vec<Load> {
        let closed = self.concurrency.iter().map(|&concurrency| Load::Closed { concurrency });
        let open = self.rate.iter().map(|&rate| Load::Open { rate });
        let points: Vec<Load> = closed.chain(open).collect();
        match (points.is_empty(), &self.trace) {
            (false, _) => points,
            (true, Some(_)) => vec![Load::Replayed { speed: self.speed }],
            (true, None) => vec![Load::Closed { concurrency: 1 }],
        }
    }

    fn amount(&self) -> Amount {
        match (self.num_requests, self.requests_per_slot, self.duration) {
            (Some(n), ..) => Amount::Requests(n),
            (None, Some(n), _) => Amount::PerSlot(n),
            (None, None, Some(duration)) => Amount::For(seconds(duration)),
            (None, None, None) if self.trace.is_some() => Amount::Requests(REQUESTS_MAX),
            (None, None, None) if self.rate.is_empty() => Amount::PerSlot(1),
            (None, None, None) => Amount::For(ARRIVALS),
        }
    }
}

impl LengthArgs {
    fn lengths(&self) -> Lengths {
        Lengths {
            input: self.input_len,
            output: self.output_len,
            spread: self.spread,
            shared_prefix: self.shared_prefix,
            ignore_eos: !self.stop_at_eos,
            trace_max: (self.trace_input_max, self.trace_output_max),
        }
    }
}

fn seconds(value: f64) -> Duration {
    Duration::try_from_secs_f64(value).unwrap_or(Duration::MAX)
}

fn positive(text: &str) -> Result<f64, String> {
    let value: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    if value > 0.0 && value <= 1e9 { Ok(value) } else { Err("give more than 0 and at most 1e9".to_owned()) }
}

fn part(text: &str) -> Result<f64, String> {
    let value: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    if (0.0..=1.0).contains(&value) { Ok(value) } else { Err("give 0 to 1".to_owned()) }
}

fn at_least_one(text: &str) -> Result<usize, String> {
    let value: usize = text.parse().map_err(|_| "not a whole number".to_owned())?;
    if (1..=REQUESTS_MAX).contains(&value) { Ok(value) } else { Err(format!("give 1 to {REQUESTS_MAX}")) }
}

fn tokens(text: &str) -> Result<u32, String> {
    prefix(text).and_then(|n| if n > 0 { Ok(n) } else { Err("give at least 1".to_owned()) })
}

fn prefix(text: &str) -> Result<u32, String> {
    let value: u32 = text.parse().map_err(|_| "not a number of tokens".to_owned())?;
    if value <= TOKENS_MAX { Ok(value) } else { Err(format!("give at most {TOKENS_MAX}")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::parse;

    fn args(line: &[&str]) -> Args {
        parse(line).unwrap()
    }

    #[test]
    fn a_list_of_numbers_is_a_list_of_bursts() {
        let options = args(&["--concurrency", "1,8"]).options().unwrap();
        assert_eq!(options.points, [Load::Closed { concurrency: 1 }, Load::Closed { concurrency: 8 }]);
        assert_eq!(options.amount, Amount::PerSlot(1));
        let options = args(&["--rate", "2.5", "--duration", "3"]).options().unwrap();
        assert_eq!((&options.points[..], options.amount), (&[Load::Open { rate: 2.5 }][..], Amount::For(seconds(3.0))));
    }

    #[test]
    fn a_trace_is_replayed_unless_the_load_is_given() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trace.jsonl");
        std::fs::write(&path, "{\"timestamp\":0,\"input_length\":7,\"output_length\":3,\"hash_ids\":[1]}\n").unwrap();
        let path = path.to_str().unwrap();
        assert_eq!(args(&["--trace", path, "--speed", "2"]).options().unwrap().points, [Load::Replayed { speed: 2.0 }]);
        let options = args(&["--trace", path, "--concurrency", "4"]).options().unwrap();
        assert_eq!((options.points.len(), options.trace.unwrap().len()), (1, 1));
        let missing = args(&["--trace", "no/such/trace"]).options().unwrap_err();
        assert!(missing.to_string().contains("no/such/trace"), "{missing}");
    }

    #[test]
    fn what_contradicts_itself_or_cannot_be_is_refused() {
        let refused: [&[&str]; 9] = [
            &["--concurrency", "0"],
            &["--concurrency", "8", "--rate", "1"],
            &["--num-requests", "8", "--duration", "1"],
            &["--chat", "--text"],
            &["--rate", "nan"],
            &["--goal-ttft-ms", "nan"],
            &["--spread", "2"],
            &["--input-len", "99999999999"],
            &["--speed", "2"],
        ];
        for line in refused {
            assert!(parse::<Args>(line).is_err(), "{line:?}");
        }
        let Err(error) = parse::<Args>(&["--rate", "-1"]) else { panic!("a negative rate is taken") };
        assert!(error.to_string().contains("give more than 0"), "{error}");
    }
}
