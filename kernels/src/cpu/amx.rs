//! Kernels for AMX: sixteen rows times sixteen columns in one instruction, one row as well as many.
//! Hot path: no allocation, no lock, no log.
//!
//! A group of a panel is two tiles of 1 KB that lie one after the other, so a panel streams, and so do activations in
//! [`Order::Tiles`]. Sums of up to 32 rows stay in four tiles over the whole depth. Tiles have as many rows as there
//! are, since an instruction takes a cycle a row; every element is summed over groups ascending in each shape.
//!
//! Rows that go through a panel once wait for memory and ask for what is 32 KB ahead; with more rows the panel is in the
//! second-level cache, and the next one is asked for meanwhile (hardware sees nothing to follow while rows go by).
//! Source: Intel 64 and IA-32 Architectures Software Developer's Manual, chapter 18; arch_prctl(2).

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count};
use std::cell::Cell;
use std::sync::OnceLock;

use crate::cpu::dot::{Dot, Order, TILE_ROWS};
use crate::cpu::lanes::LINE;
use crate::cpu::panels::{GROUP, GROUP_INT8, PANEL};
use crate::cpu::table::Table;
use crate::cpu::{Isa, avx512bf16};

/// The table of this instruction set; its functions run only where [`Isa::Amx`] is available.
pub(crate) const TABLE: Table =
    Table { isa: Isa::Amx, order: Order::Tiles, dot_bf16, dot_int8, dot_direct: None, ..avx512bf16::TABLE };

/// Bytes of a panel's group: two tiles.
const GROUP_BYTES: usize = 2048;
/// How far ahead memory is asked for.
const AHEAD: usize = 32 << 10;
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

/// What a loop goes through.
#[derive(Clone, Copy)]
struct Walk {
    /// First tile of activations; the next group's follows it.
    x: *const u8,
    /// First tile of the next sixteen rows.
    second: *const u8,
    panel: *const u8,
    groups: usize,
    sums: *mut u8,
    /// Not 0 if sums begin at 0 instead of with what their memory holds.
    is_first: usize,
    /// What to ask for.
    ahead: *const u8,
    /// Lines to ask for with each group, where a loop leaves the number open.
    n_ahead: usize,
}

/// Asks the second-level cache for lines. (Requests to the first level wait for its few miss buffers: a sixth of the
/// bandwidth.)
macro_rules! ask {
    ($($offset:literal)*) => { concat!($("prefetcht1 [{ahead} + ", $offset, "]\n"),*) };
}

/// A group's 2 KB are asked for in four parts between the tiles: requests that follow a load that waits would wait with it.
macro_rules! streaming {
    ($loops:ident, $one:ident, $two:ident, $product:literal) => {
        $loops!($one, $two, $product,
            ask!(0 64 128 192 256 320 384 448),
            ask!(512 576 640 704 768 832 896 960),
            ask!(1024 1088 1152 1216 1280 1344 1408 1472),
            ask!(1536 1600 1664 1728 1792 1856 1920 1984),
            "add {ahead}, 2048"
        );
    };
}

/// As many lines as the walk says are asked for behind a group's tiles.
macro_rules! counting {
    ($loops:ident, $one:ident, $two:ident, $product:literal) => {
        $loops!(
            $one,
            $two,
            $product,
            "",
            "",
            "",
            "",
            concat!(
                "mov {count}, {n_ahead}\n",
                "test {count}, {count}\n",
                "jz 4f\n",
                "3:\n",
                "prefetcht1 [{ahead}]\n",
                "add {ahead}, 64\n",
                "dec {count}\n",
                "jnz 3b\n",
                "4:"
            )
        );
    };
}

/// The loops for one or two tiles of rows; `$product` multiplies tiles.
macro_rules! loops {
    ($one:ident, $two:ident, $product:literal, $a:expr, $b:expr, $c:expr, $d:expr, $last:expr) => {
        /// Up to sixteen rows.
        ///
        /// # Safety
        /// AMX is available and configured for the rows; `groups` (one or more) groups of activations and 2 KB groups of the
        /// panel, and rows of sums 128 bytes apart exist.
        unsafe fn $one(walk: &Walk) {
            // SAFETY: extents are the caller's promise; a prefetch may name any address.
            unsafe {
                asm!(
                    "test {is_first}, {is_first}",
                    "jnz 5f",
                    "tileloadd tmm0, [{sums} + {sums_stride}]",
                    "tileloadd tmm1, [{sums} + {sums_stride} + 64]",
                    "jmp 2f",
                    "5:",
                    "tilezero tmm0",
                    "tilezero tmm1",
                    "2:",
                    "tileloadd tmm4, [{x} + {line_stride}]",
                    $a,
                    "tileloadd tmm6, [{panel} + {line_stride}]",
                    concat!($product, " tmm0, tmm4, tmm6"),
                    $b,
                    $c,
                    "tileloadd tmm7, [{panel} + {line_stride} + 1024]",
                    concat!($product, " tmm1, tmm4, tmm7"),
                    $d,
                    $last,
                    "add {x}, 1024",
                    "add {panel}, 2048",
                    "dec {groups}",
                    "jnz 2b",
                    "tilestored [{sums} + {sums_stride}], tmm0",
                    "tilestored [{sums} + {sums_stride} + 64], tmm1",
                    // Where requests are not counted, these would be unused.
                    "/* {count} {n_ahead} */",
                    x = inout(reg) walk.x => _,
                    panel = inout(reg) walk.panel => _,
                    groups = inout(reg) walk.groups => _,
                    ahead = inout(reg) walk.ahead => _,
                    count = out(reg) _,
                    n_ahead = in(reg) walk.n_ahead,
                    is_first = in(reg) walk.is_first,
                    sums = in(reg) walk.sums,
                    sums_stride = in(reg) PANEL * 4,
                    line_stride = in(reg) 64usize,
                    out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            }
        }

        /// Seventeen to thirty-two rows.
        ///
        /// # Safety
        /// As for one tile; the second tile's rows of sums follow the first sixteen.
        unsafe fn $two(walk: &Walk) {
            // SAFETY: extents are the caller's promise; a prefetch may name any address.
            unsafe {
                asm!(
                    "test {is_first}, {is_first}",
                    "jnz 5f",
                    "tileloadd tmm0, [{sums} + {sums_stride}]",
                    "tileloadd tmm1, [{sums} + {sums_stride} + 64]",
                    "tileloadd tmm2, [{sums} + {sums_stride} + 2048]",
                    "tileloadd tmm3, [{sums} + {sums_stride} + 2112]",
                    "jmp 2f",
                    "5:",
                    "tilezero tmm0",
                    "tilezero tmm1",
                    "tilezero tmm2",
                    "tilezero tmm3",
                    "2:",
                    "tileloadd tmm6, [{panel} + {line_stride}]",
                    $a,
                    "tileloadd tmm4, [{x} + {line_stride}]",
                    concat!($product, " tmm0, tmm4, tmm6"),
                    "tileloadd tmm7, [{panel} + {line_stride} + 1024]",
                    $b,
                    concat!($product, " tmm1, tmm4, tmm7"),
                    $c,
                    "tileloadd tmm5, [{second} + {line_stride}]",
                    concat!($product, " tmm2, tmm5, tmm6"),
                    $d,
                    concat!($product, " tmm3, tmm5, tmm7"),
                    $last,
                    "add {x}, 1024",
                    "add {second}, 1024",
                    "add {panel}, 2048",
                    "dec {groups}",
                    "jnz 2b",
                    "tilestored [{sums} + {sums_stride}], tmm0",
                    "tilestored [{sums} + {sums_stride} + 64], tmm1",
                    "tilestored [{sums} + {sums_stride} + 2048], tmm2",
                    "tilestored [{sums} + {sums_stride} + 2112], tmm3",
                    // Where requests are not counted, these would be unused.
                    "/* {count} {n_ahead} */",
                    x = inout(reg) walk.x => _,
                    second = inout(reg) walk.second => _,
                    panel = inout(reg) walk.panel => _,
                    groups = inout(reg) walk.groups => _,
                    ahead = inout(reg) walk.ahead => _,
                    count = out(reg) _,
                    n_ahead = in(reg) walk.n_ahead,
                    is_first = in(reg) walk.is_first,
                    sums = in(reg) walk.sums,
                    sums_stride = in(reg) PANEL * 4,
                    line_stride = in(reg) 64usize,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            }
        }
    };
}

streaming!(loops, bf16_one_streaming, bf16_two_streaming, "tdpbf16ps");
counting!(loops, bf16_one, bf16_two, "tdpbf16ps");
streaming!(loops, int8_one_streaming, int8_two_streaming, "tdpbusd");
counting!(loops, int8_one, int8_two, "tdpbusd");

/// A loop for one tile of rows and one for two.
type Loops = [unsafe fn(&Walk); 2];

unsafe fn dot_bf16(dot: &mut Dot<'_, u16, u16, f32>) {
    dot.check_tiles(GROUP);
    // SAFETY: AMX is available where this table is; the check asserted the extents.
    unsafe { blocks(dot, GROUP, [bf16_one_streaming, bf16_two_streaming], [bf16_one, bf16_two]) };
}

unsafe fn dot_int8(dot: &mut Dot<'_, u8, i8, i32>) {
    dot.check_tiles(GROUP_INT8);
    // SAFETY: AMX is available where this table is; the check asserted the extents.
    unsafe { blocks(dot, GROUP_INT8, [int8_one_streaming, int8_two_streaming], [int8_one, int8_two]) };
}

/// Cuts rows into blocks of 32, the rest into tiles of 16; each asks for its part of what is next.
///
/// # Safety
/// AMX is available, and `Dot::check_tiles` passed for `group`.
unsafe fn blocks<X, W, S>(dot: &mut Dot<'_, X, W, S>, group: usize, streaming: Loops, counting: Loops) {
    let (groups, stride) = (dot.depth / group, dot.stride * size_of::<X>());
    let (panel, n_walks) = (dot.panel.as_ptr().cast::<u8>(), dot.rows.div_ceil(2 * TILE_ROWS));
    // Rows that go through the panel once stream it; else each walk of each turn asks for its part of the next panel.
    let (loops, mut ahead, n_ahead) = match dot.turn {
        None => (counting, panel, 0),
        Some((_, 1)) if n_walks == 1 => (streaming, panel.wrapping_add(AHEAD), 0),
        Some((turn, n)) => {
            let n_ahead = (GROUP_BYTES / LINE).div_ceil(n * n_walks);
            (counting, panel.wrapping_add(groups * (GROUP_BYTES + turn * n_walks * n_ahead * LINE)), n_ahead)
        }
    };
    for row in (0..dot.rows).step_by(2 * TILE_ROWS) {
        let rows = (dot.rows - row).min(2 * TILE_ROWS);
        let (first, second) = (rows.min(TILE_ROWS), rows.saturating_sub(TILE_ROWS));
        // SAFETY: AMX is the caller's promise; these rows, groups and sums exist as the check asserted.
        unsafe {
            configure(first, second);
            let x = dot.x.as_ptr().cast::<u8>().add(row / TILE_ROWS * stride);
            let walk = Walk {
                x,
                second: x.wrapping_add(stride),
                panel,
                groups,
                sums: dot.sums.as_mut_ptr().add(row * PANEL).cast(),
                is_first: usize::from(dot.is_first),
                ahead,
                n_ahead,
            };
            loops[usize::from(second > 0)](&walk);
        }
        ahead = ahead.wrapping_add(n_ahead * groups * LINE);
    }
}
