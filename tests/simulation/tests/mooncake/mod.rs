//! Mooncake's traces, as the simulation's tests read them.

use std::path::Path;
use std::time::Duration;

use simulation::Request;

/// The first `n` requests of a trace.
pub(crate) fn requests(path: &Path, n: usize) -> Vec<Request> {
    let text = std::fs::read_to_string(path).unwrap();
    let request = |line: &str| {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        let number = |field: &str| line[field].as_u64().unwrap();
        Request {
            after: Duration::from_millis(number("timestamp")),
            n_prompt: number("input_length") as u32,
            n_output: number("output_length") as u32,
            blocks: line["hash_ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect(),
            tenant: 0,
        }
    };
    text.lines().take(n).map(request).collect()
}
