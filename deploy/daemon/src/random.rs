//! Randomness for identities and secrets, straight from the operating system.

use std::cell::RefCell;

/// Bytes that are drawn at once: a request takes several ids, and asking the system for each is slow.
const N_BYTES: usize = 512;

thread_local! {
    /// Bytes that were drawn, and how many of them are used.
    static DRAWN: RefCell<([u8; N_BYTES], usize)> = const { RefCell::new(([0; N_BYTES], N_BYTES)) };
}

/// Draws 64 random bits, for ids and incarnations.
///
/// # Panics
/// When the operating system has no source of randomness, without which no identity is safe.
#[must_use]
pub fn u64() -> u64 {
    DRAWN.with_borrow_mut(|(bytes, n_used)| {
        if *n_used == N_BYTES {
            getrandom::fill(bytes).expect("the operating system provides randomness");
            *n_used = 0;
        }
        let mut next = [0; 8];
        next.copy_from_slice(&bytes[*n_used..*n_used + 8]);
        *n_used += 8;
        u64::from_le_bytes(next)
    })
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
