//! Counter-based random numbers: Philox-4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).

/// Multipliers of a round.
const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
/// Increments of the key between rounds.
const INCREMENTS: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// Encrypts `counter` under `key` with ten rounds.
#[must_use]
pub fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let low = u64::from(MULTIPLIERS[0]) * u64::from(counter[0]);
        let high = u64::from(MULTIPLIERS[1]) * u64::from(counter[2]);
        counter = [
            (high >> 32) as u32 ^ counter[1] ^ key[0],
            high as u32,
            (low >> 32) as u32 ^ counter[3] ^ key[1],
            low as u32,
        ];
        key = [key[0].wrapping_add(INCREMENTS[0]), key[1].wrapping_add(INCREMENTS[1])];
    }
    counter
}

/// A number in [0, 1) with 53 random bits for `seed` and `position`.
#[must_use]
pub fn uniform(seed: u64, position: u32) -> f64 {
    let words = philox([position, 0, 0, 0], [seed as u32, (seed >> 32) as u32]);
    let bits = (u64::from(words[0]) << 32 | u64::from(words[1])) >> 11;
    bits as f64 / (1_u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_answers_of_the_authors() {
        let all = [u32::MAX; 4];
        assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox(all, [u32::MAX; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        assert_eq!(
            philox([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn every_position_and_seed_draws_its_own_number() {
        let draws: std::collections::BTreeSet<u64> =
            (0..100).flat_map(|seed| (0..100).map(move |position| uniform(seed << 30, position).to_bits())).collect();
        assert_eq!(draws.len(), 10_000);
    }
}
