//! Computes a plan: the boundary between the engine, which decides, and a device, which computes.

mod model;
mod slots;

use std::sync::Arc;
use std::time::Duration;

use contract::ids::{SlotId, StepId};
use contract::plan::{ForwardPlan, StepOutput};
use thiserror::Error;

use crate::lent::Layers;

pub use model::{ModelExecutor, limits};
pub use slots::{Slot, SlotTable};

/// Runs the steps of one engine, in order.
pub trait Executor: Send {
    /// Computes a step and samples a token for each of its logits rows.
    ///
    /// # Errors
    /// When the plan does not follow from the plans before it, or what the device says; nothing that was planned can
    /// be trusted then.
    fn run(&mut self, plan: &ForwardPlan) -> Result<StepOutput, ExecutorError>;

    /// Layers whose KV is written one after the other.
    fn n_layers(&self) -> usize {
        1
    }

    /// From now on tells `layers` of each layer of a step as its KV is written; one that does not, is taken to write all
    /// of them at the step's end.
    fn tell(&mut self, _layers: Arc<Layers>) {}

    /// Time of the last step that went into its forward pass and into sampling; the rest of the step is overhead.
    fn computed(&self) -> Duration;
}

/// Why a step could not be computed: a defect or a broken device, never a request's fault.
#[derive(Debug, Error)]
pub enum ExecutorError {
    /// A slot beyond the table.
    #[error("slot {} is beyond the {n_slots} there are", .slot.0)]
    NoSuchSlot {
        /// The slot.
        slot: SlotId,
        /// Slots there are.
        n_slots: usize,
    },
    /// A slot that no request has taken.
    #[error("slot {} is computed before a request has taken it", .slot.0)]
    NotStarted {
        /// The slot.
        slot: SlotId,
    },
    /// A block table that keeps more than it has.
    #[error("slot {} keeps {keep} blocks of {n_blocks}", .slot.0)]
    BlockTable {
        /// The slot.
        slot: SlotId,
        /// Blocks to keep.
        keep: u32,
        /// Blocks there are.
        n_blocks: usize,
    },
    /// A token of a step that is not the slot's last.
    #[error("slot {} names row {row} of step {}, which is not its last output", .slot.0, .step.0)]
    NotSampled {
        /// The slot.
        slot: SlotId,
        /// The step named.
        step: StepId,
        /// The row named.
        row: u32,
    },
    /// The device failed.
    #[error(transparent)]
    Device(#[from] kernels::Error),
    /// Anything else, such as a stand-in's own error.
    #[error("{0}")]
    Other(String),
}
