//! Runs every check and test with what they need.

use anyhow::Result;

use crate::{run, setup, tidy};

/// Runs tidy, the freshness check of generated code, the tests of the benchmark scripts, then `cargo test`.
pub fn run(args: &[String]) -> Result<()> {
    let tools = setup::for_tests()?;
    tidy::run()?;
    run::cargo(&["run", "--quiet", "--package", "codegen", "--", "--check"])?;
    run::check(run::command("python3").args(["-m", "unittest", "discover", "-q", "-s", "tests/benches/peers"]))?;
    cargo_test(&tools, args)
}

/// Runs `cargo test` with the tools' places in the environment.
pub fn cargo_test(tools: &setup::TestTools, args: &[String]) -> Result<()> {
    let mut test = run::cargo_command();
    test.arg("test");
    if !args.iter().any(|arg| arg == "-p" || arg == "--package") {
        test.arg("--workspace");
    }
    for (variable, value) in &tools.variables {
        test.env(variable, value);
    }
    run::check(test.args(args))
}
