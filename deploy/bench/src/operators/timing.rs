//! The median time of calls.

use std::time::Duration;

use daemon::clock;
use kernels::Error;

use crate::statistics::Spread;

/// Calls of a test at least, after one to warm up.
const CALLS_MIN: usize = 3;
/// Calls of a test at most.
const CALLS_MAX: usize = 100_000;

/// Calls until `time` has passed and returns the median in seconds; `prepare` runs before each call and is not timed.
pub(super) fn median(
    time: Duration,
    mut prepare: impl FnMut(usize) -> Result<(), Error>,
    mut call: impl FnMut(usize) -> Result<(), Error>,
) -> Result<f64, Error> {
    prepare(0)?;
    call(0)?;
    let mut seconds = Vec::new();
    let end = clock::now() + time;
    for number in 1..=CALLS_MAX {
        if seconds.len() >= CALLS_MIN && clock::now() >= end {
            break;
        }
        prepare(number)?;
        let began = clock::now();
        call(number)?;
        seconds.push(clock::now().duration_since(began).as_secs_f64());
    }
    Ok(Spread::of(seconds).median.max(1e-9))
}
