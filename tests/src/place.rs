//! Where the things are that `cargo xtask test` prepares.

use std::path::{Path, PathBuf};

/// The `tessera` binary.
pub fn tessera() -> PathBuf {
    prepared("TESSERA_TEST_BIN")
}

/// The demo model's GGUF file.
pub fn smollm2() -> PathBuf {
    prepared("TESSERA_TEST_MODEL")
}

/// The etcd server's binary.
pub fn etcd() -> PathBuf {
    prepared("TESSERA_TEST_ETCD")
}

/// The folder of the installed Python clients.
pub fn python_clients() -> PathBuf {
    prepared("TESSERA_TEST_PYTHONPATH")
}

/// A tiny random checkpoint under `tests/fixtures/tiny`.
pub fn tiny(name: &str) -> PathBuf {
    here().join("fixtures/tiny").join(name)
}

/// This crate's folder.
pub fn here() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn prepared(variable: &str) -> PathBuf {
    match std::env::var_os(variable) {
        Some(path) => PathBuf::from(path),
        None => panic!(
            "{variable} is not set: run this through `cargo xtask test -p tests`, which prepares what tests need"
        ),
    }
}
