//! Front door: gRPC and OpenAI HTTP, text, placement, streaming.

pub mod admission;
mod api;
mod cluster;
pub mod config;
mod decisions;
mod dispatch;
pub mod error;
mod generate;
mod metrics;
pub mod model;
pub mod resume;
pub mod route;
mod run;
pub mod text;

pub use config::Config;
pub use error::Error;
pub use run::run;
