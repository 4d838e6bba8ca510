//! Setup, serve, test, perf, tidy, codegen and ci: the repository's own commands, run as `cargo xtask NAME`.

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    clippy::disallowed_methods,
    unreachable_pub,
    reason = "a command-line tool without async"
)]

mod ci;
mod full;
mod layers;
mod perf;
mod run;
mod setup;
mod test;
mod tidy;

use std::process::ExitCode;

use anyhow::{Result, bail};

const USAGE: &str = "\
Usage: cargo xtask COMMAND

Commands:
  setup [--tests]   Fetch protoc and the demo model; with --tests also what tests need
  serve [ARGS…]     setup, build, then `tessera serve ARGS…` (also: cargo serve)
  test [ARGS…]      setup --tests, then every check and test; ARGS go to `cargo test`
  full [NAME]       The full-size form of a counted test; without NAME, list them
  perf [MODEL]      Check speed against the machine's bounds; wants an idle machine
  tidy              Check the rules of STYLE.md and ARCHITECTURE.md that a machine can check
  codegen           Regenerate the wire code from proto/**/*.proto
  ci                What CI runs: format, lints, `cargo xtask test`, documentation

SEED=N repeats a random test; TESSERA_HOME moves the model cache from ~/.cache/tessera.
";

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let command = args.next().unwrap_or_default();
    let rest: Vec<String> = args.collect();
    match dispatch(&command, &rest) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn dispatch(command: &str, args: &[String]) -> Result<()> {
    match (command, args) {
        ("setup", []) => setup::for_serving(),
        ("setup", [flag]) if flag == "--tests" => setup::for_tests().map(drop),
        ("serve", args) => run::serve(args),
        ("test", args) => test::run(args),
        ("full", args) => full::run(args),
        ("perf", args) => perf::run(args),
        ("tidy", []) => tidy::run(),
        ("codegen", []) => run::cargo(&["run", "--quiet", "--package", "codegen"]),
        ("ci", []) => ci::run(),
        ("help" | "--help" | "-h", _) => {
            print!("{USAGE}");
            Ok(())
        }
        ("", _) => bail!("no command given\n\n{USAGE}"),
        (other, _) => bail!("`{other} {}` is not a command\n\n{USAGE}", args.join(" ")),
    }
}
