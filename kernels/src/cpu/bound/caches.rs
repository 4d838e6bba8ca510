//! Bytes of this machine's caches and memory, as the system tells them.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// Bytes of all third-level caches together; 0 where the system does not say.
pub(super) fn third_level_bytes() -> usize {
    let mut caches = BTreeMap::new();
    for cpu in entries(Path::new("/sys/devices/system/cpu")) {
        for cache in entries(&cpu.join("cache")) {
            let read = |name: &str| fs::read_to_string(cache.join(name)).unwrap_or_default().trim().to_owned();
            if read("level") == "3" {
                // CPUs that share a cache all name it.
                caches.insert(read("shared_cpu_list"), bytes(&read("size")));
            }
        }
    }
    caches.into_values().fold(0, usize::saturating_add)
}

/// Bytes of memory; no bound where the system does not say.
pub(super) fn memory_bytes() -> usize {
    // SAFETY: both calls only read numbers of the system.
    let [pages, page] = unsafe { [libc::sysconf(libc::_SC_PHYS_PAGES), libc::sysconf(libc::_SC_PAGESIZE)] };
    usize::try_from(pages).ok().zip(usize::try_from(page).ok()).map_or(usize::MAX, |(n, page)| n.saturating_mul(page))
}

fn entries(folder: &Path) -> impl Iterator<Item = std::path::PathBuf> {
    fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path())
}

/// A size like `32768K`; 0 for anything else.
fn bytes(size: &str) -> usize {
    let (number, unit) = match size.split_at_checked(size.len().saturating_sub(1)) {
        Some((number, "K")) => (number, 1 << 10),
        Some((number, "M")) => (number, 1 << 20),
        _ => (size, 1),
    };
    number.parse::<usize>().unwrap_or(0).saturating_mul(unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_their_units() {
        for (size, expected) in [("32768K", 32 << 20), ("16M", 16 << 20), ("512", 512), ("", 0), ("K", 0), ("ab", 0)] {
            assert_eq!(bytes(size), expected, "{size}");
        }
        assert!(memory_bytes() > 1 << 20);
    }
}
