//! Compares a file with the SHA-256 it must have.

use std::fs::{self, File};
use std::io::Read as _;
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use sha2::{Digest as _, Sha256};

use super::progress::Progress;

const CHUNK: usize = 1 << 20;

/// Checks that `path` has `n_bytes` bytes and the digest `sha256` (lowercase hex); deletes it otherwise.
pub(super) fn verify(path: &Path, n_bytes: u64, sha256: &str) -> Result<()> {
    let judged = judge(path, n_bytes, sha256);
    if judged.is_err() {
        let _ = fs::remove_file(path);
    }
    judged
}

fn judge(path: &Path, n_bytes: u64, sha256: &str) -> Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let mut file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    let found = file.metadata()?.len();
    if found != n_bytes {
        bail!("{name} has {found} bytes where {n_bytes} were promised; the download was deleted, try again");
    }
    let progress = Progress::new(&format!("checking {name}"), Some(n_bytes));
    let mut digest = Sha256::new();
    let mut chunk = vec![0; CHUNK];
    loop {
        let n = file.read(&mut chunk).with_context(|| format!("cannot read {}", path.display()))?;
        if n == 0 {
            break;
        }
        digest.update(&chunk[..n]);
        progress.add(n as u64);
    }
    progress.finish();
    let found = hex(&digest.finalize());
    if found != sha256 {
        bail!("{name} has the sha256 {found} where {sha256} was promised; the download was deleted, try again");
    }
    Ok(())
}

/// Writes bytes as lowercase hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes
        .iter()
        .flat_map(|byte| [byte >> 4, byte & 15])
        .map(|digit| char::from(b"0123456789abcdef"[usize::from(digit)]))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ABC: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    #[test]
    fn a_file_that_is_what_was_promised_stays() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), b"abc").unwrap();
        verify(file.path(), 3, ABC).unwrap();
        assert!(file.path().exists());
    }

    #[test]
    fn a_truncated_or_altered_file_is_refused_and_removed() {
        for (bytes, reason) in [(&b"ab"[..], "2 bytes where 3"), (b"abd", "sha256")] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("model.gguf");
            fs::write(&path, bytes).unwrap();
            let error = verify(&path, 3, ABC).unwrap_err().to_string();
            assert!(error.contains("model.gguf") && error.contains(reason), "{error}");
            assert!(!path.exists());
        }
    }
}
