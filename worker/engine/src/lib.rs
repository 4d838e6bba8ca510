//! Continuous batching over a paged KV cache, pure: no IO, no clock, no thread, no randomness.
//!
//! The caller drives: `submit` and `abort` as requests come and go, `plan`, run the step, `apply`.
//! At most two plans are in flight, so that `plan(n + 1)` can be made while step `n` runs; steps run and are applied in order.
//! A block named by a plan in flight is not handed out again before the last such plan is applied, whatever becomes of its request.

pub mod config;
mod engine;
pub mod output;

pub use config::{ConfigError, EngineConfig};
pub use engine::Engine;
pub use output::{ApplyError, Counters, Output, OutputEvent, SequenceKey};
