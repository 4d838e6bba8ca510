//! The loops of AMX: tile loads read memory faster than anything else where there are tiles, and tiles multiply fastest.

use std::arch::asm;

use super::{Arithmetic, Reader, Spinner};
use crate::cpu::{Isa, amx};

/// Multiplications and additions of one tile product of bf16; of 8-bit integers there are twice as many.
const TILE_OPERATIONS: usize = 2 * 16 * 16 * 32;

pub(super) fn reader() -> Option<Reader> {
    Isa::Amx.check().is_ok().then_some(Reader { name: "AMX tile loads", run: read })
}

pub(super) fn spinner(arithmetic: Arithmetic) -> Option<Spinner> {
    match arithmetic {
        Arithmetic::F32 => None,
        Arithmetic::Bf16 => Some(Spinner { name: "tdpbf16ps", run: spin_bf16, operations: 4 * TILE_OPERATIONS }),
        Arithmetic::Int8 => Some(Spinner { name: "tdpbusd", run: spin_int8, operations: 8 * TILE_OPERATIONS }),
    }
}

/// Multiplies one row of ones with contiguous tiles of 1 KB, fetched 32 KB ahead: sums that miss no byte.
fn read(bytes: &[u8]) -> u64 {
    let pairs = bytes.len() / 2048;
    if pairs == 0 {
        return 0;
    }
    let (ones, mut sums) = ([1u8; 64], [[0i32; 16]; 2]);
    // SAFETY: `reader` has seen that AMX is available. The loop reads `pairs` times 2 KB of `bytes` and one row of 64
    // bytes of `ones`, and writes one row of 64 bytes into each half of `sums`; a prefetch may name any address.
    unsafe {
        amx::configure(1, 1);
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tileloadd tmm4, [{ones} + {stride}]",
            "2:",
            "tileloadd tmm6, [{bytes} + {stride}]",
            "tdpbusd tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{bytes} + {stride} + 1024]",
            "tdpbusd tmm1, tmm4, tmm7",
            "mov {line:e}, 32768",
            "3:",
            "prefetcht1 [{bytes} + {line}]",
            "prefetcht1 [{bytes} + {line} + 64]",
            "prefetcht1 [{bytes} + {line} + 128]",
            "prefetcht1 [{bytes} + {line} + 192]",
            "add {line:e}, 256",
            "cmp {line:e}, 34816",
            "jne 3b",
            "add {bytes}, 2048",
            "dec {pairs}",
            "jnz 2b",
            "tilestored [{sums} + {stride}], tmm0",
            "tilestored [{sums} + {stride} + 64], tmm1",
            bytes = inout(reg) bytes.as_ptr() => _,
            pairs = inout(reg) pairs => _,
            line = out(reg) _,
            ones = in(reg) ones.as_ptr(),
            sums = in(reg) sums.as_mut_ptr(),
            stride = in(reg) 64usize,
            out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
    sums.iter().flatten().fold(0, |all, &sum| all + u64::from(sum.unsigned_abs()))
}

/// The loop of one instruction: four sums of sixteen rows, as the kernels have them.
macro_rules! spin {
    ($name:ident, $product:literal) => {
        fn $name(rounds: usize) -> f32 {
            // SAFETY: `spinner` is asked only where AMX is available; the loop touches no memory.
            unsafe {
                amx::configure(16, 16);
                asm!(
                    "tilezero tmm0",
                    "tilezero tmm1",
                    "tilezero tmm2",
                    "tilezero tmm3",
                    "tilezero tmm4",
                    "tilezero tmm5",
                    "tilezero tmm6",
                    "tilezero tmm7",
                    "2:",
                    concat!($product, " tmm0, tmm4, tmm6"),
                    concat!($product, " tmm1, tmm4, tmm7"),
                    concat!($product, " tmm2, tmm5, tmm6"),
                    concat!($product, " tmm3, tmm5, tmm7"),
                    "dec {rounds}",
                    "jnz 2b",
                    rounds = inout(reg) rounds.max(1) => _,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack, nomem),
                );
            }
            0.0
        }
    };
}

spin!(spin_bf16, "tdpbf16ps");
spin!(spin_int8, "tdpbusd");
