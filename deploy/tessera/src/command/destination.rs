//! Where a report goes: tables to the terminal, JSON and HTML to files.

use std::fs::OpenOptions;
use std::path::{Path, PathBuf, absolute};

use anyhow::{Context as _, Result, bail};
use serde::Serialize;

use crate::output;

/// A file that was found writable before anything was measured, so that nothing is measured in vain.
///
/// What it holds stays until there is a report to take its place.
#[derive(Debug)]
pub(crate) struct Destination {
    path: PathBuf,
}

impl Destination {
    /// Checks that `path` can be written; `-` is standard output.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let destination = Self { path: path.to_owned() };
        let is_new = !path.exists();
        if !destination.is_standard_output() && (is_new || path.is_file()) {
            let cannot = || format!("cannot write {}", path.display());
            OpenOptions::new().write(true).create(true).truncate(false).open(path).with_context(cannot)?;
            if is_new {
                std::fs::remove_file(path).with_context(cannot)?;
            }
        }
        Ok(destination)
    }

    /// Checks that both can be written and are not the same.
    pub(crate) fn open_both(json: Option<&Path>, html: Option<&Path>) -> Result<(Option<Self>, Option<Self>)> {
        if let (Some(json), Some(html)) = (json, html)
            && absolute(json).ok() == absolute(html).ok()
        {
            bail!("--json and --html both write {}; give two files", json.display());
        }
        Ok((json.map(Self::open).transpose()?, html.map(Self::open).transpose()?))
    }

    fn write(self, mut text: String) -> Result<()> {
        if self.is_standard_output() {
            return output::line(&text);
        }
        text.push('\n');
        std::fs::write(&self.path, text).with_context(|| format!("cannot write {}", self.path.display()))
    }

    fn is_standard_output(&self) -> bool {
        self.path.as_os_str() == "-"
    }
}

/// Prints tables, unless JSON takes their place, and writes the JSON.
pub(crate) fn report(tables: &str, json: Option<Destination>, value: &impl Serialize) -> Result<()> {
    if !json.as_ref().is_some_and(Destination::is_standard_output) {
        output::line(tables)?;
    }
    match json {
        Some(json) => json.write(serde_json::to_string_pretty(value).context("cannot write JSON")?),
        None => Ok(()),
    }
}

/// Writes the page.
pub(crate) fn page(html: Option<Destination>, text: impl FnOnce() -> String) -> Result<()> {
    html.map_or(Ok(()), |html| html.write(text()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_stays_until_another_takes_its_place() {
        let folder = tempfile::tempdir().unwrap();
        let (old, new) = (folder.path().join("old.json"), folder.path().join("new.json"));
        std::fs::write(&old, "a long report from before").unwrap();
        let destination = Destination::open(&old).unwrap();
        assert_eq!(std::fs::read_to_string(&old).unwrap(), "a long report from before");
        destination.write("new".to_owned()).unwrap();
        assert_eq!(std::fs::read_to_string(&old).unwrap(), "new\n");
        drop(Destination::open(&new).unwrap());
        assert!(!new.exists());
        assert!(Destination::open(&folder.path().join("none/new.json")).is_err());
    }

    #[test]
    fn two_reports_do_not_share_a_file() {
        let [a, b, c] = ["a", "./a", "-"].map(Path::new);
        assert!(Destination::open_both(Some(a), Some(b)).is_err());
        assert!(Destination::open_both(Some(c), Some(c)).is_err());
        assert!(Destination::open_both(Some(c), None).is_ok());
    }
}
