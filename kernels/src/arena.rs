//! Scratch memory for a forward pass, sized once by a dry run, and the device on which dry runs compute nothing.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::ops::{Activation, Attention, FeedForward, LayerCache, Norm, Ops, Qkv, RopeTable};
use crate::step::StepInputs;
use crate::stream::{Event, StreamId};
use crate::tensor::{Buffer, DType, DeviceId, Shape, Tensor};
use crate::weight::{RawWeight, Weight, WeightRole};

/// Bytes to which each tensor of an arena is aligned.
const ALIGNMENT: usize = 256;

/// A stack of scratch tensors. Taking one moves a pointer; nothing is allocated after construction.
///
/// Size it by running the forward pass on [`DryRun`] with [`Arena::measuring`], then make one of [`Arena::peak`] bytes.
pub struct Arena {
    memory: Tensor,
    used: usize,
    peak: usize,
}

/// A height of an arena's stack, to which it can return.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark(usize);

impl Arena {
    /// An arena without memory that records how much a pass needs.
    pub fn measuring() -> Self {
        let len = 1 << 50;
        let shape = Shape::from([len]);
        let memory = Tensor::new(Arc::new(Buffer::dry_run(len)), shape, DType::U8).expect("the buffer has that length");
        Self { memory, used: 0, peak: 0 }
    }

    /// An arena of `bytes` on a device.
    ///
    /// # Errors
    /// What the device says about the allocation.
    pub fn with_capacity(ops: &dyn Ops, bytes: usize) -> Result<Self> {
        let shape = Shape::new(&[bytes]).ok_or(Error::OutOfMemory { bytes })?;
        Ok(Self { memory: ops.alloc(shape, DType::U8)?, used: 0, peak: 0 })
    }

    /// Takes a tensor with unspecified contents, valid as scratch until the arena returns below it.
    ///
    /// # Errors
    /// [`Error::ArenaFull`] when the arena is too small.
    pub fn take(&mut self, shape: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
        let shape = shape.into();
        let bytes = (shape.elements() * dtype.bytes()).next_multiple_of(ALIGNMENT);
        let end = self.used.saturating_add(bytes);
        if end > self.memory.n_bytes().next_multiple_of(ALIGNMENT) {
            return Err(Error::ArenaFull { capacity: self.memory.n_bytes(), wanted: end });
        }
        let tensor = self.memory.carve(self.used, shape, dtype)?;
        self.used = end;
        self.peak = self.peak.max(end);
        Ok(tensor)
    }

    /// The present height.
    pub fn mark(&self) -> Mark {
        Mark(self.used)
    }

    /// Gives back all that was taken since `mark`; handles to it must not be used any more (they would alias).
    pub fn release(&mut self, mark: Mark) {
        assert!(mark.0 <= self.used, "released out of order");
        self.used = mark.0;
    }

    /// Gives back everything.
    pub fn clear(&mut self) {
        self.used = 0;
    }

    /// Most bytes that were in use at once.
    pub fn peak(&self) -> usize {
        self.peak
    }
}

/// A device without memory: allocations succeed, operators do nothing. For dry runs at load.
#[derive(Clone, Copy, Debug, Default)]
pub struct DryRun;

impl Ops for DryRun {
    fn device(&self) -> DeviceId {
        DeviceId::DRY_RUN
    }

    fn numerics(&self) -> String {
        "dry run".to_owned()
    }

    fn alloc(&self, shape: Shape, dtype: DType) -> Result<Tensor> {
        Tensor::new(Arc::new(Buffer::dry_run(shape.elements() * dtype.bytes())), shape, dtype)
    }

    fn load_weight(&self, raw: RawWeight<'_>, role: WeightRole) -> Result<Weight> {
        Ok(Weight::new(raw.shape, role, DeviceId::DRY_RUN, 0, Arc::new(())))
    }

    fn upload(&self, _: StreamId, _: &[u8], _: &Tensor) -> Result<()> {
        Ok(())
    }

    fn read_back(&self, _: StreamId, _: &Tensor, _: &mut [u8]) -> Result<()> {
        Ok(())
    }

    fn copy(&self, _: StreamId, _: &Tensor, _: &Tensor) -> Result<()> {
        Ok(())
    }

    fn record_event(&self, _: StreamId) -> Result<Event> {
        Ok(Event::done())
    }

    fn wait_event(&self, _: StreamId, _: &Event) -> Result<()> {
        Ok(())
    }

    fn embed(&self, _: StreamId, _: &Tensor, _: &Weight, _: f32, _: &Tensor) -> Result<()> {
        Ok(())
    }

    fn rms_norm(&self, _: StreamId, _: &Tensor, _: &Norm, _: &Tensor) -> Result<()> {
        Ok(())
    }

    fn add_rms_norm(&self, _: StreamId, _: &Tensor, _: &Tensor, _: &Norm, _: &Tensor) -> Result<()> {
        Ok(())
    }

    fn head_rms_norm(&self, _: StreamId, _: &Tensor, _: &Norm) -> Result<()> {
        Ok(())
    }

    fn matmul(&self, _: StreamId, _: &Tensor, _: &Weight, _: Option<&Weight>, _: &Tensor) -> Result<()> {
        Ok(())
    }

    fn qkv(&self, _: StreamId, _: &StepInputs, _: &Tensor, _: &Qkv<'_>) -> Result<()> {
        Ok(())
    }

    fn feed_forward(&self, _: StreamId, _: &Tensor, _: &FeedForward<'_>, _: &Tensor) -> Result<()> {
        Ok(())
    }

    fn rope(&self, _: StreamId, _: &Tensor, _: &Tensor, _: &RopeTable) -> Result<()> {
        Ok(())
    }

    fn write_kv(&self, _: StreamId, _: &StepInputs, _: &Tensor, _: &Tensor, _: &LayerCache) -> Result<()> {
        Ok(())
    }

    fn paged_attention(&self, _: StreamId, _: &StepInputs, _: &Attention<'_>) -> Result<()> {
        Ok(())
    }

    fn gated_activation(&self, _: StreamId, _: Activation, _: &Tensor, _: &Tensor, _: &Tensor) -> Result<()> {
        Ok(())
    }

    fn add(&self, _: StreamId, _: &Tensor, _: &Tensor) -> Result<()> {
        Ok(())
    }

    fn scale(&self, _: StreamId, _: &Tensor, _: f32) -> Result<()> {
        Ok(())
    }

    fn soft_cap(&self, _: StreamId, _: &Tensor, _: f32) -> Result<()> {
        Ok(())
    }

    fn gather_rows(&self, _: StreamId, _: &Tensor, _: &Tensor, _: &Tensor) -> Result<()> {
        Ok(())
    }
}
