//! Matrices as the CPU computes with them: panels of 32 output columns that a kernel streams front to back.
//!
//! A panel is two strips of 16 columns, over the inputs in groups. `[..]` is a strip's part of a group:
//!
//! | layout | group | strip's part of a group |
//! |---|---|---|
//! | bf16 | 32 inputs | `[16 pairs][16 columns][2]` u16: what one AMX tile or sixteen AVX-512 registers hold |
//! | int8 | 64 inputs | `[16 quads][16 columns][4]` i8; after the last group `[32]` i32 sums of columns, `[32]` f32 scales |
//! | quantised | 32 inputs | scales and codes, see [`crate::cpu::grouped`] |
//! | f32, f16 | 1 input | `[32]` over both strips; f16 is computed as f32 |
//!
//! Missing columns of the last panel and missing inputs of the last group are 0.

use std::sync::Arc;

use half::f16;

use crate::cpu::access::Shared;
use crate::cpu::dot::{to_bf16, to_f32};
use crate::cpu::grouped::Grouping;
use crate::cpu::packing::pack_panel;
use crate::cpu::pool::Pool;
use crate::cpu::weight_memory::{Region, WeightMemory};
use crate::error::{Error, Result};
use crate::quant;
use crate::weight::{RawWeight, WeightFormat, WeightRole};

/// Output columns of a panel.
pub(crate) const PANEL: usize = 32;
/// Output columns of a strip: lanes of an AVX-512 register, columns of an AMX tile.
pub(crate) const STRIP: usize = 16;
/// Inputs of a bf16 or quantised group.
pub(crate) const GROUP: usize = 32;
/// Inputs of an int8 group.
pub(crate) const GROUP_INT8: usize = 64;
/// Most inputs of an int8 matrix: products of u8 and i8 summed in 32 bits.
const INT8_INPUTS_MAX: usize = 1 << 16;
/// Most times its own size that a padded matrix may take, which all of eight rows and more stay below.
const PADDING_FACTOR_MAX: usize = 4;
/// Bytes below which padding does not matter: mappings are whole pages anyway.
const PADDED_BYTES_FREE: usize = 16 << 10;

/// What matrices are computed as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum ComputeDtype {
    /// The format they are stored in: bf16 with activations rounded to bf16, f32 and f16 with f32 activations. Quantised
    /// formats stay quantised in memory and become bf16 in the cache as they are multiplied, to the same bits as
    /// [`Bf16`](Self::Bf16). Sums in f32.
    #[default]
    Stored,
    /// Rounded to bf16 when loaded; activations rounded to bf16, sums in f32.
    Bf16,
    /// Widened to f32 when loaded; f32 activations and sums.
    F32,
    /// Products of 8 bits. Plain formats are rounded to 8 bits when loaded with a scale for each output, activations with
    /// a scale for each row; quantised formats stay as they are, with activations rounded to 8 bits in groups of 32.
    Int8,
}

/// Layout of a matrix, by the table in the [module documentation](self).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    Bf16,
    F16,
    F32,
    Int8,
    Grouped(Grouping),
}

/// What a matrix's kernel takes activations as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Input {
    F32,
    Bf16,
    /// 8 bits with a scale for each row.
    Int8,
    /// 8 bits with a scale for each group of 32.
    Int8Groups,
}

/// What a [`crate::Weight`] of the CPU holds.
pub(crate) enum Packed {
    Matrix(Panels),
    Vector(Vec<f32>),
}

/// A matrix `[out, in]`: row `o` is column `o % 32` of panel `o / 32`.
pub(crate) struct Panels {
    storage: Arc<Region>,
    panel_bytes: usize,
    pub(crate) layout: Layout,
    pub(crate) input: Input,
    pub(crate) n_out: usize,
    pub(crate) n_in: usize,
}

impl Packed {
    /// Packs a raw weight for its role, or takes the copy that an earlier start has packed.
    pub(crate) fn load(
        pool: &mut Pool,
        memory: &mut WeightMemory,
        raw: &RawWeight<'_>,
        role: WeightRole,
        dtype: ComputeDtype,
    ) -> Result<Self> {
        raw.check()?;
        match (role, raw.shape.dims()) {
            (WeightRole::Vector { offset }, &[n]) => {
                let mut values = vec![0.0; n];
                quant::dequantize(raw.format, raw.bytes, &mut values)?;
                values.iter_mut().for_each(|value| *value += offset);
                Ok(Self::Vector(values))
            }
            (WeightRole::Matrix | WeightRole::Embedding, &[n_out, n_in]) if n_in > 0 => {
                Ok(Self::Matrix(Panels::load(pool, memory, raw, [n_out, n_in], dtype)?))
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

impl Layout {
    fn of(dtype: ComputeDtype, format: WeightFormat) -> Self {
        match (dtype, Grouping::of(format)) {
            (ComputeDtype::Bf16, _) => Self::Bf16,
            (ComputeDtype::F32, _) => Self::F32,
            (ComputeDtype::Stored | ComputeDtype::Int8, Some(grouping)) => Self::Grouped(grouping),
            (ComputeDtype::Int8, None) => Self::Int8,
            (ComputeDtype::Stored, None) => match format {
                WeightFormat::F16 => Self::F16,
                WeightFormat::F32 => Self::F32,
                _ => Self::Bf16,
            },
        }
    }

    fn input(self, dtype: ComputeDtype) -> Input {
        match self {
            Self::F16 | Self::F32 => Input::F32,
            Self::Int8 => Input::Int8,
            Self::Grouped(_) if dtype == ComputeDtype::Int8 => Input::Int8Groups,
            Self::Grouped(_) | Self::Bf16 => Input::Bf16,
        }
    }

    /// Inputs of a group.
    pub(crate) fn group(self) -> usize {
        match self {
            Self::Bf16 | Self::Grouped(_) => GROUP,
            Self::Int8 => GROUP_INT8,
            Self::F16 | Self::F32 => 1,
        }
    }

    /// Bytes of a panel.
    fn panel_bytes(self, n_in: usize) -> usize {
        let inputs = n_in.next_multiple_of(self.group());
        match self {
            Self::Bf16 | Self::F16 => inputs.saturating_mul(PANEL * 2),
            Self::F32 => inputs.saturating_mul(PANEL * 4),
            Self::Int8 => inputs.saturating_mul(PANEL).saturating_add(PANEL * 8),
            Self::Grouped(grouping) => grouping.panel_bytes(inputs / GROUP),
        }
    }
}

impl Panels {
    fn load(
        pool: &mut Pool,
        memory: &mut WeightMemory,
        raw: &RawWeight<'_>,
        [n_out, n_in]: [usize; 2],
        dtype: ComputeDtype,
    ) -> Result<Self> {
        let layout = Layout::of(dtype, raw.format);
        if layout == Layout::Int8 && n_in > INT8_INPUTS_MAX {
            let what = format!("int8 weights with {n_in} inputs (at most {INT8_INPUTS_MAX})");
            return Err(Error::Unsupported { op: "load_weight", what });
        }
        let (n_panels, panel_bytes) = (n_out.div_ceil(PANEL), layout.panel_bytes(n_in));
        let padded = n_panels.saturating_mul(panel_bytes);
        let own = padded / (n_panels * PANEL).max(1) * n_out;
        if padded > PADDED_BYTES_FREE && padded > own.saturating_mul(PADDING_FACTOR_MAX) {
            return Err(Error::WeightPadding { shape: raw.shape, own, padded, factor_max: PADDING_FACTOR_MAX });
        }
        let storage = match memory.kept(raw, layout, padded) {
            Some(storage) => storage,
            None => {
                let mut storage = memory.take(padded)?;
                let target = Shared::new(storage.as_mut_slice());
                pool.run(n_panels, &|_, panel| {
                    // SAFETY: each panel is one chunk and has its own bytes.
                    let bytes = unsafe { target.part(panel * panel_bytes, panel_bytes) };
                    let rows = panel * PANEL..((panel + 1) * PANEL).min(n_out);
                    pack_panel(layout, raw, rows, n_in, bytes);
                });
                memory.share(raw, layout, storage)
            }
        };
        Ok(Self { storage, panel_bytes, layout, input: layout.input(dtype), n_out, n_in })
    }

    /// Number of panels.
    pub(crate) fn n_panels(&self) -> usize {
        self.n_out.div_ceil(PANEL)
    }

    /// Inputs with those that fill the last group.
    pub(crate) fn padded_inputs(&self) -> usize {
        self.n_in.next_multiple_of(self.layout.group())
    }

    /// A panel's bytes.
    pub(crate) fn panel(&self, panel: usize) -> &[u8] {
        &self.storage.as_slice()[panel * self.panel_bytes..][..self.panel_bytes]
    }

    /// Sums of the columns of an int8 panel, and their scales.
    pub(crate) fn int8_tail<'a>(&self, panel: &'a [u8]) -> (&'a [i32], &'a [f32]) {
        let (sums, scales) = panel[panel.len() - 8 * PANEL..].split_at(4 * PANEL);
        (elements(sums), elements(scales))
    }

    /// Values of one row of the matrix, as they are computed with.
    pub(crate) fn row(&self, row: usize, out: &mut [f32]) {
        let (panel, column) = (self.panel(row / PANEL), row % PANEL);
        let pairs = |group: usize, inner: usize| {
            move |input: usize| {
                let (strip, within) = (column / STRIP, input % group);
                (input / group * 2 + strip) * STRIP * group
                    + within / inner * STRIP * inner
                    + column % STRIP * inner
                    + within % inner
            }
        };
        match self.layout {
            Layout::F32 => pick(elements::<f32>(panel), |input| input * PANEL + column, out, |value| value),
            Layout::F16 => {
                pick(elements(panel), |input| input * PANEL + column, out, |bits| f16::from_bits(bits).to_f32())
            }
            Layout::Bf16 => pick(elements::<u16>(panel), pairs(GROUP, 2), out, to_f32),
            Layout::Int8 => {
                let scale = self.int8_tail(panel).1[column];
                pick(elements::<i8>(panel), pairs(GROUP_INT8, 4), out, |code| f32::from(code) * scale);
            }
            Layout::Grouped(grouping) => {
                grouping.column(panel, column, out);
                if self.input == Input::Bf16 {
                    out.iter_mut().for_each(|value| *value = to_f32(to_bf16(*value)));
                }
            }
        }
    }
}

fn pick<T: Copy>(panel: &[T], place: impl Fn(usize) -> usize, out: &mut [f32], widen: impl Fn(T) -> f32) {
    out.iter_mut().enumerate().for_each(|(input, out)| *out = widen(panel[place(input)]));
}

/// Elements of a panel's bytes.
pub(crate) fn elements<T: plain::Plain>(bytes: &[u8]) -> &[T] {
    assert!(bytes.as_ptr().cast::<T>().is_aligned() && bytes.len().is_multiple_of(size_of::<T>()), "whole elements");
    // SAFETY: aligned and whole as asserted, and any bits are a value of a plain number.
    unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), bytes.len() / size_of::<T>()) }
}

/// Elements of a panel's bytes, to be written.
pub(crate) fn elements_mut<T: plain::Plain>(bytes: &mut [u8]) -> &mut [T] {
    assert!(bytes.as_ptr().cast::<T>().is_aligned() && bytes.len().is_multiple_of(size_of::<T>()), "whole elements");
    // SAFETY: aligned and whole as asserted, any bits are a value of a plain number, and it has no padding.
    unsafe { std::slice::from_raw_parts_mut(bytes.as_mut_ptr().cast(), bytes.len() / size_of::<T>()) }
}

pub(crate) mod plain {
    /// Numbers of which any bits are a value.
    pub(crate) trait Plain: Copy {}
    impl Plain for u8 {}
    impl Plain for i8 {}
    impl Plain for u16 {}
    impl Plain for u32 {}
    impl Plain for i32 {}
    impl Plain for f32 {}
}
