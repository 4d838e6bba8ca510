//! The functions that differ between instruction sets, chosen once when the device is made.

use crate::cpu::dot::Dot;
use crate::cpu::grouped::{Factor, GroupedDot};
use crate::cpu::{Isa, portable, scalar};
use crate::error::Result;
use crate::ops::{Activation, RopeStyle};

/// Functions of one instruction set; unsafe because they run only where [`Isa::check`] passes.
pub(crate) struct Table {
    pub(crate) isa: Isa,
    pub(crate) dot_bf16: unsafe fn(&mut Dot<'_, u16, u16, f32>),
    pub(crate) dot_f32: unsafe fn(&mut Dot<'_, f32, f32, f32>),
    pub(crate) dot_int8: unsafe fn(&mut Dot<'_, u8, i8, i32>),
    pub(crate) dot_grouped: unsafe fn(&mut GroupedDot<'_>),
    /// Activations to bf16.
    pub(crate) round: unsafe fn(&[f32], &mut [u16]),
    /// Activations to 8 bits and a scale.
    pub(crate) quantize: unsafe fn(&[f32], &mut [u8]) -> f32,
    /// Activations to 8 bits and a factor for each group.
    pub(crate) quantize_groups: unsafe fn(&[f32], &mut [i8], &mut [Factor]),
    /// f16 to f32.
    pub(crate) widen: unsafe fn(&[u16], &mut [f32]),
    pub(crate) sum_squares: unsafe fn(&[f32]) -> f32,
    /// `out = x * factor * weight`.
    pub(crate) normalize: unsafe fn(&[f32], f32, &[f32], &mut [f32]),
    /// `x += y`.
    pub(crate) add: unsafe fn(&mut [f32], &[f32]),
    /// Rotates the pairs of a head by cosines and sines.
    pub(crate) rotate: unsafe fn(RopeStyle, &mut [f32], &[f32], &[f32]),
    pub(crate) gated_activation: unsafe fn(Activation, &[f32], &[f32], &mut [f32]),
}

impl Table {
    /// The table of an instruction set that this CPU has.
    pub(crate) fn of(isa: Isa) -> Result<&'static Self> {
        isa.check()?;
        Ok(match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => &crate::cpu::amx::TABLE,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 => &crate::cpu::avx512bf16::TABLE,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => &crate::cpu::avx512::TABLE,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => &crate::cpu::avx2::TABLE,
            Isa::Portable => &portable::TABLE,
            _ => &scalar::TABLE,
        })
    }
}
