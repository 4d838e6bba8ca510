//! Reference quantisers: round to nearest under the plainest scales, one for each format that files store.
//!
//! The layouts are those that `kernels::quant` reads. Published files choose their scales with more care, so what is
//! measured with these bounds what they lose from above.

use half::{bf16, f16};
use kernels::WeightFormat;

/// Bytes of `values`, a whole number of the format's blocks, in `format`.
pub fn quantise(format: WeightFormat, values: &[f32]) -> Vec<u8> {
    assert!(values.len().is_multiple_of(format.block_elements()), "{} values in {format:?}", values.len());
    let blocks = values.chunks_exact(format.block_elements());
    match format {
        WeightFormat::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        WeightFormat::F16 => values.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect(),
        WeightFormat::Bf16 => values.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect(),
        WeightFormat::Q8_0 => blocks.flat_map(q8_0).collect(),
        WeightFormat::Q4_0 => blocks.flat_map(|x| centred(x, 4)).collect(),
        WeightFormat::Q5_0 => blocks.flat_map(|x| centred(x, 5)).collect(),
        WeightFormat::Q4_1 => blocks.flat_map(|x| from_minimum(x, 4)).collect(),
        WeightFormat::Q5_1 => blocks.flat_map(|x| from_minimum(x, 5)).collect(),
        WeightFormat::Q4K => blocks.flat_map(|x| grouped(x, 4)).collect(),
        WeightFormat::Q5K => blocks.flat_map(|x| grouped(x, 5)).collect(),
        WeightFormat::Q6K => blocks.flat_map(q6_k).collect(),
    }
}

/// A scale as it is stored, and as it is read back.
fn stored(scale: f32) -> ([u8; 2], f32) {
    let half = f16::from_f32(scale);
    (half.to_le_bytes(), half.to_f32())
}

/// `x / scale` to the nearest whole number; 0 under a scale of 0.
fn steps(x: f32, scale: f32) -> f32 {
    if scale == 0.0 { 0.0 } else { (x / scale).round() }
}

/// The value farthest from 0, with its sign.
fn farthest(values: &[f32]) -> f32 {
    values.iter().copied().fold(0.0, |far: f32, x| if x.abs() > far.abs() { x } else { far })
}

fn range(values: &[f32]) -> (f32, f32) {
    values.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(low, high), &x| (low.min(x), high.max(x)))
}

fn q8_0(values: &[f32]) -> Vec<u8> {
    let (bytes, d) = stored(farthest(values).abs() / 127.0);
    let quants = values.iter().map(|&x| (steps(x, d).clamp(-127.0, 127.0) as i8).cast_unsigned());
    bytes.into_iter().chain(quants).collect()
}

/// `d (q - 2^(bits - 1))`: the farthest value takes the farther end.
fn centred(values: &[f32], bits: u32) -> Vec<u8> {
    let middle = f32::from(1u8 << (bits - 1));
    let (bytes, d) = stored(farthest(values) / -middle);
    let quants: Vec<u8> = values.iter().map(|&x| (steps(x, d) + middle).clamp(0.0, 2.0 * middle - 1.0) as u8).collect();
    [bytes.to_vec(), block_of_32(&quants, bits)].concat()
}

/// `d q + m`.
fn from_minimum(values: &[f32], bits: u32) -> Vec<u8> {
    let (low, high) = range(values);
    let largest = f32::from((1u8 << bits) - 1);
    let ((d_bytes, d), (m_bytes, m)) = (stored((high - low) / largest), stored(low));
    let quants: Vec<u8> = values.iter().map(|&x| steps(x - m, d).clamp(0.0, largest) as u8).collect();
    [d_bytes.to_vec(), m_bytes.to_vec(), block_of_32(&quants, bits)].concat()
}

/// Fifth bits, where there are any, then nibbles: value `j` low and `j + 16` high.
fn block_of_32(quants: &[u8], bits: u32) -> Vec<u8> {
    let high = quants.iter().enumerate().fold(0u32, |high, (index, q)| high | u32::from(q >> 4) << index);
    let nibbles = (0..16).map(|j| quants[j] & 0xf | (quants[j + 16] & 0xf) << 4);
    let mut out = if bits == 5 { high.to_le_bytes().to_vec() } else { Vec::new() };
    out.extend(nibbles);
    out
}

/// Q4_K and Q5_K: eight groups of 32 with six bits of scale and of minimum each.
fn grouped(values: &[f32], bits: u32) -> Vec<u8> {
    let largest = f32::from((1u8 << bits) - 1);
    let groups: Vec<(f32, f32)> = values
        .chunks_exact(32)
        .map(|group| {
            let (low, high) = range(group);
            let low = low.min(0.0);
            ((high - low).max(0.0) / largest, -low)
        })
        .collect();
    let most = |values: &mut dyn Iterator<Item = f32>| values.fold(0.0, f32::max);
    let (d_bytes, d) = stored(most(&mut groups.iter().map(|group| group.0)) / 63.0);
    let (m_bytes, m) = stored(most(&mut groups.iter().map(|group| group.1)) / 63.0);
    let six_bits = |value: f32, unit: f32| steps(value, unit).clamp(0.0, 63.0) as u8;
    let packed: Vec<(u8, u8)> = groups.iter().map(|&(scale, low)| (six_bits(scale, d), six_bits(low, m))).collect();
    let mut quants = Vec::with_capacity(256);
    for (group, &(scale, minimum)) in values.chunks_exact(32).zip(&packed) {
        let (scale, minimum) = (d * f32::from(scale), m * f32::from(minimum));
        quants.extend(group.iter().map(|&x| steps(x + minimum, scale).clamp(0.0, largest) as u8));
    }
    let mut out = [d_bytes, m_bytes].concat();
    out.extend(six_bit_pairs(&packed));
    if bits == 5 {
        out.extend((0..32).map(|l| (0..8).fold(0, |byte, group| byte | (quants[group * 32 + l] >> 4) << group)));
    }
    out.extend((0..128).map(|index| {
        let (pair, l) = (index / 32, index % 32);
        quants[pair * 64 + l] & 0xf | (quants[pair * 64 + 32 + l] & 0xf) << 4
    }));
    out
}

/// Scales and minima of eight groups in twelve bytes.
fn six_bit_pairs(pairs: &[(u8, u8)]) -> [u8; 12] {
    let mut out = [0u8; 12];
    for group in 0..4 {
        let ((scale, minimum), (later_scale, later_minimum)) = (pairs[group], pairs[group + 4]);
        out[group] = scale | (later_scale >> 4) << 6;
        out[group + 4] = minimum | (later_minimum >> 4) << 6;
        out[group + 8] = later_scale & 0xf | (later_minimum & 0xf) << 4;
    }
    out
}

/// Sixteen groups of 16 with a signed scale each; the farthest value of a group takes the farther end.
fn q6_k(values: &[f32]) -> Vec<u8> {
    let scales: Vec<f32> = values.chunks_exact(16).map(|group| farthest(group) / -32.0).collect();
    let (d_bytes, d) = stored(farthest(&scales).abs() / 127.0);
    let scales: Vec<i8> = scales.iter().map(|&scale| steps(scale, d).clamp(-127.0, 127.0) as i8).collect();
    let quants: Vec<u8> = values
        .iter()
        .enumerate()
        .map(|(index, &x)| (steps(x, d * f32::from(scales[index / 16])) + 32.0).clamp(0.0, 63.0) as u8)
        .collect();
    let mut out = Vec::with_capacity(210);
    for half in quants.chunks_exact(128) {
        out.extend((0..64).map(|l| half[l] & 0xf | (half[l + 64] & 0xf) << 4));
    }
    for half in quants.chunks_exact(128) {
        out.extend(
            (0..32).map(|l| (0..4).fold(0, |byte, quarter| byte | (half[quarter * 32 + l] >> 4) << (2 * quarter))),
        );
    }
    out.extend(scales.iter().map(|scale| scale.cast_unsigned()));
    out.extend(d_bytes);
    out
}
