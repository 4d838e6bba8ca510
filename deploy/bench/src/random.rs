//! Seeded numbers: the same seed makes the same load.

/// SplitMix64 (Steele, Lea and Flood, 2014).
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    /// A stream of its own for each pair of `seed` and `stream`.
    pub(crate) fn new(seed: u64, stream: u64) -> Self {
        let mut first = Self(seed);
        let mut second = Self(first.next() ^ stream);
        Self(second.next())
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in `0..bound`; 0 when `bound` is 0.
    pub(crate) fn below(&mut self, bound: u32) -> u32 {
        // The high half of the product is below `bound` (Lemire, 2019; the bias is below 2^-32).
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u32
    }

    /// Uniform in (0, 1].
    pub(crate) fn unit(&mut self) -> f64 {
        ((self.next() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_repeats_and_streams_differ() {
        let draw = |seed, stream| {
            let mut random = Random::new(seed, stream);
            [random.next(), random.next()]
        };
        assert_eq!(draw(1, 2), draw(1, 2));
        assert_ne!(draw(1, 2), draw(1, 3));
        assert_ne!(draw(1, 2), draw(2, 2));
    }

    #[test]
    fn draws_stay_in_range() {
        let mut random = Random::new(7, 0);
        for _ in 0..10_000 {
            assert!(random.below(10) < 10);
            let unit = random.unit();
            assert!(unit > 0.0 && unit <= 1.0);
        }
        assert_eq!(random.below(0), 0);
    }
}
