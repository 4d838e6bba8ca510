//! Attention over arrays of eight floats, which the compiler makes vectors of.

use std::ops::Range;

use crate::cpu::attend::online::Online;
use crate::cpu::attend::product::{F32, Widened, bf16_bits};
use crate::cpu::attend::vector::Vector;
use crate::cpu::attend::{KvTable, attend, plain_write_head};
use crate::cpu::lanes::Lanes;
use crate::cpu::portable::Array;
use crate::op::attention::unit::{Scratch, Unit};

/// Runs on every machine.
pub(crate) static PORTABLE: KvTable = KvTable { attend: attend_arrays, write_head: plain_write_head };

fn attend_arrays(unit: &Unit<'_>, partitions: Range<usize>, partials: Option<&mut [f32]>, scratch: &mut Scratch<'_>) {
    // SAFETY: arrays need no target feature.
    unsafe { attend::<Online<F32<Array>>, Online<Widened<Array>>>(unit, partitions, partials, scratch) }
}

/// Calls `f` on an array's floats.
#[inline(always)]
fn map(x: Array, f: impl Fn([f32; 8]) -> [f32; 8]) -> Array {
    let mut lanes = [0.0; 8];
    // SAFETY: an array is eight floats.
    unsafe {
        x.store(lanes.as_mut_ptr());
        Array::load(f(lanes).as_ptr())
    }
}

impl Vector for Array {
    #[inline(always)]
    unsafe fn round_bf16(self) -> Self {
        map(self, |lanes| lanes.map(|x| f32::from_bits(bf16_bits(x))))
    }
    #[inline(always)]
    unsafe fn spread_largest(self) -> Self {
        map(self, |lanes| [lanes.into_iter().fold(f32::NEG_INFINITY, f32::max); 8])
    }
    #[inline(always)]
    unsafe fn with_sign_of(self, other: Self) -> Self {
        let mut signs = [0.0; 8];
        // SAFETY: an array is eight floats.
        unsafe { other.store(signs.as_mut_ptr()) };
        map(self, |lanes| std::array::from_fn(|i| lanes[i].copysign(signs[i])))
    }
}
