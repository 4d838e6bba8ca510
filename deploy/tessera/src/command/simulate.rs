//! `tessera simulate`: a cluster in virtual time, to see what a load would meet there.

use std::fs::File;
use std::io::BufReader;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::Thread;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use bench::serve::{TRACE_BLOCK_TOKENS, TraceEntry, read_trace};
use contract::view::Role;
use indicatif::{ProgressBar, ProgressStyle};
use router::route::RoutePolicy;
use router::route::policy;
use scheduler::state::roles::RoleSettings;
use simulation::compare::{compare, n_runs, run_all};
use simulation::{
    Delays, Goals, Links, Options, Prepared, Report, Request, Roles, Synthetic, Waiting, Workload, page, rivals,
};
use worker::sim::Profile;

use crate::command::destination::{self, Destination, report};

const EXAMPLES: &str = "\
Examples:
  tessera simulate                                            A made-up load on 8 workers
  tessera simulate --trace conversation.jsonl --workers 8     A recorded one; prints times, hits and what was good
  for n in 4 6 8 12; do tessera simulate --trace conversation.jsonl --workers $n --goal-ttft-s 2 --json |
    jq -r '[.workers, .goodput] | @tsv'; done                 How many NPUs do I need for 2 s to the first token?
  tessera simulate --trace conversation.jsonl --speed 1.5     And when the load grows by half?
  tessera simulate --profile ascend-910b --rate 20            On another device; a file of the same form does as well
  tessera simulate --policy least_loaded --html plot.html     With another policy, with plots
  tessera simulate --routers 8 --workers 64 --rate 60         Eight routers that know of each other's placements late
  tessera simulate --roles 2:6 --rate 20                      Two workers compute prompts, six go on with them
  tessera simulate --faults --seed 7                          Workers crash, links break: what must hold is checked
  tessera simulate --compare --trace a.jsonl --trace b.jsonl --speed 1,1.25,1.5 --seeds 5
                                                              The default policy against others

Traces are Mooncake's JSON lines (timestamp in ms, input_length, output_length, hash_ids of 512-token blocks) or Azure's
CSV (TIMESTAMP,ContextTokens,GeneratedTokens). The same arguments give the same report, to the byte.";

/// What `tessera simulate` takes.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Recorded requests to replay [default: a made-up load]
    #[arg(long, value_name = "FILE")]
    trace: Vec<PathBuf>,
    /// Requests of the trace to take, from the first on, or to make up
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=250_000))]
    requests: Option<u32>,
    /// Requests per second of the made-up load
    #[arg(long, value_name = "R", default_value_t = 8.0, conflicts_with = "trace", value_parser = positive)]
    rate: f64,
    /// Workers
    #[arg(long, value_name = "N", default_value_t = 8)]
    workers: usize,
    /// Routers
    #[arg(long, value_name = "N", default_value_t = 1)]
    routers: usize,
    /// What workers do: mixed, auto, or how many compute prompts and how many go on with them, such as 2:6
    #[arg(long, value_name = "mixed|auto|P:D", default_value = "mixed", value_parser = roles_by_name)]
    roles: RolesArg,
    /// How requests are placed: a router's policy, or sglang, block_count or least_predicted for comparison
    #[arg(long, value_name = "NAME", default_value = policy::DEFAULT, value_parser = policy_by_name)]
    policy: Policy,
    /// How much faster than recorded requests arrive; with --compare several
    #[arg(long, value_name = "FACTOR", value_delimiter = ',', default_value = "1", value_parser = positive)]
    speed: Vec<f64>,
    /// Decides all that is random
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Runs with so many seeds from --seed on
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    seeds: u32,
    /// What workers are like: mooncake, ascend-910b, cpu, instant or a TOML file
    #[arg(long, value_name = "NAME|FILE", default_value = "mooncake")]
    profile: PathBuf,
    #[command(flatten)]
    network: NetworkArgs,
    /// Time to first token that a good request reaches
    #[arg(long, value_name = "S", default_value_t = 2.0, value_parser = positive)]
    goal_ttft_s: f64,
    /// Time per output token that a good request reaches
    #[arg(long, value_name = "S", default_value_t = 0.1, value_parser = positive)]
    goal_tpot_s: f64,
    /// Break things at random, and check what must hold nevertheless
    #[arg(long)]
    faults: bool,
    /// Run the default policy and others on each trace and speed, and print means over all seeds
    #[arg(long, conflicts_with_all = ["policy", "html"])]
    compare: bool,
    /// Runs at a time [default: one for each processor]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1_024))]
    threads: Option<u16>,
    /// Write the report as JSON; without a file, or with -, to standard output
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    json: Option<PathBuf>,
    /// Write the report as one HTML page with plots
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

/// How late routers know what.
#[derive(Clone, Copy, clap::Args)]
struct NetworkArgs {
    /// Time from a change of a worker to the routers, by way of the scheduler
    #[arg(long, value_name = "MS", default_value_t = 50.0, value_parser = not_negative)]
    view_delay_ms: f64,
    /// Time from a change of a worker's cache to the routers [default: as --view-delay-ms]
    #[arg(long, value_name = "MS", value_parser = not_negative)]
    kv_delay_ms: Option<f64>,
    /// Time from a placement to the other routers at most; at least it is 2/5 of that
    #[arg(long, value_name = "MS", default_value_t = 5.0, value_parser = not_negative)]
    ledger_delay_ms: f64,
    /// Predicted work of an engine from which on requests wait at the router; 0 sends them at once
    #[arg(long, value_name = "MS", value_parser = not_negative)]
    dispatch_ahead_ms: Option<f64>,
    /// Tokens whose keys and values a worker sends to others in a second
    #[arg(long, value_name = "N", default_value_t = Links::default().tokens_per_s, value_parser = positive)]
    link_tokens_per_s: f64,
    /// How far short prefills go before long ones among those that wait; 0 is first come, first served
    #[arg(long, value_name = "FACTOR", value_parser = not_negative)]
    slack: Option<f64>,
}

/// What workers do.
#[derive(Clone, Copy, Debug, PartialEq)]
enum RolesArg {
    Mixed,
    Auto,
    Counts { n_prefill: usize, n_decode: usize },
}

/// A policy by its name.
#[derive(Clone, Copy)]
struct Policy(&'static dyn RoutePolicy);

/// Simulates and reports.
pub(crate) fn run(args: &Args) -> Result<()> {
    let (json, html) = Destination::open_both(args.json.as_deref(), args.html.as_deref())?;
    let profile = Profile::load(&args.profile)?;
    let loads: Vec<Prepared> = args
        .loads()?
        .into_iter()
        .map(|load| Prepared::new(load, profile.clone()).context("no engine can have this profile"))
        .collect::<Result<_>>()?;
    let options = args.options();
    options.check()?;
    let n_threads = args
        .threads
        .map_or_else(|| std::thread::available_parallelism().map_or(1, std::num::NonZero::get), usize::from);
    let seeds: Vec<u64> = (0..u64::from(args.seeds)).map(|n| args.seed.wrapping_add(n)).collect();
    if args.compare {
        let n_done = AtomicUsize::new(0);
        let n = n_runs(loads.len() * args.speed.len(), seeds.len());
        let found = shown("runs", n, &n_done, || compare(&loads, &args.speed, &seeds, &options, n_threads, &n_done))?;
        report(&found.text(), json, &found)?;
        let failed = found.cells.iter().find(|cell| cell.results.iter().all(|result| result.ttft_mean_s == 0.0));
        return failed.map_or(Ok(()), |cell| Err(anyhow!("no request of {} was answered", cell.workload)));
    }
    let reports = simulate(&loads, &options, &seeds, &args.speed, n_threads)?;
    let texts: Vec<String> = reports.iter().map(Report::text).collect();
    let text = texts.join("\n\n");
    match &reports[..] {
        [only] => report(&text, json, only)?,
        all => report(&text, json, &all)?,
    }
    destination::page(html, || page(&reports))?;
    match reports.iter().find(|report| report.has_failed()) {
        Some(failed) => bail!("no request of {} was answered, {} failed", failed.workload, failed.failed_text()),
        None => Ok(()),
    }
}

fn simulate(
    loads: &[Prepared],
    options: &Options,
    seeds: &[u64],
    speeds: &[f64],
    n_threads: usize,
) -> Result<Vec<Report>> {
    let of_load = |load| {
        speeds
            .iter()
            .flat_map(move |&speed| seeds.iter().map(move |&seed| (load, Options { speed, seed, ..options.clone() })))
    };
    let jobs: Vec<(&Prepared, Options)> = loads.iter().flat_map(of_load).collect();
    let n_done = AtomicUsize::new(0);
    if let [(load, options)] = &jobs[..] {
        let n = load.workload().requests().len();
        let result = shown("requests", n, &n_done, || simulation::simulate(load, options, &n_done));
        return Ok(vec![result?]);
    }
    Ok(shown("runs", jobs.len(), &n_done, || run_all(&jobs, n_threads, &n_done))?)
}

/// Shows how far something is while it runs, where there is a terminal.
fn shown<T: Send>(what: &'static str, n: usize, n_done: &AtomicUsize, run: impl FnOnce() -> T + Send) -> T {
    let bar = ProgressBar::new(n as u64).with_prefix(what);
    let style = ProgressStyle::with_template("{prefix} [{bar:30}] {pos}/{len} {elapsed} eta {eta}");
    let bar = bar.with_style(style.expect("the template is the one above").progress_chars("=> "));
    let is_over = AtomicBool::new(false);
    let result = std::thread::scope(|scope| {
        let watch = scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                bar.set_position(n_done.load(Ordering::Relaxed) as u64);
                std::thread::park_timeout(Duration::from_millis(200));
            }
        });
        // Even when the run panics.
        let _over = Over { is_over: &is_over, watch: watch.thread().clone() };
        run()
    });
    bar.finish_and_clear();
    result
}

/// Ends the watch when the run has ended, however it did.
struct Over<'a> {
    is_over: &'a AtomicBool,
    watch: Thread,
}

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        self.watch.unpark();
    }
}

impl Args {
    fn options(&self) -> Options {
        let NetworkArgs { view_delay_ms, kv_delay_ms, ledger_delay_ms, dispatch_ahead_ms, link_tokens_per_s, slack } =
            self.network;
        let goals = Goals { ttft_s: self.goal_ttft_s, tpot_s: self.goal_tpot_s };
        let mut options = Options {
            n_workers: self.workers,
            n_routers: self.routers,
            policy: self.policy.0,
            speed: self.speed[0],
            seed: self.seed,
            delays: Delays {
                view_ms: view_delay_ms,
                kv_ms: kv_delay_ms.unwrap_or(view_delay_ms),
                ledger_ms_min: ledger_delay_ms * 0.4,
                ledger_ms_max: ledger_delay_ms,
                ..Delays::default()
            },
            roles: self.roles.roles(&goals),
            links: Links { tokens_per_s: link_tokens_per_s, ..Links::default() },
            goals,
            faults: self.faults,
            ..Options::default()
        };
        if let (Some(slack), Some(waiting)) = (slack, options.waiting) {
            options.waiting = Some(Waiting { slack, ..waiting });
        }
        match dispatch_ahead_ms {
            Some(0.0) => options.waiting = None,
            Some(ms) => options.placer.dispatch_ahead_ms = ms,
            None => {}
        }
        options
    }

    fn loads(&self) -> Result<Vec<Workload>> {
        let n_max = self.requests.map(|n| n as usize);
        if self.trace.is_empty() {
            let usual = Synthetic::default();
            let load = Synthetic { rate: self.rate, n_requests: n_max.unwrap_or(usual.n_requests), ..usual };
            return Ok(vec![Workload::synthetic(&load, self.seed)]);
        }
        self.trace.iter().map(|path| read(path, n_max.unwrap_or(usize::MAX))).collect()
    }
}

impl RolesArg {
    fn roles(self, goals: &Goals) -> Roles {
        match self {
            Self::Mixed => Roles::Mixed,
            Self::Auto => Roles::Auto(RoleSettings {
                auto: true,
                decode_ms_goal: goals.tpot_s * 1e3,
                first_token_ms_goal: goals.ttft_s * 1e3,
                ..RoleSettings::default()
            }),
            Self::Counts { n_prefill, n_decode } => {
                let of = |role, n| std::iter::repeat_n(role, n);
                Roles::Fixed(of(Role::Prefill, n_prefill).chain(of(Role::Decode, n_decode)).collect())
            }
        }
    }
}

fn read(path: &std::path::Path, n_max: usize) -> Result<Workload> {
    const { assert!(TRACE_BLOCK_TOKENS == simulation::TRACE_BLOCK_TOKENS, "blocks of traces have one size") };
    let shown = path.display();
    let file = File::open(path).with_context(|| format!("cannot open trace {shown}"))?;
    let entries = read_trace(BufReader::new(file), n_max).with_context(|| format!("cannot use trace {shown}"))?;
    let name = path.file_stem().map_or_else(|| shown.to_string(), |stem| stem.to_string_lossy().into_owned());
    let request = |TraceEntry { after, input_len, output_len, blocks }| Request {
        after,
        n_prompt: input_len,
        n_output: output_len,
        blocks,
        tenant: 0,
    };
    Ok(Workload::new(name, entries.into_iter().map(request).collect()))
}

fn policy_by_name(name: &str) -> Result<Policy> {
    let Some(found) = policy::by_name(name).or_else(|| rivals::by_name(name)) else {
        let known: Vec<&str> = policy::POLICIES.iter().map(|policy| policy.name()).collect();
        bail!("give one of {}, block_count, least_predicted", known.join(", "));
    };
    Ok(Policy(found))
}

fn roles_by_name(text: &str) -> Result<RolesArg> {
    let wrong = || anyhow!("give mixed, auto or two numbers such as 2:6");
    Ok(match text {
        "mixed" => RolesArg::Mixed,
        "auto" => RolesArg::Auto,
        counts => {
            let (n_prefill, n_decode) = counts.split_once(':').ok_or_else(wrong)?;
            let number = |text: &str| text.parse::<u16>().ok().filter(|&n| n > 0).map(usize::from).ok_or_else(wrong);
            RolesArg::Counts { n_prefill: number(n_prefill)?, n_decode: number(n_decode)? }
        }
    })
}

fn positive(text: &str) -> Result<f64> {
    text.parse().ok().filter(|value: &f64| *value > 0.0 && value.is_finite()).context("give a number above 0")
}

fn not_negative(text: &str) -> Result<f64> {
    text.parse().ok().filter(|value: &f64| *value >= 0.0 && value.is_finite()).context("give 0 or more")
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;
    use crate::command::parse;

    #[test]
    fn a_run_that_panics_ends_the_watch_too() {
        let n_done = AtomicUsize::new(0);
        let run = || shown("runs", 1, &n_done, || panic!("as a defect would"));
        assert!(catch_unwind(AssertUnwindSafe(run)).is_err());
    }

    #[test]
    fn roles_are_words_or_a_number_of_each() {
        assert_eq!(parse::<Args>(&[]).unwrap().roles, RolesArg::Mixed);
        assert_eq!(parse::<Args>(&["--roles", "auto"]).unwrap().roles, RolesArg::Auto);
        let args = parse::<Args>(&["--roles", "2:6"]).unwrap();
        assert_eq!(args.roles, RolesArg::Counts { n_prefill: 2, n_decode: 6 });
        assert!(["2:0", "2", "some", ":"].iter().all(|roles| parse::<Args>(&["--roles", roles]).is_err()));
        let error = run(&parse::<Args>(&["--roles", "2:5", "--requests", "3"]).unwrap()).unwrap_err().to_string();
        assert_eq!(error, "roles is 7; give one for each worker");
    }

    #[test]
    fn counts_have_bounds() {
        for flags in [["--requests", "4294967295"], ["--requests", "0"], ["--threads", "0"], ["--rate", "0"]] {
            assert!(parse::<Args>(&flags).is_err(), "{flags:?}");
        }
        assert!(parse::<Args>(&["--requests", "250000", "--threads", "1"]).is_ok());
    }

    #[test]
    fn fails_when_no_request_is_answered_and_names_values_that_cannot_be_simulated() {
        let folder = tempfile::tempdir().unwrap();
        let profile = folder.path().join("short.toml");
        let short = "block_size = 16\nn_blocks = 100\nmax_running = 8\nprefill_budget = 512\ncontext_length = 64\n";
        std::fs::write(&profile, short).unwrap();
        let json = folder.path().join("report.json");
        let error = |flags: &[&str]| run(&parse::<Args>(flags).unwrap()).unwrap_err().to_string();
        let (profile, json) = (profile.to_str().unwrap(), json.to_str().unwrap());
        let failed = error(&["--requests", "3", "--profile", profile, "--json", json]);
        assert_eq!(failed, "no request of synthetic load was answered, 3 (3 context_length_exceeded) failed");
        let report: serde_json::Value = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
        assert_eq!((&report["failures"]["context_length_exceeded"], report.get("ttft_s")), (&3.into(), None));
        let speed = error(&["--requests", "3", "--speed", "1e-308"]);
        assert!(speed.contains("speed is 1e-308"), "{speed}");
        let rate = error(&["--requests", "3", "--rate", "1e-9"]);
        assert!(rate.contains("seconds from the first arrival to the last"), "{rate}");
    }
}
