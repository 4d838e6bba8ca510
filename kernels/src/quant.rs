//! GGUF's block formats: exact conversion to f32, the reference for every kernel that computes on them.
//!
//! The layouts are ggml's public ones; all numbers are little endian, `f16` is IEEE binary16. A row is a whole number
//! of blocks. Bytes come from files: sizes are checked and nothing is read beyond a slice.

use half::{bf16, f16};

use crate::error::{Error, Result};
use crate::tensor::Shape;
use crate::weight::WeightFormat;

mod blocks;
pub(crate) mod codes;
mod super_blocks;

/// Converts `bytes` in `format` to `out.len()` f32 values.
///
/// # Errors
/// [`Error::WeightRow`] when `out` is not a whole number of blocks, [`Error::WeightBytes`] when the bytes do not match.
pub fn dequantize(format: WeightFormat, bytes: &[u8], out: &mut [f32]) -> Result<()> {
    let expected = format.row_bytes(out.len())?;
    if bytes.len() != expected {
        let shape = Shape::new(&[out.len()]).unwrap_or(Shape::from([]));
        return Err(Error::WeightBytes { shape, format, expected, actual: bytes.len() });
    }
    match format {
        WeightFormat::F32 => each::<4, 1>(bytes, out, |b, out| out[0] = f32::from_le_bytes(*b)),
        WeightFormat::F16 => each::<2, 1>(bytes, out, |b, out| out[0] = f16::from_le_bytes(*b).to_f32()),
        WeightFormat::Bf16 => each::<2, 1>(bytes, out, |b, out| out[0] = bf16::from_le_bytes(*b).to_f32()),
        WeightFormat::Q8_0 => each(bytes, out, blocks::q8_0),
        WeightFormat::Q4_0 => each(bytes, out, blocks::q4_0),
        WeightFormat::Q4_1 => each(bytes, out, blocks::q4_1),
        WeightFormat::Q5_0 => each(bytes, out, blocks::q5_0),
        WeightFormat::Q5_1 => each(bytes, out, blocks::q5_1),
        WeightFormat::Q4K => each(bytes, out, super_blocks::q4_k),
        WeightFormat::Q5K => each(bytes, out, super_blocks::q5_k),
        WeightFormat::Q6K => each(bytes, out, super_blocks::q6_k),
    }
    Ok(())
}

/// Calls `convert` with each block of `B` bytes and its `N` values.
fn each<const B: usize, const N: usize>(bytes: &[u8], out: &mut [f32], convert: impl Fn(&[u8; B], &mut [f32; N])) {
    let (blocks, _) = bytes.as_chunks::<B>();
    let (values, _) = out.as_chunks_mut::<N>();
    blocks.iter().zip(values).for_each(|(block, values)| convert(block, values));
}

/// The f16 at `at` of a block.
fn f16_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_formats_convert_exactly() {
        let mut out = [0.0; 2];
        dequantize(WeightFormat::F32, &[0, 0, 0x80, 0x3f, 0, 0, 0, 0xc0], &mut out).unwrap();
        assert_eq!(out, [1.0, -2.0]);
        dequantize(WeightFormat::F16, &[0x00, 0x3c, 0x00, 0xc0], &mut out).unwrap();
        assert_eq!(out, [1.0, -2.0]);
        dequantize(WeightFormat::Bf16, &[0x80, 0x3f, 0x00, 0xc0], &mut out).unwrap();
        assert_eq!(out, [1.0, -2.0]);
    }

    #[test]
    fn wrong_sizes_are_typed_errors() {
        use WeightFormat::*;
        for format in [F32, F16, Bf16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4K, Q5K, Q6K] {
            let (n, size) = (format.block_elements(), format.block_bytes());
            let mut out = vec![0.0; 2 * n];
            assert_eq!(dequantize(format, &vec![0; 2 * size], &mut out), Ok(()));
            for len in [0, size, 2 * size - 1, 2 * size + 1] {
                let error = dequantize(format, &vec![0; len], &mut out).unwrap_err();
                assert!(matches!(error, Error::WeightBytes { actual, .. } if actual == len), "{error}");
            }
            if n > 1 {
                let error = dequantize(format, &vec![0; size], &mut vec![0.0; n - 1]).unwrap_err();
                assert_eq!(error, Error::WeightRow { format, row: n - 1, block: n });
            }
        }
    }
}
