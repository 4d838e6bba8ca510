//! How fast this machine could be at best, measured in the same run (Williams, Waterman and Patterson, 2009).

use contract::kv::KvDtype;
use daemon::clock;
use kernels::bound::{Arithmetic, peak_flops, read_bandwidth};
use kernels::{ComputeDtype, Isa, WeightFormat};
use serde::Serialize;

/// Measured rates that no kernel can exceed for data that is not in a cache.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Roofline {
    /// Bytes read from memory in a second by all threads, by the best instruction of this CPU.
    pub read_bytes_per_s: f64,
    /// The instruction that read fastest.
    pub read_by: &'static str,
    /// Multiplications and additions of f32 in a second by all threads.
    pub peak_f32_flops: f64,
    /// The same of bf16, by the best instruction that the kernels may use.
    pub peak_bf16_flops: f64,
    /// The same of 8-bit integers.
    pub peak_int8_flops: f64,
    /// The instructions of the three peaks.
    pub peak_by: [&'static str; 3],
}

impl Roofline {
    /// Measures with as many threads as the kernels will have.
    ///
    /// # Errors
    /// When the CPU lacks `isa` or there is no memory.
    pub fn measure(isa: Isa, threads: usize) -> Result<Self, kernels::Error> {
        let read = read_bandwidth(threads, clock::now)?;
        let peak = |arithmetic| peak_flops(isa, arithmetic, threads, clock::now);
        let peaks = [peak(Arithmetic::F32)?, peak(Arithmetic::Bf16)?, peak(Arithmetic::Int8)?];
        Ok(Self {
            read_bytes_per_s: read.per_s,
            read_by: read.by,
            peak_f32_flops: peaks[0].per_s,
            peak_bf16_flops: peaks[1].per_s,
            peak_int8_flops: peaks[2].per_s,
            peak_by: peaks.map(|peak| peak.by),
        })
    }

    /// Shortest time to read `bytes` and to do all `flops`, those of one arithmetic after those of another.
    #[must_use]
    pub fn seconds(&self, bytes: f64, flops: &[(f64, Arithmetic)]) -> f64 {
        let peak = |arithmetic| match arithmetic {
            Arithmetic::F32 => self.peak_f32_flops,
            Arithmetic::Bf16 => self.peak_bf16_flops,
            Arithmetic::Int8 => self.peak_int8_flops,
        };
        let computing: f64 = flops.iter().map(|&(flops, arithmetic)| flops / peak(arithmetic)).sum();
        (bytes / self.read_bytes_per_s).max(computing)
    }

    /// One line for people.
    #[must_use]
    pub fn text(&self) -> String {
        let giga = |rate: f64| rate / 1e9;
        let [f32, bf16, int8] = self.peak_by;
        format!(
            "reads {:.1} GB/s ({}), computes {:.0} GFLOP/s in f32 ({f32}), {:.0} in bf16 ({bf16}), {:.0} in int8 ({int8})",
            giga(self.read_bytes_per_s),
            self.read_by,
            giga(self.peak_f32_flops),
            giga(self.peak_bf16_flops),
            giga(self.peak_int8_flops),
        )
    }
}

/// What is multiplied when weights of `format` are computed in `dtype`.
#[must_use]
pub fn arithmetic(dtype: ComputeDtype, format: WeightFormat) -> Arithmetic {
    match (dtype, format) {
        (ComputeDtype::F32, _) | (ComputeDtype::Stored, WeightFormat::F32 | WeightFormat::F16) => Arithmetic::F32,
        (ComputeDtype::Bf16 | ComputeDtype::Stored, _) => Arithmetic::Bf16,
        (ComputeDtype::Int8, _) => Arithmetic::Int8,
    }
}

/// What attention multiplies over a cache of `dtype`.
#[must_use]
pub fn attention_arithmetic(dtype: KvDtype) -> Arithmetic {
    match dtype {
        KvDtype::F32 | KvDtype::F16 => Arithmetic::F32,
        KvDtype::Bf16 | KvDtype::Int8 => Arithmetic::Bf16,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slower_of_memory_and_arithmetic_bounds() {
        let roofline = Roofline {
            read_bytes_per_s: 10.0,
            read_by: "r",
            peak_f32_flops: 100.0,
            peak_bf16_flops: 200.0,
            peak_int8_flops: 400.0,
            peak_by: ["a", "b", "c"],
        };
        let seconds = |bytes, flops, arithmetic| roofline.seconds(bytes, &[(flops, arithmetic)]);
        assert_eq!(seconds(10.0, 10.0, Arithmetic::F32), 1.0);
        assert_eq!(seconds(10.0, 1000.0, Arithmetic::F32), 10.0);
        assert_eq!(seconds(10.0, 1000.0, Arithmetic::Int8), 2.5);
        let [weights, attention] = [(1000.0, Arithmetic::Int8), (100.0, attention_arithmetic(KvDtype::F16))];
        assert_eq!(roofline.seconds(10.0, &[weights, attention]), 3.5);
    }

    #[test]
    fn quantised_weights_are_computed_in_bf16_unless_told_otherwise() {
        let stored = |format| arithmetic(ComputeDtype::Stored, format);
        assert_eq!(stored(WeightFormat::Q4_1), Arithmetic::Bf16);
        assert_eq!((stored(WeightFormat::Bf16), stored(WeightFormat::F16)), (Arithmetic::Bf16, Arithmetic::F32));
        assert_eq!(arithmetic(ComputeDtype::Int8, WeightFormat::Q4_1), Arithmetic::Int8);
    }
}
