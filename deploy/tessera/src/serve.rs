//! `tessera serve`: every role on this machine, over the same gRPC as in a cluster.

mod cluster;
mod plan;
mod process;
mod ready;

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::{Context as _, Result, anyhow, bail};
use daemon::shutdown::Shutdown;

use crate::model::{Cache, DEMO_NAME, Model, Source, resolve};
use crate::role::{self, Role};
use crate::{configuration, output};
use cluster::{Cluster, Form};
use plan::Plan;
use ready::Ready;

/// Where the OpenAI HTTP API listens unless told otherwise.
pub(crate) const DEFAULT_HTTP: &str = "127.0.0.1:8080";
/// Where the router's gRPC listens unless told otherwise.
pub(crate) const DEFAULT_GRPC: &str = "127.0.0.1:50051";

const EXAMPLES: &str = "\
Examples:
  tessera serve                                     The demo model (fetched once), two workers
  tessera serve --model ./Qwen3-0.6B --workers 1    A folder in Hugging Face's layout
  tessera serve --model model.gguf                  A GGUF file
  tessera serve --model hf:Qwen/Qwen3-0.6B          From the Hugging Face hub
  tessera serve --http 0.0.0.0:8080                 Reachable from other machines
  tessera serve --set router.policy=round_robin     One value of the configuration
  tessera serve --isolate                           Every role in a process of its own

When it can answer it prints `ready http=ADDR grpc=ADDR model=NAME`.
Ctrl-C lets running requests finish; a second one does not.";

/// What `tessera serve` takes.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[arg(
        long,
        value_name = "MODEL",
        help = "A folder, a GGUF file, or hf:ORG/NAME[/FILE.gguf][@REVISION] [default: SmolLM2-135M-Instruct]"
    )]
    model: Option<String>,
    /// Workers to start; they share the processor's cores
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=64))]
    workers: u16,
    /// Address of the OpenAI HTTP API [default: 127.0.0.1:8080]
    #[arg(long, value_name = "ADDR")]
    http: Option<String>,
    /// Address of the router's gRPC [default: 127.0.0.1:50051]
    #[arg(long, value_name = "ADDR")]
    grpc: Option<String>,
    #[command(flatten)]
    configuration: configuration::Flags,
    /// Run every role as a process of its own
    #[arg(long)]
    isolate: bool,
}

/// Serves until a signal or a role's end.
pub(crate) async fn run(args: Args) -> Result<()> {
    let mut plan = Plan::new(args.configuration.load()?, usize::from(args.workers));
    plan.addresses(args.http.as_deref(), args.grpc.as_deref())?;
    let roles = [Role::Scheduler, Role::Router, Role::Worker];
    let _telemetry = args.configuration.begin(plan.document(), "serve", &roles)?;
    roles.iter().try_for_each(|&role| role::configure(plan.document(), role)?.value.check()).map_err(in_flags)?;
    if args.configuration.is_check() {
        return output::line("the configuration is good");
    }
    let shutdown = Shutdown::on_signals().context("cannot listen for signals")?;
    let model = tokio::select! {
        model = find_model(args.model.as_deref(), &plan) => model?,
        () = shutdown.triggered() => bail!("interrupted while fetching the model"),
    };
    plan.model(&model)?;
    let has_template = has_chat_template(model.path).await?;
    let form = if args.isolate { Form::Processes } else { Form::Tasks };
    let mut cluster = Cluster::new(form, &shutdown);
    let served = serve(&mut cluster, plan, has_template, &shutdown).await;
    let stopped = cluster.stop().await;
    served.map_err(in_flags).and(stopped)
}

/// Names the flags of this command where a role's error names its configuration.
fn in_flags(error: anyhow::Error) -> anyhow::Error {
    let text = format!("{error:#}");
    let named = text.replace("give router.http ", "give --http ").replace("give router.grpc ", "give --grpc ");
    if named == text { error } else { anyhow!(named) }
}

async fn find_model(named: Option<&str>, plan: &Plan) -> Result<Model> {
    let named = named.map(str::to_owned).or_else(|| plan.configured_model());
    let source: Source = named.as_deref().unwrap_or(DEMO_NAME).parse()?;
    // What is here needs no place to be fetched to.
    let is_here = matches!(source, Source::Path(_));
    let cache = if is_here { Cache::at(PathBuf::new()) } else { Cache::from_environment()? };
    resolve(source, cache).await
}

/// Opens the model's files, so that what is wrong with them is said once and at once.
async fn has_chat_template(path: PathBuf) -> Result<bool> {
    let opened = tokio::task::spawn_blocking(move || models::ModelFiles::open(path)).await;
    let files = opened.context("opening the model was interrupted")?.context("cannot open the model")?;
    Ok(files.chat_template().is_some())
}

/// Starts everything, says when it can answer, and returns when it should stop.
async fn serve(cluster: &mut Cluster, mut plan: Plan, has_template: bool, shutdown: &Shutdown) -> Result<()> {
    let (http, grpc) = tokio::select! {
        ready = start(cluster, &mut plan) => ready?,
        () = shutdown.triggered() => return Ok(()),
    };
    for line in (Ready { http, grpc, model: plan.model_name(), has_template }).lines() {
        output::line(&line)?;
    }
    tokio::select! {
        error = cluster.failure() => {
            // Running requests may take long to end.
            tracing::error!("{error:#}; stopping");
            Err(error)
        }
        () = shutdown.triggered() => Ok(()),
    }
}

/// Returns the router's HTTP and gRPC addresses when every role is ready.
async fn start(cluster: &mut Cluster, plan: &mut Plan) -> Result<(SocketAddr, SocketAddr)> {
    // The others need the scheduler's address; it needs nobody's.
    cluster.start(plan, Role::Scheduler, "scheduler").await?;
    plan.scheduler(cluster.address("scheduler", "grpc").await?)?;
    for name in plan.worker_names() {
        cluster.start(plan, Role::Worker, &name).await?;
    }
    cluster.start(plan, Role::Router, "router").await?;
    let mut waited = Vec::new();
    for name in plan.worker_names() {
        waited.push((name.clone(), cluster.address(&name, "grpc").await?));
    }
    let (http, grpc) = (cluster.address("router", "http").await?, cluster.address("router", "grpc").await?);
    waited.push(("router".to_owned(), http));
    if cluster.form() == Form::Processes {
        cluster.describe().iter().try_for_each(|line| output::line(line))?;
    }
    tokio::select! {
        ready = ready::until_ready(&waited) => ready?,
        error = cluster.failure() => return Err(error),
    }
    Ok((http, grpc))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_in_use_names_the_flag_that_moves_it() {
        let error = anyhow!("127.0.0.1:8080 is in use; stop the other process or give router.http another address");
        let named = in_flags(error.context("router failed")).to_string();
        assert!(named.starts_with("router failed: 127.0.0.1:8080") && named.contains("give --http another"), "{named}");
        assert_eq!(in_flags(anyhow!("inner").context("outer")).to_string(), "outer");
    }
}
