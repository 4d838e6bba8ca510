//! One role as a child process: given its document on its input, heard through its output, ended when its input ends.

use std::net::SocketAddr;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use daemon::config::Document;
use daemon::shutdown::Shutdown;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::{ChildStdin, ChildStdout, Command};
use tokio::sync::mpsc;

use super::cluster::Event;
use crate::command::role::DOCUMENT_END;
use crate::role::Role;

/// Longest time for a child to end after it was told; then it is killed.
const END_MAX: Duration = Duration::from_secs(70);

/// Longest time for a child to read its document.
const DOCUMENT_MAX: Duration = Duration::from_secs(30);

/// A running child.
pub(super) struct Child {
    name: String,
    pid: u32,
    process: tokio::process::Child,
    /// Its standard input: it ends when this does, however this process ends.
    stdin: ChildStdin,
    stdout: ChildStdout,
}

impl Child {
    /// Starts this program again as `role` and gives it its document, which is in no file, for it holds the hash key.
    pub(super) async fn start(role: Role, name: &str, document: &Document) -> Result<Self> {
        let program = std::env::current_exe().context("cannot find this program's file")?;
        let mut process = Command::new(program)
            .arg(role.name())
            .arg("--with-parent")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // A terminal's Ctrl-C goes to this process alone, which then ends the children in order.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()?;
        let pid = process.id().context("it ended at once")?;
        let mut stdin = process.stdin.take().expect("its input is piped");
        let stdout = process.stdout.take().expect("its output is piped");
        let mut text = document.to_toml().into_bytes();
        text.push(DOCUMENT_END);
        let given = tokio::time::timeout(DOCUMENT_MAX, stdin.write_all(&text)).await;
        given.context("it does not read its configuration")?.context("cannot give it its configuration")?;
        Ok(Self { name: name.to_owned(), pid, process, stdin, stdout })
    }

    /// Its process id.
    pub(super) fn pid(&self) -> u32 {
        self.pid
    }

    /// Passes on what it tells until it ends, which `shutdown` asks it to.
    pub(super) async fn follow(mut self, events: mpsc::Sender<Event>, shutdown: Shutdown) {
        let mut lines = BufReader::new(self.stdout).lines();
        let mut stdin = Some(self.stdin);
        let result = loop {
            tokio::select! {
                line = lines.next_line() => match line {
                    Ok(Some(line)) => {
                        if let Some((what, address)) = parse(&line) {
                            let _ = events.send(Event::Listening { name: self.name.clone(), what, address }).await;
                        }
                    }
                    // Its output ends with it.
                    _ => break ended(&mut self.process, stdin.is_none()).await,
                },
                () = shutdown.triggered(), if stdin.is_some() => stdin = None,
            }
            if stdin.is_none() {
                break ended(&mut self.process, true).await;
            }
        };
        let _ = events.send(Event::Ended { name: self.name, result }).await;
    }
}

/// Waits for a child's end and judges it.
async fn ended(process: &mut tokio::process::Child, told: bool) -> Result<()> {
    match tokio::time::timeout(END_MAX, process.wait()).await {
        Ok(status) => judge(status.context("cannot watch it")?, told),
        Err(_) => {
            process.start_kill().context("cannot kill it")?;
            bail!("it did not end within {} s and was killed", END_MAX.as_secs())
        }
    }
}

fn judge(status: ExitStatus, told: bool) -> Result<()> {
    if status.success() {
        return Ok(());
    }
    let reason = anyhow!("its process ended with {status}; its messages are above");
    if told { Err(reason.context("it was told to end")) } else { Err(reason) }
}

/// Reads `listening role=… what=… address=…`.
fn parse(line: &str) -> Option<(String, SocketAddr)> {
    let rest = line.strip_prefix("listening ")?;
    let field = |name: &str| rest.split(' ').find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
    Some((field("what")?.to_owned(), field("address")?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_line_in_which_a_role_tells_its_address() {
        let expected = Some(("grpc".to_owned(), "127.0.0.1:7".parse().unwrap()));
        assert_eq!(parse("listening role=worker what=grpc address=127.0.0.1:7"), expected);
        for other in ["", "listening", "listening role=worker what=grpc address=here", "ready http=127.0.0.1:7"] {
            assert_eq!(parse(other), None, "{other}");
        }
    }
}
