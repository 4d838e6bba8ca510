//! `tessera scheduler`, `tessera router` and `tessera worker`: one role of a cluster in this process.

use std::io::{BufRead as _, Read as _};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use daemon::announce::Announce;
use daemon::config::Document;
use daemon::shutdown::{Shutdown, Trigger};
use daemon::task::Tasks;
use toml::Value;

use crate::role::{self, Role};
use crate::{configuration, output};

const EXAMPLES: &str = "\
Examples:
  tessera scheduler --config cluster.toml
  tessera worker --config cluster.toml --set worker.listen=0.0.0.0:7000 --set worker.id=worker-3
  tessera worker --config cluster.toml --engine sim --profile ascend-910b
  tessera router --config cluster.toml --check-config

Prints `listening role=ROLE what=grpc|http address=ADDR` for each address it listens on.
SIGTERM and SIGINT let running requests finish; a second one does not.";

/// Time for a process whose parent has died.
const ORPHAN_GRACE: Duration = Duration::from_secs(3);

/// Ends the document that a parent gives; no TOML contains it.
pub(crate) const DOCUMENT_END: u8 = 0;
/// Largest such document.
const DOCUMENT_BYTES_MAX: u64 = 16 << 20;

/// What the role commands take.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(flatten)]
    configuration: configuration::Flags,
    /// Read the document from standard input, and stop when that ends, which it does with the process that started this
    /// one
    #[arg(long, hide = true)]
    with_parent: bool,
}

/// What `tessera worker` takes.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct WorkerArgs {
    #[command(flatten)]
    role: Args,
    /// What computes: the model, or a simulation that takes the time a profile says and loads no weights
    #[arg(long, value_parser = ["model", "sim"])]
    engine: Option<String>,
    /// Profile of the simulation: mooncake, ascend-910b, cpu, instant or a TOML file
    #[arg(long, value_name = "FILE")]
    profile: Option<String>,
}

impl WorkerArgs {
    /// The same, said by overrides.
    ///
    /// # Errors
    /// A profile of a worker that is not simulated.
    pub(crate) fn into_args(self) -> Result<Args> {
        let Self { mut role, engine, profile } = self;
        let has_profile = profile.is_some();
        for (path, flag) in [("worker.engine", engine), ("worker.sim_profile", profile)] {
            if let Some(text) = flag {
                role.configuration.set(path, &text);
            }
        }
        let is_simulated = |document: &Document| document.get("worker.engine").and_then(Value::as_str) == Some("sim");
        if has_profile && !is_simulated(&role.configuration.load()?) {
            bail!("--profile is of a simulated worker; give --engine sim, or engine = \"sim\" in the [worker] table");
        }
        Ok(role)
    }
}

/// Runs `role` until it is told to stop.
pub(crate) async fn run(role: Role, args: Args) -> Result<()> {
    let document = if args.with_parent { given_document()? } else { args.configuration.load()? };
    let _telemetry = args.configuration.begin(&document, role.name(), &[role])?;
    let mut configured = role::configure(&document, role)?.value;
    configured.check()?;
    if args.configuration.is_check() {
        return output::line("the configuration is good");
    }
    let (trigger, shutdown) = Shutdown::on_signals().context("cannot listen for signals")?.part();
    if args.with_parent {
        follow_parent(trigger)?;
    }
    let (announce, mut announced) = Announce::channel();
    configured.announce(announce);
    let listening = Tasks::new();
    listening.spawn("announcements", async move {
        while let Some((what, address)) = announced.next().await {
            let text = format!("listening role={} what={what} address={address}", role.name());
            if let Err(error) = output::line(&text) {
                tracing::warn!("{error:#}");
            }
        }
    });
    configured.run(shutdown).await
}

/// Reads the document that stands at the beginning of standard input.
fn given_document() -> Result<Document> {
    let mut text = Vec::new();
    std::io::stdin().lock().take(DOCUMENT_BYTES_MAX).read_until(DOCUMENT_END, &mut text)?;
    if text.pop() != Some(DOCUMENT_END) {
        bail!("the process that started this one gave no whole configuration");
    }
    Ok(Document::parse(std::str::from_utf8(&text)?, "the configuration given on standard input")?)
}

/// Fires `trigger` when standard input ends; without a parent there is no long grace.
fn follow_parent(trigger: Trigger) -> Result<()> {
    let parent = std::os::unix::process::parent_id();
    let follow = move || {
        let mut ignored = [0; 64];
        while std::io::stdin().read(&mut ignored).is_ok_and(|n| n > 0) {}
        trigger.fire();
        if std::os::unix::process::parent_id() != parent {
            std::thread::sleep(ORPHAN_GRACE);
            std::process::exit(1);
        }
    };
    std::thread::Builder::new().name("parent".to_owned()).spawn(follow).context("cannot start a thread")?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Probe {
        #[command(flatten)]
        args: WorkerArgs,
    }

    #[test]
    fn flags_of_a_simulated_worker_are_overrides() {
        let flags = ["tessera", "--set", "worker.id=w", "--engine", "sim", "--profile", "my \"own\".toml"];
        let document = Probe::parse_from(flags).args.into_args().unwrap().configuration.load().unwrap();
        let text = |path| document.get(path).and_then(Value::as_str);
        assert_eq!((text("worker.id"), text("worker.engine")), (Some("w"), Some("sim")));
        assert_eq!(text("worker.sim_profile"), Some("my \"own\".toml"));
        let configured = role::configure(&document, Role::Worker).unwrap();
        assert!(configured.unknown.is_empty(), "{:?}", configured.unknown);
        let into_args = |flags: &[&str]| Probe::parse_from([&["tessera"], flags].concat()).args.into_args();
        for model in [&["--profile", "cpu"][..], &["--profile", "cpu", "--engine", "model"]] {
            let Err(error) = into_args(model) else { panic!("a profile of what?") };
            assert!(error.to_string().contains("--engine sim"), "{error}");
        }
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("cluster.toml");
        std::fs::write(&file, "[worker]\nengine = \"sim\"\n").unwrap();
        assert!(into_args(&["--config", file.to_str().unwrap(), "--profile", "cpu"]).is_ok());
        assert!(Probe::try_parse_from(["tessera", "--engine", "steam"]).is_err());
    }
}
