//! Seeds of random tests: printed, repeatable by `SEED`, rotating otherwise.

use std::time::{SystemTime, UNIX_EPOCH};

/// A small generator (SplitMix64; Steele, Lea and Flood 2014).
pub struct Random(u64);

/// Takes the seed from `SEED` or from the clock, and prints it.
pub fn from_environment() -> Random {
    let clock = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
    let seed = std::env::var("SEED").ok().map_or_else(clock, |seed| seed.parse().expect("SEED is a number"));
    eprintln!("SEED={seed} repeats this run");
    Random(seed)
}

/// Whether the full size of counted tests is asked for.
pub fn is_full() -> bool {
    std::env::var_os("TESSERA_FULL").is_some()
}

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.draw() % bound
    }
}
