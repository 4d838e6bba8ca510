//! From rows of a file to panels: a strip's rows are converted one by one, then transposed a block at a time.

use std::ops::Range;

use half::f16;
use half::slice::{HalfBitsSliceExt as _, HalfFloatSliceExt as _};

use crate::cpu::dot::{nearest, to_bf16};
use crate::cpu::panels::{Layout, PANEL, STRIP, elements_mut, plain::Plain};
use crate::quant;
use crate::quant::codes;
use crate::weight::RawWeight;

/// Units of a row that are transposed at a time: with 16 columns a block of 1 KB, which an AMX tile holds.
const BLOCK: usize = 16;

/// Packs the rows of one panel, whose bytes are zero; the weight is checked and has `n_in` columns.
pub(crate) fn pack_panel(layout: Layout, raw: &RawWeight<'_>, rows: Range<usize>, n_in: usize, panel: &mut [u8]) {
    let row_bytes = raw.format.row_bytes(n_in).expect("checked: rows are whole blocks");
    let row = |column: usize| &raw.bytes[(rows.start + column) * row_bytes..][..row_bytes];
    let n_columns = rows.len();
    if let Layout::Grouped(grouping) = layout {
        for column in 0..n_columns {
            codes::each(raw.format, row(column), |group, codes| grouping.put(panel, group, column, codes));
        }
        return;
    }
    let mut values = vec![0.0f32; n_in];
    let mut widen = |column: usize, store: &mut dyn FnMut(&[f32])| {
        quant::dequantize(raw.format, row(column), &mut values).expect("checked: rows are whole blocks");
        store(&values);
    };
    match layout {
        Layout::F32 => strips(elements_mut::<u32>(panel), Order::Plain, n_columns, |column, units| {
            widen(column, &mut |values| {
                units.iter_mut().zip(values).for_each(|(unit, value)| *unit = value.to_bits());
            });
        }),
        Layout::F16 => strips(elements_mut::<u16>(panel), Order::Plain, n_columns, |column, units| {
            widen(column, &mut |values| {
                units[..n_in].reinterpret_cast_mut::<f16>().convert_from_f32_slice(values);
            });
        }),
        Layout::Bf16 => strips(elements_mut::<u32>(panel), Order::Strips, n_columns, |column, units| {
            widen(column, &mut |values| bf16_pairs(values, units));
        }),
        Layout::Int8 => {
            let (codes, tail) = panel.split_at_mut(n_in.next_multiple_of(layout.group()) * PANEL);
            let tail = elements_mut::<u32>(tail);
            strips(elements_mut::<u32>(codes), Order::Strips, n_columns, |column, units| {
                widen(column, &mut |values| {
                    let (sum, scale) = int8_quads(values, units);
                    (tail[column], tail[PANEL + column]) = (sum.cast_unsigned(), scale.to_bits());
                });
            });
        }
        Layout::Grouped(_) => unreachable!("packed by its codes above"),
    }
}

/// How the two strips of a panel lie: values that one column keeps together are a unit.
#[derive(Clone, Copy, PartialEq)]
enum Order {
    /// Unit after unit, 32 columns each.
    Plain,
    /// Block after block of 16 units, one strip of it after the other.
    Strips,
}

/// Packs a panel strip by strip; `fill(column, units)` gives a column's units, where missing ones stay 0.
fn strips<T: Plain + Default>(panel: &mut [T], order: Order, n_columns: usize, mut fill: impl FnMut(usize, &mut [T])) {
    let n_units = panel.len() / PANEL;
    let stride = n_units.next_multiple_of(BLOCK);
    let mut units = vec![T::default(); STRIP * stride];
    for strip in 0..n_columns.div_ceil(STRIP) {
        let columns = strip * STRIP..n_columns.min((strip + 1) * STRIP);
        units[columns.len() * stride..].fill(T::default());
        for (column, units) in columns.zip(units.chunks_exact_mut(stride)) {
            fill(column, units);
        }
        let (strip_at, step) = match order {
            Order::Plain => (strip * STRIP, PANEL),
            Order::Strips => (strip * STRIP * BLOCK, STRIP),
        };
        for first in (0..n_units).step_by(BLOCK) {
            let block: [[T; BLOCK]; STRIP] = std::array::from_fn(|column| {
                *units[column * stride + first..].first_chunk().expect("rows are padded to whole blocks")
            });
            let target = &mut panel[first * PANEL + strip_at..];
            for (unit, target) in target.chunks_mut(step).take(BLOCK.min(n_units - first)).enumerate() {
                let target: &mut [T; STRIP] = target.first_chunk_mut().expect("a strip of a unit");
                *target = std::array::from_fn(|column| block[column][unit]);
            }
        }
    }
}

fn bf16_pairs(values: &[f32], units: &mut [u32]) {
    let pair = |low: u16, high: u16| {
        let ([a, b], [c, d]) = (low.to_ne_bytes(), high.to_ne_bytes());
        u32::from_ne_bytes([a, b, c, d])
    };
    let (pairs, odd) = values.as_chunks::<2>();
    for (unit, &[low, high]) in units.iter_mut().zip(pairs) {
        *unit = pair(to_bf16(low), to_bf16(high));
    }
    if let [last] = odd {
        units[pairs.len()] = pair(to_bf16(*last), 0);
    }
}

/// Rounds a column to 8 bits: symmetric, the largest magnitude is 127. Returns the sum of codes and their scale.
fn int8_quads(values: &[f32], units: &mut [u32]) -> (i32, f32) {
    let largest = values.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
    let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
    let code = |value: f32| nearest(value * inverse).clamp(-127.0, 127.0) as i8;
    let mut sum = 0;
    for (unit, values) in units.iter_mut().zip(values.chunks(4)) {
        let mut quad = [0; 4];
        for (byte, &value) in quad.iter_mut().zip(values) {
            sum += i32::from(code(value));
            *byte = code(value).cast_unsigned();
        }
        *unit = u32::from_ne_bytes(quad);
    }
    (sum, largest / 127.0)
}
