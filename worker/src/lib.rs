//! One model replica: gRPC service, engine thread, executor and sampler.
//!
//! Tokens in, tokens out: text never comes here, and what another worker holds is not known here.

pub mod config;
pub mod cores;
mod departure;
mod engine_loop;
mod error;
pub mod executor;
mod inbox;
mod kv_events;
mod lent;
mod load;
mod mailbox;
mod packed;
mod report;
mod run;
pub mod sampler;
mod service;
pub mod sim;
mod split;
mod stall;
pub mod transfer;

pub use config::Config;
pub use engine_loop::{EngineFailure, Lendings};
pub use error::Error;
pub use lent::{Layers, Watched};
pub use run::run;
pub use transfer::{TransferConfig, Way};

#[cfg(test)]
mod tests;
