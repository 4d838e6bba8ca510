//! Packed weights between starts: which file keeps them, when it is written, and how many files stay.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, UNIX_EPOCH};
use std::{fs, io};

use daemon::clock;
use daemon::task::Tasks;
use kernels::{CpuOps, PackedCopies, PackedFile, PackedFileError};
use models::ModelFiles;

use crate::config::Config;

/// Files that stay in the folder, newest first.
const FILES_MAX: usize = 8;
/// Age after which a file that was never finished is nobody's.
const ABANDONED: Duration = Duration::from_secs(3_600);

/// A model is being loaded, and its packed weights are kept.
pub(crate) struct Keeping {
    file: PackedFile,
}

impl Keeping {
    /// Begins it before the first weight is loaded; `None` when packed weights are not kept.
    ///
    /// A file is this model's when names, formats, shapes and samples of all tensors are the same, and length and
    /// times of the weight files. Reading all of them at each start would cost more than packing. What goes unnoticed
    /// is a change that misses the samples and leaves the file's times: within one tick of the file system's clock, or
    /// written to the disk below it.
    pub(crate) fn begin(config: &Config, files: &ModelFiles, ops: &CpuOps) -> Option<Self> {
        let folder = config.keeps_packed()?;
        let identity = [&files.model_fingerprint().0[..], &files.weight_stamps()].concat();
        let file = PackedFile::in_folder(folder, &identity, config.compute_dtype());
        match ops.begin_packing(&file) {
            Ok(()) => {}
            Err(PackedFileError::Io(error)) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                let path = file.path().display();
                tracing::warn!(%path, %error, "packed weights are made again: the file that keeps them is no good");
            }
        }
        Some(Self { file })
    }

    /// Ends it after the last weight; `None` when the file has all of them.
    pub(crate) fn finish(self, ops: &CpuOps) -> Option<Unwritten> {
        Some(Unwritten { copies: ops.finish_packing()?, file: self.file })
    }
}

/// Packed weights that are to be written.
pub(crate) struct Unwritten {
    copies: PackedCopies,
    file: PackedFile,
}

impl Unwritten {
    /// Writes them while the worker serves.
    pub(crate) fn write(self, tasks: &Tasks) -> Writing {
        let stop = Arc::new(AtomicBool::new(false));
        let stopping = Arc::clone(&stop);
        tasks.spawn("packed weights", async move {
            // A panic there is a defect, which the runtime has printed; the worker serves without the file.
            let _ = tokio::task::spawn_blocking(move || self.write_now(&stopping)).await;
        });
        Writing { stop }
    }

    fn write_now(self, stop: &AtomicBool) {
        let path = self.file.path();
        match self.copies.write(&self.file, stop) {
            Ok(()) => {
                tracing::info!(path = %path.display(), mb = self.copies.n_bytes() >> 20, "packed weights are kept");
                path.parent().into_iter().for_each(keep_newest);
            }
            Err(_) if stop.load(Ordering::Relaxed) => {}
            Err(error) => {
                let path = path.display();
                tracing::warn!(%path, %error, "cannot keep packed weights; worker.packed_cache names another folder");
            }
        }
    }
}

/// Gives up when it is dropped.
pub(crate) struct Writing {
    stop: Arc<AtomicBool>,
}

impl Drop for Writing {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// Deletes all but the newest files of packed weights, and what processes that were killed have left.
fn keep_newest(folder: &Path) {
    let mut kept = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let Ok(modified) = entry.metadata().and_then(|about| about.modified()) else { continue };
        let (path, name) = (entry.path(), entry.file_name());
        if path.extension().is_some_and(|extension| extension == PackedFile::EXTENSION) {
            kept.push((modified, path));
        } else if name.to_string_lossy().starts_with(PackedFile::TEMPORARY)
            && modified + ABANDONED < UNIX_EPOCH + Duration::from_millis(clock::unix_ms())
        {
            // Another worker may be doing the same; who is late finds nothing.
            let _ = fs::remove_file(path);
        }
    }
    kept.sort();
    for (_, path) in kept.iter().rev().skip(FILES_MAX) {
        let _ = fs::remove_file(path);
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn the_newest_files_stay_and_abandoned_ones_go() {
        let folder = tempfile::tempdir().unwrap();
        let make = |name: String, age: u64| {
            let path = folder.path().join(name);
            let file = File::create(&path).unwrap();
            file.set_modified(UNIX_EPOCH + Duration::from_millis(clock::unix_ms()) - Duration::from_secs(age)).unwrap();
            path
        };
        let packed: Vec<_> =
            (0..12).map(|age| make(format!("{age}.{}", PackedFile::EXTENSION), age * 10_000)).collect();
        let other = make("other".to_owned(), 1_000_000);
        let [fresh, old] = [60, 7_200].map(|age| make(format!("{}{age}", PackedFile::TEMPORARY), age));
        keep_newest(folder.path());
        assert!(other.exists() && fresh.exists() && !old.exists());
        assert!(packed[..FILES_MAX].iter().all(|path| path.exists()));
        assert!(!packed[FILES_MAX..].iter().any(|path| path.exists()));
        keep_newest(&folder.path().join("absent"));
    }
}
