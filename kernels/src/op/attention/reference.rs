//! Attention in plain code: the oracle of all kernels.

use std::ops::Range;

use crate::op::attention::PARTITION;
use crate::op::attention::softmax::{LOWEST, Softmax};
use crate::op::attention::unit::{Kernel, Scratch, Unit, Work, walk};
use crate::tensor::DType;

/// Two passes over a partition: scores, then weighted values.
pub(crate) struct Reference;

/// [`super::Attend`] of plain code.
pub(crate) fn attend(
    unit: &Unit<'_>,
    partitions: Range<usize>,
    partials: Option<&mut [f32]>,
    scratch: &mut Scratch<'_>,
) {
    // SAFETY: plain code runs on every CPU.
    unsafe { walk::<Reference>(unit, partitions, partials, scratch) }
}

impl Kernel for Reference {
    unsafe fn begin(_: &Unit<'_>, _: &mut Work<'_>) {}

    unsafe fn partition(unit: &Unit<'_>, positions: Range<usize>, _: &mut Work<'_>, state: &mut Softmax<'_>) {
        state.clear();
        for row in 0..unit.n_rows() {
            let visible = unit.visible(row);
            let visible = visible.start.max(positions.start)..visible.end.min(positions.end);
            if !visible.is_empty() {
                row_of_partition(unit, row, visible, state);
            }
        }
    }
}

fn row_of_partition(unit: &Unit<'_>, row: usize, visible: Range<usize>, state: &mut Softmax<'_>) {
    let rounded = matches!(unit.keys.layout.dtype, DType::Bf16 | DType::I8);
    let round = |value: f32| if rounded { half::bf16::from_f32(value).to_f32() } else { value };
    let query = unit.query(row);
    let mut weights = [0.0f32; PARTITION];
    let mut largest = LOWEST;
    for (weight, position) in weights.iter_mut().zip(visible.clone()) {
        let (run, offset) = unit.place(&unit.keys, position);
        let element = |d| unit.keys.get(run + unit.keys.layout.element(offset, d));
        let dot: f32 = query.iter().enumerate().map(|(d, &q)| round(q) * element(d)).sum();
        let score = dot * unit.keys.scale(run, offset) * unit.scale;
        let score = unit.soft_cap.map_or(score, |cap| cap * (score / cap).tanh());
        *weight = score * std::f32::consts::LOG2_E;
        largest = largest.max(*weight);
    }
    let stride = unit.dims.value_stride();
    let acc = &mut state.acc[row * stride..][..unit.dims.value_dim];
    for (weight, position) in weights.iter_mut().zip(visible) {
        *weight = (*weight - largest).exp2();
        state.sum[row] += *weight;
        let (run, offset) = unit.place(&unit.values, position);
        let factor = round(*weight * unit.values.scale(run, offset));
        for (d, acc) in acc.iter_mut().enumerate() {
            *acc += factor * unit.values.get(run + unit.values.layout.element(offset, d));
        }
    }
    state.largest[row] = largest;
}
