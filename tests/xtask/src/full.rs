//! The full-size forms of counted tests: CI runs a slice of each, this runs the whole.

use anyhow::{Result, bail};

use crate::{run, setup, test};

/// Name, what it shows, and the `cargo test` arguments that run it.
const FULL: &[(&str, &str, &[&str])] = &[
    ("engine", "random operation sequences against the naive model of the engine", &["-p", "engine"]),
    (
        "cluster",
        "200 concurrent streams while a worker is killed, over real processes",
        &["-p", "tests", "--test", "cluster"],
    ),
    (
        "placement",
        "10,000 requests with random models and tenants make no metric series; what restarts leave credited",
        &["-p", "tests", "--test", "placement"],
    ),
    ("disconnects", "2,000 random client disconnects leave nothing behind", &["-p", "tests", "--test", "disconnects"]),
    (
        "invariance",
        "thousands of random batches, chunks, prefix hits and thread counts against each sequence alone, to the bit",
        &["-p", "models", "--test", "invariance"],
    ),
    (
        "accuracy",
        "SmolLM2 in every format, computed in every way, against f32; writes accuracy.md",
        &["-p", "models", "--test", "accuracy"],
    ),
    (
        "directory",
        "ten million prefixes come and go in the router's prefix directory, whose memory stays as it was",
        &["-p", "router", "--lib", "directory"],
    ),
    (
        "disaggregation",
        "prefill and decode workers killed 20 times each at five points of a request, over real processes",
        &["-p", "tests", "--test", "disaggregation"],
    ),
    (
        "overlap",
        "layers of a prompt travel while later ones are computed, median of 20",
        &["-p", "worker", "--lib", "split"],
    ),
    (
        "faults",
        "500 seeds of crashes, cut links, lost and late events under virtual time, and a planted defect that is found",
        &["-p", "simulation", "--test", "faults"],
    ),
    (
        "interleavings",
        "10,000 interleavings of requests, aborts, moving prompts, role changes, drains, crashes and lost frames",
        &["-p", "simulation", "--test", "interleavings"],
    ),
    (
        "roles",
        "automatic roles against every fixed split, simulated on a 910B; TESSERA_TRACES names Mooncake's whole traces",
        &["-p", "simulation", "--test", "roles"],
    ),
    (
        "migration",
        "workers killed and stopped in mid-stream over real processes, a next token within 2 s",
        &["-p", "tests", "--test", "migration"],
    ),
    (
        "rolling",
        "all workers and routers restarted one by one: 30 rounds at 50 simulated streams a second, 12 at 3 of SmolLM2",
        &["-p", "tests", "--test", "rolling"],
    ),
    (
        "outages",
        "etcd away for a minute, killed, emptied and compacted, and schedulers killed, at 25 streams a second",
        &["-p", "tests", "--test", "outages"],
    ),
    (
        "netfaults",
        "half a minute each of cut links, 30 % loss, half a second of delay, broken connections; 20 streams a second",
        &["-p", "tests", "--test", "netfaults", "--test", "connections"],
    ),
    (
        "soak",
        "half an hour at 80 % load with a random fault a minute; SOAK_S sets another duration, SEED repeats the faults",
        &["-p", "tests", "--test", "soak"],
    ),
    ("files", "random damage to model files is refused, never a panic", &["-p", "models"]),
];

/// Runs one by name, or lists them.
pub fn run(args: &[String]) -> Result<()> {
    let [name] = args else {
        for (name, shows, _) in FULL {
            println!("{name:<14}{shows}");
        }
        return Ok(());
    };
    let Some((_, _, test_args)) = FULL.iter().find(|(known, _, _)| known == name) else {
        bail!("no full test is called {name:?}; `cargo xtask full` lists them");
    };
    let mut tools = setup::for_tests()?;
    tools.variables.push(("TESSERA_FULL", "1".into()));
    let mut args: Vec<String> = test_args.iter().map(|arg| (*arg).to_owned()).collect();
    args.extend(["--".to_owned(), "--nocapture".to_owned()]);
    test::cargo_test(&tools, &args)?;
    println!("{name}: full size passed in {}", run::root().display());
    Ok(())
}
