//! Operators with a planted defect, to show that the checks find what they look for.

use std::sync::Arc;

use kernels::tensor::{as_bytes, as_bytes_mut};
use kernels::{
    Activation, Attention, DType, DeviceId, Event, FeedForward, LayerCache, Norm, Ops, Qkv, RawWeight, Result,
    RopeTable, Shape, StepInputs, StreamId, Tensor, Weight, WeightRole,
};

/// What is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Defect {
    /// Products of more than this many rows are summed in two halves.
    RowsAbove(usize),
    /// Products are summed in two halves on this many threads.
    Threads(usize),
    /// Keys of a sequence's later chunks are rounded once more, as if they had come from elsewhere.
    LaterChunks,
    /// The last bit of attention's results is another one in steps of more than one sequence.
    LastBitInCompany,
}

/// A device that computes as another one does, but for the defect.
pub struct Defective {
    inner: Arc<dyn Ops>,
    threads: usize,
    defect: Defect,
}

impl Defective {
    /// Plants a defect into a device with that many threads.
    pub fn new(inner: Arc<dyn Ops>, threads: usize, defect: Defect) -> Self {
        Self { inner, threads, defect }
    }

    fn sums_halves(&self, rows: usize) -> bool {
        match self.defect {
            Defect::RowsAbove(most) => rows > most,
            Defect::Threads(threads) => self.threads == threads,
            Defect::LaterChunks | Defect::LastBitInCompany => false,
        }
    }

    fn values(&self, stream: StreamId, tensor: &Tensor) -> Result<Vec<f32>> {
        let mut values = vec![0.0; tensor.shape().elements()];
        self.inner.read_back(stream, tensor, as_bytes_mut(&mut values))?;
        Ok(values)
    }

    /// `x` without the columns that `keep` refuses.
    fn masked(&self, stream: StreamId, x: &Tensor, keep: impl Fn(usize) -> bool) -> Result<Tensor> {
        let mut values = self.values(stream, x)?;
        let columns = x.shape().columns();
        values.iter_mut().enumerate().filter(|(index, _)| !keep(index % columns)).for_each(|(_, value)| *value = 0.0);
        let masked = self.inner.alloc(x.shape(), DType::F32)?;
        self.inner.upload(stream, as_bytes(&values), &masked)?;
        Ok(masked)
    }
}

impl Ops for Defective {
    fn matmul(&self, stream: StreamId, x: &Tensor, weight: &Weight, bias: Option<&Weight>, out: &Tensor) -> Result<()> {
        let (rows, half) = (x.shape().rows(), x.shape().columns() / 2);
        if !self.sums_halves(rows) {
            return self.inner.matmul(stream, x, weight, bias, out);
        }
        let (first, second) =
            (self.masked(stream, x, |column| column < half)?, self.masked(stream, x, |column| column >= half)?);
        let rest = self.inner.alloc(out.shape(), DType::F32)?;
        self.inner.matmul(stream, &first, weight, bias, out)?;
        self.inner.matmul(stream, &second, weight, None, &rest)?;
        self.inner.add(stream, out, &rest)
    }

    /// In parts, so that defects of the parts show.
    fn qkv(&self, stream: StreamId, step: &StepInputs, x: &Tensor, args: &Qkv<'_>) -> Result<()> {
        let parts = [(args.query, args.query_out), (args.key, args.key_scratch), (args.value, args.value_scratch)];
        for (linear, out) in parts {
            let dims = out.dims();
            self.matmul(stream, x, linear.weight, linear.bias, &out.view([dims[0], dims[1] * dims[2]])?)?;
        }
        for (tensor, norm) in [(args.query_out, args.query_norm), (args.key_scratch, args.key_norm)] {
            if let Some(norm) = norm {
                self.head_rms_norm(stream, tensor, norm)?;
            }
            self.rope(stream, tensor, args.positions, args.rope)?;
        }
        self.write_kv(stream, step, args.key_scratch, args.value_scratch, args.cache)
    }

    /// In parts, so that defects of the parts show.
    fn feed_forward(&self, stream: StreamId, x: &Tensor, args: &FeedForward<'_>, out: &Tensor) -> Result<()> {
        let FeedForward { gate, up, down, activation, gated } = *args;
        let (g, u) = (self.inner.alloc(gated.shape(), DType::F32)?, self.inner.alloc(gated.shape(), DType::F32)?);
        self.matmul(stream, x, gate.weight, gate.bias, &g)?;
        self.matmul(stream, x, up.weight, up.bias, &u)?;
        self.gated_activation(stream, activation, &g, &u, gated)?;
        self.matmul(stream, gated, down.weight, down.bias, out)
    }

    fn write_kv(&self, stream: StreamId, step: &StepInputs, k: &Tensor, v: &Tensor, cache: &LayerCache) -> Result<()> {
        if self.defect == Defect::LaterChunks {
            let (host, mut values) = (step.host(), self.values(stream, k)?);
            let row = k.shape().elements() / host.token_ids.len().max(1);
            for sequence in 0..host.n_sequences() {
                let rows = host.query_rows(sequence);
                if !rows.is_empty() && host.positions[rows.start] > 0 {
                    let later = &mut values[rows.start * row..rows.end * row];
                    later.iter_mut().for_each(|value| *value = (*value * 16.0).round() / 16.0);
                }
            }
            self.inner.upload(stream, as_bytes(&values), k)?;
        }
        self.inner.write_kv(stream, step, k, v, cache)
    }

    fn paged_attention(&self, stream: StreamId, step: &StepInputs, args: &Attention<'_>) -> Result<()> {
        self.inner.paged_attention(stream, step, args)?;
        if self.defect != Defect::LastBitInCompany || step.host().n_sequences() < 2 {
            return Ok(());
        }
        let mut values = self.values(stream, args.out)?;
        values.iter_mut().for_each(|value| *value = f32::from_bits(value.to_bits() ^ 1));
        self.inner.upload(stream, as_bytes(&values), args.out)
    }

    fn device(&self) -> DeviceId {
        self.inner.device()
    }

    fn numerics(&self) -> String {
        self.inner.numerics()
    }

    fn alloc(&self, shape: Shape, dtype: DType) -> Result<Tensor> {
        self.inner.alloc(shape, dtype)
    }

    fn load_weight(&self, raw: RawWeight<'_>, role: WeightRole) -> Result<Weight> {
        self.inner.load_weight(raw, role)
    }

    fn upload(&self, stream: StreamId, source: &[u8], target: &Tensor) -> Result<()> {
        self.inner.upload(stream, source, target)
    }

    fn read_back(&self, stream: StreamId, source: &Tensor, target: &mut [u8]) -> Result<()> {
        self.inner.read_back(stream, source, target)
    }

    fn copy(&self, stream: StreamId, source: &Tensor, target: &Tensor) -> Result<()> {
        self.inner.copy(stream, source, target)
    }

    fn record_event(&self, stream: StreamId) -> Result<Event> {
        self.inner.record_event(stream)
    }

    fn wait_event(&self, stream: StreamId, event: &Event) -> Result<()> {
        self.inner.wait_event(stream, event)
    }

    fn embed(&self, stream: StreamId, ids: &Tensor, table: &Weight, scale: f32, out: &Tensor) -> Result<()> {
        self.inner.embed(stream, ids, table, scale, out)
    }

    fn rms_norm(&self, stream: StreamId, x: &Tensor, norm: &Norm, out: &Tensor) -> Result<()> {
        self.inner.rms_norm(stream, x, norm, out)
    }

    fn add_rms_norm(&self, stream: StreamId, residual: &Tensor, x: &Tensor, norm: &Norm, out: &Tensor) -> Result<()> {
        self.inner.add_rms_norm(stream, residual, x, norm, out)
    }

    fn head_rms_norm(&self, stream: StreamId, x: &Tensor, norm: &Norm) -> Result<()> {
        self.inner.head_rms_norm(stream, x, norm)
    }

    fn rope(&self, stream: StreamId, x: &Tensor, positions: &Tensor, rope: &RopeTable) -> Result<()> {
        self.inner.rope(stream, x, positions, rope)
    }

    fn gated_activation(
        &self,
        stream: StreamId,
        activation: Activation,
        gate: &Tensor,
        up: &Tensor,
        out: &Tensor,
    ) -> Result<()> {
        self.inner.gated_activation(stream, activation, gate, up, out)
    }

    fn add(&self, stream: StreamId, x: &Tensor, y: &Tensor) -> Result<()> {
        self.inner.add(stream, x, y)
    }

    fn scale(&self, stream: StreamId, x: &Tensor, factor: f32) -> Result<()> {
        self.inner.scale(stream, x, factor)
    }

    fn soft_cap(&self, stream: StreamId, x: &Tensor, cap: f32) -> Result<()> {
        self.inner.soft_cap(stream, x, cap)
    }

    fn gather_rows(&self, stream: StreamId, x: &Tensor, rows: &Tensor, out: &Tensor) -> Result<()> {
        self.inner.gather_rows(stream, x, rows, out)
    }
}
