//! Attention and cache kernels: which instruction set computes with what; see [`crate::op::attention`].

#[cfg(target_arch = "x86_64")]
mod amx;
mod online;
mod portable;
mod product;
mod stripe;
mod vector;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::ops::Range;

use crate::cpu::Isa;
use crate::op::attention::unit::{Kernel, Scratch, Unit, walk};
use crate::op::attention::{Attend, reference};
use crate::op::kv::{self, Write, WriteHead};
use crate::tensor::DType;

/// Functions of one instruction set; unsafe because they run only where [`Isa::check`] passes.
pub(crate) struct KvTable {
    pub(crate) attend: Attend,
    pub(crate) write_head: WriteHead,
}

/// The table of an instruction set.
pub(crate) fn table(isa: Isa) -> &'static KvTable {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Amx => &x86::AMX,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Bf16 => &x86::AVX512_BF16,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => &x86::AVX512,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => &x86::AVX2,
        Isa::Portable => &portable::PORTABLE,
        _ => &SCALAR,
    }
}

/// Runs on every machine and judges all others.
static SCALAR: KvTable = KvTable { attend: reference::attend, write_head: plain_write_head };

unsafe fn plain_write_head(write: &Write<'_>, head: usize) {
    // SAFETY: the caller's obligation is the same.
    unsafe { kv::write_head(write, head) }
}

/// Takes the kernel for the cache's format: `Single` for f32 and f16, `Pairs` for bf16 and int8.
///
/// # Safety
/// As for [`Kernel`].
#[inline(always)]
unsafe fn attend<Single: Kernel, Pairs: Kernel>(
    unit: &Unit<'_>,
    partitions: Range<usize>,
    partials: Option<&mut [f32]>,
    scratch: &mut Scratch<'_>,
) {
    // SAFETY: the caller's obligation is the same.
    unsafe {
        match unit.keys.layout.dtype {
            DType::F32 | DType::F16 => walk::<Single>(unit, partitions, partials, scratch),
            _ => walk::<Pairs>(unit, partitions, partials, scratch),
        }
    }
}
