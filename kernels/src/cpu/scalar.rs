//! The table of plain code: the references that each operator's file holds.

use crate::cpu::Isa;
use crate::cpu::table::Table;
use crate::op::{activation, matmul, norm};

/// Runs on every machine and judges all other tables.
pub(crate) static TABLE: Table = Table {
    isa: Isa::Scalar,
    matmul_bf16: matmul::reference_bf16,
    matmul_f32: matmul::reference_f32,
    sum_squares: norm::reference_sum_squares,
    gated_activation: activation::reference,
};
