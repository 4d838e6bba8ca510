//! Writes to the terminal; a reader that has gone is no error of ours.

use std::io::Write as _;

/// Prints one line to standard output, at once.
pub(crate) fn line(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{text}");
    let _ = out.flush();
}

/// Prints one line to standard error.
pub(crate) fn error(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// Shows on a terminal that something goes on, and what; shows nothing elsewhere.
pub(crate) fn spinner() -> indicatif::ProgressBar {
    let spinner = indicatif::ProgressBar::new_spinner();
    spinner.enable_steady_tick(std::time::Duration::from_millis(200));
    spinner
}
