//! Blocks of 256 values in groups that have scales (and minima) of their own, the K formats.

use super::f16_at;

/// `d: f16, m: f16, s: [u8; 12], q: [u8; 128]`; 8 groups of 32 with 6-bit scale and minimum.
///
/// Groups `2 g` and `2 g + 1` are the low and high nibbles of bytes `32 g..32 g + 32`; `d scale q - m minimum`.
pub(super) fn q4_k(block: &[u8; 144], out: &mut [f32; 256]) {
    let (d, m) = (f16_at(block, 0), f16_at(block, 2));
    for (group, out) in out.chunks_exact_mut(32).enumerate() {
        let (scale, minimum) = scale_and_minimum(&block[4..16], group);
        let (scale, minimum) = (d * f32::from(scale), m * f32::from(minimum));
        let bytes = &block[16 + group / 2 * 32..][..32];
        for (out, byte) in out.iter_mut().zip(bytes) {
            *out = scale * f32::from(nibble(*byte, group % 2)) - minimum;
        }
    }
}

/// `d: f16, m: f16, s: [u8; 12], h: [u8; 32], q: [u8; 128]`; as Q4_K, with a fifth bit.
///
/// Bit `g` of `h[l]` is the fifth bit of value `l` of group `g`.
pub(super) fn q5_k(block: &[u8; 176], out: &mut [f32; 256]) {
    let (d, m) = (f16_at(block, 0), f16_at(block, 2));
    let high = &block[16..48];
    for (group, out) in out.chunks_exact_mut(32).enumerate() {
        let (scale, minimum) = scale_and_minimum(&block[4..16], group);
        let (scale, minimum) = (d * f32::from(scale), m * f32::from(minimum));
        let bytes = &block[48 + group / 2 * 32..][..32];
        for ((out, byte), high) in out.iter_mut().zip(bytes).zip(high) {
            let q = nibble(*byte, group % 2) | (high >> group & 1) << 4;
            *out = scale * f32::from(q) - minimum;
        }
    }
}

/// `l: [u8; 128], h: [u8; 64], s: [i8; 16], d: f16`; 16 groups of 16; `d scale (q - 32)`.
///
/// In each half of 128 values, quarter `k` (32 values) takes its low four bits from nibble `k / 2` of bytes
/// `l[32 (k % 2)..]` and its upper two from bits `2 k` of `h`.
pub(super) fn q6_k(block: &[u8; 210], out: &mut [f32; 256]) {
    let d = f16_at(block, 208);
    for (half, out) in out.chunks_exact_mut(128).enumerate() {
        let low = &block[half * 64..][..64];
        let high = &block[128 + half * 32..][..32];
        let scales = &block[192 + half * 8..][..8];
        for (quarter, out) in out.chunks_exact_mut(32).enumerate() {
            let low = &low[quarter % 2 * 32..][..32];
            for (l, out) in out.iter_mut().enumerate() {
                let q = nibble(low[l], quarter / 2) | (high[l] >> (2 * quarter) & 3) << 4;
                let scale = f32::from(scales[quarter * 2 + l / 16].cast_signed());
                *out = d * scale * (f32::from(q) - 32.0);
            }
        }
    }
}

/// Scale and minimum of a group, six bits each.
///
/// Groups 0..4: the low six bits of `s[g]` and `s[g + 4]`. Groups 4..8: four bits from the nibbles of `s[g + 4]`,
/// their upper two from the top of `s[g - 4]` and `s[g]`.
pub(super) fn scale_and_minimum(s: &[u8], group: usize) -> (u8, u8) {
    if group < 4 {
        (s[group] & 63, s[group + 4] & 63)
    } else {
        ((s[group + 4] & 0xf) | (s[group - 4] >> 6) << 4, (s[group + 4] >> 4) | (s[group] >> 6) << 4)
    }
}

fn nibble(byte: u8, high: usize) -> u8 {
    if high == 0 { byte & 0xf } else { byte >> 4 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Scales 1, 2, 3, 63, 17, 32, 5, 6 and minima 4, 8, 12, 16, 20, 40, 60, 63, packed by hand.
    const PACKED: [u8; 12] = [
        1 | (17 >> 4) << 6,
        2 | (32 >> 4) << 6,
        3,
        63,
        4 | (20 >> 4) << 6,
        8 | (40 >> 4) << 6,
        12 | (60 >> 4) << 6,
        16 | (63 >> 4) << 6,
        (17 & 15) | (20 & 15) << 4,
        (40 & 15) << 4,
        5 | (60 & 15) << 4,
        6 | (63 & 15) << 4,
    ];
    const SCALES: [u8; 8] = [1, 2, 3, 63, 17, 32, 5, 6];
    const MINIMA: [u8; 8] = [4, 8, 12, 16, 20, 40, 60, 63];
    /// f16 0.5, 0.25.
    const D_AND_M: [u8; 4] = [0x00, 0x38, 0x00, 0x34];

    fn quant(i: usize) -> u8 {
        (i * 7 % 16) as u8
    }

    fn expected(i: usize, q: f32) -> f32 {
        0.5 * f32::from(SCALES[i / 32]) * q - 0.25 * f32::from(MINIMA[i / 32])
    }

    fn nibbles() -> Vec<u8> {
        let byte = |pair: usize, l: usize| quant(pair * 64 + l) | quant(pair * 64 + 32 + l) << 4;
        (0..128).map(|i| byte(i / 32, i % 32)).collect()
    }

    #[test]
    fn six_bit_scales_and_minima_unpack() {
        for group in 0..8 {
            assert_eq!(scale_and_minimum(&PACKED, group), (SCALES[group], MINIMA[group]), "group {group}");
        }
    }

    #[test]
    fn q4_k_scales_groups_of_32() {
        let block: [u8; 144] = [D_AND_M.as_slice(), &PACKED, &nibbles()].concat().try_into().unwrap();
        let mut out = [0.0; 256];
        q4_k(&block, &mut out);
        for (i, value) in out.into_iter().enumerate() {
            assert_eq!(value, expected(i, f32::from(quant(i))), "value {i}");
        }
    }

    #[test]
    fn q5_k_adds_a_bit_for_each_group() {
        let high: [u8; 32] = std::array::from_fn(|l| (l * 37 % 256) as u8);
        let block: [u8; 176] = [D_AND_M.as_slice(), &PACKED, &high, &nibbles()].concat().try_into().unwrap();
        let mut out = [0.0; 256];
        q5_k(&block, &mut out);
        for (i, value) in out.into_iter().enumerate() {
            let q = f32::from(quant(i)) + if high[i % 32] & 1 << (i / 32) != 0 { 16.0 } else { 0.0 };
            assert_eq!(value, expected(i, q), "value {i}");
        }
    }

    #[test]
    fn q6_k_joins_four_and_two_bits() {
        let q = |i: usize| (i * 11 % 64) as u8;
        let (mut low, mut high) = ([0u8; 128], [0u8; 64]);
        for half in 0..2 {
            for l in 0..32 {
                let at = |quarter: usize| q(half * 128 + quarter * 32 + l);
                low[half * 64 + l] = (at(0) & 15) | (at(2) & 15) << 4;
                low[half * 64 + 32 + l] = (at(1) & 15) | (at(3) & 15) << 4;
                high[half * 32 + l] = (0..4).map(|k| (at(k) >> 4) << (2 * k)).sum();
            }
        }
        let scales: [u8; 16] = std::array::from_fn(|i| (i as i8 - 8).cast_unsigned());
        let block: [u8; 210] = [low.as_slice(), &high, &scales, &D_AND_M[..2]].concat().try_into().unwrap();
        let mut out = [0.0; 256];
        q6_k(&block, &mut out);
        for (i, value) in out.into_iter().enumerate() {
            assert_eq!(
                value,
                0.5 * (i as f32 / 16.0).floor().mul_add(1.0, -8.0) * (f32::from(q(i)) - 32.0),
                "value {i}"
            );
        }
    }
}
