//! Continuous batching over a paged KV cache, pure: no IO, no clock, no thread, no randomness.
//!
//! The caller drives: `submit` and `abort` as requests come and go, `plan`, run the step, `apply`.
//! At most two plans are in flight, so that `plan(n + 1)` can be made while step `n` runs; steps run and are applied in order.
//! A block named by a plan in flight is not handed out again before the last such plan is applied, whatever becomes of its request.
//!
//! | file | holds |
//! |---|---|
//! | `engine` | state, requests in and out, what is reported |
//! | `batch` | makes a plan: who runs, preemption, admission |
//! | `apply` | takes a step's output: tokens, stops, blocks to the index |
//! | `sequence`, `queue`, `in_flight` | a request, those that wait, plans not applied |
//! | `hold` | blocks lent to others while a prompt moves between engines |
//! | `cost_fit` | what steps cost, from their times |
//! | `block_pool`, `prefix_cache`, `lru` | blocks by reference count, their index and its events, order of eviction |

mod apply;
mod batch;
mod block_pool;
pub mod config;
pub mod cost_fit;
mod engine;
mod hold;
mod in_flight;
mod invariants;
mod lru;
pub mod output;
mod prefix_cache;
mod queue;
mod sequence;

pub use config::{ConfigError, EngineConfig};
pub use cost_fit::CostFit;
pub use engine::{Engine, PLANS_IN_FLIGHT_MAX};
pub use hold::{CachedHold, Hold, HoldUsage};
pub use output::{ApplyError, Counters, Output, OutputEvent, SequenceKey};
