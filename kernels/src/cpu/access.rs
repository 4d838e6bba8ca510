//! From tensor handles to slices: device, number format, alignment and overlap are checked here and nowhere else.

use std::fmt;

use crate::cpu::panels::{Packed, Panels};
use crate::error::{Error, Result};
use crate::tensor::{DType, DeviceId, Element, Shape, Tensor};
use crate::weight::Weight;

/// Gives one operator call its slices. Made by `CpuOps::enter` while the device's lock is held, so that no other call
/// touches the device's memory as long as the slices live.
pub(crate) struct Access {
    pub(crate) op: &'static str,
    pub(crate) device: DeviceId,
}

impl Access {
    /// The elements of a tensor that this call reads.
    pub(crate) fn read<'a, T: Element>(&'a self, name: &'static str, tensor: &Tensor, dtype: DType) -> Result<&'a [T]> {
        let start = self.start::<T>(name, tensor, dtype)?;
        // SAFETY: `start` checked device, size and alignment; the device's memory is mapped while the handle lives and
        // initialised (zeroed when mapped). The lock keeps other calls out, and `write` refuses overlaps in this one.
        Ok(unsafe { std::slice::from_raw_parts(start, tensor.shape().elements()) })
    }

    /// The elements of a tensor that this call writes.
    ///
    /// # Safety
    /// `others` are all other tensors this call makes slices of.
    #[expect(clippy::mut_from_ref, reason = "the memory is not part of self; the obligation above makes it exclusive")]
    pub(crate) unsafe fn write<'a, T: Element>(
        &'a self,
        name: &'static str,
        tensor: &Tensor,
        dtype: DType,
        others: &[&Tensor],
    ) -> Result<&'a mut [T]> {
        let start = self.start::<T>(name, tensor, dtype)?;
        if others.iter().any(|other| other.overlaps(tensor)) {
            return Err(Error::Overlap { op: self.op, tensor: name });
        }
        // SAFETY: as in `read`, and no other slice of this call overlaps.
        Ok(unsafe { std::slice::from_raw_parts_mut(start.cast_mut(), tensor.shape().elements()) })
    }

    /// The bytes of a tensor that this call reads.
    pub(crate) fn read_bytes<'a>(&'a self, name: &'static str, tensor: &Tensor) -> Result<&'a [u8]> {
        let shape = Shape::from([tensor.n_bytes()]);
        self.read(name, &tensor.carve(0, shape, DType::U8)?, DType::U8)
    }

    /// The bytes of a tensor that this call writes.
    ///
    /// # Safety
    /// As for [`Access::write`].
    #[expect(clippy::mut_from_ref, reason = "as for write")]
    pub(crate) unsafe fn write_bytes<'a>(
        &'a self,
        name: &'static str,
        tensor: &Tensor,
        others: &[&Tensor],
    ) -> Result<&'a mut [u8]> {
        let shape = Shape::from([tensor.n_bytes()]);
        // SAFETY: the caller's obligation is the same.
        unsafe { self.write(name, &tensor.carve(0, shape, DType::U8)?, DType::U8, others) }
    }

    /// A matrix or embedding.
    pub(crate) fn panels<'a>(&self, name: &'static str, weight: &'a Weight) -> Result<&'a Panels> {
        match self.packed(name, weight)? {
            Packed::Matrix(panels) => Ok(panels),
            Packed::Vector(_) => Err(self.role_error(name, weight)),
        }
    }

    /// A vector of a given length.
    pub(crate) fn vector<'a>(&self, name: &'static str, weight: &'a Weight, len: usize) -> Result<&'a [f32]> {
        match self.packed(name, weight)? {
            Packed::Vector(values) if values.len() == len => Ok(values),
            Packed::Vector(_) => {
                let expected = format!("[{len}]");
                Err(Error::Shape { op: self.op, tensor: name, expected, actual: weight.shape() })
            }
            Packed::Matrix(_) => Err(self.role_error(name, weight)),
        }
    }

    /// Fails unless `holds`; only then is `expected` made text.
    pub(crate) fn shape(
        &self,
        name: &'static str,
        tensor: &Tensor,
        holds: bool,
        expected: impl fmt::Display,
    ) -> Result<()> {
        if holds {
            return Ok(());
        }
        Err(Error::Shape { op: self.op, tensor: name, expected: expected.to_string(), actual: tensor.shape() })
    }

    /// Fails unless the tensor is this device's.
    pub(crate) fn device(&self, name: &'static str, tensor: &Tensor) -> Result<()> {
        if tensor.device() == self.device {
            return Ok(());
        }
        let (expected, actual) = (self.device, tensor.device());
        Err(Error::Device { op: self.op, tensor: name, expected, actual })
    }

    /// Fails unless `value < bound`.
    pub(crate) fn index(&self, what: &'static str, value: usize, bound: usize) -> Result<()> {
        if value < bound {
            return Ok(());
        }
        Err(Error::Index { op: self.op, what, value: value as u64, bound: bound as u64 })
    }

    fn packed<'a>(&self, name: &'static str, weight: &'a Weight) -> Result<&'a Packed> {
        let packed = weight.packed::<Packed>().filter(|_| weight.device() == self.device);
        let (expected, actual) = (self.device, weight.device());
        packed.ok_or(Error::Device { op: self.op, tensor: name, expected, actual })
    }

    fn role_error(&self, name: &'static str, weight: &Weight) -> Error {
        Error::WeightRole { op: self.op, tensor: name, actual: weight.role().name() }
    }

    fn start<T: Element>(&self, name: &'static str, tensor: &Tensor, dtype: DType) -> Result<*const T> {
        self.device(name, tensor)?;
        if tensor.dtype() != dtype || dtype.bytes() != size_of::<T>() {
            return Err(Error::Dtype { op: self.op, tensor: name, actual: tensor.dtype() });
        }
        let start: *const T = std::ptr::with_exposed_provenance(tensor.device_address());
        if !start.is_aligned() {
            return Err(Error::Unsupported { op: self.op, what: format!("{name} at a misaligned address") });
        }
        Ok(start)
    }
}

/// A slice that chunks of a parallel loop write in disjoint parts.
pub(crate) struct Shared<'a, T> {
    start: *mut T,
    len: usize,
    _slice: std::marker::PhantomData<&'a mut [T]>,
}

// SAFETY: parts are given out only through `part`, whose callers promise that they are disjoint.
unsafe impl<T: Send> Sync for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self { start: slice.as_mut_ptr(), len: slice.len(), _slice: std::marker::PhantomData }
    }

    /// Elements of the slice.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Elements `start..start + len`.
    ///
    /// # Safety
    /// No other part that lives at the same time overlaps.
    ///
    /// # Panics
    /// When they reach beyond the slice.
    #[expect(clippy::mut_from_ref, reason = "the obligation above makes it exclusive")]
    pub(crate) unsafe fn part(&self, start: usize, len: usize) -> &mut [T] {
        assert!(start <= self.len && len <= self.len - start, "part {start}+{len} of {}", self.len);
        // SAFETY: in bounds as asserted, borrowed mutably for 'a by `new`, and exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(start), len) }
    }
}
