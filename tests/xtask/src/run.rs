//! Starts other programs from the repository's root.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::setup;

/// The repository's root.
pub fn root() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    root.canonicalize().unwrap_or(root)
}

/// A command that will start in the root.
pub fn command(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    command.current_dir(root());
    command
}

/// Runs a command to its end and fails when it failed.
pub fn check(command: &mut Command) -> Result<()> {
    let shown = show(command);
    let status = command.status().with_context(|| format!("start `{shown}`"))?;
    if !status.success() {
        bail!("`{shown}` failed ({status})");
    }
    Ok(())
}

/// Runs a command and returns what it printed; its errors are shown only when it fails.
pub fn output(command: &mut Command) -> Result<String> {
    let shown = show(command);
    let output = command.output().with_context(|| format!("start `{shown}`"))?;
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr);
        bail!("`{shown}` failed ({}): {}", output.status, last_line(&errors));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Runs cargo with arguments.
pub fn cargo(args: &[&str]) -> Result<()> {
    check(cargo_command().args(args))
}

/// The cargo that runs us.
pub fn cargo_command() -> Command {
    command(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// Builds the binary, as a part of the workspace: with the features that tests are built with no crate is built twice.
pub fn build_tessera() -> Result<()> {
    cargo(&["build", "--workspace", "--bin", "tessera"])
}

/// Where `cargo build` leaves the binary.
pub fn tessera_binary() -> Result<PathBuf> {
    let metadata = output(cargo_command().args(["metadata", "--format-version=1", "--no-deps"]))?;
    let metadata: serde_json::Value = serde_json::from_str(&metadata).context("parse cargo metadata")?;
    let target = metadata["target_directory"].as_str().context("cargo metadata names no target directory")?;
    Ok(Path::new(target).join("debug/tessera"))
}

/// Prepares, builds and becomes `tessera serve`.
pub fn serve(args: &[String]) -> Result<()> {
    setup::protoc()?;
    build_tessera()?;
    let mut serve = Command::new(tessera_binary()?);
    serve.arg("serve").args(args);
    become_command(serve)
}

#[cfg(unix)]
fn become_command(mut command: Command) -> Result<()> {
    use std::os::unix::process::CommandExt as _;
    let error = command.exec();
    Err(error).with_context(|| format!("start `{}`", show(&command)))
}

#[cfg(not(unix))]
fn become_command(mut command: Command) -> Result<()> {
    check(&mut command)
}

fn show(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(OsStr::to_string_lossy).collect::<Vec<_>>().join(" ")
}

fn last_line(text: &str) -> &str {
    text.trim_end().lines().last().unwrap_or("no message")
}
