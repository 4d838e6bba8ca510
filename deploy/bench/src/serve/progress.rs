//! A bar with live tokens per second while a point of load runs, where there is a terminal.

use std::io::IsTerminal as _;
use std::sync::Arc;
use std::time::Duration;

use daemon::clock;
use indicatif::{ProgressBar, ProgressStyle};

use super::client::Live;

/// Time between two looks at the counts.
const INTERVAL: Duration = Duration::from_millis(250);

/// Shows `live` until dropped; `n_requests` is how many there will be, if that is known.
pub(crate) async fn show(label: String, live: Arc<Live>, n_requests: Option<u64>) {
    if !std::io::stderr().is_terminal() {
        return std::future::pending().await;
    }
    let bar = Cleared(bar(label, n_requests));
    let mut ticks = tokio::time::interval(INTERVAL);
    let (mut before, mut seen) = (clock::now(), 0);
    loop {
        ticks.tick().await;
        let [n_parts, n_over, n_failed] = live.counts();
        let now = clock::now();
        let seconds = now.duration_since(before).as_secs_f64();
        let rate = if seconds > 0.0 { (n_parts - seen) as f64 / seconds } else { 0.0 };
        (before, seen) = (now, n_parts);
        bar.0.set_position(n_over);
        let failed = if n_failed > 0 { format!(", {n_failed} failed") } else { String::new() };
        bar.0.set_message(format!("{rate:.0} tokens/s, {n_parts} tokens{failed}"));
    }
}

fn bar(label: String, n_requests: Option<u64>) -> ProgressBar {
    let (bar, template) = match n_requests {
        Some(n) => (ProgressBar::new(n), "{prefix} [{bar:30}] {pos}/{len} {msg} {elapsed}"),
        None => (ProgressBar::new_spinner(), "{prefix} {spinner} {pos} {msg} {elapsed}"),
    };
    let style = ProgressStyle::with_template(template).expect("the template is one of the two above");
    bar.with_style(style.progress_chars("=> ")).with_prefix(label)
}

/// Leaves the terminal as it was.
struct Cleared(ProgressBar);

impl Drop for Cleared {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
