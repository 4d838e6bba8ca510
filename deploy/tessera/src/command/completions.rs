//! `tessera completions SHELL`.

use anyhow::{Context as _, Result};
use clap::CommandFactory as _;
use clap_complete::Shell;

use crate::output;

/// What `tessera completions` takes.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The shell to complete in
    shell: Shell,
}

/// Prints the script.
pub(crate) fn run(args: &Args) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut crate::Cli::command(), "tessera", &mut script);
    output::piece(&String::from_utf8(script).context("cannot print the script")?).map(|_| ())
}
