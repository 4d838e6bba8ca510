//! `tessera drain`: sends a worker away without a client noticing.

use std::path::PathBuf;
use std::pin::pin;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use contract::ids::{EngineId, Incarnation};
use contract::view::{ClusterView, EngineView};
use daemon::client::{ChannelOptions, channel};
use daemon::config::Document;
use futures::StreamExt as _;
use proto::cluster::v1::WatchViewRequest;
use proto::cluster::v1::scheduler_client::SchedulerClient;
use proto::worker::v1::worker_client::WorkerClient;
use proto::worker::v1::{DescribeRequest, DrainRequest};
use tokio::time::{sleep, timeout};
use toml::Value;
use tonic::Status;
use tonic::transport::Channel;

use crate::output;

const EXAMPLES: &str = "\
Examples:
  tessera drain worker-3 --scheduler 10.0.0.1:7001    Let worker-3 finish what it runs, then exit
  tessera drain worker-3 --config cluster.toml        The same; the scheduler is in the document
  tessera drain worker-3 --config cluster.toml --grace 10m
  tessera drain worker-3 --config cluster.toml --now  Move what runs to other workers at once
  tessera drain 10.0.0.7:7000 --config cluster.toml   The worker at that address, where several have one name

The worker takes no new request. What still runs when the grace is over goes on at other workers, from the next token on,
and clients notice nothing. When this command returns with exit code 0, the worker has left.
SIGTERM to the worker does the same within worker.server.grace_ms.";

/// Longest wait for a scheduler to tell its view.
const VIEW_MAX: Duration = Duration::from_secs(10);
/// Longest silence of a worker that drains, which tells of itself every second.
const SILENCE_MAX: Duration = Duration::from_secs(10);
/// Longest wait for a life of the worker to say that it lives.
const ANSWER_MAX: Duration = Duration::from_secs(5);
/// Workers asked at a time whether they live.
const ASKED_MAX: usize = 16;
/// Longest time for a worker that has nothing left to do to end, and time between two looks.
const END_MAX: Duration = Duration::from_secs(60);
const END_LOOK: Duration = Duration::from_millis(100);
/// Largest view.
const VIEW_BYTES_MAX: usize = 64 << 20;

/// What `tessera drain` takes.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES, group = clap::ArgGroup::new("cluster").required(true).args(["scheduler", "config"]))]
pub(crate) struct Args {
    /// The worker's id or address
    worker: String,
    /// Scheduler that knows the worker
    #[arg(long, value_name = "ADDR")]
    scheduler: Option<String>,
    /// Document of the cluster, which names its schedulers in scheduler_addresses
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Time that requests have to end by themselves, such as 30s or 10m; the worker's own grace if absent
    #[arg(long, value_name = "TIME", value_parser = duration, allow_hyphen_values = true)]
    grace: Option<Duration>,
    /// Move what runs to other workers at once
    #[arg(long, conflicts_with = "grace")]
    now: bool,
    /// Send it away also when no other worker takes requests for its model
    #[arg(long)]
    last: bool,
}

/// A life of a worker, as a scheduler knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Life {
    worker: String,
    incarnation: Incarnation,
    address: String,
    model: String,
    /// It takes no new request already.
    leaves: bool,
}

/// Finds the worker, sends it away and waits for its end.
pub(crate) async fn run(args: Args) -> Result<()> {
    let lives = all_lives(&schedulers(&args)?).await?;
    let life = the_one(&args.worker, living(known(&args.worker, &lives)?).await?)?;
    if !args.last {
        check_not_last(&life, &lives).await?;
    }
    let grace = if args.now { Some(Duration::ZERO) } else { args.grace };
    tokio::select! {
        drained = drain(&life, grace) => drained,
        _ = tokio::signal::ctrl_c() => bail!("interrupted; {} goes on leaving, and nothing calls it back", life.worker),
    }
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

/// Every life of every worker, as the first scheduler that answers sees it.
async fn all_lives(schedulers: &[String]) -> Result<Vec<Life>> {
    let mut last_error = None;
    for scheduler in schedulers {
        let seen = timeout(VIEW_MAX, view(scheduler)).await.unwrap_or_else(|_| bail!("it does not answer"));
        match seen.with_context(|| format!("cannot ask the scheduler at {scheduler}")) {
            Ok(view) => return Ok(lives(&view)),
            Err(error) => last_error = Some(error),
        }
    }
    Err(last_error.context("no scheduler is given")?)
}

async fn view(scheduler: &str) -> Result<ClusterView> {
    let channel = channel(scheduler, &ChannelOptions::default())?;
    let mut client = SchedulerClient::new(channel).max_decoding_message_size(VIEW_BYTES_MAX);
    let views = client.watch_view(WatchViewRequest { router: String::new() }).await.map_err(reason)?;
    Ok(views.into_inner().message().await.map_err(reason)?.context("it tells no view")?.try_into()?)
}

fn lives(view: &ClusterView) -> Vec<Life> {
    let life = |engine: &EngineView| Life {
        worker: engine.engine.worker.to_string(),
        incarnation: engine.engine.incarnation,
        address: engine.address.clone(),
        model: engine.identity.name.to_string(),
        leaves: engine.draining.is_some(),
    };
    let mut lives: Vec<Life> = view.engines.iter().map(life).collect();
    // Engines of one worker stand beside each other.
    lives.dedup_by(|one, other| (&one.worker, one.incarnation) == (&other.worker, other.incarnation));
    lives
}

/// Those of a worker, by its name or address; one that leaves already gives way to one that does not.
fn known(named: &str, lives: &[Life]) -> Result<Vec<Life>> {
    let of_worker = |life: &&Life| life.worker == named || life.address == named;
    let (leaving, staying): (Vec<Life>, Vec<Life>) =
        lives.iter().filter(of_worker).cloned().partition(|life| life.leaves);
    if staying.is_empty() && leaving.is_empty() {
        let mut others: Vec<&str> = lives.iter().map(|life| life.worker.as_str()).collect();
        others.dedup();
        let others =
            if others.is_empty() { "there is none".to_owned() } else { format!("there are {}", others.join(", ")) };
        bail!("the scheduler knows no worker {named}; {others}");
    }
    Ok(if staying.is_empty() { leaving } else { staying })
}

/// Those of `known` that answer: one that was killed is known until its lease ends, and its address may be another's by
/// then.
async fn living(known: Vec<Life>) -> Result<Vec<Life>> {
    let (mut living, mut why_not) = (Vec::new(), Vec::new());
    for life in known {
        match answers(&life).await {
            Ok(()) => living.push(life),
            Err(error) => why_not.push(format!("{} at {}: {error:#}", life.worker, life.address)),
        }
    }
    if living.is_empty() {
        bail!("the worker cannot be reached; {}", why_not.join("; "));
    }
    why_not.iter().for_each(|why| output::error(&format!("passes over a life of {why}")));
    Ok(living)
}

async fn answers(life: &Life) -> Result<()> {
    timeout(ANSWER_MAX, is_there(life)).await.unwrap_or_else(|_| bail!("it does not answer"))
}

async fn is_there(life: &Life) -> Result<()> {
    let mut client = WorkerClient::new(channel(&life.address, &ChannelOptions::default())?);
    let described = client.describe(DescribeRequest {}).await.map_err(reason)?.into_inner();
    let engines: Vec<EngineId> = described.engines.into_iter().map(EngineId::from).collect();
    let is_it = |engine: &EngineId| engine.worker.as_str() == life.worker && engine.incarnation == life.incarnation;
    let other = engines.iter().find(|engine| !is_it(engine));
    other.map_or(Ok(()), |other| bail!("{other} answers there"))
}

/// The one life that is meant.
fn the_one(named: &str, living: Vec<Life>) -> Result<Life> {
    match <[Life; 1]>::try_from(living) {
        Ok([life]) => Ok(life),
        Err(living) => {
            let addresses: Vec<&str> = living.iter().map(|life| life.address.as_str()).collect();
            bail!("{} workers are called {named}; give the address of one: {}", living.len(), addresses.join(", "))
        }
    }
}

/// Refuses to take a model's last worker away, last among those that answer.
async fn check_not_last(life: &Life, lives: &[Life]) -> Result<()> {
    if life.leaves {
        return Ok(());
    }
    let takes_over =
        |other: &&Life| other.model == life.model && other.incarnation != life.incarnation && !other.leaves;
    let asked = futures::stream::iter(lives.iter().filter(takes_over)).map(answers).buffer_unordered(ASKED_MAX);
    if pin!(asked).any(async |answer| answer.is_ok()).await {
        return Ok(());
    }
    let Life { worker, model, .. } = life;
    bail!(
        "no other worker takes requests for {model}: they would fail; start one before {worker} leaves, or give --last"
    )
}

async fn drain(life: &Life, grace: Option<Duration>) -> Result<()> {
    let Life { worker, incarnation, address, .. } = life;
    let cannot = || format!("cannot see {worker} to its end");
    let mut client = WorkerClient::new(channel(address, &ChannelOptions::default())?);
    let grace_ms = grace.map(|grace| u64::try_from(grace.as_millis()).unwrap_or(u64::MAX));
    let wish = DrainRequest { grace_ms, incarnation: Some(incarnation.0) };
    let asked = timeout(SILENCE_MAX, client.drain(wish)).await.context("it does not answer")?;
    let mut progress = asked.map_err(reason).with_context(cannot)?.into_inner();
    output::error(&format!("{worker} at {address} takes no new request"));
    let mut told = None;
    loop {
        let message = timeout(SILENCE_MAX, progress.message()).await.with_context(|| format!("{worker} is silent"))?;
        let message = message.map_err(reason).with_context(cannot)?;
        let left = message.context("it ended before its requests did").with_context(cannot)?.requests_left;
        if told.replace(left) != Some(left) {
            output::error(&format!("{left} request{} left", if left == 1 { "" } else { "s" }));
        }
        if left == 0 {
            break;
        }
    }
    timeout(END_MAX, ended(client)).await.with_context(|| format!("{worker} has no request left and does not end"))?;
    output::error(&format!("{worker} has left"));
    Ok(())
}

/// Returns when nothing answers any more.
async fn ended(mut client: WorkerClient<Channel>) {
    while timeout(SILENCE_MAX, client.describe(DescribeRequest {})).await.is_ok_and(|answer| answer.is_ok()) {
        sleep(END_LOOK).await;
    }
}

/// What a peer says, or the first cause of its silence.
fn reason(status: Status) -> anyhow::Error {
    let mut source = std::error::Error::source(&status);
    while let Some(cause) = source.and_then(std::error::Error::source) {
        source = Some(cause);
    }
    match (source, status.message()) {
        (Some(cause), _) => anyhow!("{cause}"),
        (None, "") => anyhow!("{}", status.code().description()),
        (None, message) => anyhow!("{message}"),
    }
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
        let Err(error) = args(&["--grace", "-5s"]) else { panic!("a time before now?") };
        assert!(error.to_string().contains("such as 30s"), "{error}");
        for wrong in [&["--grace", "30"][..], &["--grace", "s"], &["--grace", "-1s"], &["--grace", "1s", "--now"]] {
            assert!(args(wrong).is_err(), "{wrong:?}");
        }
        assert!(parse::<Args>(&["w"]).is_err(), "which cluster?");
    }

    fn life(worker: &str, incarnation: u64, leaves: bool) -> Life {
        let address = format!("10.0.0.{incarnation}:7000");
        Life {
            worker: worker.to_owned(),
            incarnation: Incarnation(incarnation),
            address,
            model: "m".to_owned(),
            leaves,
        }
    }

    #[test]
    fn a_name_or_an_address_says_which_life_is_meant() {
        let lives = [life("a", 1, true), life("a", 2, false), life("b", 3, false), life("b", 4, false)];
        assert_eq!(known("a", &lives).unwrap(), [lives[1].clone()], "the other leaves already");
        assert_eq!(known("10.0.0.1:7000", &lives).unwrap(), [lives[0].clone()]);
        assert!(known("c", &lives).unwrap_err().to_string().ends_with("there are a, b"));
        let twice = the_one("b", known("b", &lives).unwrap()).unwrap_err().to_string();
        assert!(twice.contains("10.0.0.3:7000, 10.0.0.4:7000"), "{twice}");
    }

    #[tokio::test]
    async fn a_models_last_worker_stays() {
        let other_model = Life { model: "n".to_owned(), ..life("c", 3, false) };
        let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        let killed = Life { address: nobody, ..life("d", 4, false) };
        let lives = [life("a", 1, false), life("b", 2, true), other_model, killed];
        let error = check_not_last(&lives[0], &lives).await.unwrap_err().to_string();
        assert!(error.contains("for m") && error.contains("--last"), "{error}");
        check_not_last(&lives[1], &lives).await.unwrap();
    }

    #[tokio::test]
    async fn a_scheduler_that_is_not_there_is_named() {
        let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        let error = run(parse(&["w", "--scheduler", &nobody]).unwrap()).await.unwrap_err();
        assert!(format!("{error:#}").contains(&nobody), "{error:#}");
    }
}
