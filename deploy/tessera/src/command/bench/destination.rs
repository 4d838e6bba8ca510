//! Where a report goes: tables to the terminal, JSON and HTML to files.

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use serde::Serialize;

use crate::output;

/// A file that was opened before anything was measured, so that nothing is measured in vain.
pub(super) struct Destination {
    path: PathBuf,
    /// None is standard output.
    file: Option<File>,
}

impl Destination {
    /// Creates `path`; `-` is standard output.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let file = if path.as_os_str() == "-" {
            None
        } else {
            Some(File::create(path).with_context(|| format!("cannot create {}", path.display()))?)
        };
        Ok(Self { path: path.to_owned(), file })
    }

    fn write(mut self, text: &str) -> Result<()> {
        match &mut self.file {
            None => output::line(text),
            Some(file) => {
                let written = file.write_all(text.as_bytes()).and_then(|()| file.write_all(b"\n"));
                written.with_context(|| format!("cannot write {}", self.path.display()))?;
            }
        }
        Ok(())
    }

    fn is_standard_output(&self) -> bool {
        self.file.is_none()
    }
}

/// Prints tables, unless JSON takes their place, and writes the JSON.
pub(super) fn report(tables: &str, json: Option<Destination>, value: &impl Serialize) -> Result<()> {
    if !json.as_ref().is_some_and(Destination::is_standard_output) {
        output::line(tables);
    }
    match json {
        Some(json) => json.write(&serde_json::to_string_pretty(value).context("cannot write JSON")?),
        None => Ok(()),
    }
}

/// Writes the page.
pub(super) fn page(html: Option<Destination>, text: impl FnOnce() -> String) -> Result<()> {
    html.map_or(Ok(()), |html| html.write(&text()))
}
