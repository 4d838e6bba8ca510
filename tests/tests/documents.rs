//! What the documents say exists: commands, flags and links.

#![allow(
    clippy::disallowed_methods,
    clippy::print_stderr,
    clippy::unwrap_used,
    missing_docs,
    reason = "tests: a failed step panics, and real time is what they measure"
)]

use std::path::PathBuf;
use std::process::Command;

use tests::place;

const DOCUMENTS: [&str; 3] = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"];

/// Commands whose first argument is a command again.
const COMMANDS_OF_COMMANDS: [&str; 2] = ["bench", "model"];

fn root() -> PathBuf {
    place::here().join("..")
}

fn read(name: &str) -> String {
    std::fs::read_to_string(root().join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Everything between single back-ticks, and every line of a fenced block.
fn snippets(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut fenced = false;
    for line in text.lines() {
        if line.starts_with("```") {
            fenced = !fenced;
        } else if fenced {
            found.push(line.split(" #").next().unwrap_or_default().trim().to_owned());
        } else {
            found.extend(line.split('`').skip(1).step_by(2).map(str::to_owned));
        }
    }
    found
}

/// The arguments that a snippet gives to the `tessera` binary, if it runs it.
fn tessera_arguments(snippet: &str) -> Option<Vec<&str>> {
    let words: Vec<&str> = snippet.split_whitespace().collect();
    match words.as_slice() {
        ["cargo", "serve", rest @ ..] => Some([&["serve"], rest].concat()),
        ["cargo", "tessera", rest @ ..] | ["tessera", rest @ ..] if !rest.is_empty() => Some(rest.to_vec()),
        _ => None,
    }
}

fn help(arguments: &[&str]) -> String {
    let output = Command::new(place::tessera()).args(arguments).arg("--help").output().unwrap();
    assert!(output.status.success(), "{arguments:?} --help: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn every_tessera_command_and_flag_in_the_documents_exists() {
    let mut n_checked = 0;
    for document in DOCUMENTS {
        for snippet in snippets(&read(document)) {
            let Some(arguments) = tessera_arguments(&snippet) else { continue };
            if arguments[0].starts_with('-') {
                continue;
            }
            let n_commands = if COMMANDS_OF_COMMANDS.contains(&arguments[0]) { 2 } else { 1 };
            let help = help(&arguments[..n_commands.min(arguments.len())]);
            for flag in arguments.iter().filter(|argument| argument.starts_with("--")) {
                let flag = flag.split('=').next().unwrap();
                assert!(help.contains(flag), "{document}: `{snippet}`: {} has no {flag}", arguments[0]);
            }
            n_checked += 1;
        }
    }
    assert!(n_checked >= 8, "only {n_checked} commands were found");
}

#[test]
fn every_xtask_command_in_the_documents_exists() {
    let usage = std::fs::read_to_string(place::here().join("xtask/src/main.rs")).unwrap();
    for document in DOCUMENTS {
        for snippet in snippets(&read(document)) {
            let Some(command) = snippet.strip_prefix("cargo xtask ") else { continue };
            let command = command.split_whitespace().next().unwrap();
            assert!(
                usage.contains(&format!("(\"{command}\"")) || usage.contains(&format!("\"{command}\" |")),
                "{document}: `{snippet}`"
            );
        }
    }
}

#[test]
fn every_file_that_the_documents_link_to_or_name_exists() {
    for document in DOCUMENTS {
        let text = read(document);
        let links =
            text.split("](").skip(1).filter_map(|rest| rest.split(')').next()).filter(|link| !link.contains("://"));
        for link in links {
            assert!(root().join(link).exists(), "{document} links to {link}");
        }
        for snippet in snippets(&text).iter().filter(|snippet| snippet.ends_with(".rs") && !snippet.contains(' ')) {
            assert!(root().join(snippet).exists(), "{document} names {snippet}");
        }
    }
}
