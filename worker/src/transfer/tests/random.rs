//! Small random numbers (splitmix64).

pub(super) struct Random(pub(super) u64);

impl Random {
    /// The seed that `SEED` says, else a new one; printed either way.
    pub(super) fn seeded() -> Self {
        let seed = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or_else(daemon::random::u64);
        println!("SEED={seed}");
        Self(seed)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Between the two, the second not among them.
    pub(super) fn range(&mut self, start: u32, end: u32) -> u32 {
        start + (self.next() % u64::from(end - start)) as u32
    }

    pub(super) fn of<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.range(0, values.len() as u32) as usize]
    }

    pub(super) fn shuffle<T>(&mut self, values: &mut [T]) {
        for i in (1..values.len()).rev() {
            values.swap(i, self.range(0, i as u32 + 1) as usize);
        }
    }
}
