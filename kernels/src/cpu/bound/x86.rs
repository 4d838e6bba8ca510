//! The loops of x86-64: one for each instruction that reads or multiplies fastest somewhere.

use std::arch::x86_64::{
    __m256, __m256i, __m512, __m512bh, __m512i, _MM_HINT_T0, _mm_prefetch, _mm256_add_epi32, _mm256_add_ps,
    _mm256_fmadd_ps, _mm256_loadu_si256, _mm256_madd_epi16, _mm256_maddubs_epi16, _mm256_set1_epi8, _mm256_set1_epi16,
    _mm256_set1_ps, _mm256_setzero_si256, _mm256_storeu_ps, _mm256_storeu_si256, _mm256_xor_si256, _mm512_add_epi32,
    _mm512_add_ps, _mm512_cvtepi32_ps, _mm512_dpbf16_ps, _mm512_dpbusd_epi32, _mm512_fmadd_ps, _mm512_loadu_si512,
    _mm512_reduce_add_ps, _mm512_set1_epi8, _mm512_set1_epi16, _mm512_set1_ps, _mm512_setzero_si512,
    _mm512_storeu_si512, _mm512_xor_si512,
};
use std::hint::black_box;

use super::{Arithmetic, CHAINS, Reader, Spinner};
use crate::cpu::Isa;

/// Bytes that are fetched ahead of the loads.
const AHEAD: usize = 8 << 10;

/// All loops over memory that this CPU can run.
pub(super) fn readers() -> Vec<Reader> {
    let mut readers = Vec::new();
    if is_x86_feature_detected!("avx2") {
        readers.push(Reader { name: "AVX2 loads", run: read_avx2 });
    }
    if is_x86_feature_detected!("avx512f") {
        readers.push(Reader { name: "AVX-512 loads", run: read_avx512 });
        readers.push(Reader { name: "AVX-512 loads, prefetched", run: read_avx512_ahead });
    }
    readers
}

/// The loop of the fastest instruction that `isa`, which this CPU has, may use for `arithmetic`.
pub(super) fn spinner(isa: Isa, arithmetic: Arithmetic) -> Option<Spinner> {
    if isa == Isa::Amx
        && let Some(spinner) = super::amx::spinner(arithmetic)
    {
        return Some(spinner);
    }
    Some(match arithmetic {
        Arithmetic::Bf16 if isa >= Isa::Avx512Bf16 => {
            Spinner { name: "vdpbf16ps", run: spin_bf16, operations: 2 * 32 * CHAINS }
        }
        Arithmetic::Int8 if isa >= Isa::Avx512Bf16 => {
            Spinner { name: "vpdpbusd", run: spin_vnni, operations: 2 * 64 * CHAINS }
        }
        Arithmetic::Int8 if isa >= Isa::Avx2 => {
            Spinner { name: "vpmaddubsw", run: spin_int8, operations: 2 * 32 * CHAINS }
        }
        _ if isa >= Isa::Avx512 => Spinner { name: "AVX-512 FMA", run: spin_avx512, operations: 2 * 16 * CHAINS },
        _ if isa >= Isa::Avx2 => Spinner { name: "AVX2 FMA", run: spin_avx2, operations: 2 * 8 * CHAINS },
        _ => return None,
    })
}

fn read_avx2(bytes: &[u8]) -> u64 {
    #[target_feature(enable = "avx2")]
    fn read(bytes: &[u8]) -> u64 {
        let mut sums = [_mm256_setzero_si256(); 8];
        for unit in bytes.as_chunks::<256>().0 {
            for (sum, part) in sums.iter_mut().zip(unit.as_chunks::<32>().0) {
                // SAFETY: `part` is 32 readable bytes.
                let value = unsafe { _mm256_loadu_si256(part.as_ptr().cast()) };
                *sum = _mm256_xor_si256(*sum, value);
            }
        }
        let sum = sums.into_iter().fold(_mm256_setzero_si256(), |all, sum| _mm256_xor_si256(all, sum));
        let mut words = [0u64; 4];
        // SAFETY: `words` is 32 writable bytes.
        unsafe { _mm256_storeu_si256(words.as_mut_ptr().cast::<__m256i>(), sum) };
        words.iter().fold(0, |all, word| all ^ word)
    }
    // SAFETY: `readers` has seen that this CPU has AVX2.
    unsafe { read(bytes) }
}

fn read_avx512(bytes: &[u8]) -> u64 {
    // SAFETY: `readers` has seen that this CPU has AVX-512.
    unsafe { read_zmm::<false>(bytes) }
}

fn read_avx512_ahead(bytes: &[u8]) -> u64 {
    // SAFETY: `readers` has seen that this CPU has AVX-512.
    unsafe { read_zmm::<true>(bytes) }
}

#[target_feature(enable = "avx512f")]
fn read_zmm<const PREFETCH: bool>(bytes: &[u8]) -> u64 {
    let mut sums = [_mm512_setzero_si512(); 8];
    for unit in bytes.as_chunks::<512>().0 {
        for (sum, part) in sums.iter_mut().zip(unit.as_chunks::<64>().0) {
            if PREFETCH {
                let ahead = part.as_ptr().wrapping_add(AHEAD).cast();
                _mm_prefetch::<_MM_HINT_T0>(ahead);
            }
            // SAFETY: `part` is 64 readable bytes.
            let value = unsafe { _mm512_loadu_si512(part.as_ptr().cast()) };
            *sum = _mm512_xor_si512(*sum, value);
        }
    }
    let sum = sums.into_iter().fold(_mm512_setzero_si512(), |all, sum| _mm512_xor_si512(all, sum));
    let mut words = [0u64; 8];
    // SAFETY: `words` is 64 writable bytes.
    unsafe { _mm512_storeu_si512(words.as_mut_ptr().cast::<__m512i>(), sum) };
    words.iter().fold(0, |all, word| all ^ word)
}

fn spin_avx2(rounds: usize) -> f32 {
    #[target_feature(enable = "avx2,fma")]
    fn spin(rounds: usize) -> f32 {
        let (factor, term) = (black_box(_mm256_set1_ps(0.999)), black_box(_mm256_set1_ps(0.001)));
        let mut sums: [__m256; CHAINS] = black_box([_mm256_set1_ps(1.0); CHAINS]);
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = _mm256_fmadd_ps(*sum, factor, term);
            }
        }
        let sum = sums.into_iter().fold(_mm256_set1_ps(0.0), |all, sum| _mm256_add_ps(all, sum));
        let mut lanes = [0.0f32; 8];
        // SAFETY: `lanes` is 32 writable bytes.
        unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), sum) };
        lanes.iter().sum()
    }
    // SAFETY: `spinner` is asked for instruction sets that this CPU has, and this is of AVX2 and FMA.
    unsafe { spin(rounds) }
}

fn spin_avx512(rounds: usize) -> f32 {
    #[target_feature(enable = "avx512f")]
    fn spin(rounds: usize) -> f32 {
        let (factor, term) = (black_box(_mm512_set1_ps(0.999)), black_box(_mm512_set1_ps(0.001)));
        let mut sums: [__m512; CHAINS] = black_box([_mm512_set1_ps(1.0); CHAINS]);
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = _mm512_fmadd_ps(*sum, factor, term);
            }
        }
        _mm512_reduce_add_ps(sums.into_iter().fold(_mm512_set1_ps(0.0), |all, sum| _mm512_add_ps(all, sum)))
    }
    // SAFETY: `spinner` is asked for instruction sets that this CPU has, and this is of AVX-512.
    unsafe { spin(rounds) }
}

fn spin_bf16(rounds: usize) -> f32 {
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    fn spin(rounds: usize) -> f32 {
        // 2^-126 twice a pair: sums stay finite for any number of rounds.
        let bits = _mm512_set1_epi16(0x0080);
        // SAFETY: both types are 64 bytes, of which any bits are valid.
        let tiny: __m512bh = unsafe { std::mem::transmute(bits) };
        let (a, b) = (black_box(tiny), black_box(tiny));
        let mut sums: [__m512; CHAINS] = black_box([_mm512_set1_ps(1.0); CHAINS]);
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = _mm512_dpbf16_ps(*sum, a, b);
            }
        }
        _mm512_reduce_add_ps(sums.into_iter().fold(_mm512_set1_ps(0.0), |all, sum| _mm512_add_ps(all, sum)))
    }
    // SAFETY: `spinner` is asked for instruction sets that this CPU has, and this is of AVX512-BF16.
    unsafe { spin(rounds) }
}

fn spin_vnni(rounds: usize) -> f32 {
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    fn spin(rounds: usize) -> f32 {
        let (a, b) = (black_box(_mm512_set1_epi8(1)), black_box(_mm512_set1_epi8(1)));
        let mut sums: [__m512i; CHAINS] = black_box([_mm512_setzero_si512(); CHAINS]);
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = _mm512_dpbusd_epi32(*sum, a, b);
            }
        }
        let sum = sums.into_iter().fold(_mm512_setzero_si512(), |all, sum| _mm512_add_epi32(all, sum));
        _mm512_reduce_add_ps(_mm512_cvtepi32_ps(sum))
    }
    // SAFETY: `spinner` is asked for instruction sets that this CPU has, and this is of AVX512-VNNI.
    unsafe { spin(rounds) }
}

fn spin_int8(rounds: usize) -> f32 {
    #[target_feature(enable = "avx2")]
    fn spin(rounds: usize) -> f32 {
        let (bytes, ones) = (black_box(_mm256_set1_epi8(1)), black_box(_mm256_set1_epi16(1)));
        let mut sums: [__m256i; CHAINS] = black_box([_mm256_setzero_si256(); CHAINS]);
        for _ in 0..rounds {
            for sum in &mut sums {
                // The sums are the bytes too, or the product would be the same in every round and move out of the loop.
                let products = _mm256_madd_epi16(_mm256_maddubs_epi16(*sum, bytes), ones);
                *sum = _mm256_add_epi32(*sum, products);
            }
        }
        let sum = sums.into_iter().fold(_mm256_setzero_si256(), |all, sum| _mm256_xor_si256(all, sum));
        let mut words = [0i32; 8];
        // SAFETY: `words` is 32 writable bytes.
        unsafe { _mm256_storeu_si256(words.as_mut_ptr().cast::<__m256i>(), sum) };
        words.iter().map(|&word| word as f32).sum()
    }
    // SAFETY: `spinner` is asked for instruction sets that this CPU has, and this is AVX2.
    unsafe { spin(rounds) }
}
