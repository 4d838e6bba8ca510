//! How much virtual time a load takes, and how much may be simulated.

use std::time::Duration;

use contract::cost::StepLoad;

use crate::options::OptionsError;
use crate::prepared::Prepared;
use crate::workload::Request;

/// Longest time from the first arrival to the last, and longest time of one request alone, in seconds: workers give
/// signs of life every second, so time in which nothing else happens is not free.
const SPAN_S_MAX: f64 = 1e6;
/// A run that takes so many times what its load asks for does not end.
const PATIENCE: f64 = 100.0;

/// Checks that a load can be simulated in a time worth waiting for.
///
/// # Errors
/// A load that arrives, or a request that is answered, over too long a time.
pub(crate) fn check(prepared: &Prepared, speed: f64) -> Result<(), OptionsError> {
    let wrong = |field, value, way_out: &str| {
        Err(OptionsError { field, value, want: format!("at most {SPAN_S_MAX} with {way_out}") })
    };
    let span_s = arrivals_s(prepared, speed);
    if span_s > SPAN_S_MAX {
        return wrong(
            "seconds from the first arrival to the last",
            span_s,
            "a higher speed or rate, or fewer requests",
        );
    }
    let longest_s = prepared.requests().iter().map(|request| alone_s(prepared, request)).fold(0.0, f64::max);
    if longest_s > SPAN_S_MAX {
        return wrong("seconds of the longest request", longest_s, "shorter times in the profile, or shorter requests");
    }
    Ok(())
}

/// No run takes longer than this, or it does not end.
pub(crate) fn longest(prepared: &Prepared, speed: f64) -> Duration {
    let work_s: f64 = prepared.requests().iter().map(|request| alone_s(prepared, request)).sum();
    Duration::from_secs_f64((arrivals_s(prepared, speed) + work_s) * PATIENCE + 100_000.0)
}

/// Seconds from the first arrival to the last.
fn arrivals_s(prepared: &Prepared, speed: f64) -> f64 {
    prepared.requests().last().map_or(0.0, |request| request.after.as_secs_f64()) / speed
}

/// Seconds that a worker with nothing else to do and an empty cache takes for a request.
fn alone_s(prepared: &Prepared, request: &Request) -> f64 {
    let (profile, n_output) = (prepared.profile(), prepared.output_max(request));
    let mut decode = StepLoad::default();
    decode.add_decode(1, u64::from(request.n_prompt) + u64::from(n_output));
    let n_chunks = f64::from(request.n_prompt.div_ceil(profile.prefill_budget.max(1)));
    let prefill_ms =
        profile.timing.cost().prefill_ms(request.n_prompt.into(), 0) + n_chunks * profile.timing.step_base_ms;
    prefill_ms / 1e3 + profile.timing.step(&decode).as_secs_f64() * f64::from(n_output)
}

#[cfg(test)]
mod tests {
    use worker::sim::Profile;

    use super::*;
    use crate::Workload;

    fn prepared(after_s: u64, timing: &str) -> Prepared {
        let bounds = "block_size = 16\nn_blocks = 100\nmax_running = 8\nprefill_budget = 512\ncontext_length = 1000\n";
        let profile = Profile::parse(&format!("{bounds}[timing]\n{timing}\n"), "p").unwrap();
        let request = |after| Request {
            after: Duration::from_secs(after),
            n_prompt: 900,
            n_output: 500,
            blocks: vec![],
            tenant: 0,
        };
        Prepared::new(Workload::new("t", vec![request(0), request(after_s)]), profile).unwrap()
    }

    #[test]
    fn a_load_without_end_is_refused_with_the_way_out() {
        let year = prepared(366 * 86_400, "decode_base_ms = 1");
        let error = check(&year, 1.0).unwrap_err().to_string();
        assert_eq!(
            error,
            "seconds from the first arrival to the last is 31622400; give at most 1000000 with a higher speed or rate, \
             or fewer requests"
        );
        assert_eq!(check(&year, 100.0), Ok(()));
        let slow = prepared(1, "decode_base_ms = 1e6\nstep_base_ms = 1e6\nprefill_tokens_per_s = 1e-3");
        let error = check(&slow, 1.0).unwrap_err().to_string();
        // 900 tokens of 1,000 s, two steps of them, and 100 tokens of 2,000 s up to the end of the context.
        assert!(error.starts_with("seconds of the longest request is 1102000; give at most"), "{error}");
    }

    #[test]
    fn patience_grows_with_slowness_of_arrivals_and_of_steps() {
        let load = prepared(1_000, "decode_base_ms = 1e3");
        assert_eq!(longest(&load, 1.0), Duration::from_secs((1_000 + 200) * 100 + 100_000));
        assert_eq!(longest(&load, 0.01), Duration::from_secs((100_000 + 200) * 100 + 100_000));
    }
}
