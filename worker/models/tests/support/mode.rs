//! What the promises about numbers hold for: weight formats, ways to compute and cache formats, each listed once.

use std::fmt;
use std::sync::Arc;

use contract::kv::KvDtype;
use kernels::{ComputeDtype, CpuOps, CpuOptions, Ops, WeightFormat};

/// Every format that files store.
pub const FORMATS: [WeightFormat; 11] = [
    WeightFormat::F32,
    WeightFormat::F16,
    WeightFormat::Bf16,
    WeightFormat::Q8_0,
    WeightFormat::Q4_0,
    WeightFormat::Q4_1,
    WeightFormat::Q5_0,
    WeightFormat::Q5_1,
    WeightFormat::Q4K,
    WeightFormat::Q5K,
    WeightFormat::Q6K,
];

/// Ways to compute, as stored and those that a flag asks for.
pub const COMPUTE: [ComputeDtype; 4] =
    [ComputeDtype::Stored, ComputeDtype::Bf16, ComputeDtype::F32, ComputeDtype::Int8];

/// Formats of cached keys and values.
pub const KV_DTYPES: [KvDtype; 4] = [KvDtype::F32, KvDtype::Bf16, KvDtype::F16, KvDtype::Int8];

/// How weights are stored and computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mode {
    /// Format of matrices in the file.
    pub stored: WeightFormat,
    /// Format that they are computed in.
    pub compute: ComputeDtype,
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} as {:?}", self.stored, self.compute)
    }
}

/// Every format as it is stored, and each other way to compute from a plain format and from a quantised one.
pub fn modes() -> Vec<Mode> {
    let mode = |stored, compute| Mode { stored, compute };
    let others = COMPUTE.into_iter().filter(|&compute| compute != ComputeDtype::Stored);
    let others = others.flat_map(|compute| [mode(WeightFormat::Bf16, compute), mode(WeightFormat::Q4K, compute)]);
    FORMATS.into_iter().map(|stored| mode(stored, ComputeDtype::Stored)).chain(others).collect()
}

/// A device on the instruction set that `TESSERA_CPU` names, else on the fastest there is.
pub fn cpu(compute: ComputeDtype, threads: usize) -> Arc<dyn Ops> {
    Arc::new(CpuOps::new(&CpuOptions { dtype: compute, threads, isa: None }).expect("this machine has it"))
}
