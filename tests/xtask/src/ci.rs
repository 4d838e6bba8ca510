//! What CI runs, on a clean checkout.

use anyhow::Result;

use crate::{run, setup};

/// Checks format and lints, runs the README's test command, builds the documentation.
pub fn run() -> Result<()> {
    run::cargo(&["fmt", "--all", "--check"])?;
    setup::protoc()?;
    run::cargo(&["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"])?;
    run::cargo(&["xtask", "test"])?;
    run::check(run::cargo_command().args(["doc", "--workspace", "--no-deps"]).env("RUSTDOCFLAGS", "-D warnings"))
}
