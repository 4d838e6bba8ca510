//! Weights as the CPU computes with them: panels of 32 output columns, and plain vectors.

use crate::cpu::access::Shared;
use crate::cpu::pool::Pool;
use crate::cpu::table::PANEL;
use crate::error::{Error, Result};
use crate::memory::Mapping;
use crate::quant;
use crate::weight::{RawWeight, WeightRole};

/// Most times its own size that a padded matrix may take, which all of eight rows and more stay below.
const PADDING_FACTOR_MAX: usize = 4;
/// Bytes below which padding does not matter: mappings are whole pages anyway.
const PADDED_BYTES_FREE: usize = 16 << 10;

/// Number format of packed matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum ComputeDtype {
    /// Rounded to bf16 when loaded; computed with f32 activations and f32 accumulation.
    #[default]
    Bf16,
    /// Kept or widened to f32.
    F32,
}

/// What a [`crate::Weight`] of the CPU holds.
pub(crate) enum Packed {
    Matrix(Panels),
    Vector(Vec<f32>),
}

/// A matrix `[out, in]` as `[ceil(out / 32), in, 32]`: row `o` is column `o % 32` of panel `o / 32`.
///
/// A kernel streams a panel once, front to back, and has 32 results per row of `x`. Missing rows of the last panel are 0.
pub(crate) struct Panels {
    storage: Mapping,
    dtype: ComputeDtype,
    pub(crate) n_out: usize,
    pub(crate) n_in: usize,
}

/// The elements of one or more panels.
pub(crate) enum PanelData<'a> {
    Bf16(&'a [u16]),
    F32(&'a [f32]),
}

impl Packed {
    /// Packs a raw weight for its role.
    pub(crate) fn load(pool: &mut Pool, raw: &RawWeight<'_>, role: WeightRole, dtype: ComputeDtype) -> Result<Self> {
        raw.check()?;
        let dims = raw.shape.dims();
        match (role, dims) {
            (WeightRole::Vector { offset }, &[n]) => {
                let mut values = vec![0.0; n];
                quant::dequantize(raw.format, raw.bytes, &mut values)?;
                values.iter_mut().for_each(|value| *value += offset);
                Ok(Self::Vector(values))
            }
            (WeightRole::Matrix | WeightRole::Embedding, &[n_out, n_in]) if n_in > 0 => {
                Ok(Self::Matrix(Panels::pack(pool, raw, [n_out, n_in], dtype)?))
            }
            _ => {
                let expected = if matches!(role, WeightRole::Vector { .. }) { "[n]" } else { "[out, in]" };
                let expected = format!("{expected} for {}", role.name());
                Err(Error::Shape { op: "load_weight", tensor: "raw", expected, actual: raw.shape })
            }
        }
    }

    pub(crate) fn n_bytes(&self) -> usize {
        match self {
            Self::Matrix(panels) => panels.storage.len(),
            Self::Vector(values) => size_of_val(values.as_slice()),
        }
    }
}

impl Panels {
    fn pack(pool: &mut Pool, raw: &RawWeight<'_>, [n_out, n_in]: [usize; 2], dtype: ComputeDtype) -> Result<Self> {
        let n_panels = n_out.div_ceil(PANEL);
        let element_bytes = if dtype == ComputeDtype::Bf16 { 2 } else { 4 };
        let panel_bytes = n_in.saturating_mul(PANEL * element_bytes);
        let padded = n_panels.saturating_mul(panel_bytes);
        let own = n_out.saturating_mul(n_in).saturating_mul(element_bytes);
        if padded > PADDED_BYTES_FREE && padded > own.saturating_mul(PADDING_FACTOR_MAX) {
            return Err(Error::WeightPadding { shape: raw.shape, own, padded, factor_max: PADDING_FACTOR_MAX });
        }
        let mut storage = Mapping::zeroed(padded)?;
        let row_bytes = raw.format.row_bytes(n_in)?;
        let target = Shared::new(storage.as_mut_slice());
        pool.run(n_panels, &|_, panel| {
            // SAFETY: each panel is one chunk and has its own bytes.
            let bytes = unsafe { target.part(panel * panel_bytes, panel_bytes) };
            let rows = panel * PANEL..((panel + 1) * PANEL).min(n_out);
            let mut row = vec![0.0f32; n_in];
            for (column, source) in
                raw.bytes[rows.start * row_bytes..rows.end * row_bytes].chunks_exact(row_bytes).enumerate()
            {
                quant::dequantize(raw.format, source, &mut row).expect("checked: rows are whole blocks");
                match dtype {
                    ComputeDtype::Bf16 => scatter(&row, bytes, column, |x| half::bf16::from_f32(x).to_ne_bytes()),
                    ComputeDtype::F32 => scatter(&row, bytes, column, f32::to_ne_bytes),
                }
            }
        });
        Ok(Self { storage, dtype, n_out, n_in })
    }

    /// Number of panels.
    pub(crate) fn n_panels(&self) -> usize {
        self.n_out.div_ceil(PANEL)
    }

    /// Elements of one panel, `[in, 32]`.
    pub(crate) fn panel(&self, panel: usize) -> PanelData<'_> {
        let elements = self.n_in * PANEL;
        match self.dtype {
            ComputeDtype::Bf16 => PanelData::Bf16(&self.elements::<u16>()[panel * elements..(panel + 1) * elements]),
            ComputeDtype::F32 => PanelData::F32(&self.elements::<f32>()[panel * elements..(panel + 1) * elements]),
        }
    }

    fn elements<T: Copy>(&self) -> &[T] {
        let bytes = self.storage.as_slice();
        // SAFETY: a mapping is page aligned and initialised, T is u16 or f32 (any bits are valid), and nothing writes
        // after `pack`.
        unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), bytes.len() / size_of::<T>()) }
    }
}

fn scatter<const N: usize>(row: &[f32], panel: &mut [u8], column: usize, convert: impl Fn(f32) -> [u8; N]) {
    for (line, &value) in panel.chunks_exact_mut(PANEL * N).zip(row) {
        line[column * N..(column + 1) * N].copy_from_slice(&convert(value));
    }
}
