//! The functions that differ between instruction sets, chosen once when the device is made.

use crate::cpu::dot::{Dot, Order};
use crate::cpu::grouped::{DirectDot, Factor, GroupedDot, Unpack};
use crate::cpu::{Isa, portable, scalar};
use crate::error::Result;
use crate::ops::{Activation, RopeStyle};

/// Functions of one instruction set; unsafe because they run only where [`Isa::check`] passes.
#[derive(Clone, Copy)]
pub(crate) struct Table {
    pub(crate) isa: Isa,
    /// Order of activations for `dot_bf16` and `dot_int8`.
    pub(crate) order: Order,
    pub(crate) dot_bf16: unsafe fn(&mut Dot<'_, u16, u16, f32>),
    pub(crate) dot_f32: unsafe fn(&mut Dot<'_, f32, f32, f32>),
    pub(crate) dot_int8: unsafe fn(&mut Dot<'_, u8, i8, i32>),
    pub(crate) dot_grouped: unsafe fn(&mut GroupedDot<'_>),
    /// Quantised weights to bf16.
    pub(crate) unpack: unsafe fn(&mut Unpack<'_>),
    /// Products of few rows with quantised weights in bf16, to the bits of `unpack` and `dot_bf16`, where that is faster.
    pub(crate) dot_direct: Option<unsafe fn(&mut DirectDot<'_>)>,
    /// A row of activations to bf16, its groups some elements apart.
    pub(crate) round: unsafe fn(&[f32], &mut [u16], usize),
    /// A row of activations to 8 bits and a scale, its groups some elements apart.
    pub(crate) quantize: unsafe fn(&[f32], &mut [u8], usize) -> f32,
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

/// The table of kernels written over [`Lanes`](crate::cpu::lanes::Lanes), compiled with the target features that
/// the vector needs.
macro_rules! vector_table {
    ($isa:expr, $vector:ty $(, $features:literal)?) => {{
        use crate::cpu::dot::{self, Dot, Order};
        use crate::cpu::grouped::{Factor, GroupedDot, Unpack};
        use crate::cpu::table::Table;
        use crate::cpu::{simd, simd_grouped, simd_unpack};
        use crate::op::{elementwise, norm, rope};
        use crate::ops::{Activation, RopeStyle};

        $(#[target_feature(enable = $features)])?
        unsafe fn dot_bf16(dot: &mut Dot<'_, u16, u16, f32>) {
            // SAFETY: the vector's features are enabled here, or it needs none.
            unsafe { simd::dot_bf16::<$vector>(dot) }
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn dot_f32(dot: &mut Dot<'_, f32, f32, f32>) {
            // SAFETY: as above.
            unsafe { simd::dot_f32::<$vector>(dot) }
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn dot_int8(dot: &mut Dot<'_, u8, i8, i32>) {
            dot::int8(dot);
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn dot_grouped(dot: &mut GroupedDot<'_>) {
            // SAFETY: as above.
            unsafe { simd_grouped::dot::<$vector, false>(dot) }
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn unpack(work: &mut Unpack<'_>) {
            // SAFETY: as above.
            unsafe { simd_unpack::to_bf16::<$vector, false>(work) }
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn round(x: &[f32], out: &mut [u16], step: usize) {
            dot::round(x, out, step);
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn quantize(x: &[f32], out: &mut [u8], step: usize) -> f32 {
            dot::quantize(x, out, step)
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn quantize_groups(x: &[f32], codes: &mut [i8], factors: &mut [Factor]) {
            // SAFETY: as above.
            unsafe { simd_grouped::quantize::<$vector>(x, codes, factors) }
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn widen(from: &[u16], to: &mut [f32]) {
            // SAFETY: as above.
            unsafe { simd::widen::<$vector>(from, to) }
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn sum_squares(x: &[f32]) -> f32 {
            // SAFETY: as above.
            unsafe { simd::sum_squares::<$vector>(x) }
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn normalize(x: &[f32], factor: f32, weight: &[f32], out: &mut [f32]) {
            norm::normalize(x, factor, weight, out);
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn add(x: &mut [f32], y: &[f32]) {
            elementwise::add_to(x, y);
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn rotate(style: RopeStyle, head: &mut [f32], cos: &[f32], sin: &[f32]) {
            rope::rotate(style, head, cos, sin);
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn gated_activation(activation: Activation, gate: &[f32], up: &[f32], out: &mut [f32]) {
            // SAFETY: as above.
            unsafe { simd::gated_activation::<$vector>(activation, gate, up, out) }
        }

        Table {
            isa: $isa,
            order: Order::Rows,
            dot_bf16,
            dot_f32,
            dot_int8,
            dot_grouped,
            unpack,
            dot_direct: None,
            quantize_groups,
            round,
            quantize,
            widen,
            sum_squares,
            normalize,
            add,
            rotate,
            gated_activation,
        }
    }};
}
pub(crate) use vector_table;
