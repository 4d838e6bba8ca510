//! Tensor, Ops and the CPU implementation.
#![expect(unsafe_code, reason = "memory maps, SIMD intrinsics and raw tensor memory; every block states its fact")]

pub mod arena;
pub mod cpu;
pub mod error;
pub mod memory;
mod op;
pub mod ops;
pub mod quant;
pub mod step;
pub mod stream;
pub mod tensor;
pub mod weight;

pub use arena::{Arena, DryRun};
pub use cpu::{ComputeDtype, CpuOps, CpuOptions, ISA_VARIABLE, Isa, PackedCopies, PackedFile, PackedFileError, bound};
pub use error::{Error, Result};
pub use ops::{Activation, Attention, FeedForward, LayerCache, Linear, Norm, Ops, Qkv, RopeStyle, RopeTable};
pub use step::{HostInputs, StepInputs, StepLimits};
pub use stream::{Event, GroupId, StreamId};
pub use tensor::{DType, DeviceId, Shape, Tensor};
pub use weight::{RawWeight, Weight, WeightFormat, WeightRole};
