//! A cluster under virtual time: the routers' placement, the scheduler's state machine and the workers' engines, the same
//! code that serves, without sockets and with one seed.
//!
//! A test tool, which breaks things at random and checks what must hold, and a planning tool: `tessera simulate`.
//!
//! | file | holds |
//! |---|---|
//! | `workload`, `prepared` | what is asked, and when; prompts hashed once for all runs |
//! | `event`, `network` | messages in virtual time, with delays |
//! | `router`, `worker`, `scheduler` | thin shells around `Placer`, `Engine` and `Device`, and `State` |
//! | `cluster` | all of them, and the loop |
//! | `span` | how much virtual time a load may take |
//! | `faults`, `checker` | what breaks, and what must hold nevertheless |
//! | `report`, `plot` | what a run showed |
//! | `rivals`, `compare` | policies of others, and how ours does against them |
//!
//! The same seed and options make the same report, byte for byte.

mod book;
mod checker;
mod cluster;
pub mod compare;
mod distribution;
mod event;
mod faults;
mod network;
mod options;
mod plot;
mod prepared;
mod random;
mod report;
pub mod rivals;
mod router;
mod scheduler;
mod span;
mod worker;
mod workload;

use std::sync::atomic::AtomicUsize;

use thiserror::Error;

pub use checker::Violation;
pub use distribution::Distribution;
pub use network::{Delays, Links};
pub use options::{Goals, Options, OptionsError, Planted, Roles, Waiting};
pub use plot::page;
pub use prepared::Prepared;
pub use report::{Calibration, Moved, Report, Served};
pub use workload::{Request, Synthetic, TRACE_BLOCK_TOKENS, Workload};

/// Why a run ended without a report.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum SimulationError {
    /// The options make no sense.
    #[error(transparent)]
    Options(#[from] OptionsError),
    /// Something that must hold does not.
    #[error("seed {seed}: {violation}")]
    Violation {
        /// Repeats the run.
        seed: u64,
        /// What does not hold.
        violation: Violation,
    },
}

/// Runs a cluster until every request has ended; `n_ended` counts them for whoever watches.
///
/// # Errors
/// Options that make no sense, or an invariant that does not hold, with the seed that shows it.
pub fn simulate(prepared: &Prepared, options: &Options, n_ended: &AtomicUsize) -> Result<Report, SimulationError> {
    options.check()?;
    span::check(prepared, options.speed)?;
    let finished = cluster::Cluster::new(prepared, options).run(n_ended);
    let violated = |violation| SimulationError::Violation { seed: options.seed, violation };
    Ok(Report::of(&finished.map_err(violated)?, prepared, options))
}
