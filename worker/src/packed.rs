//! Packed weights between starts: which file keeps them and when it is written.

mod folder;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::{fs, io};

use daemon::task::Tasks;
use kernels::{CpuOps, PackedCopies, PackedFile, PackedFileError};
use models::ModelFiles;

use crate::config::Config;
use folder::{Folder, TooLarge, note_use};

/// A model is being loaded, and its packed weights are kept.
pub(crate) struct Keeping {
    file: PackedFile,
    /// Whether the file was read.
    is_read: bool,
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
        if folder.exists() && !folder.is_dir() {
            tracing::warn!("worker.packed_cache: {} is not a folder; packed weights are not kept", folder.display());
            return None;
        }
        Folder(&folder).clean();
        let identity = [&files.model_fingerprint().0[..], &files.weight_stamps()].concat();
        let file = PackedFile::in_folder(&folder, &identity, config.compute_dtype());
        let begun = ops.begin_packing(&file);
        let is_read = begun.is_ok();
        match begun {
            Ok(()) => {}
            Err(PackedFileError::Io(error)) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                let path = file.path().display();
                tracing::warn!(%path, %error, "packed weights are made again: the file that keeps them is no good");
                if matches!(error, PackedFileError::Damaged(_)) {
                    discard(file.path());
                }
            }
        }
        Some(Self { file, is_read })
    }

    /// Ends it after the last weight; `None` when the file has all of them.
    pub(crate) fn finish(self, ops: &CpuOps) -> Option<Unwritten> {
        let Some(copies) = ops.finish_packing() else {
            note_use(self.file.path());
            return None;
        };
        if self.is_read {
            // It has other weights than the model.
            discard(self.file.path());
        }
        Some(Unwritten { copies, file: self.file })
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

    /// Writes them and returns when they are written, or cannot be.
    pub(crate) fn write_now(self, stop: &AtomicBool) {
        let path = self.file.path();
        let folder = Folder(path.parent().unwrap_or(Path::new(".")));
        let (shown, n_bytes) = (path.display(), self.copies.n_bytes() as u64);
        folder.clean();
        let written = folder.begin_writing().and_then(|_lock| {
            folder.make_room(path, n_bytes, folder.bytes_free()).map_err(|TooLarge { bytes_max }| {
                let [mb, mb_max] = [n_bytes, bytes_max].map(|bytes| bytes >> 20);
                io::Error::new(
                    io::ErrorKind::StorageFull,
                    format!("they have {mb} MB, half of the disk's free space is {mb_max} MB"),
                )
            })?;
            self.copies.write(&self.file, stop)
        });
        match written {
            Ok(()) => tracing::info!(path = %shown, mb = n_bytes >> 20, "packed weights are kept"),
            Err(_) if stop.load(Ordering::Relaxed) => {}
            Err(error) => {
                tracing::warn!(path = %shown, %error, "cannot keep packed weights; worker.packed_cache names another folder");
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

/// Deletes a file that is to be written again, whose room a full disk may need for that.
fn discard(path: &Path) {
    // What cannot be deleted may still be replaced.
    let _ = fs::remove_file(path);
}
