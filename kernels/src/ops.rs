//! The closed list of operators that transformers need; model files are written against it once.
//!
//! Every method enqueues on a stream and returns; only [`Event::wait`] and [`Ops::read_back`] block (a CPU executes
//! at once). Arguments are checked when a method is called: a shape, number format or device that the contract does
//! not name is an [`Error`] and nothing is computed. Outputs are handles too, and no output may overlap
//! another argument unless the method works in place and says so. Activations are f32.

use crate::error::{Error, Result};
use crate::step::StepInputs;
use crate::stream::{Event, StreamId};
use crate::tensor::{DType, DeviceId, Shape, Tensor, as_bytes};
use crate::weight::{RawWeight, Weight, WeightRole};

/// Largest rotary table: a million positions of 256 elements.
const ROPE_BYTES_MAX: usize = 1 << 30;
/// Bytes of a rotary table that are computed before they are uploaded.
const ROPE_CHUNK_BYTES: usize = 1 << 18;

/// How pairs of elements are rotated together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RopeStyle {
    /// Element `i` with element `i + rotary / 2` (GPT-NeoX; Hugging Face layout of Llama and most others).
    HalfSplit,
    /// Element `2 i` with element `2 i + 1` (GPT-J; original Llama layout, which GGUF keeps for `llama`).
    Interleaved,
}

/// Cosines and sines of a rotary embedding, made once at load.
#[derive(Clone, Debug)]
pub struct RopeTable {
    table: Tensor,
    style: RopeStyle,
}

impl RopeTable {
    /// Computes `amplitude * cos(position * frequency)` and the same sine, in f32, for positions `0..n_positions`.
    ///
    /// `frequencies` are per pair, `theta^(-2 i / rotary)` with whatever scaling the model has (linear, llama3, yarn)
    /// already in them; `amplitude` is yarn's attention factor, else 1. Rotates the first `2 * frequencies.len()`
    /// elements of a head and leaves the rest.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] when the table takes more than a gibibyte or the device has no room for it.
    pub fn build(
        ops: &dyn Ops,
        frequencies: &[f32],
        amplitude: f32,
        n_positions: usize,
        style: RopeStyle,
    ) -> Result<Self> {
        let (pairs, row_bytes) = (frequencies.len(), size_of_val(frequencies).saturating_mul(2));
        let bytes = n_positions.saturating_mul(row_bytes);
        let shape = Shape::new(&[n_positions, 2, pairs])
            .filter(|_| bytes <= ROPE_BYTES_MAX)
            .ok_or(Error::OutOfMemory { bytes })?;
        let table = ops.alloc(shape, DType::F32)?;
        let rows_max = (ROPE_CHUNK_BYTES / row_bytes.max(1)).max(1);
        let mut values = vec![0.0f32; rows_max.min(n_positions) * 2 * pairs];
        for first in (0..n_positions).step_by(rows_max) {
            let rows = first..n_positions.min(first + rows_max);
            let values = &mut values[..rows.len() * 2 * pairs];
            for (position, row) in rows.clone().zip(values.chunks_exact_mut((2 * pairs).max(1))) {
                let (cos, sin) = row.split_at_mut(pairs);
                for ((cos, sin), frequency) in cos.iter_mut().zip(sin).zip(frequencies) {
                    let (s, c) = (position as f32 * frequency).sin_cos();
                    (*cos, *sin) = (c * amplitude, s * amplitude);
                }
            }
            ops.upload(StreamId::MAIN, as_bytes(values), &table.rows(rows)?)?;
        }
        Ok(Self { table, style })
    }

    /// The values: `[positions, 2, rotary / 2]` f32, cosines then sines.
    pub fn table(&self) -> &Tensor {
        &self.table
    }

    /// Which elements form a pair.
    pub fn style(&self) -> RopeStyle {
        self.style
    }
}

/// Root-mean-square norm: `x / sqrt(mean(x^2) + epsilon) * weight`.
#[derive(Clone, Debug)]
pub struct Norm {
    /// `[hidden]`, loaded as [`WeightRole::Vector`].
    pub weight: Weight,
    /// Added to the mean of squares.
    pub epsilon: f32,
}

/// A weight and its bias: `x W^T + bias`.
#[derive(Clone, Copy, Debug)]
pub struct Linear<'a> {
    /// `[out, in]` matrix or embedding.
    pub weight: &'a Weight,
    /// `[out]` vector.
    pub bias: Option<&'a Weight>,
}

/// Arguments of [`Ops::qkv`].
#[derive(Clone, Copy, Debug)]
pub struct Qkv<'a> {
    /// Projection of queries, `[heads * dim, in]`.
    pub query: Linear<'a>,
    /// Projection of keys, `[kv_heads * dim, in]`.
    pub key: Linear<'a>,
    /// Projection of values, `[kv_heads * value_dim, in]`.
    pub value: Linear<'a>,
    /// Norm of each query head.
    pub query_norm: Option<&'a Norm>,
    /// Norm of each key head.
    pub key_norm: Option<&'a Norm>,
    /// Rotation of queries and keys.
    pub rope: &'a RopeTable,
    /// `[tokens]` u32.
    pub positions: &'a Tensor,
    /// Where keys and values go.
    pub cache: &'a LayerCache,
    /// `[tokens, heads, dim]` f32: the rotated queries.
    pub query_out: &'a Tensor,
    /// `[tokens, kv_heads, dim]` f32, scratch.
    pub key_scratch: &'a Tensor,
    /// `[tokens, kv_heads, value_dim]` f32, scratch.
    pub value_scratch: &'a Tensor,
}

/// Arguments of [`Ops::feed_forward`].
#[derive(Clone, Copy, Debug)]
pub struct FeedForward<'a> {
    /// What goes through the activation, `[intermediate, in]`.
    pub gate: Linear<'a>,
    /// What the activation multiplies, `[intermediate, in]`.
    pub up: Linear<'a>,
    /// Back to the width of the residual stream, `[out, intermediate]`.
    pub down: Linear<'a>,
    /// Nonlinearity of the gate.
    pub activation: Activation,
    /// `[.., intermediate]` f32, scratch.
    pub gated: &'a Tensor,
}

/// Nonlinearity of a gated feed-forward layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activation {
    /// `x / (1 + exp(-x))` (SwiGLU).
    Silu,
    /// `0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))` (GeGLU as gemma has it).
    GeluTanh,
}

/// One layer's keys and values in the block pool.
///
/// On a CPU a block is `[kv_heads, block, dim]`, and where an element of a head's run lies in it is the operators' own
/// affair; cache formats are f32, bf16, f16, and int8 (`i8`) with an f32 scale for each row.
#[derive(Clone, Debug)]
pub struct LayerCache {
    /// `[n_blocks, kv_heads, block, key_dim]`; `key_dim + 4` for int8.
    pub keys: Tensor,
    /// `[n_blocks, kv_heads, block, value_dim]`; `value_dim + 4` for int8.
    pub values: Tensor,
}

/// Arguments of [`Ops::paged_attention`].
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    /// `[tokens, heads, key_dim]` f32, one row for each query token of the step.
    pub query: &'a Tensor,
    /// The layer's cache, into which `write_kv` has put this step's keys and values.
    pub cache: &'a LayerCache,
    /// Factor of the scores, `1 / sqrt(key_dim)` in most models.
    pub scale: f32,
    /// Positions that a query sees, itself included; `None` sees all before it.
    pub window: Option<u32>,
    /// `cap * tanh(score / cap)` after scaling.
    pub soft_cap: Option<f32>,
    /// `[tokens, heads, value_dim]` f32.
    pub out: &'a Tensor,
}

/// The operators. See the [module documentation](self) for what holds for all of them.
///
/// Dimension names: `tokens` query tokens of a step over all sequences, `hidden` width of the residual stream.
pub trait Ops: Send + Sync {
    /// This instance; it refuses tensors and weights of others.
    fn device(&self) -> DeviceId;

    /// Device, instruction set, formats and version in one line: part of the numerics fingerprint, equal results when
    /// equal.
    fn numerics(&self) -> String;

    /// Allocates zeroed memory, aligned for the device and committed when it is touched.
    fn alloc(&self, shape: Shape, dtype: DType) -> Result<Tensor>;

    /// Brings a weight into the form that this device computes with.
    ///
    /// # Shapes
    /// Matrix and embedding: two dimensions. Vector: one.
    fn load_weight(&self, raw: RawWeight<'_>, role: WeightRole) -> Result<Weight>;

    /// Copies host bytes (machine order, exactly `target.n_bytes()`) to the device; `source` is free on return.
    fn upload(&self, stream: StreamId, source: &[u8], target: &Tensor) -> Result<()>;

    /// Waits for the stream, then copies a tensor's bytes to the host; `target` is exactly `source.n_bytes()` long.
    fn read_back(&self, stream: StreamId, source: &Tensor, target: &mut [u8]) -> Result<()>;

    /// `target = source`: equal byte counts and number formats.
    fn copy(&self, stream: StreamId, source: &Tensor, target: &Tensor) -> Result<()>;

    /// Marks the present end of a stream.
    fn record_event(&self, stream: StreamId) -> Result<Event>;

    /// Lets a stream go on only when the event has happened.
    fn wait_event(&self, stream: StreamId, event: &Event) -> Result<()>;

    /// `out[t] = scale * table[ids[t]]`.
    ///
    /// # Shapes
    /// `ids: [tokens]` u32, `table: [vocab, hidden]` embedding, `out: [tokens, hidden]` f32.
    fn embed(&self, stream: StreamId, ids: &Tensor, table: &Weight, scale: f32, out: &Tensor) -> Result<()>;

    /// `out = norm(x)` for each row.
    ///
    /// # Shapes
    /// `x, out: [.., hidden]` f32.
    fn rms_norm(&self, stream: StreamId, x: &Tensor, norm: &Norm, out: &Tensor) -> Result<()>;

    /// `residual += x`, then `out = norm(residual)` for each row.
    ///
    /// # Shapes
    /// `residual, x, out: [.., hidden]` f32; `residual` is changed in place.
    fn add_rms_norm(&self, stream: StreamId, residual: &Tensor, x: &Tensor, norm: &Norm, out: &Tensor) -> Result<()>;

    /// `x = norm(x)` for each head, in place (queries and keys of qwen3, gemma3).
    ///
    /// # Shapes
    /// `x: [tokens, heads, dim]` f32, norm weight `[dim]`.
    fn head_rms_norm(&self, stream: StreamId, x: &Tensor, norm: &Norm) -> Result<()>;

    /// `out = x W^T + bias`, accumulated in f32 in one order per output element whatever the number of rows.
    ///
    /// # Shapes
    /// `x: [.., in]` f32, `weight: [out, in]` matrix or embedding, `bias: [out]` vector, `out: [.., out]` f32 with
    /// as many rows as `x`. The output head is this on gathered rows.
    fn matmul(&self, stream: StreamId, x: &Tensor, weight: &Weight, bias: Option<&Weight>, out: &Tensor) -> Result<()>;

    /// Queries, keys and values of a step: projections, norms of heads, rotation, and keys and values into the cache; bit
    /// for bit what [`matmul`](Ops::matmul), [`head_rms_norm`](Ops::head_rms_norm), [`rope`](Ops::rope) and
    /// [`write_kv`](Ops::write_kv) make of them.
    ///
    /// # Shapes
    /// `x: [tokens, in]` f32; see [`Qkv`].
    fn qkv(&self, stream: StreamId, step: &StepInputs, x: &Tensor, args: &Qkv<'_>) -> Result<()>;

    /// `out = (activation(x G^T + g) * (x U^T + u)) D^T + d`, bit for bit what [`matmul`](Ops::matmul) and
    /// [`gated_activation`](Ops::gated_activation) make of it.
    ///
    /// # Shapes
    /// `x: [.., in]` f32, `out: [.., out]` f32; see [`FeedForward`].
    fn feed_forward(&self, stream: StreamId, x: &Tensor, args: &FeedForward<'_>, out: &Tensor) -> Result<()>;

    /// Rotates queries or keys by their position, in place.
    ///
    /// # Shapes
    /// `x: [tokens, heads, dim]` f32, `positions: [tokens]` u32 below the table's, `dim` at least the rotary size.
    fn rope(&self, stream: StreamId, x: &Tensor, positions: &Tensor, rope: &RopeTable) -> Result<()>;

    /// Writes this step's keys and values, rounded to the cache's format, into the slots of `step`.
    ///
    /// # Shapes
    /// `k: [tokens, kv_heads, key_dim]`, `v: [tokens, kv_heads, value_dim]` f32.
    fn write_kv(&self, stream: StreamId, step: &StepInputs, k: &Tensor, v: &Tensor, cache: &LayerCache) -> Result<()>;

    /// Causal grouped-query attention over the paged cache, for prefill chunks and decode rows in one call.
    ///
    /// Query head `h` reads kv head `h * kv_heads / heads`. A query at position `p` sees cache positions `0..=p` of its
    /// own sequence (the last `window` of them), read through its block table in the cache's format, with online
    /// softmax in f32 over tiles anchored at absolute positions: results do not depend on chunking or neighbours.
    fn paged_attention(&self, stream: StreamId, step: &StepInputs, args: &Attention<'_>) -> Result<()>;

    /// `out = activation(gate) * up`.
    ///
    /// # Shapes
    /// `gate, up, out`: equal, f32.
    fn gated_activation(
        &self,
        stream: StreamId,
        activation: Activation,
        gate: &Tensor,
        up: &Tensor,
        out: &Tensor,
    ) -> Result<()>;

    /// `x += y`, in place. Equal shapes, f32.
    fn add(&self, stream: StreamId, x: &Tensor, y: &Tensor) -> Result<()>;

    /// `x *= factor`, in place. f32.
    fn scale(&self, stream: StreamId, x: &Tensor, factor: f32) -> Result<()>;

    /// `x = cap * tanh(x / cap)`, in place (final logits of gemma2). f32.
    fn soft_cap(&self, stream: StreamId, x: &Tensor, cap: f32) -> Result<()>;

    /// `out[i] = x[rows[i]]`.
    ///
    /// # Shapes
    /// `x: [tokens, hidden]` f32, `rows: [n]` u32, `out: [n, hidden]` f32.
    fn gather_rows(&self, stream: StreamId, x: &Tensor, rows: &Tensor, out: &Tensor) -> Result<()>;
}
