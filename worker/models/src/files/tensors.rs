//! Tensors as they lie in weight files: name, number format, shape and bytes.

use std::collections::BTreeMap;

use kernels::WeightFormat;
use thiserror::Error;

/// Format, its name, its number in GGUF.
const FORMATS: [(WeightFormat, &str, u32); 11] = [
    (WeightFormat::F32, "F32", 0),
    (WeightFormat::F16, "F16", 1),
    (WeightFormat::Bf16, "BF16", 30),
    (WeightFormat::Q4_0, "Q4_0", 2),
    (WeightFormat::Q4_1, "Q4_1", 3),
    (WeightFormat::Q5_0, "Q5_0", 6),
    (WeightFormat::Q5_1, "Q5_1", 7),
    (WeightFormat::Q8_0, "Q8_0", 8),
    (WeightFormat::Q4K, "Q4_K", 12),
    (WeightFormat::Q5K, "Q5_K", 13),
    (WeightFormat::Q6K, "Q6_K", 14),
];

/// A format that nothing here reads.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("format {found} is not supported ({supported} are)")]
pub struct FormatError {
    /// Its number or name.
    pub found: String,
    /// Names of those that are.
    pub supported: String,
}

impl FormatError {
    pub(crate) fn new(found: impl ToString) -> Self {
        Self { found: found.to_string(), supported: FORMATS.map(|row| row.1).join(", ") }
    }
}

/// Looks a format up by its number in GGUF.
///
/// # Errors
/// When there is none, with the names of those there are.
pub fn format_of_gguf(code: u32) -> Result<WeightFormat, FormatError> {
    FORMATS.iter().find(|row| row.2 == code).map(|row| row.0).ok_or_else(|| FormatError::new(code))
}

/// Bytes of a tensor; none when a row is not whole blocks or the size overflows.
pub fn bytes_of(format: WeightFormat, shape: &[usize]) -> Option<usize> {
    let row = shape.last().copied().unwrap_or(1);
    if !row.is_multiple_of(format.block_elements()) {
        return None;
    }
    // Zeros count as ones here, so that the same product of any part of the shape cannot overflow either.
    let bound = shape.iter().try_fold(1usize, |product, &dim| product.checked_mul(dim.max(1)))?;
    bound.checked_mul(4).filter(|&bytes| bytes <= isize::MAX as usize)?;
    (shape.iter().product::<usize>() / format.block_elements()).checked_mul(format.block_bytes())
}

/// Where a tensor lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TensorPlace {
    pub(crate) format: WeightFormat,
    pub(crate) shape: Vec<usize>,
    /// Index into the mapped files.
    pub(crate) file: usize,
    pub(crate) offset: usize,
    pub(crate) len: usize,
}

/// Tensors by name.
pub(crate) type TensorTable = BTreeMap<String, TensorPlace>;

/// A tensor's stored bytes, row-major, little-endian.
#[derive(Clone, Copy, Debug)]
pub struct StoredTensor<'a> {
    /// Number format.
    pub format: WeightFormat,
    /// Dimensions, slowest first.
    pub shape: &'a [usize],
    /// As many bytes as format and shape take.
    pub bytes: &'a [u8],
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_whole_blocks_or_nothing() {
        assert_eq!(bytes_of(WeightFormat::Q4K, &[2, 512]), Some(2 * 2 * 144));
        assert_eq!(bytes_of(WeightFormat::Q4K, &[2, 128]), None);
        assert_eq!(bytes_of(WeightFormat::F32, &[usize::MAX, 2]), None);
        assert_eq!(bytes_of(WeightFormat::F32, &[usize::MAX / 4, 1]), None, "more than an allocation can be");
        assert_eq!(bytes_of(WeightFormat::F32, &[0, usize::MAX / 2, 3]), None, "a zero hides no overflow");
        assert_eq!(bytes_of(WeightFormat::F32, &[]), Some(4));
    }

    #[test]
    fn unknown_formats_name_the_known() {
        let error = format_of_gguf(16).expect_err("IQ2_XXS is not read").to_string();
        assert!(error.contains("16") && error.contains("Q6_K"), "{error}");
    }
}
