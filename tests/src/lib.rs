//! Starts real Tessera processes, talks to them as clients do, and looks at what they leave behind.

#![allow(
    clippy::unwrap_used,
    clippy::print_stderr,
    clippy::disallowed_methods,
    missing_docs,
    reason = "a test harness: a failed step panics or prints, and real time is what it measures"
)]

pub mod answer;
pub mod client;
pub mod cluster;
pub mod etcd;
pub mod host;
pub mod load;
pub mod metrics;
pub mod otlp;
pub mod place;
pub mod process;
pub mod proxy;
pub mod seed;
pub mod switch;
pub mod wait;
