//! The folder where fetched models stay, and the lock that lets one process fetch at a time.
//!
//! `models/FILE.gguf` is the demo model; `hub/ORG--NAME/COMMIT/` is one commit of a hub repository, complete once
//! its `.complete` exists; `packed/` has what workers keep between starts. Everything else is on its way and may be deleted.

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result};

/// Marks a hub folder whose files have all arrived.
pub(super) const COMPLETE: &str = ".complete";

/// How often a process looks whether another has finished fetching.
const LOCK_POLL: Duration = Duration::from_millis(200);

/// The model cache.
#[derive(Clone, Debug)]
pub(crate) struct Cache {
    home: PathBuf,
}

/// A model in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Cached {
    /// What `--model` takes.
    pub(crate) name: String,
    /// Bytes of its files.
    pub(crate) n_bytes: u64,
    /// Where it is.
    pub(crate) path: PathBuf,
}

impl Cache {
    /// Opens the cache at `TESSERA_HOME`, else at `~/.cache/tessera`.
    ///
    /// # Errors
    /// When neither `TESSERA_HOME` nor `HOME` is set.
    pub(crate) fn from_environment() -> Result<Self> {
        let set = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let home = set("TESSERA_HOME").or_else(|| Some(set("HOME")?.join(".cache/tessera")));
        Ok(Self::at(home.context("cannot place the model cache: set TESSERA_HOME to a folder")?))
    }

    /// Opens the cache at `home`.
    pub(crate) fn at(home: PathBuf) -> Self {
        Self { home }
    }

    /// Where workers keep packed weights.
    pub(crate) fn packed(&self) -> PathBuf {
        self.home.join("packed")
    }

    /// A folder of the cache, made if it is not there.
    pub(super) fn folder(&self, name: &str) -> Result<PathBuf> {
        let folder = self.home.join(name);
        fs::create_dir_all(&folder)
            .with_context(|| format!("cannot make {}; set TESSERA_HOME to a folder you may write", folder.display()))?;
        Ok(folder)
    }

    /// Waits until no other process fetches `what`, and keeps others waiting until the lock is dropped.
    pub(super) fn lock(&self, what: &str) -> Result<File> {
        let path = self.folder("locks")?.join(what);
        let file = File::create(&path).with_context(|| format!("cannot make {}", path.display()))?;
        let mut told = false;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(file),
                // The holder is alive: a lock ends with its process.
                Err(TryLockError::WouldBlock) => {
                    if !told {
                        tracing::info!("waiting for another process that fetches {what}");
                        told = true;
                    }
                    std::thread::sleep(LOCK_POLL);
                }
                Err(TryLockError::Error(error)) => {
                    return Err(error).with_context(|| format!("cannot lock {}", path.display()));
                }
            }
        }
    }

    /// Lists the models that are complete, by name.
    pub(crate) fn list(&self) -> Vec<Cached> {
        let mut found = Vec::new();
        for file in entries(&self.home.join("models")).filter(|path| path.extension().is_some_and(|e| e == "gguf")) {
            let is_demo = super::demo::is_demo(&file);
            let name = if is_demo { super::DEMO_NAME.to_owned() } else { file.display().to_string() };
            found.push(Cached { name, n_bytes: size(&file), path: file });
        }
        for repository in entries(&self.home.join("hub")) {
            let folder = repository.file_name().unwrap_or_default().to_string_lossy().into_owned();
            for commit in entries(&repository).filter(|path| path.join(COMPLETE).exists()) {
                let name = format!("hf:{}", folder.replacen("--", "/", 1));
                found.push(Cached { name, n_bytes: entries(&commit).map(|file| size(&file)).sum(), path: commit });
            }
        }
        found.sort_by(|one, two| (&one.name, &one.path).cmp(&(&two.name, &two.path)));
        found
    }
}

fn entries(folder: &Path) -> impl Iterator<Item = PathBuf> {
    fs::read_dir(folder).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()))
}

fn size(path: &Path) -> u64 {
    fs::metadata(path).map_or(0, |metadata| metadata.len())
}

/// Adds up the files under `folder`.
pub(super) fn tree_size(folder: &Path) -> u64 {
    let sizes = entries(folder).map(|path| if path.is_dir() { tree_size(&path) } else { size(&path) });
    sizes.sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_what_is_complete_and_nothing_that_is_on_its_way() {
        let home = tempfile::tempdir().unwrap();
        let cache = Cache::at(home.path().to_owned());
        assert_eq!(cache.list(), []);
        fs::write(cache.folder("models").unwrap().join("other.gguf"), b"123").unwrap();
        fs::write(cache.folder("models").unwrap().join("other.gguf.part"), b"1").unwrap();
        let complete = cache.folder("hub/org--a--b/c0ffee").unwrap();
        fs::write(complete.join("model.safetensors"), b"12345").unwrap();
        fs::write(complete.join(COMPLETE), b"").unwrap();
        fs::write(cache.folder("hub/org--later/0000").unwrap().join("model.safetensors.part"), b"1").unwrap();
        let other = home.path().join("models/other.gguf");
        let expected = [
            Cached { name: other.display().to_string(), n_bytes: 3, path: other },
            Cached { name: "hf:org/a--b".to_owned(), n_bytes: 5, path: complete },
        ];
        assert_eq!(cache.list(), expected);
    }

    #[test]
    fn a_second_process_waits_for_the_first() {
        let home = tempfile::tempdir().unwrap();
        let cache = Cache::at(home.path().to_owned());
        let first = cache.lock("model").unwrap();
        let (sender, receiver) = std::sync::mpsc::channel();
        let waiting = std::thread::spawn(move || {
            let lock = cache.lock("model").unwrap();
            sender.send(()).unwrap();
            drop(lock);
        });
        assert!(receiver.try_recv().is_err());
        drop(first);
        receiver.recv_timeout(Duration::from_secs(10)).unwrap();
        waiting.join().unwrap();
    }
}
