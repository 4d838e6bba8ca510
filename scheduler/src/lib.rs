//! Control plane: folds membership and occupancy into the cluster view that routers place by.
//!
//! No request waits on the scheduler: routers and workers keep serving on the last view when it is gone.
//! With embedded membership it also hosts the store in which everyone keeps a lease.

mod config;
mod publish;
mod relay;
mod run;
mod service;
pub mod state;
mod telemetry;

pub use config::Config;
pub use run::{Error, run};
