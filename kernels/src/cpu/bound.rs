//! What this machine can do at best, measured: bytes read from memory and operations done in registers per second.
//!
//! A kernel is judged by these, measured in the same run: whatever slows the machine slows its bound too.

use std::hint::black_box;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::cpu::Isa;
use crate::error::Result;
use crate::memory::Mapping;

#[cfg(target_arch = "x86_64")]
mod amx;
mod caches;
#[cfg(target_arch = "x86_64")]
mod x86;

/// Fewest bytes that the bandwidth is measured over, where memory allows; more where caches are large.
const READ_BYTES_MIN: usize = 256 << 20;
/// Times that those bytes fill the third-level caches of all sockets.
const READ_CACHES: usize = 4;
/// Passes over the bytes at least; the best counts.
const READ_PASSES: usize = 7;
/// Bytes that the loops take at once; each thread's part is a multiple.
const READ_UNIT: usize = 4096;

/// Rounds of the register loops in one pass, some milliseconds each.
const PEAK_ROUNDS: usize = 1 << 20;
/// Passes of the register loops at least; the best counts.
const PEAK_PASSES: usize = 5;
/// Passes go on for so long: new threads may share a core until the system has moved them apart.
const TIME_MIN: Duration = Duration::from_millis(100);
/// Independent chains of a register loop: latency times throughput of fused multiply-add, on all cores so far.
pub(crate) const CHAINS: usize = 12;

/// Numbers that a kernel multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Arithmetic {
    /// f32 times f32.
    F32,
    /// bf16 times bf16, summed in f32.
    Bf16,
    /// 8-bit integers, summed in 32 bits.
    Int8,
}

/// A measured rate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate {
    /// Bytes, or multiplications and additions, in a second.
    pub per_s: f64,
    /// The instruction that reached it.
    pub by: &'static str,
}

/// A loop over memory.
#[derive(Clone, Copy)]
pub(crate) struct Reader {
    pub(crate) name: &'static str,
    /// Reads all bytes; callers hand over whole units and have checked what the function needs.
    pub(crate) run: fn(&[u8]) -> u64,
}

/// A loop in registers.
#[derive(Clone, Copy)]
pub(crate) struct Spinner {
    pub(crate) name: &'static str,
    /// Runs so many rounds.
    pub(crate) run: fn(usize) -> f32,
    /// Multiplications and additions of one round.
    pub(crate) operations: usize,
}

/// Measures how fast `threads` threads together read memory that no cache holds, in huge pages where there are any,
/// by the fastest instruction that this CPU has, whatever kernels are told to use.
///
/// `now` reads a monotonic clock.
///
/// # Errors
/// [`Error::OutOfMemory`](crate::Error::OutOfMemory) when there is no memory to read.
pub fn read_bandwidth(threads: usize, now: fn() -> Instant) -> Result<Rate> {
    let bytes = READ_BYTES_MIN.max(caches::third_level_bytes().saturating_mul(READ_CACHES));
    read_rate(bytes.min(caches::memory_bytes() / 4), threads.max(1), now)
}

/// Measures how many multiplications and additions `threads` threads together do in a second without touching memory,
/// by the fastest instruction that `isa` has for `arithmetic`: that of f32 where it has none for narrower numbers.
///
/// `now` reads a monotonic clock.
///
/// # Errors
/// [`Error::IsaMissing`](crate::Error::IsaMissing) when this CPU lacks `isa`.
pub fn peak_flops(isa: Isa, arithmetic: Arithmetic, threads: usize, now: fn() -> Instant) -> Result<Rate> {
    isa.check()?;
    let spinner = spinner(isa, arithmetic);
    let operations = (spinner.operations * PEAK_ROUNDS * threads.max(1)) as f64;
    let seconds = best_of(PEAK_PASSES, threads.max(1), now, &|_| {
        black_box((spinner.run)(black_box(PEAK_ROUNDS)));
    });
    Ok(Rate { per_s: operations / seconds, by: spinner.name })
}

fn read_rate(bytes: usize, threads: usize, now: fn() -> Instant) -> Result<Rate> {
    let part = (bytes / threads / READ_UNIT).max(1) * READ_UNIT;
    let mut memory = Mapping::zeroed(part * threads)?;
    // Touched, or every page would be the one of zeros.
    memory.as_mut_slice().fill(1);
    let memory = memory.as_slice();
    let mut best = Rate { per_s: 0.0, by: "" };
    for reader in readers() {
        let seconds = best_of(READ_PASSES, threads, now, &|thread| {
            black_box((reader.run)(&memory[thread * part..(thread + 1) * part]));
        });
        let per_s = memory.len() as f64 / seconds;
        if per_s > best.per_s {
            best = Rate { per_s, by: reader.name };
        }
    }
    Ok(best)
}

/// The shortest time that all of `threads` threads need for `body`, in seconds, of `passes` or more.
fn best_of(passes: usize, threads: usize, now: fn() -> Instant, body: &(dyn Fn(usize) + Sync)) -> f64 {
    let (barrier, is_over, first) = (Barrier::new(threads), AtomicBool::new(false), now());
    let work = |thread: usize| {
        let mut best = Duration::MAX;
        for n_done in 0.. {
            if thread == 0 {
                is_over
                    .store(n_done >= passes && now().saturating_duration_since(first) >= TIME_MIN, Ordering::Relaxed);
            }
            barrier.wait();
            if is_over.load(Ordering::Relaxed) {
                break;
            }
            let began = now();
            body(thread);
            barrier.wait();
            best = best.min(now().saturating_duration_since(began));
        }
        best
    };
    let best = std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|thread| scope.spawn(move || work(thread))).collect();
        let own = work(0);
        // The slowest thread's clock has seen every thread's work.
        others.into_iter().fold(own, |best, other| best.max(other.join().unwrap_or(own)))
    });
    best.max(Duration::from_nanos(1)).as_secs_f64()
}

fn readers() -> Vec<Reader> {
    let plain = Reader { name: "64-bit loads", run: read_plain };
    #[cfg(target_arch = "x86_64")]
    return std::iter::once(plain).chain(x86::readers()).chain(amx::reader()).collect();
    #[cfg(not(target_arch = "x86_64"))]
    vec![plain]
}

fn spinner(isa: Isa, arithmetic: Arithmetic) -> Spinner {
    #[cfg(target_arch = "x86_64")]
    if let Some(spinner) = x86::spinner(isa, arithmetic) {
        return spinner;
    }
    let _ = (isa, arithmetic);
    Spinner { name: "compiled f32", run: spin_plain, operations: 2 * CHAINS * PLAIN_LANES }
}

/// Sums in eight chains, which compilers turn into whatever vectors the target has.
fn read_plain(bytes: &[u8]) -> u64 {
    let mut sums = [0u64; 8];
    for line in bytes.as_chunks::<64>().0 {
        for (sum, word) in sums.iter_mut().zip(line.as_chunks::<8>().0) {
            *sum ^= u64::from_ne_bytes(*word);
        }
    }
    sums.iter().fold(0, |all, sum| all ^ sum)
}

const PLAIN_LANES: usize = 4;

/// Multiplies and adds in vectors as the compiler has them without being told of any instruction set.
fn spin_plain(rounds: usize) -> f32 {
    let (factor, term) = (black_box([0.999f32; PLAIN_LANES]), black_box([0.001f32; PLAIN_LANES]));
    // The compiler must not see that the chains are equal, or it would keep one.
    let mut sums = black_box([[1.0f32; PLAIN_LANES]; CHAINS]);
    for _ in 0..rounds {
        for sum in &mut sums {
            for lane in 0..PLAIN_LANES {
                sum[lane] = sum[lane] * factor[lane] + term[lane];
            }
        }
    }
    sums.iter().flatten().sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[expect(clippy::disallowed_methods, reason = "a test measures real time")]
    fn now() -> Instant {
        Instant::now()
    }

    #[test]
    fn every_reader_reads_every_byte() {
        let mut bytes = vec![0u8; 2 * READ_UNIT];
        for reader in readers() {
            assert_eq!((reader.run)(&bytes), 0, "{}", reader.name);
            for at in (0..bytes.len()).step_by(61) {
                bytes[at] = 1;
                assert_ne!((reader.run)(&bytes), 0, "{} skips byte {at}", reader.name);
                bytes[at] = 0;
            }
        }
    }

    #[test]
    fn rates_are_positive_for_all_that_this_machine_has() {
        for threads in 1..=2 {
            let rate = read_rate(8 << 20, threads, now).unwrap();
            assert!(rate.per_s > 1e6 && !rate.by.is_empty(), "{rate:?}");
        }
        for isa in Isa::available() {
            for arithmetic in [Arithmetic::F32, Arithmetic::Bf16, Arithmetic::Int8] {
                let spinner = spinner(isa, arithmetic);
                let seconds = best_of(2, 1, now, &|_| {
                    black_box((spinner.run)(black_box(10_000)));
                });
                assert!(seconds > 0.0 && (spinner.run)(10).is_finite(), "{isa} {arithmetic:?} {}", spinner.name);
            }
        }
    }

    #[test]
    fn an_instruction_set_that_is_missing_is_not_run() {
        for isa in Isa::ALL.into_iter().filter(|isa| isa.check().is_err()) {
            assert_eq!(peak_flops(isa, Arithmetic::F32, 1, now).unwrap_err(), isa.check().unwrap_err());
        }
    }
}
