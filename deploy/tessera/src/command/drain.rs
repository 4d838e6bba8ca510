//! `tessera drain`: sends a worker away without a client noticing.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use contract::ids::{EngineId, Incarnation};
use contract::view::{ClusterView, EngineView};
use daemon::client::{ChannelOptions, channel};
use daemon::config::Document;
use proto::cluster::v1::WatchViewRequest;
use proto::cluster::v1::scheduler_client::SchedulerClient;
use proto::worker::v1::worker_client::WorkerClient;
use proto::worker::v1::{DescribeRequest, DrainRequest};
use tokio::time::{sleep, timeout};
use toml::Value;
use tonic::transport::Channel;

use crate::output;

const EXAMPLES: &str = "\
Examples:
  tessera drain worker-3 --scheduler 10.0.0.1:7001    Let worker-3 finish what it runs, then exit
  tessera drain worker-3 --config cluster.toml        The same; the scheduler is in the document
  tessera drain worker-3 --config cluster.toml --grace 10m
  tessera drain worker-3 --config cluster.toml --now  Move what runs to other workers at once

The worker takes no new request. What still runs when the grace is over goes on at other workers, from the next token on,
and clients notice nothing. When this command returns with exit code 0, the worker has left.
SIGTERM to the worker does the same within worker.server.grace_ms.";

/// Longest wait for a scheduler to tell its view.
const VIEW_MAX: Duration = Duration::from_secs(10);
/// Longest silence of a worker that drains, which tells of itself every second.
const SILENCE_MAX: Duration = Duration::from_secs(10);
/// Longest wait for a life of the worker to say that it lives.
const ANSWER_MAX: Duration = Duration::from_secs(5);
/// Longest time for a worker that has nothing left to do to end, and time between two looks.
const END_MAX: Duration = Duration::from_secs(60);
const END_LOOK: Duration = Duration::from_millis(100);
/// Largest view.
const VIEW_BYTES_MAX: usize = 64 << 20;

/// What `tessera drain` takes.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES, group = clap::ArgGroup::new("cluster").required(true).args(["scheduler", "config"]))]
pub(crate) struct Args {
    /// The worker's id
    worker: String,
    /// Scheduler that knows the worker
    #[arg(long, value_name = "ADDR")]
    scheduler: Option<String>,
    /// Document of the cluster, which names its schedulers in scheduler_addresses
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Time that requests have to end by themselves, such as 30s or 10m; the worker's own grace if absent
    #[arg(long, value_name = "TIME", value_parser = duration)]
    grace: Option<Duration>,
    /// Move what runs to other workers at once
    #[arg(long, conflicts_with = "grace")]
    now: bool,
}

/// A life of the worker, as a scheduler knows it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Life {
    incarnation: Incarnation,
    address: String,
}

/// Finds the worker, sends it away and waits for its end.
pub(crate) async fn run(args: Args) -> Result<()> {
    let name = &args.worker;
    let known = find(name, &schedulers(&args)?).await?;
    let grace = if args.now { Some(Duration::ZERO) } else { args.grace };
    for Life { address, .. } in living(name, known).await? {
        output::error(&format!("{name} at {address} takes no new request"));
        drain(name, &address, grace).await?;
        output::error(&format!("{name} has left"));
    }
    Ok(())
}

fn schedulers(args: &Args) -> Result<Vec<String>> {
    if let Some(scheduler) = &args.scheduler {
        return Ok(vec![scheduler.clone()]);
    }
    let document = Document::load(args.config.as_deref(), &[])?;
    let paths = ["scheduler_addresses", "router.scheduler_addresses", "worker.scheduler_addresses"];
    let listed = paths.iter().find_map(|path| document.get(path).and_then(Value::as_array));
    let listed = listed.into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect::<Vec<_>>();
    if listed.is_empty() {
        bail!("the document names no scheduler in scheduler_addresses; give one with --scheduler");
    }
    Ok(listed)
}

/// The lives of a worker, as the first scheduler that answers sees it.
async fn find(worker: &str, schedulers: &[String]) -> Result<Vec<Life>> {
    let mut last_error = None;
    for scheduler in schedulers {
        let seen = timeout(VIEW_MAX, view(scheduler)).await.unwrap_or_else(|_| bail!("it does not answer"));
        match seen.with_context(|| format!("cannot ask the scheduler at {scheduler}")) {
            Ok(view) => return lives(worker, &view),
            Err(error) => last_error = Some(error),
        }
    }
    Err(last_error.context("no scheduler is given")?)
}

async fn view(scheduler: &str) -> Result<ClusterView> {
    let channel = channel(scheduler, &ChannelOptions::default())?;
    let mut client = SchedulerClient::new(channel).max_decoding_message_size(VIEW_BYTES_MAX);
    let mut views = client.watch_view(WatchViewRequest { router: String::new() }).await?.into_inner();
    Ok(views.message().await?.context("it tells no view")?.try_into()?)
}

fn lives(worker: &str, view: &ClusterView) -> Result<Vec<Life>> {
    let of_worker = view.engines.iter().filter(|engine| engine.engine.worker.as_str() == worker);
    let life = |engine: &EngineView| Life { incarnation: engine.engine.incarnation, address: engine.address.clone() };
    let mut lives: Vec<Life> = of_worker.map(life).collect();
    lives.sort_unstable();
    lives.dedup();
    if lives.is_empty() {
        let mut known: Vec<&str> = view.engines.iter().map(|engine| engine.engine.worker.as_str()).collect();
        known.sort_unstable();
        known.dedup();
        let known =
            if known.is_empty() { "there is none".to_owned() } else { format!("there are {}", known.join(", ")) };
        bail!("the scheduler knows no worker {worker}; {known}");
    }
    Ok(lives)
}

/// Those of `known` that answer: one that was killed is known until its lease ends, and its address may be another's by
/// then.
async fn living(worker: &str, known: Vec<Life>) -> Result<Vec<Life>> {
    let (mut living, mut why_not) = (Vec::new(), Vec::new());
    for life in known {
        match timeout(ANSWER_MAX, answers(worker, &life)).await.unwrap_or_else(|_| bail!("it does not answer")) {
            Ok(()) => living.push(life),
            Err(error) => why_not.push(format!("at {}: {error:#}", life.address)),
        }
    }
    if living.is_empty() {
        bail!("no life of {worker} that the scheduler knows can be reached; {}", why_not.join("; "));
    }
    why_not.iter().for_each(|why| output::error(&format!("passes over a life of {worker} {why}")));
    Ok(living)
}

async fn answers(worker: &str, life: &Life) -> Result<()> {
    let mut client = WorkerClient::new(channel(&life.address, &ChannelOptions::default())?);
    let described = client.describe(DescribeRequest {}).await?.into_inner();
    let engines: Vec<EngineId> = described.engines.into_iter().map(EngineId::from).collect();
    let is_it = |engine: &EngineId| engine.worker.as_str() == worker && engine.incarnation == life.incarnation;
    let other = engines.iter().find(|engine| !is_it(engine));
    other.map_or(Ok(()), |other| bail!("{other} answers there"))
}

async fn drain(worker: &str, address: &str, grace: Option<Duration>) -> Result<()> {
    let mut client = WorkerClient::new(channel(address, &ChannelOptions::default())?);
    let grace_ms = grace.map(|grace| u64::try_from(grace.as_millis()).unwrap_or(u64::MAX));
    let asked = timeout(SILENCE_MAX, client.drain(DrainRequest { grace_ms })).await;
    let mut progress = asked.context("it does not answer")?.with_context(|| cannot(worker))?.into_inner();
    let mut told = None;
    loop {
        let message = timeout(SILENCE_MAX, progress.message()).await.with_context(|| format!("{worker} is silent"))?;
        let left = message.with_context(|| cannot(worker))?.with_context(|| cannot(worker))?.requests_left;
        if told.replace(left) != Some(left) {
            output::error(&format!("{left} requests left"));
        }
        if left == 0 {
            break;
        }
    }
    timeout(END_MAX, ended(client)).await.with_context(|| format!("{worker} has no request left and does not end"))
}

/// Returns when nothing answers any more.
async fn ended(mut client: WorkerClient<Channel>) {
    while timeout(SILENCE_MAX, client.describe(DescribeRequest {})).await.is_ok_and(|answer| answer.is_ok()) {
        sleep(END_LOOK).await;
    }
}

fn cannot(worker: &str) -> String {
    format!("cannot see {worker} to its end")
}

/// Reads a whole number of ms, s, m or h.
fn duration(text: &str) -> Result<Duration> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let unit_ms = match unit {
        "ms" => 1,
        "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        _ => bail!("give a whole number with ms, s, m or h, such as 30s"),
    };
    let number: u64 = number.parse().context("give a whole number with ms, s, m or h, such as 30s")?;
    Ok(Duration::from_millis(number.checked_mul(unit_ms).context("that is too long")?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::parse;

    #[test]
    fn a_grace_has_a_unit_and_a_cluster_is_needed() {
        let args = |line: &[&str]| parse::<Args>(&[&["w", "--scheduler", "a:1"], line].concat());
        assert_eq!(args(&["--grace", "90s"]).unwrap().grace, Some(Duration::from_secs(90)));
        assert_eq!(args(&["--grace", "2m"]).unwrap().grace, Some(Duration::from_secs(120)));
        for wrong in [&["--grace", "30"][..], &["--grace", "s"], &["--grace", "-1s"], &["--grace", "1s", "--now"]] {
            assert!(args(wrong).is_err(), "{wrong:?}");
        }
        assert!(parse::<Args>(&["w"]).is_err(), "which cluster?");
    }

    #[tokio::test]
    async fn a_scheduler_that_is_not_there_is_named() {
        let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        let error = run(parse(&["w", "--scheduler", &nobody]).unwrap()).await.unwrap_err();
        assert!(format!("{error:#}").contains(&nobody), "{error:#}");
    }
}
