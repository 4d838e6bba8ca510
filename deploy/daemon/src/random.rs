//! Randomness for identities and secrets, straight from the operating system.

/// Draws 64 random bits, for ids and incarnations.
///
/// # Panics
/// When the operating system has no source of randomness, without which no identity is safe.
#[must_use]
pub fn u64() -> u64 {
    getrandom::u64().expect("the operating system provides randomness")
}

/// Draws 128 random bits, for ids that must never meet.
///
/// # Panics
/// As [`u64()`].
#[must_use]
pub fn u128() -> u128 {
    (u128::from(u64()) << 64) | u128::from(u64())
}

/// Draws 256 random bits, for keys.
///
/// # Panics
/// As [`u64()`].
#[must_use]
pub fn key() -> [u8; 32] {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).expect("the operating system provides randomness");
    bytes
}

#[cfg(test)]
mod tests {
    #[test]
    fn draws_differ() {
        assert_ne!(super::u64(), super::u64());
        assert_ne!(super::u128(), super::u128());
        assert_ne!(super::key(), super::key());
    }
}
