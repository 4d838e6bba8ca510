//! Regenerates the committed wire code: `codegen` writes it, `codegen --check` fails when it is out of date.

#![allow(clippy::print_stdout, clippy::disallowed_methods, reason = "a command-line tool")]

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use prost::Message as _;

const PROTOS: [&str; 4] = [
    "tessera/inference/v1/inference.proto",
    "tessera/worker/v1/worker.proto",
    "tessera/worker/v1/transfer.proto",
    "tessera/cluster/v1/cluster.proto",
];

fn main() -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize()?;
    let committed = root.join("proto/src/generated");
    match std::env::args().nth(1).as_deref() {
        None => {
            generate(&root, &committed)?;
            println!("wrote {}", committed.display());
            Ok(())
        }
        Some("--check") => {
            let fresh = root.join("target/codegen-check");
            generate(&root, &fresh)?;
            let differing = compare(&committed, &fresh)?;
            if !differing.is_empty() {
                bail!("generated code is out of date: {}; run `cargo xtask codegen` and commit", differing.join(", "));
            }
            println!("generated code is up to date");
            Ok(())
        }
        Some(other) => bail!("unknown argument {other:?}; usage: codegen [--check]"),
    }
}

/// Compiles all protos into `out`, which it empties first.
fn generate(root: &Path, out: &Path) -> Result<()> {
    if out.exists() {
        fs::remove_dir_all(out).with_context(|| format!("empty {}", out.display()))?;
    }
    fs::create_dir_all(out).with_context(|| format!("create {}", out.display()))?;
    let descriptors = protox::compile(PROTOS, [root.join("proto")]).context("compile protos")?;
    fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure().out_dir(out).compile_fds(descriptors).context("generate code")?;
    Ok(())
}

/// Names of files that are missing on one side or differ.
fn compare(committed: &Path, fresh: &Path) -> Result<Vec<String>> {
    let mut names: Vec<PathBuf> = Vec::new();
    for folder in [committed, fresh] {
        for entry in fs::read_dir(folder).with_context(|| format!("read {}", folder.display()))? {
            names.push(entry?.file_name().into());
        }
    }
    names.sort();
    names.dedup();
    let differs = |name: &PathBuf| fs::read(committed.join(name)).ok() != fs::read(fresh.join(name)).ok();
    Ok(names.iter().filter(|name| differs(name)).map(|name| name.display().to_string()).collect())
}
