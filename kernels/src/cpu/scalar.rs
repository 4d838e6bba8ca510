//! The table of plain code: the references that each operator's file holds.

use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};

use crate::cpu::table::Table;
use crate::cpu::{Isa, dot, grouped};
use crate::op::{activation, elementwise, norm, rope};

/// Runs on every machine and judges all other tables.
pub(crate) const TABLE: Table = Table {
    isa: Isa::Scalar,
    order: dot::Order::Rows,
    dot_bf16: dot::bf16,
    dot_f32: dot::f32,
    dot_int8: dot::int8,
    dot_grouped: grouped::reference,
    unpack: grouped::unpack,
    dot_direct: None,
    quantize_groups: grouped::quantize,
    round: dot::round,
    quantize: dot::quantize,
    widen,
    sum_squares: norm::reference_sum_squares,
    normalize: norm::normalize,
    add: elementwise::add_to,
    rotate: rope::rotate,
    gated_activation: activation::reference,
};

/// The plain widening of f16.
pub(crate) fn widen(from: &[u16], to: &mut [f32]) {
    from.reinterpret_cast::<half::f16>().convert_to_f32_slice(to);
}
