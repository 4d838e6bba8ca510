//! The binary refuses an instruction set that this CPU lacks, in words, whoever names it.

#![allow(
    clippy::disallowed_methods,
    clippy::print_stderr,
    clippy::unwrap_used,
    missing_docs,
    reason = "tests: a failed step panics, and real time is what they measure"
)]

use std::process::Command;
use std::time::Duration;

use tests::place;
use tests::process::Process;

const END: Duration = Duration::from_secs(60);

/// Instruction sets, fastest first, and the flag by which Linux says that a CPU has it.
const FLAGS: [(&str, &str); 4] =
    [("amx", "amx_tile"), ("avx512bf16", "avx512_bf16"), ("avx512", "avx512f"), ("avx2", "avx2")];

/// One that this CPU lacks; none on a CPU that has all.
fn lacking() -> Option<&'static str> {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let has = |flag: &str| info.split_whitespace().any(|word| word == flag);
    FLAGS.into_iter().find(|(_, flag)| !has(flag)).map(|(name, _)| name)
}

/// A role of the binary over a tiny model, with an instruction set from the document or from the environment.
fn start(role: &str, document: Option<&str>, environment: Option<&str>) -> Process {
    let mut command = Command::new(place::tessera());
    let model = place::tiny("llama");
    match role {
        "serve" => command.args(["serve", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--model"]).arg(model),
        role => command.args([role, "--set", &format!("worker.model={}", model.display())]),
    };
    command.args(["--set", &format!("hash_key={}", "0a".repeat(32))]);
    if let Some(name) = document {
        command.args(["--set", &format!("worker.cpu={name}")]);
    }
    command.env_remove("TESSERA_CPU");
    command.envs(environment.map(|name| ("TESSERA_CPU", name)));
    Process::start(role, command)
}

fn assert_refused(mut process: Process, words: &[&str]) {
    let status = process.ended(END);
    let errors = process.errors();
    assert_eq!(status.code(), Some(1), "{status}: {errors}");
    words.iter().for_each(|word| assert!(errors.contains(word), "{word:?} is not in: {errors}"));
    assert!(!errors.contains("panicked"), "{errors}");
}

#[test]
fn a_lacking_instruction_set_is_named_with_those_there_are() {
    let Some(name) = lacking() else {
        eprintln!("skipped: this CPU lacks none of {FLAGS:?}");
        return;
    };
    for role in ["worker", "serve"] {
        for (document, environment) in [(Some(name), None), (None, Some(name))] {
            let words = [format!("cannot run {name}"), "scalar".to_owned()];
            assert_refused(start(role, document, environment), &words.each_ref().map(String::as_str));
        }
    }
}

#[test]
fn an_unknown_instruction_set_is_refused_with_those_that_are_known() {
    for role in ["worker", "serve"] {
        for (document, environment) in [(Some("sse9"), None), (None, Some("sse9"))] {
            assert_refused(start(role, document, environment), &["\"sse9\"", "scalar", "avx512"]);
        }
    }
}
