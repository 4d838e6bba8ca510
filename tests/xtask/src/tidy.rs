//! The rules of STYLE.md and ARCHITECTURE.md that a machine can check.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::{layers, run};

/// Lines of code a file may have, tests at its end not counted.
const CODE_LINES_MAX: usize = 500;
/// File names that say nothing of what is inside.
const EMPTY_NAMES: [&str; 4] = ["utils", "helpers", "common", "misc"];
/// Folders whose files may hold `unsafe`.
const UNSAFE_FOLDERS: [&str; 1] = ["kernels/"];
/// Names of files that hold text, by their endings.
const TEXT_ENDINGS: [&str; 9] = [".rs", ".md", ".toml", ".py", ".proto", ".sh", ".yml", ".yaml", ".json"];

/// Checks everything and fails with all complaints.
pub fn run() -> Result<()> {
    let mut complaints = layers::complaints()?;
    let files = run::output(run::command("git").args(["ls-files", "--cached", "--others", "--exclude-standard"]))?;
    for file in files.lines().filter(|file| run::root().join(file).is_file()) {
        if !TEXT_ENDINGS.iter().any(|ending| file.ends_with(ending)) {
            continue;
        }
        let text = fs::read_to_string(run::root().join(file)).with_context(|| format!("read {file}"))?;
        complaints.extend(file_complaints(file, &text));
    }
    if complaints.is_empty() {
        println!("tidy: all rules hold");
        return Ok(());
    }
    bail!("tidy found {}:\n  {}", complaints.len(), complaints.join("\n  "))
}

fn file_complaints(file: &str, text: &str) -> Vec<String> {
    let mut complaints = machine_complaints(file, text);
    if file.ends_with(".rs") && !file.starts_with("proto/src/generated/") {
        complaints.extend(rust_complaints(file, text));
    }
    complaints
}

/// Nothing of the machine it was written on stands in the repository.
fn machine_complaints(file: &str, text: &str) -> Vec<String> {
    let places = [concat!("/wo", "rk/"), concat!("../sha", "red"), concat!("/ro", "ot/")];
    let named = places.iter().filter(|place| text.contains(**place));
    named.map(|place| format!("{file}: names {place}, a place of one machine")).collect()
}

fn rust_complaints(file: &str, text: &str) -> Vec<String> {
    let mut complaints = Vec::new();
    let stem = Path::new(file).file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
    if EMPTY_NAMES.contains(&stem.as_str()) {
        complaints.push(format!("{file}: a file is named after its idea, and {stem} is none"));
    }
    if !text.starts_with("//! ") {
        complaints.push(format!("{file}: the first line is `//!` and one sentence"));
    }
    let lines = code_lines(text);
    if lines > CODE_LINES_MAX {
        complaints.push(format!("{file}: {lines} lines of code are more than {CODE_LINES_MAX}; a file holds one idea"));
    }
    if !UNSAFE_FOLDERS.iter().any(|folder| file.starts_with(folder)) && has_unsafe(text) {
        complaints.push(format!("{file}: unsafe is kept to {}", UNSAFE_FOLDERS.join(", ")));
    }
    complaints
}

/// Lines that are neither blank nor comment, up to the file's tests.
fn code_lines(text: &str) -> usize {
    let code = text.lines().take_while(|line| *line != "#[cfg(test)]").map(str::trim);
    code.filter(|line| !line.is_empty() && !line.starts_with("//")).count()
}

fn has_unsafe(text: &str) -> bool {
    let code = text.lines().map(str::trim).filter(|line| !line.starts_with("//"));
    code.into_iter().any(|line| {
        [concat!("unsa", "fe {"), concat!("unsa", "fe fn"), concat!("unsa", "fe impl")]
            .iter()
            .any(|word| line.contains(word))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rule_finds_what_breaks_it() {
        let good = "//! One idea.\n\nfn f() {}\n";
        assert!(file_complaints("router/src/route.rs", good).is_empty());
        assert_eq!(file_complaints("router/src/utils.rs", good).len(), 1);
        assert_eq!(file_complaints("router/src/route.rs", "fn f() {}\n").len(), 1);
        let long = format!("//! Long.\n{}", "fn f() {}\n".repeat(CODE_LINES_MAX + 1));
        assert_eq!(file_complaints("router/src/route.rs", &long).len(), 1);
        let raw = concat!("//! Raw.\nfn f() { unsa", "fe { } }\n");
        assert_eq!(file_complaints("router/src/route.rs", raw).len(), 1);
        assert!(file_complaints("kernels/src/memory.rs", raw).is_empty());
        assert_eq!(file_complaints("README.md", concat!("see /wo", "rk/main")).len(), 1);
    }

    #[test]
    fn tests_at_the_end_of_a_file_do_not_count() {
        let text = format!("//! Short.\nfn f() {{}}\n#[cfg(test)]\n{}", "fn f() {}\n".repeat(1000));
        assert_eq!(code_lines(&text), 1);
    }
}
