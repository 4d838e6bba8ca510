//! A child process whose output is kept, whose announced addresses are read, and which never outlives its test.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use crate::host::Host;

/// Longest wait for the rest of the output of a process that has ended.
const OUTPUT_END: Duration = Duration::from_secs(5);

/// A running child.
pub struct Process {
    pub name: String,
    child: Child,
    lines: Arc<Lines>,
    log: PathBuf,
    folders: Vec<tempfile::TempDir>,
}

#[derive(Default)]
struct Lines {
    seen: Mutex<(Vec<String>, bool)>,
    changed: Condvar,
}

impl Process {
    /// Starts `command`; its errors go to a file that is shown when the test fails.
    pub fn start(name: &str, mut command: Command) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("stderr");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(File::create(&log).unwrap());
        let mut child = command.spawn().unwrap_or_else(|error| panic!("start {name}: {error}"));
        let lines = Arc::new(Lines::default());
        let (output, sink) = (child.stdout.take().unwrap(), Arc::clone(&lines));
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                sink.seen.lock().unwrap().0.push(line);
                sink.changed.notify_all();
            }
            sink.seen.lock().unwrap().1 = true;
            sink.changed.notify_all();
        });
        Self { name: name.to_owned(), child, lines, log, folders: vec![folder] }
    }

    /// Starts the `tessera` binary with a configuration document, given as TOML.
    pub fn tessera(name: &str, args: &[&str], config: Option<&toml::Table>) -> Self {
        Self::tessera_on(&Host::LOOPBACK, name, args, config)
    }

    /// The same on a host.
    pub fn tessera_on(host: &Host, name: &str, args: &[&str], config: Option<&toml::Table>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut command = host.command(crate::place::tessera());
        // What it keeps between starts ends with it.
        command.args(args).env("TESSERA_HOME", folder.path());
        if let Some(config) = config {
            let path = folder.path().join("config.toml");
            std::fs::write(&path, toml::to_string(config).unwrap()).unwrap();
            command.arg("--config").arg(path);
        }
        let mut process = Self::start(name, command);
        process.folders.push(folder);
        process
    }

    /// Waits for a line of output for which `look` gives something.
    pub fn line<T>(&self, what: &str, deadline: Duration, look: impl Fn(&str) -> Option<T>) -> T {
        let end = Instant::now() + deadline;
        let mut seen = self.lines.seen.lock().unwrap();
        loop {
            if let Some(found) = seen.0.iter().find_map(|line| look(line)) {
                return found;
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() || seen.1 {
                let state = if seen.1 { "ended" } else { "runs" };
                panic!(
                    "{} printed no {what} within {deadline:?} ({state}):\n{}\n{}",
                    self.name,
                    seen.0.join("\n"),
                    self.errors()
                );
            }
            seen = self.lines.changed.wait_timeout(seen, left).unwrap().0;
        }
    }

    /// The address it announced for `what` (`grpc` or `http`).
    pub fn address(&self, what: &str) -> String {
        let wanted = format!("what={what}");
        self.line(&format!("address of {what}"), Duration::from_secs(60), |line| {
            let fields = fields(line.strip_prefix("listening ")?);
            line.split(' ').any(|word| word == wanted).then(|| fields["address"].to_owned())
        })
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Everything it wrote to standard error.
    pub fn errors(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Everything it wrote to standard output.
    pub fn output(&self) -> String {
        self.lines.seen.lock().unwrap().0.join("\n")
    }

    /// Open file descriptors.
    pub fn n_descriptors(&self) -> usize {
        std::fs::read_dir(Path::new("/proc").join(self.pid().to_string()).join("fd")).map_or(0, Iterator::count)
    }

    /// Resident memory.
    pub fn resident_bytes(&self) -> u64 {
        let status = std::fs::read_to_string(Path::new("/proc").join(self.pid().to_string()).join("status"));
        let status = status.unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
        kib.unwrap_or(0) * 1024
    }

    /// Kills it as a crash would.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Asks it to stop, as Kubernetes does.
    pub fn terminate(&self) {
        self.signal("TERM");
    }

    /// Sends it a signal by name.
    pub fn signal(&self, name: &str) {
        let status = Command::new("kill").args(["-s", name, &self.pid().to_string()]).status().unwrap();
        assert!(status.success(), "kill -s {name} {}", self.pid());
    }

    /// Waits for its end, and for that of its output.
    pub fn ended(&mut self, deadline: Duration) -> ExitStatus {
        let end = Instant::now() + deadline;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                // A process that it started may hold the pipe for longer.
                let is_open = |lines: &mut (Vec<String>, bool)| !lines.1;
                let seen = self.lines.seen.lock().unwrap();
                drop(self.lines.changed.wait_timeout_while(seen, OUTPUT_END, is_open).unwrap());
                return status;
            }
            assert!(Instant::now() < end, "{} still runs after {deadline:?}:\n{}", self.name, self.errors());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Whether it still runs.
    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
        if std::thread::panicking() {
            let errors = self.errors();
            let tail: Vec<&str> = errors.lines().rev().take(30).collect();
            eprintln!("--- last lines of {} ---", self.name);
            tail.iter().rev().for_each(|line| eprintln!("{line}"));
        }
    }
}

/// `key=value` pairs of a line.
pub fn fields(line: &str) -> BTreeMap<&str, &str> {
    line.split(' ').filter_map(|word| word.split_once('=')).collect()
}
