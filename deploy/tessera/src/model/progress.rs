//! Shows how far something has come: a bar on a terminal, a line now and then elsewhere.

use std::io::{IsTerminal as _, Write as _};
use std::sync::atomic::{AtomicU64, Ordering};

use indicatif::{ProgressBar, ProgressStyle};

/// Lines printed for one thing where there is no terminal.
const N_LINES: u64 = 4;

/// Smaller things are done before anyone has read of them.
const LINE_BYTES_MIN: u64 = 1_000_000;

/// How far one thing has come, in bytes.
pub(super) struct Progress {
    label: String,
    total: Option<u64>,
    position: AtomicU64,
    bar: Option<ProgressBar>,
}

impl Progress {
    /// Starts at zero of `total`, or of a size that is not known.
    pub(super) fn new(label: &str, total: Option<u64>) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| bar(label, total));
        let progress = Self { label: label.to_owned(), total, position: AtomicU64::new(0), bar };
        if progress.bar.is_none() {
            progress.line(0);
        }
        progress
    }

    /// Says that `position` is reached.
    pub(super) fn set(&self, position: u64) {
        let before = self.position.swap(position, Ordering::Relaxed);
        if let Some(bar) = &self.bar {
            bar.set_position(position);
        } else if let Some(total) = self.total.filter(|total| *total > 0) {
            let part = |position: u64| position.min(total).saturating_mul(N_LINES) / total;
            if part(position) > part(before) {
                self.line(position);
            }
        }
    }

    /// Says that `n` more are done.
    pub(super) fn add(&self, n: u64) {
        self.set(self.position.load(Ordering::Relaxed) + n);
    }

    /// Ends the bar.
    pub(super) fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish();
        }
    }

    fn line(&self, position: u64) {
        if self.total.is_some_and(|total| total < LINE_BYTES_MIN) {
            return;
        }
        let megabytes = |n: u64| n / 1_000_000;
        let text = match self.total {
            Some(total) => format!("{}: {} of {} MB", self.label, megabytes(position), megabytes(total)),
            None => self.label.clone(),
        };
        // Nobody may be reading.
        let _ = writeln!(std::io::stderr(), "{text}");
    }
}

fn bar(label: &str, total: Option<u64>) -> ProgressBar {
    let (bar, template) = match total {
        Some(total) => (ProgressBar::new(total), "{msg} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec} {eta}"),
        None => (ProgressBar::new_spinner(), "{msg} {spinner} {bytes} {bytes_per_sec}"),
    };
    let style = ProgressStyle::with_template(template).expect("the template is one of the two above");
    bar.with_style(style.progress_chars("=> ")).with_message(label.to_owned())
}
