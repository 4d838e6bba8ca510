//! Handles to device memory: shape, number format and where the bytes lie.

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::error::{Error, Result};

/// Number format of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// 32-bit float.
    F32,
    /// 16-bit float with 8 bits of exponent.
    Bf16,
    /// 16-bit float with 5 bits of exponent.
    F16,
    /// Unsigned 32-bit integer: token ids, positions, slots.
    U32,
    /// A byte.
    U8,
    /// Signed 8-bit integer.
    I8,
}

impl DType {
    /// Bytes an element takes.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 | Self::U32 => 4,
            Self::Bf16 | Self::F16 => 2,
            Self::U8 | Self::I8 => 1,
        }
    }
}

/// Instance of a device that owns memory; tensors of one are refused by all others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeviceId(pub u64);

impl DeviceId {
    /// Memory that does not exist: what an arena hands out in a dry run.
    pub const DRY_RUN: Self = Self(0);

    /// A number that no device of this process has yet.
    pub fn unique() -> Self {
        static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);
        Self(NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed))
    }
}

/// Up to four dimensions, row-major and contiguous, last dimension fastest.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    dims: [usize; 4],
    rank: u8,
}

impl Shape {
    /// Makes a shape; `None` with more than four dimensions or when the element count overflows.
    pub fn new(dims: &[usize]) -> Option<Self> {
        if dims.len() > 4 {
            return None;
        }
        // Sixteen bytes an element at most, so that byte counts cannot overflow either.
        dims.iter().try_fold(16usize, |product, &dim| product.checked_mul(dim.max(1)))?;
        let mut shape = Self { dims: [1; 4], rank: u8::try_from(dims.len()).ok()? };
        shape.dims[..dims.len()].copy_from_slice(dims);
        Some(shape)
    }

    /// The dimensions, outermost first.
    pub fn dims(&self) -> &[usize] {
        &self.dims[..usize::from(self.rank)]
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.dims().iter().product()
    }

    /// Product of all dimensions but the last: the rows when seen as a matrix.
    pub fn rows(&self) -> usize {
        self.dims().split_last().map_or(1, |(_, outer)| outer.iter().product())
    }

    /// The last dimension.
    pub fn columns(&self) -> usize {
        self.dims().last().copied().unwrap_or(1)
    }
}

impl<const N: usize> From<[usize; N]> for Shape {
    /// # Panics
    /// With more than four dimensions or an element count that overflows; outside numbers go through [`Shape::new`].
    fn from(dims: [usize; N]) -> Self {
        Self::new(&dims).expect("at most four dimensions whose product fits")
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.dims())
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A range of device memory and whatever keeps it alive.
pub struct Buffer {
    address: usize,
    len: usize,
    device: DeviceId,
    _owner: Option<Box<dyn Any + Send + Sync>>,
}

impl Buffer {
    /// Wraps device memory.
    ///
    /// # Safety
    /// `len` bytes at `address` are valid on `device` for reads and writes until `owner` is dropped, and only
    /// operators of `device` touch them, or a [`BlockMemory`](crate::memory::blocks::BlockMemory) it made of them.
    pub unsafe fn new(address: usize, len: usize, device: DeviceId, owner: Box<dyn Any + Send + Sync>) -> Self {
        Self { address, len, device, _owner: Some(owner) }
    }

    /// Memory of a dry run, which no device accepts.
    pub(crate) fn dry_run(len: usize) -> Self {
        Self { address: 0, len, device: DeviceId::DRY_RUN, _owner: None }
    }
}

/// A handle to a contiguous, row-major array in device memory; cloning copies the handle, never the data.
///
/// Handles may overlap. Who reads and writes them is decided by the device's operators, which run in stream order.
#[derive(Clone)]
pub struct Tensor {
    buffer: Arc<Buffer>,
    offset: usize,
    shape: Shape,
    dtype: DType,
}

impl Tensor {
    /// Makes a handle to the start of `buffer`.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] when the buffer is too small.
    pub fn new(buffer: Arc<Buffer>, shape: Shape, dtype: DType) -> Result<Self> {
        let tensor = Self { buffer, offset: 0, shape, dtype };
        if tensor.n_bytes() > tensor.buffer.len {
            return Err(Error::OutOfMemory { bytes: tensor.n_bytes() });
        }
        Ok(tensor)
    }

    /// The shape.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// The dimensions, outermost first.
    pub fn dims(&self) -> &[usize] {
        self.shape.dims()
    }

    /// The number format.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Bytes of the data.
    pub fn n_bytes(&self) -> usize {
        self.shape.elements() * self.dtype.bytes()
    }

    /// The device instance that owns the memory.
    pub fn device(&self) -> DeviceId {
        self.buffer.device
    }

    /// Address of the first byte as the device sees it; only the device's own operators may use it.
    pub fn device_address(&self) -> usize {
        self.buffer.address + self.offset
    }

    /// The same elements under another shape.
    ///
    /// # Errors
    /// [`Error::Shape`] when the element counts differ.
    pub fn view(&self, shape: impl Into<Shape>) -> Result<Self> {
        let shape = shape.into();
        if shape.elements() != self.shape.elements() {
            let expected = format!("{} elements", shape.elements());
            return Err(Error::Shape { op: "view", tensor: "self", expected, actual: self.shape });
        }
        Ok(Self { shape, ..self.clone() })
    }

    /// Entries `range` of the outermost dimension.
    ///
    /// # Errors
    /// [`Error::Shape`] when the range reaches beyond it.
    pub fn rows(&self, range: Range<usize>) -> Result<Self> {
        let fits = self.shape.rank > 0 && range.start <= range.end && range.end <= self.shape.dims[0];
        if !fits {
            let expected = format!("at least {} entries in the first dimension", range.end);
            return Err(Error::Shape { op: "rows", tensor: "self", expected, actual: self.shape });
        }
        let mut shape = self.shape;
        shape.dims[0] = 1;
        let stride = shape.elements() * self.dtype.bytes();
        shape.dims[0] = range.end - range.start;
        Ok(Self { shape, offset: self.offset + range.start * stride, ..self.clone() })
    }

    /// `shape` elements of `dtype` that start `offset` bytes into this tensor; how arenas and pools are carved.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] when they reach beyond it.
    pub fn carve(&self, offset: usize, shape: Shape, dtype: DType) -> Result<Self> {
        let bytes = shape.elements() * dtype.bytes();
        if offset.checked_add(bytes).is_none_or(|end| end > self.n_bytes()) {
            return Err(Error::OutOfMemory { bytes });
        }
        Ok(Self { buffer: Arc::clone(&self.buffer), offset: self.offset + offset, shape, dtype })
    }

    /// Whether any byte belongs to both.
    pub fn overlaps(&self, other: &Self) -> bool {
        let (a, b) = (self.device_address(), other.device_address());
        self.device() == other.device()
            && self.n_bytes() > 0
            && other.n_bytes() > 0
            && a < b + other.n_bytes()
            && b < a + self.n_bytes()
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({:?} {} on {:?})", self.dtype, self.shape, self.device())
    }
}

mod sealed {
    pub trait Sealed {}
}

/// Plain number types whose slices can be seen as bytes in the machine's order.
pub trait Element: sealed::Sealed + Copy + 'static {}

macro_rules! element {
    ($($t:ty),*) => { $(impl sealed::Sealed for $t {} impl Element for $t {})* };
}
element!(f32, u32, u8, i8, half::bf16, half::f16);

/// The bytes of numbers, for `Ops::upload`.
pub fn as_bytes<T: Element>(values: &[T]) -> &[u8] {
    // SAFETY: `Element` is sealed over types without padding, any of whose bytes are valid u8.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

/// The bytes of numbers, for `Ops::read_back`.
pub fn as_bytes_mut<T: Element>(values: &mut [T]) -> &mut [u8] {
    // SAFETY: `Element` is sealed over types without padding for which every bit pattern is valid.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
}
