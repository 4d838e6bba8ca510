//! Speed goals that need no peers: against the bounds that `tessera bench` measures, and how cost grows.
//!
//! Ratios against peers are measured and judged by `tests/benches/peers`.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::{run, setup};

/// Load above which timings mean nothing.
const LOAD_MAX: f64 = 0.5;
/// Part of the best read bandwidth that decode reaches at batch 1, and attention at the longest context.
const READ_PART_MIN: f64 = 0.75;
/// Longest time of a step outside model and sampler at batch 32, in microseconds.
const OVERHEAD_US_MAX: f64 = 50.0;
/// Part of its rate that may be lost where work grows.
const CLIFF_MAX: f64 = 0.1;
/// Part of the bound at 512 tokens that longer prompts keep.
const PREFILL_KEPT_MIN: f64 = 0.75;
/// Seconds from start to ready: the first start packs the weights, the second finds them packed.
const READY_S_MAX: [f64; 2] = [5.0, 1.0];
/// Part of its bound that each way of moving blocks reaches with checksums: the way, its bound, the part.
const TRANSFER_PARTS_MIN: [(&str, &str, f64); 3] =
    [("tcp", "loopback", 0.60), ("pull", "memcpy", 0.60), ("ring", "memcpy", 0.35)];
/// Longest wait for a server, to be ready, to write its packed weights and to end.
const DEADLINE: Duration = Duration::from_secs(120);
/// Time between two looks.
const INTERVAL: Duration = Duration::from_millis(50);

/// What was measured, beside its goal.
#[derive(Clone, Debug, PartialEq)]
struct Check {
    what: String,
    measured: f64,
    goal: Goal,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Goal {
    AtLeast(f64),
    AtMost(f64),
}

impl Check {
    fn passes(&self) -> bool {
        match self.goal {
            Goal::AtLeast(least) => self.measured >= least,
            Goal::AtMost(most) => self.measured <= most,
        }
    }

    fn line(&self) -> String {
        let (sign, goal) = match self.goal {
            Goal::AtLeast(least) => (">=", least),
            Goal::AtMost(most) => ("<=", most),
        };
        let verdict = if self.passes() { "pass" } else { "FAIL" };
        format!("{verdict}  {:<72} {:>10.3} {sign} {goal:.3}", self.what, self.measured)
    }
}

/// Measures everything, prints each check and fails when one fails.
pub fn run(args: &[String]) -> Result<()> {
    let model = match args {
        [] => "demo",
        [model] => model,
        _ => bail!("give one model at most"),
    };
    setup::for_serving()?;
    run::build_tessera()?;
    let transfer = ["bench", "--profile", "dev", "--package", "worker", "--bench", "transfer"];
    run::cargo(&[&transfer[..], &["--no-run"]].concat())?;
    idle()?;
    let mut checks = Vec::new();
    let growth = &["--prompt", "128,512,2048,8000", "--batch", "1,2,4,8,16,32,64,128,256"];
    let few = &["--repetitions", "3", "--decode-steps", "16"];
    add(&mut checks, engine_checks(&bench(&[&["engine", "--model", model], &growth[..], &few[..]])?));
    let step = &["--engine", "--prompt", "32", "--batch", "32"];
    add(&mut checks, overhead_checks(&bench(&[&["engine", "--model", model], &step[..]])?));
    let formats = &["--format", "bf16,q8_0,q4_1,q4_k"];
    add(&mut checks, kernel_checks(&bench(&[&["kernels", "--kernel", "matmul,attention"], &formats[..]])?));
    println!("measuring: cargo {}", transfer.join(" "));
    add(&mut checks, transfer_checks(&run::output(run::cargo_command().args(transfer))?)?);
    let packed = tempfile::tempdir().context("make a folder for packed weights")?;
    for (start, most) in ["cold", "warm"].into_iter().zip(READY_S_MAX) {
        let what = format!("{start} start to ready, seconds");
        let measured = seconds_to_ready(model, packed.path())?;
        add(&mut checks, vec![Check { what, measured, goal: Goal::AtMost(most) }]);
    }
    let n_failed = checks.iter().filter(|check| !check.passes()).count();
    if n_failed > 0 {
        bail!("{n_failed} of {} checks failed", checks.len());
    }
    println!("all {} checks passed", checks.len());
    Ok(())
}

/// Tells what was found as soon as it is.
fn add(checks: &mut Vec<Check>, found: Vec<Check>) {
    found.iter().for_each(|check| println!("{}", check.line()));
    checks.extend(found);
}

/// Refuses a machine on which others work.
fn idle() -> Result<()> {
    let text = std::fs::read_to_string("/proc/loadavg").context("read the load")?;
    let load: f64 = text.split(' ').next().unwrap_or_default().parse().context("read the load")?;
    // Building has just ended; what it leaves of the average is not asked to have faded.
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    if load > LOAD_MAX * cores as f64 + 1.0 {
        bail!("the load is {load} on {cores} cores; timings need an idle machine");
    }
    Ok(())
}

fn bench(args: &[&[&str]]) -> Result<Value> {
    let args = args.concat();
    println!("measuring: tessera bench {}", args.join(" "));
    let mut command = Command::new(run::tessera_binary()?);
    command.arg("bench").args(args).arg("--json");
    let text = run::output(&mut command)?;
    serde_json::from_str(&text).context("parse the report")
}

fn engine_checks(report: &Value) -> Vec<Check> {
    let results = || report["results"].as_array().into_iter().flatten();
    let of = |test: &str| results().filter(|result| result["test"] == test).collect::<Vec<_>>();
    let mut checks = Vec::new();
    let prefills = of("prefill");
    if let Some(base) = prefills.iter().find(|result| result["tokens"] == 512) {
        for result in prefills.iter().filter(|result| number(&result["tokens"]) > 512.0) {
            let what = format!("prefill of {} tokens: part of the bound, against that at 512", result["tokens"]);
            let measured = number(&result["of_bound"]) / number(&base["of_bound"]);
            checks.push(Check { what, measured, goal: Goal::AtLeast(PREFILL_KEPT_MIN) });
        }
    }
    let decodes = of("decode");
    for result in decodes.iter().filter(|result| result["batch"] == 1) {
        let what = "decode at batch 1: part of the best read bandwidth".to_owned();
        checks.push(Check { what, measured: number(&result["of_bound"]), goal: Goal::AtLeast(READ_PART_MIN) });
    }
    let rates = decodes.iter().map(|result| (number(&result["batch"]), number(&result["tokens_per_s"]["median"])));
    checks.extend(growth("decode, tokens/s from batch", rates));
    checks
}

/// What a step costs beside its computation; a report without it fails.
fn overhead_checks(report: &Value) -> Vec<Check> {
    let mut results = report["results"].as_array().into_iter().flatten();
    let found = results.find(|result| result["test"] == "engine_decode" && result["batch"] == 32);
    let measured = found.map_or(f64::NAN, |result| number(&result["overhead_us"]["median"]));
    let what = "step at batch 32 outside model and sampler, microseconds".to_owned();
    vec![Check { what, measured, goal: Goal::AtMost(OVERHEAD_US_MAX) }]
}

fn kernel_checks(report: &Value) -> Vec<Check> {
    let results = || report["results"].as_array().into_iter().flatten();
    let mut checks = Vec::new();
    let mut products: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
    for result in results().filter(|result| result["kernel"] == "matmul") {
        let text = |field: &str| result[field].as_str().unwrap_or_default().to_owned();
        let name = format!("matmul {} {} x {}, GFLOP/s from row", text("format"), result["k"], result["n"]);
        products.entry(name).or_default().push((number(&result["m"]), number(&result["gflops"])));
    }
    for (name, rates) in products {
        checks.extend(growth(&name, rates.into_iter()));
    }
    let decodes: Vec<&Value> = results().filter(|result| result["kernel"] == "attention_decode").collect();
    let longest = decodes.iter().map(|result| number(&result["context"])).fold(0.0, f64::max);
    for result in decodes.iter().filter(|result| number(&result["context"]) == longest) {
        let what = format!("attention decode of {} at {longest}: part of the best read bandwidth", result["m"]);
        checks.push(Check { what, measured: number(&result["of_bound"]), goal: Goal::AtLeast(READ_PART_MIN) });
    }
    checks
}

/// What the bench `transfer` printed, a line of JSON for each way and kind of blocks; ways that it left out fail.
fn transfer_checks(lines: &str) -> Result<Vec<Check>> {
    let lines: serde_json::Result<Vec<Value>> = lines.lines().map(serde_json::from_str).collect();
    let results = lines.context("parse the report of transfers")?;
    let kinds: BTreeSet<&str> = results.iter().filter_map(|result| result["blocks"].as_str()).collect();
    if kinds.is_empty() {
        bail!("no transfer was measured");
    }
    let goals = kinds.into_iter().flat_map(|kind| TRANSFER_PARTS_MIN.map(|goal| (kind, goal)));
    let check = |(kind, (way, bound, least))| {
        let found = results.iter().find(|result| result["blocks"] == kind && result["way"] == way);
        let measured = found.map_or(f64::NAN, |result| number(&result["part"]));
        let what = format!("blocks of {kind} by {way}: part of {bound}");
        Check { what, measured, goal: Goal::AtLeast(least) }
    };
    Ok(goals.map(check).collect())
}

/// Rates never fall from one size to the next.
fn growth(name: &str, rates: impl Iterator<Item = (f64, f64)>) -> Vec<Check> {
    let rates: Vec<(f64, f64)> = rates.collect();
    let pair = |pair: &[(f64, f64)]| Check {
        what: format!("{name} {} to {}: what is kept", pair[0].0, pair[1].0),
        measured: pair[1].1 / pair[0].1,
        goal: Goal::AtLeast(1.0 - CLIFF_MAX),
    };
    rates.windows(2).map(pair).collect()
}

/// Starts a server, waits until it can answer, lets it write packed weights into `packed`, and ends it.
fn seconds_to_ready(model: &str, packed: &Path) -> Result<f64> {
    let began = Instant::now();
    let mut serve = Command::new(run::tessera_binary()?);
    serve.args(["serve", "--workers", "1", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"]);
    serve.arg("--set").arg(format!("worker.packed_cache={}", packed.display()));
    if model != "demo" {
        serve.args(["--model", model]);
    }
    let child = serve.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn();
    let mut child = Ended(child.context("start `tessera serve`")?);
    let output = child.0.stdout.take().context("the server has no output")?;
    let (sender, receiver) = std::sync::mpsc::sync_channel(1);
    std::thread::spawn(move || {
        let ready = BufReader::new(output).lines().map_while(Result::ok).any(|line| line.starts_with("ready "));
        // Nobody waits any more once the deadline has passed.
        let _ = sender.send(ready);
    });
    match receiver.recv_timeout(DEADLINE) {
        Ok(true) => {}
        Ok(false) => bail!("`tessera serve` ended before it was ready"),
        Err(_) => bail!("`tessera serve` was not ready within {DEADLINE:?}"),
    }
    let seconds = began.elapsed().as_secs_f64();
    wait_until("`tessera serve` has written packed weights", || has_packed(packed))?;
    run::output(Command::new("kill").arg("-TERM").arg(child.0.id().to_string()))?;
    wait_until("`tessera serve` has ended", || Ok(child.0.try_wait()?.is_some()))?;
    Ok(seconds)
}

fn has_packed(folder: &Path) -> Result<bool> {
    let is_packed = |path: &Path| path.extension().is_some_and(|extension| extension == "packed");
    Ok(std::fs::read_dir(folder)?.flatten().any(|entry| is_packed(&entry.path())))
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> Result<bool>) -> Result<()> {
    let began = Instant::now();
    while !is_so()? {
        if began.elapsed() > DEADLINE {
            bail!("waited {DEADLINE:?} in vain until {what}");
        }
        std::thread::sleep(INTERVAL);
    }
    Ok(())
}

/// A child that does not outlive its use.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A number that is not there fails every goal.
fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn goals_are_held_against_what_was_measured() {
        let report = json!({"results": [
            {"test": "prefill", "tokens": 512, "of_bound": 0.8},
            {"test": "prefill", "tokens": 2048, "of_bound": 0.4},
            {"test": "decode", "batch": 1, "of_bound": 0.8, "tokens_per_s": {"median": 100.0}},
            {"test": "decode", "batch": 8, "of_bound": 0.8, "tokens_per_s": {"median": 80.0}},
            {"test": "engine_decode", "batch": 32, "overhead_us": {"median": 40.0}},
        ]});
        let verdicts: Vec<bool> = engine_checks(&report).iter().map(Check::passes).collect();
        assert_eq!(verdicts, [false, true, false]);
        assert!(overhead_checks(&report)[0].passes());
        assert!(!overhead_checks(&json!({"results": []}))[0].passes(), "what was not measured is not met");
    }

    #[test]
    fn transfers_are_judged_by_kind_of_blocks_and_ways_left_out_fail() {
        let line = |way: &str, part: f64| json!({"way": way, "blocks": "8 heads of 128", "part": part}).to_string();
        let report = [line("tcp", 0.7), line("ring", 0.3)].join("\n");
        let checks = transfer_checks(&report).unwrap();
        assert_eq!(checks.iter().map(Check::passes).collect::<Vec<_>>(), [true, false, false]);
        assert!(checks[1].measured.is_nan());
        assert!(transfer_checks("").is_err());
    }

    #[test]
    fn kernels_are_judged_by_shape_and_missing_numbers_fail() {
        let product = |m: u32, gflops: f64| json!({"kernel": "matmul", "format": "bf16", "m": m, "k": 2, "n": 3, "gflops": gflops});
        let report = json!({"results": [
            product(1, 10.0), product(8, 9.5), product(64, 5.0),
            {"kernel": "attention_decode", "m": 1, "context": 512, "of_bound": 0.1},
            {"kernel": "attention_decode", "m": 1, "context": 8192},
        ]});
        let verdicts: Vec<bool> = kernel_checks(&report).iter().map(Check::passes).collect();
        assert_eq!(verdicts, [true, false, false]);
    }
}
