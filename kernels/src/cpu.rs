//! The CPU as a device: executes at once, on its own threads, with the instruction set chosen when it is made.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::cpu::access::Access;
use crate::cpu::activations::Activations;
use crate::cpu::panels::Packed;
use crate::cpu::pool::{Body, Pool};
use crate::cpu::table::Table;
use crate::cpu::weight_memory::WeightMemory;
use crate::cpu::workspace::Locals;
use crate::error::Result;
use crate::memory::Mapping;
use crate::memory::blocks::BlockMemory;
use crate::op;
use crate::ops::{Activation, Attention, FeedForward, LayerCache, Linear, Norm, Ops, Qkv, RopeTable};
use crate::step::StepInputs;
use crate::stream::{Event, StreamId};
use crate::tensor::{Buffer, DType, DeviceId, Shape, Tensor};
use crate::weight::{RawWeight, Weight, WeightRole};

pub(crate) mod access;
pub(crate) mod activations;
mod affinity;
#[cfg(target_arch = "x86_64")]
mod amx;
pub(crate) mod attend;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512bf16;
pub mod bound;
pub(crate) mod dot;
pub(crate) mod grouped;
mod isa;
pub(crate) mod lanes;
mod packed_file;
mod packing;
pub(crate) mod panels;
mod pool;
mod portable;
pub(crate) mod results;
mod scalar;
mod simd;
#[expect(clippy::needless_range_loop, reason = "registers are arrays over rows and columns alike")]
mod simd_grouped;
mod simd_unpack;
pub(crate) mod table;
pub(crate) mod weight_memory;
pub(crate) mod workspace;

pub use isa::{ISA_VARIABLE, Isa};
pub use packed_file::{PackedCopies, PackedFile, PackedFileError};
pub use panels::ComputeDtype;

/// Elementary operations below which a loop is not worth waking other threads.
pub(crate) const PARALLEL_WORK: usize = 32_768;

/// Part of [`Ops::numerics`]: raised whenever the same inputs give other bits than before.
const NUMERICS_VERSION: u32 = 3;

/// How a CPU computes.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct CpuOptions {
    /// What matrices are computed as.
    pub dtype: ComputeDtype,
    /// Threads, the caller's included; 0 takes one.
    pub threads: usize,
    /// Instruction set; `None` takes the one that [`ISA_VARIABLE`] names, else the fastest there is.
    pub isa: Option<Isa>,
}

/// The operators on this CPU.
///
/// Calls of one instance run one after the other, on whichever thread makes them; `forward` passes belong on a thread
/// of their own, never on one of an async runtime.
pub struct CpuOps {
    device: DeviceId,
    dtype: ComputeDtype,
    isa: Isa,
    machine: Mutex<Machine>,
}

/// What a call computes with; whoever holds it has the device to itself.
pub(crate) struct Machine {
    pool: Pool,
    pub(crate) table: &'static Table,
    pub(crate) kv: &'static attend::KvTable,
    pub(crate) attention: op::attention::Memory,
    locals: Locals,
    /// Where matrices are packed to.
    weights: WeightMemory,
    /// A product's activations, kept for their capacity.
    pub(crate) activations: Activations,
    /// The same of the second product of a feed-forward layer.
    pub(crate) gated: Activations,
}

impl Machine {
    /// Calls `body(thread, chunk)` for each chunk, on all threads when `work` is worth it.
    pub(crate) fn run(&mut self, work: usize, n_chunks: usize, body: &Body<'_>) {
        if work < PARALLEL_WORK {
            (0..n_chunks).for_each(|chunk| body(0, chunk));
        } else {
            self.pool.run(n_chunks, body);
        }
    }

    /// Calls `body(memory of threads, thread, chunk)` for each chunk, equal runs of them on each thread when `work` is
    /// worth it.
    pub(crate) fn split(&mut self, work: usize, n_chunks: usize, body: &(dyn Fn(&Locals, usize, usize) + Sync)) {
        let locals = &self.locals;
        if work < PARALLEL_WORK {
            (0..n_chunks).for_each(|chunk| body(locals, 0, chunk));
        } else {
            self.pool.split(n_chunks, &|thread, chunk| body(locals, thread, chunk));
        }
    }

    /// Number of threads.
    pub(crate) fn threads(&self) -> usize {
        self.pool.threads()
    }
}

impl CpuOps {
    /// Starts the threads and chooses the kernels.
    ///
    /// # Errors
    /// [`IsaMissing`](crate::Error::IsaMissing) when this CPU lacks the instruction set asked for; [`System`](crate::Error::System) when threads cannot be
    /// started.
    pub fn new(options: &CpuOptions) -> Result<Self> {
        let table = Table::of(options.isa.map_or_else(Isa::chosen, Ok)?)?;
        let pool = Pool::new(options.threads.max(1))?;
        let machine = Mutex::new(Machine {
            locals: Locals::new(pool.threads())?,
            pool,
            table,
            kv: attend::table(table.isa),
            attention: op::attention::Memory::default(),
            weights: WeightMemory::default(),
            activations: Activations::default(),
            gated: Activations::default(),
        });
        Ok(Self { device: DeviceId::unique(), dtype: options.dtype, isa: table.isa, machine })
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Threads that compute.
    pub fn threads(&self) -> usize {
        self.enter("threads").0.threads()
    }

    /// Calls `body(thread, row, elements)` once for each row of an f32 matrix, on any of the threads and in any order:
    /// how a batch of logits is sampled.
    ///
    /// `body` must not call operators of this instance: it would wait for itself.
    ///
    /// # Errors
    /// When the tensor is another device's, not f32 or no matrix.
    pub fn for_each_row(&self, matrix: &Tensor, body: &(dyn Fn(usize, usize, &[f32]) + Sync)) -> Result<()> {
        let (mut machine, access) = self.enter("for_each_row");
        let elements = access.read::<f32>("matrix", matrix, DType::F32)?;
        let dims = matrix.dims();
        access.shape("matrix", matrix, dims.len() == 2, "two dimensions")?;
        let (n_rows, width) = (dims[0], dims[1]);
        machine.run(elements.len(), n_rows, &|thread, row| body(thread, row, &elements[row * width..][..width]));
        Ok(())
    }

    /// The memory of a paged cache that this device holds, for transfers between workers; `layers` have equal regions of
    /// `[n_blocks, block]`.
    ///
    /// # Errors
    /// When a region is another device's or differs from those of the first layer.
    pub fn block_memory(&self, layers: &[LayerCache]) -> Result<BlockMemory> {
        let access = Access { op: "block_memory", device: self.device };
        let regions = |layer: &LayerCache| [("keys", layer.keys.clone()), ("values", layer.values.clone())];
        let n_blocks = layers.first().and_then(|layer| layer.keys.dims().first().copied()).unwrap_or(0);
        let bytes = |layer: &LayerCache| [layer.keys.n_bytes(), layer.values.n_bytes()];
        let region_bytes = layers.first().map_or([0; 2], bytes);
        let (mut addresses, mut owners) = (Vec::with_capacity(layers.len()), Vec::<Box<dyn Any + Send + Sync>>::new());
        for layer in layers {
            for (name, tensor) in regions(layer) {
                access.device(name, &tensor)?;
                let fits = tensor.dims().first() == Some(&n_blocks) && bytes(layer) == region_bytes;
                access.shape(name, &tensor, fits, format_args!("[{n_blocks}, block] of {region_bytes:?} bytes"))?;
                owners.push(Box::new(tensor));
            }
            addresses.push([layer.keys.device_address(), layer.values.device_address()]);
        }
        // SAFETY: the tensors are this device's, so their bytes lie in mappings of this process that the handles keep;
        // operators make slices of a region only to reach blocks that their plan names, and who moves bytes has blocks
        // that no plan names, as `BlockMemory` says.
        Ok(unsafe { BlockMemory::new(addresses, n_blocks, region_bytes.map(|n| n / n_blocks.max(1)), owners) })
    }

    /// Takes the device for one call.
    fn enter(&self, op: &'static str) -> (MutexGuard<'_, Machine>, Access) {
        // A panicking kernel leaves unspecified results, not broken state.
        let machine = self.machine.lock().unwrap_or_else(PoisonError::into_inner);
        (machine, Access { op, device: self.device })
    }
}

impl fmt::Debug for CpuOps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CpuOps({})", self.numerics())
    }
}

impl Ops for CpuOps {
    fn device(&self) -> DeviceId {
        self.device
    }

    fn numerics(&self) -> String {
        format!("cpu {} {:?} v{NUMERICS_VERSION}", self.isa, self.dtype).to_lowercase()
    }

    fn alloc(&self, shape: Shape, dtype: DType) -> Result<Tensor> {
        let mapping = Mapping::zeroed(shape.elements() * dtype.bytes())?;
        let (address, len) = (mapping.address(), mapping.len());
        // SAFETY: the mapping lives as long as the buffer owns it, and only `Access`, under the lock, reaches into it.
        let buffer = unsafe { Buffer::new(address, len, self.device, Box::new(mapping)) };
        Tensor::new(Arc::new(buffer), shape, dtype)
    }

    fn load_weight(&self, raw: RawWeight<'_>, role: WeightRole) -> Result<Weight> {
        let (mut machine, _) = self.enter("load_weight");
        let Machine { pool, weights, .. } = &mut *machine;
        let packed = Packed::load(pool, weights, &raw, role, self.dtype)?;
        Ok(Weight::new(raw.shape, role, self.device, packed.n_bytes(), Arc::new(packed)))
    }

    fn upload(&self, _: StreamId, source: &[u8], target: &Tensor) -> Result<()> {
        let (_machine, access) = self.enter("upload");
        let fits = source.len() == target.n_bytes();
        access.shape("target", target, fits, format_args!("{} bytes", source.len()))?;
        // SAFETY: `target` is the only tensor of this call.
        unsafe { access.write_bytes("target", target, &[])? }.copy_from_slice(source);
        Ok(())
    }

    fn read_back(&self, _: StreamId, source: &Tensor, target: &mut [u8]) -> Result<()> {
        let (_machine, access) = self.enter("read_back");
        access.shape("source", source, target.len() == source.n_bytes(), format_args!("{} bytes", target.len()))?;
        target.copy_from_slice(access.read_bytes("source", source)?);
        Ok(())
    }

    fn copy(&self, _: StreamId, source: &Tensor, target: &Tensor) -> Result<()> {
        let (_machine, access) = self.enter("copy");
        let fits = source.n_bytes() == target.n_bytes() && source.dtype() == target.dtype();
        access.shape("target", target, fits, format_args!("{:?} {}", source.dtype(), source.shape()))?;
        let from = access.read_bytes("source", source)?;
        // SAFETY: the other tensor of this call is named.
        unsafe { access.write_bytes("target", target, &[source])? }.copy_from_slice(from);
        Ok(())
    }

    fn record_event(&self, _: StreamId) -> Result<Event> {
        Ok(Event::done())
    }

    fn wait_event(&self, _: StreamId, event: &Event) -> Result<()> {
        event.wait()
    }

    fn embed(&self, _: StreamId, ids: &Tensor, table: &Weight, scale: f32, out: &Tensor) -> Result<()> {
        let (mut machine, access) = self.enter("embed");
        op::embed::run(&mut machine, &access, ids, table, scale, out)
    }

    fn rms_norm(&self, _: StreamId, x: &Tensor, norm: &Norm, out: &Tensor) -> Result<()> {
        let (mut machine, access) = self.enter("rms_norm");
        op::norm::run(&mut machine, &access, x, norm, out)
    }

    fn add_rms_norm(&self, _: StreamId, residual: &Tensor, x: &Tensor, norm: &Norm, out: &Tensor) -> Result<()> {
        let (mut machine, access) = self.enter("add_rms_norm");
        op::norm::run_add(&mut machine, &access, residual, x, norm, out)
    }

    fn head_rms_norm(&self, _: StreamId, x: &Tensor, norm: &Norm) -> Result<()> {
        let (mut machine, access) = self.enter("head_rms_norm");
        op::norm::run_heads(&mut machine, &access, x, norm)
    }

    fn matmul(&self, _: StreamId, x: &Tensor, weight: &Weight, bias: Option<&Weight>, out: &Tensor) -> Result<()> {
        let (mut machine, access) = self.enter("matmul");
        op::matmul::run(&mut machine, &access, x, Linear { weight, bias }, out)
    }

    fn qkv(&self, _: StreamId, step: &StepInputs, x: &Tensor, args: &Qkv<'_>) -> Result<()> {
        let (mut machine, access) = self.enter("qkv");
        op::qkv::run(&mut machine, &access, step, x, args)
    }

    fn feed_forward(&self, _: StreamId, x: &Tensor, args: &FeedForward<'_>, out: &Tensor) -> Result<()> {
        let (mut machine, access) = self.enter("feed_forward");
        op::feed_forward::run(&mut machine, &access, x, args, out)
    }

    fn rope(&self, _: StreamId, x: &Tensor, positions: &Tensor, rope: &RopeTable) -> Result<()> {
        let (mut machine, access) = self.enter("rope");
        op::rope::run(&mut machine, &access, x, positions, rope)
    }

    fn write_kv(&self, _: StreamId, step: &StepInputs, k: &Tensor, v: &Tensor, cache: &LayerCache) -> Result<()> {
        let (mut machine, access) = self.enter("write_kv");
        op::kv::run(&mut machine, &access, step, [k, v], cache)
    }

    fn paged_attention(&self, _: StreamId, step: &StepInputs, args: &Attention<'_>) -> Result<()> {
        let (mut machine, access) = self.enter("paged_attention");
        op::attention::run(&mut machine, &access, step, args)
    }

    fn gated_activation(
        &self,
        _: StreamId,
        activation: Activation,
        gate: &Tensor,
        up: &Tensor,
        out: &Tensor,
    ) -> Result<()> {
        let (mut machine, access) = self.enter("gated_activation");
        op::activation::run(&mut machine, &access, activation, [gate, up, out])
    }

    fn add(&self, _: StreamId, x: &Tensor, y: &Tensor) -> Result<()> {
        let (mut machine, access) = self.enter("add");
        op::elementwise::add(&mut machine, &access, x, y)
    }

    fn scale(&self, _: StreamId, x: &Tensor, factor: f32) -> Result<()> {
        let (mut machine, access) = self.enter("scale");
        op::elementwise::scale(&mut machine, &access, x, factor)
    }

    fn soft_cap(&self, _: StreamId, x: &Tensor, cap: f32) -> Result<()> {
        let (mut machine, access) = self.enter("soft_cap");
        op::elementwise::soft_cap(&mut machine, &access, x, cap)
    }

    fn gather_rows(&self, _: StreamId, x: &Tensor, rows: &Tensor, out: &Tensor) -> Result<()> {
        let (_machine, access) = self.enter("gather_rows");
        op::elementwise::gather_rows(&access, x, rows, out)
    }
}
