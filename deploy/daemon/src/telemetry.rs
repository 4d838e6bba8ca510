//! Logs, traces and metrics of a process: set up once, named in one file.

mod logs;
pub mod metrics;
pub mod names;
mod process;
pub mod propagation;

pub use logs::{Guard, InitError, LogFormat, TelemetryConfig, init};
