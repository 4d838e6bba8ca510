//! CPUs that this process may run on, and threads pinned to them.

/// The CPUs that this process may run on when there are exactly `threads` of them, else none.
pub(crate) fn one_each(threads: usize) -> Vec<usize> {
    // SAFETY: the set is plain bits, and the call writes at most its size.
    let set = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        if libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set) != 0 {
            return Vec::new();
        }
        set
    };
    // SAFETY: the numbers are below the size of the set.
    let cpus: Vec<usize> = (0..8 * size_of_val(&set)).filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &set) }).collect();
    if cpus.len() == threads { cpus } else { Vec::new() }
}

/// Keeps the calling thread on one CPU. Where the system refuses, the thread runs as well anywhere.
pub(crate) fn pin(cpu: usize) {
    // SAFETY: the set is plain bits and holds a number that the system gave; the call reads it only.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(cpu, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pinned_thread_has_one_cpu() {
        assert!(one_each(100_000).is_empty());
        let all = (1..1024).map(one_each).find(|cpus| !cpus.is_empty()).unwrap_or_default();
        if let Some(&cpu) = all.last() {
            let seen = std::thread::spawn(move || {
                pin(cpu);
                one_each(1)
            });
            assert_eq!(seen.join().unwrap(), [cpu]);
        }
    }
}
