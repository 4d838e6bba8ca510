//! Processor time of this process.

/// Ticks of `/proc/self/stat` in a second: `USER_HZ`, 100 on every Linux that matters here.
const TICKS_PER_S: f64 = 100.0;

/// Seconds that all threads have run, user and system; none where the system does not tell.
pub(crate) fn seconds() -> Option<f64> {
    parse(&std::fs::read_to_string("/proc/self/stat").ok()?)
}

/// Fields 14 and 15 of proc(5), counted after the name in parentheses, which may hold spaces.
fn parse(stat: &str) -> Option<f64> {
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_ascii_whitespace().skip(11);
    let (user, system): (f64, f64) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
    Some((user + system) / TICKS_PER_S)
}

#[cfg(test)]
mod tests {
    #[test]
    fn user_and_system_time_are_found_behind_any_name() {
        let stat = "42 (a ) b) S 1 1 1 0 -1 4194560 100 0 0 0 250 50 0 0 20 0 1 0 9";
        assert_eq!(super::parse(stat), Some(3.0));
        assert_eq!(super::parse("nonsense"), None);
    }
}
