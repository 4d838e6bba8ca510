//! Weights: raw bytes as a file stores them, and the opaque form a device computes with.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::tensor::{DeviceId, Shape};

/// How a file stores a weight; the quantised formats are GGUF's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WeightFormat {
    /// 32-bit float, little endian.
    F32,
    /// 16-bit float with 5 bits of exponent, little endian.
    F16,
    /// 16-bit float with 8 bits of exponent, little endian.
    Bf16,
    /// 32 values of 8 bits with one scale.
    Q8_0,
    /// 32 values of 4 bits with one scale.
    Q4_0,
    /// 32 values of 4 bits with scale and minimum.
    Q4_1,
    /// 32 values of 5 bits with one scale.
    Q5_0,
    /// 32 values of 5 bits with scale and minimum.
    Q5_1,
    /// 256 values of 4 bits, 8 groups with 6-bit scales and minima.
    Q4K,
    /// 256 values of 5 bits, 8 groups with 6-bit scales and minima.
    Q5K,
    /// 256 values of 6 bits, 16 groups with 8-bit scales.
    Q6K,
}

impl WeightFormat {
    /// All there are.
    pub const ALL: [Self; 11] = [
        Self::F32,
        Self::F16,
        Self::Bf16,
        Self::Q8_0,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
    ];

    /// Elements that are stored together; every row is a whole number of them.
    pub const fn block_elements(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => 1,
            Self::Q8_0 | Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 => 32,
            Self::Q4K | Self::Q5K | Self::Q6K => 256,
        }
    }

    /// Bytes that [`Self::block_elements`] elements take.
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Q8_0 => 34,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q4K => 144,
            Self::Q5K => 176,
            Self::Q6K => 210,
        }
    }

    /// Bytes of a row of `elements`.
    ///
    /// # Errors
    /// [`Error::WeightRow`] when it is not a whole number of blocks.
    pub fn row_bytes(self, elements: usize) -> Result<usize> {
        let block = self.block_elements();
        if !elements.is_multiple_of(block) {
            return Err(Error::WeightRow { format: self, row: elements, block });
        }
        Ok(elements / block * self.block_bytes())
    }
}

/// A weight as a file stores it: row-major, `shape` outermost first, so `[out, in]` for a matrix.
///
/// GGUF writes dimensions innermost first; a reader reverses them.
#[derive(Clone, Copy)]
pub struct RawWeight<'a> {
    /// The bytes, exactly as many as shape and format imply.
    pub bytes: &'a [u8],
    /// How they are stored.
    pub format: WeightFormat,
    /// Dimensions.
    pub shape: Shape,
}

impl RawWeight<'_> {
    /// Checks that the bytes are what shape and format imply.
    ///
    /// # Errors
    /// [`Error::WeightRow`] or [`Error::WeightBytes`].
    pub fn check(&self) -> Result<()> {
        let row = self.format.row_bytes(self.shape.columns())?;
        // Shapes keep sixteen bytes an element below overflow, and no format takes more than four.
        let expected = self.shape.rows() * row;
        if expected != self.bytes.len() {
            let (shape, format, actual) = (self.shape, self.format, self.bytes.len());
            return Err(Error::WeightBytes { shape, format, expected, actual });
        }
        Ok(())
    }
}

impl fmt::Debug for RawWeight<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RawWeight({:?} {})", self.format, self.shape)
    }
}

/// What a weight is for, which decides how a device packs it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum WeightRole {
    /// `[out, in]`, multiplied from the right: `y = x W^T`.
    Matrix,
    /// `[vocab, hidden]`: rows are looked up, and it may be multiplied too (tied output head).
    Embedding,
    /// One dimension, kept in f32: norm weights and biases. `offset` is added to each element (gemma's norms: 1).
    Vector {
        /// Added to each element when loaded.
        offset: f32,
    },
}

impl WeightRole {
    /// A vector as it is stored.
    pub const VECTOR: Self = Self::Vector { offset: 0.0 };

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Matrix => "a matrix",
            Self::Embedding => "an embedding",
            Self::Vector { .. } => "a vector",
        }
    }
}

/// A weight in the form its device computes with; cloning copies the handle.
#[derive(Clone)]
pub struct Weight {
    shape: Shape,
    role: WeightRole,
    device: DeviceId,
    n_bytes: usize,
    packed: Arc<dyn Any + Send + Sync>,
}

impl Weight {
    /// Wraps what a device made of a raw weight; called by `load_weight` of devices.
    pub fn new(
        shape: Shape,
        role: WeightRole,
        device: DeviceId,
        n_bytes: usize,
        packed: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        Self { shape, role, device, n_bytes, packed }
    }

    /// The shape of the raw weight, `[out, in]` for a matrix.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// What it was loaded for.
    pub fn role(&self) -> WeightRole {
        self.role
    }

    /// The device instance that made it.
    pub fn device(&self) -> DeviceId {
        self.device
    }

    /// Bytes it occupies on the device.
    pub fn n_bytes(&self) -> usize {
        self.n_bytes
    }

    /// The device's own form; `None` when another device made it.
    pub fn packed<T: 'static>(&self) -> Option<&T> {
        self.packed.downcast_ref()
    }
}

impl fmt::Debug for Weight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Weight({} {} on {:?})", self.role.name(), self.shape, self.device)
    }
}
