//! What the promises about numbers hold for: formats, ways to compute, cache formats and instruction sets, each listed once.

use std::fmt;
use std::sync::Arc;

use contract::kv::KvDtype;
use kernels::{ComputeDtype, CpuOps, CpuOptions, Isa, Ops, WeightFormat};

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

/// Ways to compute that a flag asks for, whatever the file stores.
pub const COMPUTE: [ComputeDtype; 2] = [ComputeDtype::Bf16, ComputeDtype::F32];

/// Formats of cached keys and values.
pub const KV_DTYPES: [KvDtype; 3] = [KvDtype::F32, KvDtype::Bf16, KvDtype::F16];

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

/// Every format as it is stored, and each other way to compute once.
pub fn modes() -> Vec<Mode> {
    let as_stored = FORMATS.map(|stored| Mode { stored, compute: ComputeDtype::default() });
    let others = COMPUTE.into_iter().filter(|&compute| compute != ComputeDtype::default());
    let stored = |compute| if compute == ComputeDtype::F32 { WeightFormat::Q4K } else { WeightFormat::Bf16 };
    as_stored.into_iter().chain(others.map(|compute| Mode { stored: stored(compute), compute })).collect()
}

/// Instruction sets to test: those of this machine, or the one that `TESSERA_CPU` asks for.
pub fn isas() -> Vec<Option<Isa>> {
    match std::env::var_os("TESSERA_CPU") {
        Some(_) => vec![None],
        None => Isa::available().map(Some).collect(),
    }
}

/// A device.
pub fn cpu(compute: ComputeDtype, threads: usize, isa: Option<Isa>) -> Arc<dyn Ops> {
    Arc::new(CpuOps::new(&CpuOptions { dtype: compute, threads, isa }).expect("this machine has it"))
}
