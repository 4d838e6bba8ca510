//! The functions that differ between instruction sets, chosen once when the device is made.

use crate::cpu::{Isa, scalar};
use crate::error::Result;
use crate::ops::Activation;

/// Output columns of a weight panel: two AVX-512 registers.
pub(crate) const PANEL: usize = 32;
/// Most rows of one matrix tile.
pub(crate) const TILE_ROWS: usize = 8;
/// Results of one tile: row `r`, column `c` at `r * PANEL + c`.
pub(crate) type Accumulators = [f32; TILE_ROWS * PANEL];

/// One matrix tile: a few rows of `x` times one panel of weights.
pub(crate) struct MatmulTile<'a, W> {
    /// `[rows, in]`, 1 to [`TILE_ROWS`] rows.
    pub(crate) x: &'a [f32],
    /// `in`, at least 1.
    pub(crate) depth: usize,
    /// `[in, PANEL]`.
    pub(crate) panel: &'a [W],
}

impl<W> MatmulTile<'_, W> {
    /// Checks what kernels rely on, and returns the number of rows.
    #[inline(always)]
    pub(crate) fn rows(&self) -> usize {
        let rows = self.x.len() / self.depth;
        assert!((1..=TILE_ROWS).contains(&rows) && self.x.len() == rows * self.depth, "rows of a tile");
        assert!(self.panel.len() == self.depth * PANEL, "length of a panel");
        rows
    }
}

/// Functions of one instruction set; unsafe because they run only where [`Isa::check`] passes.
pub(crate) struct Table {
    pub(crate) isa: Isa,
    pub(crate) matmul_bf16: unsafe fn(&MatmulTile<'_, u16>, &mut Accumulators),
    pub(crate) matmul_f32: unsafe fn(&MatmulTile<'_, f32>, &mut Accumulators),
    pub(crate) sum_squares: unsafe fn(&[f32]) -> f32,
    pub(crate) gated_activation: unsafe fn(Activation, &[f32], &[f32], &mut [f32]),
}

impl Table {
    /// The table of an instruction set that this CPU has.
    pub(crate) fn of(isa: Isa) -> Result<&'static Self> {
        isa.check()?;
        Ok(match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => &crate::cpu::avx512::TABLE,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => &crate::cpu::avx2::TABLE,
            _ => &scalar::TABLE,
        })
    }
}
