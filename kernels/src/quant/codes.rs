//! GGUF's quantised formats taken apart: codes and scales of 32 values at a time, nothing rounded.
//!
//! A value is the same expression of code and scales that [`super::dequantize`] computes.

use std::array::from_fn;

use half::f16;

use crate::weight::WeightFormat;

/// 32 consecutive values of a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Codes {
    pub(crate) codes: [u8; 32],
    pub(crate) scales: Scales,
}

/// Scales as the format stores them; see [`crate::cpu::grouped::ScaleKind`] for the formulas.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Scales {
    Centred(f16),
    Minimum(f16, f16),
    SuperMinimum { d: f16, m: f16, s: u8, t: u8 },
    SuperHalves { d: f16, s: [i8; 2] },
}

/// Calls `put(group, codes)` for each group of 32 values in a row of a quantised format.
pub(crate) fn each(format: WeightFormat, row: &[u8], mut put: impl FnMut(usize, &Codes)) {
    for (block, bytes) in row.chunks_exact(format.block_bytes()).enumerate() {
        let groups = format.block_elements() / 32;
        for group in 0..groups {
            put(block * groups + group, &one(format, bytes, group));
        }
    }
}

fn one(format: WeightFormat, block: &[u8], group: usize) -> Codes {
    let f16_at = |at: usize| f16::from_le_bytes([block[at], block[at + 1]]);
    let nibble = |at: usize, i: usize| block[at + i % 16] >> (4 * (i / 16)) & 15;
    let fifth = |at: usize, i: usize| (block[at + i / 8] >> (i % 8) & 1) << 4;
    match format {
        WeightFormat::Q8_0 => Codes { codes: from_fn(|i| block[2 + i] ^ 0x80), scales: Scales::Centred(f16_at(0)) },
        WeightFormat::Q4_0 => Codes { codes: from_fn(|i| nibble(2, i)), scales: Scales::Centred(f16_at(0)) },
        WeightFormat::Q4_1 => Codes { codes: from_fn(|i| nibble(4, i)), scales: Scales::Minimum(f16_at(0), f16_at(2)) },
        WeightFormat::Q5_0 => {
            Codes { codes: from_fn(|i| nibble(6, i) | fifth(2, i)), scales: Scales::Centred(f16_at(0)) }
        }
        WeightFormat::Q5_1 => {
            let codes = from_fn(|i| nibble(8, i) | fifth(4, i));
            Codes { codes, scales: Scales::Minimum(f16_at(0), f16_at(2)) }
        }
        WeightFormat::Q4K | WeightFormat::Q5K => {
            let five = format == WeightFormat::Q5K;
            let nibbles = (if five { 48 } else { 16 }) + group / 2 * 32;
            let high = |i: usize| if five { (block[16 + i] >> group & 1) << 4 } else { 0 };
            let codes = from_fn(|i| (block[nibbles + i] >> (4 * (group % 2)) & 15) | high(i));
            let (s, t) = super::super_blocks::scale_and_minimum(&block[4..16], group);
            Codes { codes, scales: Scales::SuperMinimum { d: f16_at(0), m: f16_at(2), s, t } }
        }
        WeightFormat::Q6K => {
            let (half, quarter) = (group / 4, group % 4);
            let low = |i: usize| block[half * 64 + quarter % 2 * 32 + i] >> (4 * (quarter / 2)) & 15;
            let high = |i: usize| (block[128 + half * 32 + i] >> (2 * quarter) & 3) << 4;
            let s = [0, 1].map(|i| block[192 + half * 8 + quarter * 2 + i].cast_signed());
            Codes { codes: from_fn(|i| low(i) | high(i)), scales: Scales::SuperHalves { d: f16_at(208), s } }
        }
        WeightFormat::F32 | WeightFormat::F16 | WeightFormat::Bf16 => unreachable!("plain formats have no codes"),
    }
}
