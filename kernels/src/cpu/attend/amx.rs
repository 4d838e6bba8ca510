//! Attention on AMX tiles: up to sixteen rows times sixteen positions or dimensions in one instruction.
//! Hot path: no allocation, no lock, no log.
//!
//! Scores: a row of the left tile is 32 dimensions of a query, the right tile is 1 KB of a key panel. Values: a row of
//! the left tile is the weights of sixteen positions, the right tile is half a KB, one panel of a value tile. Both take
//! four right tiles at a time, whose sums do not wait for each other. One decode row runs the same instructions as a
//! prefill's rows, since tiles sum in an order of their own. What comes later is asked for tile by tile between the
//! products: all at once, products would wait until memory has taken every question.

use std::arch::asm;
use std::arch::x86_64::*;
use std::marker::PhantomData;
use std::ops::Range;

use crate::cpu::amx::configure_attention;
use crate::cpu::attend::product::Product;
use crate::cpu::attend::stripe::{Stripe, TILES};
use crate::cpu::attend::x86::Pairs;
use crate::op::attention::cache::TILE;
use crate::op::attention::softmax::Softmax;
use crate::op::attention::unit::{Unit, Work};
use crate::op::attention::{STRIPE, UNIT_ROWS};

/// Most steps of depth that one call multiplies.
const STEPS: usize = 8;

/// One product of tiles: `sums[c] += sum over i of left[i] * right[i][c]` for up to sixteen rows.
pub(crate) struct TileProduct<'a> {
    pub(crate) rows: usize,
    /// Whether a step is sixteen deep (left rows of 32 bytes, right tiles of 8 rows) or 32 (64 bytes, 16 rows).
    pub(crate) is_half: bool,
    /// First left tile; the next is as many bytes further as a row of it is long.
    pub(crate) left: *const u8,
    /// Bytes from one left row to the next.
    pub(crate) left_stride: usize,
    /// Right tiles of each step, rows of 64 bytes that follow each other.
    pub(crate) right: &'a [[*const u8; TILES]],
    /// What to ask for while the right tile in its place is multiplied: as many tiles, or none.
    pub(crate) ahead: &'a [[*const u8; TILES]],
    /// First sums; the next tile is 64 bytes further. All four, or only the first.
    pub(crate) sums: *mut f32,
    pub(crate) all_four: bool,
    /// Bytes from one row of sums to the next.
    pub(crate) sums_stride: usize,
    /// Whether sums begin at 0, whatever is there; only of all four.
    pub(crate) is_first: bool,
}

/// Whatever multiplies tiles.
pub(crate) trait TileUnit {
    /// Multiplies.
    ///
    /// # Safety
    /// The instruction set is there; rows, tiles and sums exist as the product names them.
    unsafe fn multiply(product: &TileProduct<'_>);
}

/// The tiles of the CPU.
pub(crate) struct Amx;

/// What a sum begins with.
macro_rules! begin {
    (zero, $c:literal) => {
        concat!("tilezero tmm", $c)
    };
    (load, $c:literal) => {
        concat!("tileloadd tmm", $c, ", [{sums} + {sums_stride} + 64*", $c, "]")
    };
}

/// Asks the second-level cache for a tile, whole or half.
macro_rules! ask {
    (none, $c:literal) => {
        ""
    };
    (half, $c:literal) => {
        concat!(
            "mov {tile}, [{ahead} + 8*", $c, "]\n",
            "prefetcht1 [{tile}]\nprefetcht1 [{tile} + 64]\nprefetcht1 [{tile} + 128]\nprefetcht1 [{tile} + 192]\n",
            "prefetcht1 [{tile} + 256]\nprefetcht1 [{tile} + 320]\nprefetcht1 [{tile} + 384]\nprefetcht1 [{tile} + 448]",
        )
    };
    (whole, $c:literal) => {
        concat!(
            ask!(half, $c),
            "\nprefetcht1 [{tile} + 512]\nprefetcht1 [{tile} + 576]\nprefetcht1 [{tile} + 640]\nprefetcht1 [{tile} + 704]\n",
            "prefetcht1 [{tile} + 768]\nprefetcht1 [{tile} + 832]\nprefetcht1 [{tile} + 896]\nprefetcht1 [{tile} + 960]",
        )
    };
}

macro_rules! multiply {
    ($name:ident, $begin:ident, $ask:ident, $left:literal, $right:literal, $($c:literal),*) => {
        /// # Safety
        /// As for [`TileUnit::multiply`], tiles configured for the rows.
        unsafe fn $name(product: &TileProduct<'_>, step: usize) {
            // SAFETY: the caller's promise; a tile load touches the rows and bytes that the configuration has.
            unsafe {
                asm!(
                    $(begin!($begin, $c),)*
                    "2:",
                    concat!("tileloadd ", $left, ", [{left} + {left_stride}]"),
                    $(
                        concat!("mov {tile}, [{right} + 8*", $c, "]"),
                        concat!("tileloadd ", $right, ", [{tile} + {line}]"),
                        concat!("tdpbf16ps tmm", $c, ", ", $left, ", ", $right),
                        ask!($ask, $c),
                    )*
                    "add {left}, {step}",
                    "add {right}, 32",
                    "add {ahead}, 32",
                    "dec {steps}",
                    "jnz 2b",
                    $(concat!("tilestored [{sums} + {sums_stride} + 64*", $c, "], tmm", $c),)*
                    left = inout(reg) product.left => _,
                    right = inout(reg) product.right.as_ptr() => _,
                    ahead = inout(reg) product.ahead.as_ptr() => _,
                    steps = inout(reg) product.right.len() => _,
                    tile = out(reg) _,
                    left_stride = in(reg) product.left_stride,
                    sums = in(reg) product.sums,
                    sums_stride = in(reg) product.sums_stride,
                    line = in(reg) 64usize,
                    step = in(reg) step,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            }
        }
    };
}

multiply!(first_whole_four, zero, none, "tmm4", "tmm6", 0, 1, 2, 3);
multiply!(first_whole_four_asking, zero, whole, "tmm4", "tmm6", 0, 1, 2, 3);
multiply!(first_half_four, zero, none, "tmm5", "tmm7", 0, 1, 2, 3);
multiply!(first_half_four_asking, zero, half, "tmm5", "tmm7", 0, 1, 2, 3);
multiply!(whole_four, load, none, "tmm4", "tmm6", 0, 1, 2, 3);
multiply!(whole_four_asking, load, whole, "tmm4", "tmm6", 0, 1, 2, 3);
multiply!(half_four, load, none, "tmm5", "tmm7", 0, 1, 2, 3);
multiply!(half_four_asking, load, half, "tmm5", "tmm7", 0, 1, 2, 3);
multiply!(half_one, load, none, "tmm5", "tmm7", 0);
multiply!(half_one_asking, load, half, "tmm5", "tmm7", 0);

impl TileUnit for Amx {
    #[inline(always)]
    unsafe fn multiply(product: &TileProduct<'_>) {
        // SAFETY: the caller's promise.
        unsafe {
            configure_attention(product.rows);
            match (product.is_half, product.all_four, product.is_first, product.ahead.is_empty()) {
                (false, _, true, true) => first_whole_four(product, 64),
                (false, _, true, false) => first_whole_four_asking(product, 64),
                (false, _, false, true) => whole_four(product, 64),
                (false, _, false, false) => whole_four_asking(product, 64),
                (true, true, true, true) => first_half_four(product, 32),
                (true, true, true, false) => first_half_four_asking(product, 32),
                (true, true, false, true) => half_four(product, 32),
                (true, true, false, false) => half_four_asking(product, 32),
                (true, false, _, true) => half_one(product, 32),
                (true, false, _, false) => half_one_asking(product, 32),
            }
        }
    }
}

/// Pairs multiplied by tiles.
pub(crate) struct Tiles<U>(PhantomData<U>);

impl<U: TileUnit> Product for Tiles<U> {
    type V = __m512;
    type Element = u16;
    type Line = __m512bh;
    type Factor = __m512bh;

    const GROUP: usize = 2;
    const WORDS: usize = 1;
    const ROWS: usize = 6;
    const PANELS: usize = 4;

    #[inline(always)]
    unsafe fn line(from: *const u16) -> __m512bh {
        // SAFETY: the caller's obligation is the same.
        unsafe { Pairs::line(from) }
    }
    #[inline(always)]
    unsafe fn factor(from: *const f32) -> __m512bh {
        // SAFETY: the caller's obligation is the same.
        unsafe { Pairs::factor(from) }
    }
    #[inline(always)]
    unsafe fn add_product(factor: __m512bh, line: __m512bh, sum: __m512) -> __m512 {
        // SAFETY: the caller's obligation is the same.
        unsafe { Pairs::add_product(factor, line, sum) }
    }
    #[inline(always)]
    unsafe fn pack(from: &[f32], to: &mut [f32]) {
        // SAFETY: the caller's obligation is the same.
        unsafe { Pairs::pack(from, to) }
    }
    #[inline(always)]
    unsafe fn store_weights(weights: __m512, row: *mut f32, position: usize) {
        // SAFETY: the caller's obligation is the same.
        unsafe { Pairs::store_weights(weights, row, position) }
    }

    #[inline(always)]
    unsafe fn score(unit: &Unit<'_>, work: &mut Work<'_>, stripe: &Stripe<u16>, rows: Range<usize>) {
        let depth = unit.dims.key_stride();
        let words = depth / 2;
        // Tiles that are not in use stand for the first that is; nobody reads their scores.
        let mut keys = [stripe.keys[stripe.tiles.start].cast::<u8>(); TILES];
        let mut next = keys;
        for tile in stripe.tiles.clone() {
            keys[tile] = stripe.keys[tile].cast();
            next[tile] = stripe.next_keys[tile].cast();
        }
        for row in rows.clone().step_by(TILE) {
            let n = TILE.min(rows.end - row);
            let left = work.query[row * words..(row + n) * words].as_ptr().cast::<u8>();
            let sums = work.weights[row * STRIPE..(row + n) * STRIPE].as_mut_ptr();
            let mut d = 0;
            while d < depth {
                let is_half = depth - d < 2 * TILE;
                let steps = if is_half { 1 } else { ((depth - d) / (2 * TILE)).min(STEPS) };
                let (mut right, mut ahead) = ([keys; STEPS], [next; STEPS]);
                for step in 0..steps {
                    for key in right[step].iter_mut().chain(&mut ahead[step]) {
                        // Sixteen positions of two bytes for each dimension.
                        *key = key.wrapping_add((d + step * 2 * TILE) * 2 * TILE);
                    }
                }
                let product = TileProduct {
                    rows: n,
                    is_half,
                    left: left.wrapping_add(2 * d),
                    left_stride: 4 * words,
                    right: &right[..steps],
                    ahead: if row == rows.start { &ahead[..steps] } else { &[] },
                    sums,
                    all_four: true,
                    sums_stride: 4 * STRIPE,
                    is_first: d == 0,
                };
                // SAFETY: features are the caller's promise; `n` queries of `depth` elements and scores of as many
                // stripes are there, and key panels are `depth` deep.
                unsafe { U::multiply(&product) };
                d += if is_half { TILE } else { steps * 2 * TILE };
            }
        }
    }

    #[inline(always)]
    unsafe fn mix(unit: &Unit<'_>, work: &Work<'_>, stripe: &Stripe<u16>, rows: Range<usize>, state: &mut Softmax<'_>) {
        let stride = state.stride();
        let n_panels = unit.dims.value_stride() / TILE;
        for (acc, &alpha) in state.acc.chunks_exact_mut(stride).zip(&work.alpha).take(rows.end).skip(rows.start) {
            // Most stripes bring no larger score.
            if alpha != 1.0 {
                acc.iter_mut().for_each(|acc| *acc *= alpha);
            }
        }
        for row in rows.clone().step_by(TILE) {
            let n = TILE.min(rows.end - row);
            let weights = &work.weights[row * STRIPE..(row + n) * STRIPE];
            let acc = &mut state.acc[row * stride..(row + n) * stride];
            let mut panel = 0;
            while panel < n_panels {
                let all_four = n_panels - panel >= TILES;
                let mut right = [[std::ptr::null(); TILES]; TILES];
                let mut ahead = right;
                for (step, tile) in stripe.tiles.clone().enumerate() {
                    for c in 0..TILES {
                        let offset = (panel + c) * TILE * TILE;
                        right[step][c] = stripe.values[tile].wrapping_add(offset).cast::<u8>();
                        ahead[step][c] = stripe.next_values[tile].wrapping_add(offset).cast::<u8>();
                    }
                }
                let product = TileProduct {
                    rows: n,
                    is_half: true,
                    left: weights[stripe.tiles.start * TILE / 2..].as_ptr().cast(),
                    left_stride: 4 * STRIPE,
                    right: &right[..stripe.tiles.len()],
                    ahead: if row == rows.start { &ahead[..stripe.tiles.len()] } else { &[] },
                    sums: acc[panel * TILE..].as_mut_ptr(),
                    all_four,
                    sums_stride: 4 * stride,
                    is_first: false,
                };
                // SAFETY: features are the caller's promise; `n` rows of weights and sums are there, and in each tile
                // the panels that are multiplied.
                unsafe { U::multiply(&product) };
                panel += if all_four { TILES } else { 1 };
            }
        }
    }
}

const _: () = assert!(UNIT_ROWS.is_multiple_of(TILE));

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::attend::online::Online;
    use crate::cpu::attend::product::F32;
    use crate::cpu::attend::{KvTable, attend, plain_write_head};
    use crate::op::attention::unit::Scratch;
    use crate::step::SequenceInputs;
    use crate::tensor::{as_bytes, as_bytes_mut};
    use crate::{Attention, ComputeDtype, CpuOps, CpuOptions, DType, Isa, LayerCache, Ops, Shape, StepInputs};
    use crate::{StepLimits, StreamId, Tensor};

    const MAIN: StreamId = StreamId::MAIN;

    /// What the manual says of TDPBF16PS: products of a step summed apart, then added.
    struct Emulated;

    impl TileUnit for Emulated {
        unsafe fn multiply(product: &TileProduct<'_>) {
            let pairs = if product.is_half { 8 } else { 16 };
            let bf16 = |at: *const u8| {
                // SAFETY: tests run where the tiles that the product names exist.
                f32::from_bits(u32::from(unsafe { at.cast::<u16>().read_unaligned() }) << 16)
            };
            for (step, right) in product.right.iter().enumerate() {
                for row in 0..product.rows {
                    let left = product.left.wrapping_add(row * product.left_stride + step * pairs * 4);
                    for column in 0..if product.all_four { 64 } else { 16 } {
                        let (tile, n) = (right[column / 16], column % 16);
                        let mut sum = 0.0f32;
                        for pair in 0..pairs {
                            for i in 0..2 {
                                let factor = bf16(left.wrapping_add(pair * 4 + i * 2));
                                sum = factor.mul_add(bf16(tile.wrapping_add(pair * 64 + n * 4 + i * 2)), sum);
                            }
                        }
                        let place = product.sums.wrapping_byte_add(row * product.sums_stride).wrapping_add(column);
                        // SAFETY: as above.
                        unsafe { *place = if product.is_first && step == 0 { sum } else { *place + sum } };
                    }
                }
            }
        }
    }

    #[target_feature(enable = "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn attend_emulated(
        unit: &Unit<'_>,
        partitions: Range<usize>,
        partials: Option<&mut [f32]>,
        scratch: &mut Scratch<'_>,
    ) {
        // SAFETY: the features are enabled here.
        unsafe { attend::<Online<F32<__m512>>, Online<Tiles<Emulated>>>(unit, partitions, partials, scratch) }
    }

    static EMULATED: KvTable = KvTable { attend: attend_emulated, write_head: plain_write_head };

    struct Case {
        dtype: DType,
        heads: usize,
        dim: usize,
        block: usize,
        window: Option<u32>,
    }

    fn tensor(ops: &CpuOps, shape: [usize; 3], seed: u32) -> Tensor {
        let mut state = seed;
        let mut value = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        let values: Vec<f32> = (0..shape.iter().product()).map(|_| value()).collect();
        let tensor = ops.alloc(Shape::from(shape), DType::F32).unwrap();
        ops.upload(MAIN, as_bytes(&values), &tensor).unwrap();
        tensor
    }

    /// The rows of a sequence, run in chunks of some length.
    fn run(case: &Case, ops: &CpuOps, len: usize, chunk: usize) -> Vec<f32> {
        let Case { dtype, heads, dim, block, window } = *case;
        let (kv_heads, blocks) = (2, len.div_ceil(block));
        let extra = if dtype == DType::I8 { 4 } else { 0 };
        let region = || ops.alloc(Shape::from([blocks, kv_heads, block, dim + extra]), dtype).unwrap();
        let cache = LayerCache { keys: region(), values: region() };
        let k = tensor(ops, [len, kv_heads, dim], 1);
        let (v, query) = (tensor(ops, [len, kv_heads, dim], 2), tensor(ops, [len, heads, dim], 3));
        let out = ops.alloc(Shape::from([len, heads, dim]), DType::F32).unwrap();
        let table: Vec<u32> = (0..blocks as u32).rev().collect();
        let limits = StepLimits { tokens: len, sequences: 1, block_entries: blocks, logits_rows: 0, block_size: block };
        let mut step = StepInputs::new(ops, limits).unwrap();
        for first in (0..len).step_by(chunk) {
            let rows = first..len.min(first + chunk);
            step.clear();
            let (tokens, position) = (vec![0; rows.len()], first as u32);
            let inputs = SequenceInputs { tokens: &tokens, position, block_table: &table, logits_rows: (0, 0) };
            step.push(&inputs).unwrap();
            let part = |tensor: &Tensor| tensor.rows(rows.clone()).unwrap();
            ops.write_kv(MAIN, &step, &part(&k), &part(&v), &cache).unwrap();
            let (query, out) = (&part(&query), &part(&out));
            let args = Attention { query, cache: &cache, scale: 0.5, window, soft_cap: None, out };
            ops.paged_attention(MAIN, &step, &args).unwrap();
        }
        let mut values = vec![0.0f32; len * heads * dim];
        ops.read_back(MAIN, &out, as_bytes_mut(&mut values)).unwrap();
        values
    }

    #[test]
    fn tiles_as_the_manual_has_them_compute_attention_in_any_chunks() {
        if Isa::Avx512Bf16.check().is_err() {
            return;
        }
        let ops = |isa| CpuOps::new(&CpuOptions { dtype: ComputeDtype::F32, threads: 2, isa: Some(isa) }).unwrap();
        for case in [
            Case { dtype: DType::Bf16, heads: 6, dim: 64, block: 16, window: None },
            Case { dtype: DType::Bf16, heads: 2, dim: 80, block: 32, window: Some(70) },
            Case { dtype: DType::I8, heads: 8, dim: 48, block: 16, window: None },
            Case { dtype: DType::Bf16, heads: 34, dim: 24, block: 5, window: Some(20) },
            Case { dtype: DType::Bf16, heads: 4, dim: 288, block: 16, window: None },
        ] {
            let (len, tiles) = (150, ops(Isa::Avx512Bf16));
            tiles.machine.lock().unwrap().kv = &EMULATED;
            let expected = run(&case, &ops(Isa::Scalar), len, len);
            let actual = run(&case, &tiles, len, len);
            for (a, e) in actual.iter().zip(&expected) {
                assert!((a - e).abs() <= 4e-3 * (1.0 + e.abs()), "{a} for {e} with {:?} {}", case.dtype, case.dim);
            }
            for chunk in [1, 17] {
                let cut = run(&case, &tiles, len, chunk);
                assert!(cut.iter().zip(&actual).all(|(a, b)| a.to_bits() == b.to_bits()), "chunks of {chunk}");
            }
        }
    }
}
