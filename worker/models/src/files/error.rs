//! Why model files could not be opened.

use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

/// Why [`ModelFiles::open`](super::ModelFiles::open) failed.
#[derive(Debug, Error)]
pub enum OpenError {
    /// The operating system refused.
    #[error("cannot read {path}")]
    Io {
        /// File or folder.
        path: PathBuf,
        /// What it said.
        source: io::Error,
    },
    /// The path holds something else.
    #[error("{path} is not a model: {reason}; give a Hugging Face folder or a GGUF file")]
    NotAModel {
        /// What was given.
        path: PathBuf,
        /// What was found.
        reason: String,
    },
    /// A file of the folder is absent.
    #[error("{folder} has no {file}: {remedy}")]
    MissingFile {
        /// The folder.
        folder: PathBuf,
        /// Name of the file.
        file: String,
        /// What to do.
        remedy: &'static str,
    },
    /// A pipe, a device or a folder is where a file should be.
    #[error("{path} is not a regular file")]
    NotAFile {
        /// What is there.
        path: PathBuf,
    },
    /// A file is larger than any of its kind.
    #[error("{path} has {bytes} bytes, more than the {bytes_max} that such a file may have")]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: u64,
        /// The limit.
        bytes_max: u64,
    },
    /// A file that should hold JSON does not.
    #[error("{path} is not valid JSON: {reason}")]
    Json {
        /// The file.
        path: PathBuf,
        /// Where and why.
        reason: String,
    },
    /// A configuration or metadata key is absent.
    #[error("{path} has no key {key}")]
    MissingKey {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
    },
    /// A key has a value that cannot be used.
    #[error("{path}: {key} is {value}, expected {expected}")]
    BadValue {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// What it holds.
        value: String,
        /// What it could hold.
        expected: String,
    },
    /// No code runs this architecture.
    #[error("{path}: architecture {found} is not supported; supported are {supported}")]
    UnknownArchitecture {
        /// The file.
        path: PathBuf,
        /// What it names.
        found: String,
        /// What there is.
        supported: String,
    },
    /// A weight file is damaged, truncated or of another version.
    #[error("{path} is damaged or truncated: {reason}")]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// The first thing that is wrong, with values.
        reason: String,
    },
    /// A tensor has a number format nothing here reads.
    #[error("{path}: tensor {tensor} has format {format}; supported are {supported}")]
    UnsupportedFormat {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// What it has.
        format: String,
        /// What there is.
        supported: String,
    },
}

impl OpenError {
    pub(crate) fn io(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { path, source }
    }

    pub(crate) fn bad_value(
        path: &Path,
        key: impl Into<String>,
        value: impl ToString,
        expected: impl Into<String>,
    ) -> Self {
        Self::BadValue { path: path.to_owned(), key: key.into(), value: value.to_string(), expected: expected.into() }
    }

    pub(crate) fn missing_key(path: &Path, key: impl Into<String>) -> Self {
        Self::MissingKey { path: path.to_owned(), key: key.into() }
    }

    pub(crate) fn corrupt(path: &Path, reason: impl ToString) -> Self {
        Self::Corrupt { path: path.to_owned(), reason: reason.to_string() }
    }
}
