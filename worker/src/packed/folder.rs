//! The folder of packed weights: which of its files are ours, how many stay, and what killed processes have left.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use daemon::clock;
use kernels::PackedFile;

/// Files that stay, the one being written included.
const FILES_MAX: usize = 8;
/// Hexadecimal digits in a file's name.
const DIGITS: usize = 32;

/// Packed weights would take more of the disk than they may.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct TooLarge {
    /// Bytes they may take.
    pub(super) bytes_max: u64,
}

/// A folder of packed weights, which need not be there.
#[derive(Debug)]
pub(super) struct Folder<'a>(pub(super) &'a Path);

impl Folder<'_> {
    /// Makes the folder, and a promise that somebody writes to it while the lock is held.
    ///
    /// # Errors
    /// What the operating system says about the folder; a file system without locks gives none.
    pub(super) fn begin_writing(&self) -> io::Result<Option<File>> {
        fs::create_dir_all(self.0)?;
        let lock = File::open(self.0)?;
        Ok(lock.lock_shared().is_ok().then_some(lock))
    }

    /// Deletes what processes that were killed while they wrote have left; while somebody writes it stays.
    pub(super) fn clean(&self) {
        // The lock of a process ends with it, however it ends.
        let Ok(lock) = File::open(self.0) else { return };
        if lock.try_lock().is_err() {
            return;
        }
        for (path, ..) in self.files(|name| name.starts_with(PackedFile::TEMPORARY)) {
            // Who deletes it later finds nothing.
            let _ = fs::remove_file(path);
        }
    }

    /// Deletes the files used least recently until `n_bytes` fit beside the rest; `ours`, which they replace, stays.
    ///
    /// All files together take at most half of what they and `free` bytes are.
    ///
    /// # Errors
    /// When `n_bytes` alone are more than that; then nothing is deleted.
    pub(super) fn make_room(&self, ours: &Path, n_bytes: u64, free: Option<u64>) -> Result<(), TooLarge> {
        let now = now();
        let mut all: Vec<_> = self
            .files(is_packed)
            // A clock that was wrong for a while makes no file stay for good.
            .map(|(path, about)| (about.modified().map_or(UNIX_EPOCH, |modified| modified.min(now)), about.len(), path))
            .collect();
        let taken = all.iter().map(|(_, len, _)| len).fold(0u64, |sum, len| sum.saturating_add(*len));
        let bytes_max = free.map_or(u64::MAX, |free| free.saturating_add(taken) / 2);
        if n_bytes > bytes_max {
            return Err(TooLarge { bytes_max });
        }
        all.retain(|(.., path)| path != ours);
        all.sort();
        let (mut n_files, mut total) = (1, n_bytes);
        for (_, len, path) in all.iter().rev() {
            n_files += 1;
            total = total.saturating_add(*len);
            if n_files > FILES_MAX || total > bytes_max {
                let _ = fs::remove_file(path);
            }
        }
        Ok(())
    }

    /// Bytes that are free where the folder is.
    pub(super) fn bytes_free(&self) -> Option<u64> {
        let about = rustix::fs::statvfs(self.0).ok()?;
        Some(about.f_bavail.saturating_mul(about.f_frsize))
    }

    /// Regular files with such names.
    fn files(&self, is_ours: impl Fn(&str) -> bool) -> impl Iterator<Item = (PathBuf, fs::Metadata)> {
        let entries = fs::read_dir(self.0).into_iter().flatten().flatten();
        entries.filter_map(move |entry| {
            let about = entry.metadata().ok()?;
            (about.is_file() && is_ours(entry.file_name().to_str()?)).then(|| (entry.path(), about))
        })
    }
}

/// Notes that a file was used, so that others leave before it.
pub(super) fn note_use(path: &Path) {
    // On a file system that cannot be written to it stays anyway.
    let _ = File::open(path).and_then(|file| file.set_modified(now()));
}

fn now() -> SystemTime {
    UNIX_EPOCH + Duration::from_millis(clock::unix_ms())
}

/// Whether a file of packed weights has such a name.
fn is_packed(name: &str) -> bool {
    let digits = name.strip_suffix(PackedFile::EXTENSION).and_then(|stem| stem.strip_suffix('.'));
    let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    digits.is_some_and(|digits| digits.len() == DIGITS && digits.bytes().all(is_digit))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEN: u64 = 100;

    fn make(folder: &Path, name: &str, age: i64) -> PathBuf {
        let path = folder.join(name);
        let file = File::create(&path).unwrap();
        file.set_len(LEN).unwrap();
        let distance = Duration::from_secs(age.unsigned_abs());
        file.set_modified(if age < 0 { now() + distance } else { now() - distance }).unwrap();
        path
    }

    fn packed(folder: &Path, index: usize, age: i64) -> PathBuf {
        make(folder, &format!("{index:032x}.{}", PackedFile::EXTENSION), age)
    }

    fn n_there(paths: &[PathBuf]) -> usize {
        paths.iter().filter(|path| path.exists()).count()
    }

    #[test]
    fn the_files_used_last_stay_and_what_is_not_ours() {
        let temporary = tempfile::tempdir().unwrap();
        let folder = temporary.path();
        let files: Vec<_> = (0..12).map(|index| packed(folder, index, index as i64 * 1_000)).collect();
        let others =
            ["other", "notes.packed", &format!("{}.packed", "g".repeat(32))].map(|name| make(folder, name, 9_999_999));
        let inner = folder.join(format!("{}.packed", "a".repeat(32)));
        fs::create_dir(&inner).unwrap();
        note_use(&files[11]);
        Folder(folder).make_room(&files[10], LEN, None).unwrap();
        assert!(files[10].exists(), "the one to be written is not deleted, however old");
        assert!(files[11].exists() && n_there(&files[..6]) == 6 && n_there(&files[6..10]) == 0);
        assert!(others.iter().all(|path| path.exists()) && inner.exists());
        Folder(&folder.join("absent")).make_room(&files[0], LEN, None).unwrap();
    }

    #[test]
    fn a_file_from_the_future_is_no_newer_than_one_used_now() {
        let temporary = tempfile::tempdir().unwrap();
        let ours = packed(temporary.path(), 0, -1_000_000);
        let future: Vec<_> = (1..=20).map(|index| packed(temporary.path(), index, -1_000_000 * index as i64)).collect();
        Folder(temporary.path()).make_room(&ours, LEN, None).unwrap();
        assert!(ours.exists());
        assert_eq!(n_there(&future), FILES_MAX - 1);
    }

    #[test]
    fn files_take_at_most_half_of_what_they_and_the_free_bytes_are() {
        let temporary = tempfile::tempdir().unwrap();
        let folder = Folder(temporary.path());
        let files: Vec<_> = (0..4).map(|index| packed(temporary.path(), index, index as i64 * 1_000)).collect();
        let ours = temporary.path().join(format!("{}.packed", "f".repeat(32)));
        assert_eq!(folder.make_room(&ours, 301, Some(200)), Err(TooLarge { bytes_max: 300 }));
        assert_eq!(n_there(&files), 4, "what cannot be kept deletes nothing");
        folder.make_room(&ours, 100, Some(200)).unwrap();
        assert!(files[1].exists() && n_there(&files) == 2, "the bound is 300");
        assert!(folder.bytes_free().is_some());
    }

    #[test]
    fn what_was_left_half_written_goes_unless_somebody_writes() {
        let temporary = tempfile::tempdir().unwrap();
        let folder = Folder(temporary.path());
        let writing = folder.begin_writing().unwrap();
        assert!(writing.is_some());
        let left = make(temporary.path(), &format!("{}1", PackedFile::TEMPORARY), 0);
        let whole = packed(temporary.path(), 0, 0);
        folder.clean();
        assert!(left.exists(), "it may be the writer's");
        drop(writing);
        folder.clean();
        assert!(!left.exists() && whole.exists());
        Folder(&temporary.path().join("absent")).clean();
    }
}
