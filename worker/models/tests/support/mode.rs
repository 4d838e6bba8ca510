//! What the promises about numbers hold for: weight formats, ways to compute and cache formats, each listed once.

use std::fmt;
use std::sync::Arc;

use contract::kv::KvDtype;
use kernels::{ComputeDtype, CpuOps, CpuOptions, Ops, WeightFormat};

/// Every format that files store.
pub const FORMATS: [WeightFormat; 11] = WeightFormat::ALL;

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

/// Every format as it is stored and in 8 bits; converted at load, from a plain format and from a quantised one.
pub fn modes() -> Vec<Mode> {
    let mode = |stored, compute| Mode { stored, compute };
    let kept =
        FORMATS.into_iter().flat_map(|stored| [ComputeDtype::Stored, ComputeDtype::Int8].map(|c| mode(stored, c)));
    let converted = [ComputeDtype::Bf16, ComputeDtype::F32].into_iter();
    let converted = converted.flat_map(|c| [WeightFormat::Bf16, WeightFormat::Q4K].map(|stored| mode(stored, c)));
    kept.chain(converted).collect()
}

/// A device on the instruction set that `TESSERA_CPU` names, else on the fastest there is.
pub fn cpu(compute: ComputeDtype, threads: usize) -> Arc<dyn Ops> {
    Arc::new(CpuOps::new(&CpuOptions { dtype: compute, threads, isa: None }).expect("this machine has it"))
}
