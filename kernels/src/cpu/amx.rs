//! Kernels for AMX: sixteen rows times sixteen columns in one instruction, one row as well as many.
//! Hot path: no allocation, no lock, no log.
//!
//! A group of a panel is two tiles of 1 KB that lie one after the other, so a panel streams. Sums of up to 32 rows stay
//! in four tiles. Tiles have as many rows as there are, since an instruction takes a cycle a row; every element is
//! summed over groups ascending in each shape.
//! Source: Intel 64 and IA-32 Architectures Software Developer's Manual, chapter 18; arch_prctl(2).

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count};
use std::cell::Cell;
use std::sync::OnceLock;

use crate::cpu::dot::Dot;
use crate::cpu::panels::{GROUP, GROUP_INT8, PANEL};
use crate::cpu::table::Table;
use crate::cpu::{Isa, avx512bf16};

/// The table of this instruction set; its functions run only where [`Isa::Amx`] is available.
pub(crate) const TABLE: Table = Table { isa: Isa::Amx, dot_bf16, dot_int8, dot_direct: None, ..avx512bf16::TABLE };

/// Rows of a tile.
const TILE_ROWS: usize = 16;
/// State component of tile data, for which a process must ask.
const XTILEDATA: usize = 18;

/// The first thing that AMX needs and this process lacks. Asks the system for tiles, once.
pub(crate) fn missing() -> Option<&'static str> {
    static MISSING: OnceLock<Option<&'static str>> = OnceLock::new();
    *MISSING.get_or_init(|| {
        if __cpuid(0).eax < 7 {
            return Some("amx_tile");
        }
        let features = __cpuid_count(7, 0).edx;
        let lacking = [("amx_bf16", 22), ("amx_tile", 24), ("amx_int8", 25)];
        if let Some((name, _)) = lacking.into_iter().find(|(_, bit)| features >> bit & 1 == 0) {
            return Some(name);
        }
        (!permitted()).then_some("the system's permission to use tiles")
    })
}

/// `arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA)`: holds for all threads of the process.
fn permitted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    // SAFETY: the call takes two numbers and touches no memory of ours.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0 }
}

/// Operand of `ldtilecfg`, palette 1.
#[repr(C, align(64))]
struct TileConfig {
    palette: u8,
    start_row: u8,
    _reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

thread_local! {
    /// Rows of the first and second tile of activations that this thread's configuration has; attention's has 255 first.
    static SHAPE: Cell<[u8; 2]> = const { Cell::new([0; 2]) };
}

/// Configures tiles: 0, 1 sums of the first rows, 2, 3 of the second, 4, 5 activations, 6, 7 weights.
///
/// # Safety
/// AMX is available.
pub(crate) unsafe fn configure(first: usize, second: usize) {
    let shape = [first as u8, second as u8];
    let second = shape[1].max(1);
    // SAFETY: the caller's promise.
    unsafe { load(shape, [shape[0], shape[0], second, second, shape[0], second, 16, 16], [64; 8]) };
}

/// Configures tiles for attention over `rows` rows: 0 to 3 sums, 4 and 5 left tiles with rows of 64 and of 32 bytes, 6
/// and 7 right tiles of sixteen and of eight rows.
///
/// # Safety
/// AMX is available; `rows` is at least 1 and at most 16.
pub(crate) unsafe fn configure_attention(rows: usize) {
    let n = rows as u8;
    // SAFETY: the caller's promise.
    unsafe { load([u8::MAX, n], [n, n, n, n, n, n, 16, 8], [64, 64, 64, 64, 64, 32, 64, 64]) };
}

/// Loads a configuration unless `shape`, which names it, is the thread's already.
///
/// # Safety
/// AMX is available, and the numbers are a valid configuration.
unsafe fn load(shape: [u8; 2], rows: [u8; 8], row_bytes: [u16; 8]) {
    if SHAPE.get() == shape {
        return;
    }
    SHAPE.set(shape);
    let mut config = TileConfig { palette: 1, start_row: 0, _reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
    config.rows[..8].copy_from_slice(&rows);
    config.row_bytes[..8].copy_from_slice(&row_bytes);
    // SAFETY: AMX is the caller's promise; the operand is 64 bytes of a valid configuration.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, readonly)) };
}

/// The loops for one or two tiles of rows; `$product` multiplies tiles.
macro_rules! loops {
    ($one:ident, $two:ident, $product:literal) => {
        /// Up to sixteen rows, the panel fetched 16 KB ahead.
        ///
        /// # Safety
        /// AMX is available and configured for the rows; `groups` groups of activations, `groups` 2 KB groups of the
        /// panel, and rows of sums 128 bytes apart exist.
        unsafe fn $one(x: *const u8, stride: usize, panel: *const u8, groups: usize, sums: *mut u8) {
            // SAFETY: extents are the caller's promise; a prefetch may name any address.
            unsafe {
                asm!(
                    "tileloadd tmm0, [{sums} + {sums_stride}]",
                    "tileloadd tmm1, [{sums} + {sums_stride} + 64]",
                    "2:",
                    "tileloadd tmm4, [{x} + {stride}]",
                    "tileloadd tmm6, [{panel} + {panel_stride}]",
                    concat!($product, " tmm0, tmm4, tmm6"),
                    "tileloadd tmm7, [{panel} + {panel_stride} + 1024]",
                    concat!($product, " tmm1, tmm4, tmm7"),
                    // Two tiles, line by line.
                    "mov {line:e}, 16384",
                    "3:",
                    "prefetcht0 [{panel} + {line}]",
                    "prefetcht0 [{panel} + {line} + 64]",
                    "prefetcht0 [{panel} + {line} + 128]",
                    "prefetcht0 [{panel} + {line} + 192]",
                    "add {line:e}, 256",
                    "cmp {line:e}, 18432",
                    "jne 3b",
                    "add {x}, 64",
                    "add {panel}, 2048",
                    "dec {groups}",
                    "jnz 2b",
                    "tilestored [{sums} + {sums_stride}], tmm0",
                    "tilestored [{sums} + {sums_stride} + 64], tmm1",
                    x = inout(reg) x => _,
                    panel = inout(reg) panel => _,
                    groups = inout(reg) groups => _,
                    line = out(reg) _,
                    stride = in(reg) stride,
                    sums = in(reg) sums,
                    sums_stride = in(reg) PANEL * 4,
                    panel_stride = in(reg) 64usize,
                    out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            }
        }

        /// Seventeen to thirty-two rows, as [`loops`] for one tile otherwise.
        ///
        /// # Safety
        /// As for one tile; the second tile's rows follow the first sixteen.
        unsafe fn $two(x: *const u8, stride: usize, panel: *const u8, groups: usize, sums: *mut u8) {
            // SAFETY: extents are the caller's promise.
            unsafe {
                asm!(
                    "tileloadd tmm0, [{sums} + {sums_stride}]",
                    "tileloadd tmm1, [{sums} + {sums_stride} + 64]",
                    "tileloadd tmm2, [{sums} + {sums_stride} + 2048]",
                    "tileloadd tmm3, [{sums} + {sums_stride} + 2112]",
                    "2:",
                    "tileloadd tmm6, [{panel} + {panel_stride}]",
                    "tileloadd tmm4, [{x} + {stride}]",
                    concat!($product, " tmm0, tmm4, tmm6"),
                    "tileloadd tmm7, [{panel} + {panel_stride} + 1024]",
                    concat!($product, " tmm1, tmm4, tmm7"),
                    "tileloadd tmm5, [{second} + {stride}]",
                    concat!($product, " tmm2, tmm5, tmm6"),
                    concat!($product, " tmm3, tmm5, tmm7"),
                    "add {x}, 64",
                    "add {second}, 64",
                    "add {panel}, 2048",
                    "dec {groups}",
                    "jnz 2b",
                    "tilestored [{sums} + {sums_stride}], tmm0",
                    "tilestored [{sums} + {sums_stride} + 64], tmm1",
                    "tilestored [{sums} + {sums_stride} + 2048], tmm2",
                    "tilestored [{sums} + {sums_stride} + 2112], tmm3",
                    x = inout(reg) x => _,
                    second = inout(reg) x.wrapping_add(TILE_ROWS * stride) => _,
                    panel = inout(reg) panel => _,
                    groups = inout(reg) groups => _,
                    stride = in(reg) stride,
                    sums = in(reg) sums,
                    sums_stride = in(reg) PANEL * 4,
                    panel_stride = in(reg) 64usize,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            }
        }
    };
}

loops!(bf16_one, bf16_two, "tdpbf16ps");
loops!(int8_one, int8_two, "tdpbusd");

type Loop = unsafe fn(*const u8, usize, *const u8, usize, *mut u8);

unsafe fn dot_bf16(dot: &mut Dot<'_, u16, u16, f32>) {
    dot.check(GROUP);
    // SAFETY: AMX is available where this table is; `check` asserted the extents.
    unsafe { blocks(dot, GROUP, bf16_one, bf16_two) };
}

unsafe fn dot_int8(dot: &mut Dot<'_, u8, i8, i32>) {
    dot.check(GROUP_INT8);
    // SAFETY: AMX is available where this table is; `check` asserted the extents.
    unsafe { blocks(dot, GROUP_INT8, int8_one, int8_two) };
}

/// Cuts rows into blocks of 32, the rest into tiles of 16.
///
/// # Safety
/// AMX is available, and `Dot::check` passed for `group`.
unsafe fn blocks<X, W, S>(dot: &mut Dot<'_, X, W, S>, group: usize, one: Loop, two: Loop) {
    let (groups, stride) = (dot.depth / group, dot.stride * size_of::<X>());
    if groups == 0 {
        return;
    }
    let mut row = 0;
    while row < dot.rows {
        let rows = (dot.rows - row).min(2 * TILE_ROWS);
        let (first, second) = (rows.min(TILE_ROWS), rows.saturating_sub(TILE_ROWS));
        // SAFETY: AMX is the caller's promise; these rows, groups and sums exist as `check` asserted.
        unsafe {
            configure(first, second);
            let x = dot.x.as_ptr().add(row * dot.stride).cast();
            let sums = dot.sums.as_mut_ptr().add(row * PANEL).cast();
            let run = if second == 0 { one } else { two };
            run(x, stride, dot.panel.as_ptr().cast(), groups, sums);
        }
        row += rows;
    }
}
