//! Files that are read in place: weights are larger than what anyone wants to copy.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

/// A file mapped for reading; pages are loaded when they are touched and shared with other processes.
#[derive(Debug)]
pub struct MappedFile {
    map: memmap2::Mmap,
    stamp: FileStamp,
}

/// Changes when a file does: its length, and when contents and metadata last changed, as its system counts time.
///
/// Nobody can set the last of these, so a file that was overwritten and given back its old time has another stamp. Two
/// changes within one tick of the system's clock (some milliseconds) may have the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileStamp(pub [u8; 40]);

impl MappedFile {
    /// Maps a whole file.
    ///
    /// The file must not be shortened while it is mapped: touching what is gone ends the process, as with any
    /// program that maps files. Replace model files by renaming new ones over them.
    ///
    /// # Errors
    /// What the operating system says, or that this is a pipe, a device or a folder.
    pub fn open(path: &Path) -> io::Result<Self> {
        // Before it is opened, since opening a pipe waits for its other end.
        if !std::fs::metadata(path)?.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
        }
        let file = File::open(path)?;
        let about = file.metadata()?;
        let mut stamp = FileStamp([0; 40]);
        let times = [about.mtime(), about.mtime_nsec(), about.ctime(), about.ctime_nsec()].map(i64::to_le_bytes);
        stamp.0[..8].copy_from_slice(&about.len().to_le_bytes());
        stamp.0[8..].copy_from_slice(times.as_flattened());
        // SAFETY: the mapping is private and read-only, so nobody writes through it; that others do not change the
        // file meanwhile is asked of the operator above.
        let map = unsafe { memmap2::Mmap::map(&file) }?;
        Ok(Self { map, stamp })
    }

    /// What the file was when it was opened.
    pub fn stamp(&self) -> FileStamp {
        self.stamp
    }

    /// The file's bytes.
    pub fn as_slice(&self) -> &[u8] {
        &self.map
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_regular_files_are_mapped() {
        for path in ["/dev/zero", "/"] {
            let error = MappedFile::open(Path::new(path)).expect_err("it is no file");
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{path}");
        }
        let error = MappedFile::open(Path::new("/does/not/exist")).expect_err("it is absent");
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
