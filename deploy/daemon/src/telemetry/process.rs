//! What the operating system knows of this process, read when metrics are rendered.

use std::sync::OnceLock;
use std::time::Instant;

use super::metrics::scope;
use super::names;
use crate::{clock, task};

/// Sets the gauges of the process.
pub(super) fn observe() {
    let process = scope("process", "");
    let set = |metric, value: Option<u64>| {
        if let Some(value) = value {
            process.gauge(metric, &[]).set(i64::try_from(value).unwrap_or(i64::MAX));
        }
    };
    set(&names::RUNTIME_TASKS, Some(task::alive() as u64));
    set(&names::PROCESS_FILE_DESCRIPTORS, n_file_descriptors());
    set(&names::PROCESS_MEMORY, resident_bytes());
    set(&names::PROCESS_UPTIME, Some(clock::now().duration_since(started()).as_secs()));
}

/// When this process first touched its metrics, which it does at start.
pub(super) fn started() -> Instant {
    static STARTED: OnceLock<Instant> = OnceLock::new();
    *STARTED.get_or_init(clock::now)
}

fn n_file_descriptors() -> Option<u64> {
    // One of them is the directory being read.
    std::fs::read_dir("/proc/self/fd").ok().map(|entries| (entries.count() as u64).saturating_sub(1))
}

fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sees_an_opened_file_and_its_own_memory() {
        let before = n_file_descriptors().unwrap();
        let files: Vec<_> = (0..64).map(|_| std::fs::File::open("/dev/null").unwrap()).collect();
        // Other tests open and close a few at the same time.
        assert!(n_file_descriptors().unwrap() >= before + 32);
        drop(files);
        assert!(resident_bytes().unwrap() > 1 << 20);
    }
}
