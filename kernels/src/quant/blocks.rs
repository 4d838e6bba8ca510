//! Blocks of 32 values with one scale, and a minimum in the `_1` formats.

use super::f16_at;

/// `d: f16, q: [i8; 32]`; `d q`.
pub(super) fn q8_0(block: &[u8; 34], out: &mut [f32; 32]) {
    let d = f16_at(block, 0);
    out.iter_mut().zip(&block[2..]).for_each(|(out, &q)| *out = d * f32::from(q.cast_signed()));
}

/// `d: f16, q: [u8; 16]`; byte `j` holds value `j` low and value `j + 16` high; `d (q - 8)`.
pub(super) fn q4_0(block: &[u8; 18], out: &mut [f32; 32]) {
    let d = f16_at(block, 0);
    nibbles(&block[2..], out, |_, q| d * (f32::from(q) - 8.0));
}

/// `d: f16, m: f16, q: [u8; 16]` as in Q4_0; `d q + m`.
pub(super) fn q4_1(block: &[u8; 20], out: &mut [f32; 32]) {
    let (d, m) = (f16_at(block, 0), f16_at(block, 2));
    nibbles(&block[4..], out, |_, q| d * f32::from(q) + m);
}

/// `d: f16, h: u32, q: [u8; 16]`; bit `i` of `h` is the fifth bit of value `i`; `d (q - 16)`.
pub(super) fn q5_0(block: &[u8; 22], out: &mut [f32; 32]) {
    let (d, high) = (f16_at(block, 0), high_bits(&block[2..6]));
    nibbles(&block[6..], out, |i, q| d * (f32::from(fifth(high, i, q)) - 16.0));
}

/// `d: f16, m: f16, h: u32, q: [u8; 16]` as in Q5_0; `d q + m`.
pub(super) fn q5_1(block: &[u8; 24], out: &mut [f32; 32]) {
    let (d, m, high) = (f16_at(block, 0), f16_at(block, 2), high_bits(&block[4..8]));
    nibbles(&block[8..], out, |i, q| d * f32::from(fifth(high, i, q)) + m);
}

fn nibbles(bytes: &[u8], out: &mut [f32; 32], value: impl Fn(usize, u8) -> f32) {
    for (j, &byte) in bytes.iter().enumerate() {
        out[j] = value(j, byte & 0xf);
        out[j + 16] = value(j + 16, byte >> 4);
    }
}

fn high_bits(bytes: &[u8]) -> u32 {
    bytes.iter().rev().fold(0, |bits, &byte| bits << 8 | u32::from(byte))
}

fn fifth(high: u32, i: usize, low: u8) -> u8 {
    low | u8::from(high >> i & 1 == 1) << 4
}

#[cfg(test)]
mod tests {
    use super::*;

    /// f16 0.5 and -1.0.
    const HALF: [u8; 2] = [0x00, 0x38];
    const MINUS_ONE: [u8; 2] = [0x00, 0xbc];

    fn block<const N: usize>(parts: &[&[u8]]) -> [u8; N] {
        parts.concat().try_into().unwrap()
    }

    /// Bytes whose low nibble counts up and whose high nibble counts down.
    fn counting() -> [u8; 16] {
        std::array::from_fn(|j| j as u8 | (15 - j as u8) << 4)
    }

    fn low_or_high(i: usize) -> f32 {
        if i < 16 { i as f32 } else { (31 - i) as f32 }
    }

    #[test]
    fn q8_0_scales_signed_bytes() {
        let mut bytes = block::<34>(&[&HALF, &[0; 32]]);
        (bytes[2], bytes[3], bytes[33]) = (127, 128, 255);
        let mut out = [9.0; 32];
        q8_0(&bytes, &mut out);
        assert_eq!((out[0], out[1], out[2], out[31]), (63.5, -64.0, 0.0, -0.5));
    }

    #[test]
    fn q4_values_lie_in_low_then_high_nibbles() {
        let mut out = [0.0; 32];
        q4_0(&block(&[&HALF, &counting()]), &mut out);
        assert_eq!(out, std::array::from_fn(|i| 0.5 * (low_or_high(i) - 8.0)));
        q4_1(&block(&[&HALF, &MINUS_ONE, &counting()]), &mut out);
        assert_eq!(out, std::array::from_fn(|i| 0.5 * low_or_high(i) - 1.0));
    }

    #[test]
    fn q5_takes_its_fifth_bit_from_the_mask() {
        let mask = [0b0000_0101, 0, 0b0000_0010, 0x80];
        let high = |i: usize| if [0, 2, 17, 31].contains(&i) { 16.0 } else { 0.0 };
        let mut out = [0.0; 32];
        q5_0(&block(&[&HALF, &mask, &counting()]), &mut out);
        assert_eq!(out, std::array::from_fn(|i| 0.5 * (low_or_high(i) + high(i) - 16.0)));
        q5_1(&block(&[&HALF, &MINUS_ONE, &mask, &counting()]), &mut out);
        assert_eq!(out, std::array::from_fn(|i| 0.5 * (low_or_high(i) + high(i)) - 1.0));
    }
}
