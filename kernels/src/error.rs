//! What can go wrong when an operator is asked for, and what a caller can do about it.

use crate::tensor::{DType, DeviceId, Shape};
use crate::weight::WeightFormat;

/// Result of an operator.
pub type Result<T> = std::result::Result<T, Error>;

/// Why an operator, an allocation or a weight was refused; nothing was computed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A tensor has another shape than the operator's contract says.
    #[error("{op}: {tensor} has shape {actual}, expected {expected}")]
    Shape {
        /// The operator.
        op: &'static str,
        /// The argument's name in the operator's contract.
        tensor: &'static str,
        /// The contract, in words or numbers.
        expected: String,
        /// What was given.
        actual: Shape,
    },
    /// A tensor has a number format that the operator does not take there.
    #[error("{op}: {tensor} is {actual:?}, which is not supported there")]
    Dtype {
        /// The operator.
        op: &'static str,
        /// The argument's name in the operator's contract.
        tensor: &'static str,
        /// What was given.
        actual: DType,
    },
    /// A tensor or weight belongs to another device or another instance of it.
    #[error("{op}: {tensor} lives on device {actual:?}, the operator runs on {expected:?}")]
    Device {
        /// The operator.
        op: &'static str,
        /// The argument's name in the operator's contract.
        tensor: &'static str,
        /// Device of the operator.
        expected: DeviceId,
        /// Device of the tensor.
        actual: DeviceId,
    },
    /// An output overlaps another argument.
    #[error("{op}: {tensor} overlaps another argument")]
    Overlap {
        /// The operator.
        op: &'static str,
        /// The argument's name in the operator's contract.
        tensor: &'static str,
    },
    /// An index or length that the operator read from its inputs is out of range.
    #[error("{op}: {what} is {value}, must be below {bound}")]
    Index {
        /// The operator.
        op: &'static str,
        /// What the number means.
        what: &'static str,
        /// The number.
        value: u64,
        /// First value that is too large.
        bound: u64,
    },
    /// A raw weight's bytes do not fit its shape and format.
    #[error("weight {shape} in {format:?} takes {expected} bytes, {actual} were given")]
    WeightBytes {
        /// Shape that was declared.
        shape: Shape,
        /// Format that was declared.
        format: WeightFormat,
        /// Bytes that both imply.
        expected: usize,
        /// Bytes that were given.
        actual: usize,
    },
    /// A row of a quantised weight is not a whole number of the format's blocks.
    #[error("a row of {row} elements is not a multiple of the {block} elements of a {format:?} block")]
    WeightRow {
        /// Format that was declared.
        format: WeightFormat,
        /// Elements of a row.
        row: usize,
        /// Elements of a block.
        block: usize,
    },
    /// A matrix has so few rows that padding it for the device would multiply it.
    #[error("weight {shape} of {own} bytes would be padded to {padded}, more than {factor_max} times as many")]
    WeightPadding {
        /// Its shape.
        shape: Shape,
        /// Bytes without padding, in the device's format.
        own: usize,
        /// Bytes with it.
        padded: usize,
        /// Most times its own size that a matrix may take.
        factor_max: usize,
    },
    /// A weight was loaded for another role than it is used in.
    #[error("{op}: {tensor} was loaded as {actual}")]
    WeightRole {
        /// The operator.
        op: &'static str,
        /// The argument's name in the operator's contract.
        tensor: &'static str,
        /// The role it was loaded for.
        actual: &'static str,
    },
    /// The device has no room.
    #[error("out of memory: {bytes} bytes were asked for")]
    OutOfMemory {
        /// Bytes of the allocation.
        bytes: usize,
    },
    /// An arena is smaller than what is taken from it.
    #[error("scratch arena holds {capacity} bytes, {wanted} were asked for; the dry run was for a smaller step")]
    ArenaFull {
        /// Bytes of the arena.
        capacity: usize,
        /// Bytes in use with the one that failed.
        wanted: usize,
    },
    /// A step is larger than the limits that its buffers were made for.
    #[error("step needs {value} {what}, its buffers hold {bound}")]
    StepTooLarge {
        /// What is too many.
        what: &'static str,
        /// How many.
        value: usize,
        /// How many there may be.
        bound: usize,
    },
    /// The CPU lacks an instruction set that was asked for.
    #[error("this cpu cannot run {wanted}: it lacks {missing}; it has {available}")]
    IsaMissing {
        /// The instruction set.
        wanted: &'static str,
        /// What the CPU does not have.
        missing: &'static str,
        /// Names of the instruction sets it has.
        available: String,
    },
    /// An instruction set has a name that is not known.
    #[error("unknown instruction set {name:?}, known are {known}")]
    IsaUnknown {
        /// The name.
        name: String,
        /// The names there are.
        known: String,
    },
    /// The device cannot do this.
    #[error("{op}: {what} is not supported")]
    Unsupported {
        /// The operator.
        op: &'static str,
        /// What is not.
        what: String,
    },
    /// The operating system refused.
    #[error("{what}: {reason}")]
    System {
        /// What was attempted.
        what: &'static str,
        /// The system's words.
        reason: String,
    },
}
