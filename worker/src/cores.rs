//! How many threads may compute: physical cores that this process is allowed, within the CPU time its groups grant.

use std::collections::BTreeSet;

/// Where cgroups are mounted.
const CGROUPS: &str = "/sys/fs/cgroup";

/// Threads to compute on: as many as asked for, or for 0 all that are [`allowed`].
#[must_use]
pub fn or_allowed(threads: usize) -> usize {
    if threads == 0 { allowed() } else { threads }
}

/// Counts the cores of this machine that this process may keep busy, at least one.
#[must_use]
pub fn allowed() -> usize {
    count(|path| std::fs::read_to_string(path).ok())
        .unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from))
}

/// Counts them by what `read` says of files under `/proc` and `/sys`; none where the system tells no affinity.
///
/// Threads that share a core share its multipliers, so two of them compute no faster than one.
fn count(read: impl Fn(&str) -> Option<String>) -> Option<usize> {
    let status = read("/proc/self/status")?;
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    let core_of = |cpu: usize| {
        let siblings = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
        read(&siblings).map_or_else(|| cpu.to_string(), |list| list.trim().to_owned())
    };
    let cores: BTreeSet<String> = cpus(list)?.map(core_of).collect();
    let granted = quota(&read).map_or(usize::MAX, |cpus| cpus as usize);
    Some(cores.len().min(granted).max(1))
}

/// The CPUs of a list such as `0-3,8`.
fn cpus(list: &str) -> Option<impl Iterator<Item = usize>> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.trim().parse::<usize>().ok()?..=last.trim().parse::<usize>().ok()?)
    };
    let ranges: Vec<_> = list.trim().split(',').map(range).collect::<Option<_>>()?;
    Some(ranges.into_iter().flatten())
}

/// The least CPU time, in CPUs, that any of this process's cgroups grants; none when nothing bounds it.
fn quota(read: &impl Fn(&str) -> Option<String>) -> Option<f64> {
    let groups = read("/proc/self/cgroup")?;
    let quotas = groups.lines().filter_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next()?, fields.next()?);
        // The second version has one hierarchy for all; in the first, `cpu` has its own.
        let (mount, is_second) = match controllers.split(',').any(|name| name == "cpu") {
            true => (format!("{CGROUPS}/cpu"), false),
            false if controllers.is_empty() => (CGROUPS.to_owned(), true),
            false => return None,
        };
        ancestors(path)
            .filter_map(|group| if is_second { second(read, &mount, group) } else { first(read, &mount, group) })
            .reduce(f64::min)
    });
    quotas.reduce(f64::min)
}

/// A group's path, its parent's and so on; the root's is empty.
///
/// Inside a container the path may be the host's, of which only the root is there.
fn ancestors(path: &str) -> impl Iterator<Item = &str> {
    let path = path.trim_end_matches('/');
    std::iter::successors(Some(path), |path| path.rfind('/').map(|slash| &path[..slash]))
}

/// `cpu.max`: time and period in microseconds, or `max`.
fn second(read: &impl Fn(&str) -> Option<String>, mount: &str, group: &str) -> Option<f64> {
    let text = read(&format!("{mount}{group}/cpu.max"))?;
    let (time, period) = text.trim().split_once(' ')?;
    share(time, period)
}

/// The same in two files; no bound is -1.
fn first(read: &impl Fn(&str) -> Option<String>, mount: &str, group: &str) -> Option<f64> {
    let file = |name: &str| read(&format!("{mount}{group}/cpu.cfs_{name}_us"));
    share(file("quota")?.trim(), file("period")?.trim())
}

fn share(time: &str, period: &str) -> Option<f64> {
    let (time, period) = (time.parse::<f64>().ok()?, period.parse::<f64>().ok()?);
    (time > 0.0 && period > 0.0).then(|| time / period)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine of `n_cores` cores with two threads each, numbered as Linux does on Intel's.
    fn machine(n_cores: usize, files: &[(&str, &str)], path: &str) -> Option<String> {
        if let Some((_, text)) = files.iter().find(|(name, _)| *name == path) {
            return Some((*text).to_owned());
        }
        let rest = path.strip_prefix("/sys/devices/system/cpu/cpu")?;
        let cpu: usize = rest.strip_suffix("/topology/thread_siblings_list")?.parse().ok()?;
        (cpu < 2 * n_cores).then(|| format!("{},{}\n", cpu % n_cores, cpu % n_cores + n_cores))
    }

    fn count_on(n_cores: usize, files: &[(&str, &str)]) -> Option<usize> {
        count(|path| machine(n_cores, files, path))
    }

    fn status(list: &str) -> String {
        format!("Name:\ttessera\nCpus_allowed:\tff\nCpus_allowed_list:\t{list}\nMems_allowed:\t1\n")
    }

    #[test]
    fn threads_of_one_core_count_once() {
        for (list, expected) in [("0-7", 4), ("0-3", 4), ("0,4", 1), ("0-1,4-5,7", 3), ("6", 1)] {
            assert_eq!(count_on(4, &[("/proc/self/status", &status(list))]), Some(expected), "{list}");
        }
        let unknown = count(|path| (path == "/proc/self/status").then(|| status("0-5")));
        assert_eq!(unknown, Some(6), "a system that tells no topology");
    }

    #[test]
    fn the_tightest_group_bounds_the_cores() {
        let counted = |groups: &str, files: &[(&str, &str)]| {
            let status = status("0-15");
            let mut all = vec![("/proc/self/status", status.as_str()), ("/proc/self/cgroup", groups)];
            all.extend_from_slice(files);
            count_on(8, &all).unwrap()
        };
        assert_eq!(counted("0::/a/b\n", &[("/sys/fs/cgroup/a/b/cpu.max", "max 100000\n")]), 8);
        assert_eq!(counted("0::/a/b\n", &[("/sys/fs/cgroup/a/b/cpu.max", "350000 100000\n")]), 3);
        assert_eq!(counted("0::/a/b\n", &[("/sys/fs/cgroup/a/cpu.max", "200000 100000\n")]), 2, "the parent's");
        assert_eq!(counted("0::/\n", &[("/sys/fs/cgroup/cpu.max", "50000 100000\n")]), 1, "half a core is one");
        assert_eq!(counted("0::/host/path\n", &[("/sys/fs/cgroup/cpu.max", "600000 100000\n")]), 6, "a container");
        let first = [
            ("/sys/fs/cgroup/cpu/x/cpu.cfs_quota_us", "400000\n"),
            ("/sys/fs/cgroup/cpu/x/cpu.cfs_period_us", "100000\n"),
            ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n"),
            ("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n"),
        ];
        assert_eq!(counted("5:memory:/x\n4:cpu,cpuacct:/x\n", &first), 4, "the first version of cgroups");
    }

    #[test]
    fn what_cannot_be_read_is_left_to_the_standard_library() {
        assert_eq!(count(|_| None), None);
        assert_eq!(count(|_| Some(status("all of them"))), None);
        assert!((1..=4096).contains(&allowed()));
    }
}
