//! The parts of admission against simple models.

mod fairness;
mod queue;
mod quotas;
mod routers;
mod tenants;

use std::time::{Duration, Instant};

use proptest::prelude::ProptestConfig;

use super::*;

/// The seed that SEED names, or a random one; printed, so that a failure can be replayed.
#[expect(clippy::print_stderr, reason = "the test harness shows it with the failure")]
fn config() -> ProptestConfig {
    let seed = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or_else(daemon::random::u64);
    eprintln!("SEED={seed}");
    let rng_seed = proptest::test_runner::RngSeed::Fixed(seed);
    ProptestConfig { rng_seed, failure_persistence: None, ..ProptestConfig::default() }
}

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn ask(tenant: &str, tokens: u64) -> Ask {
    Ask { tenant: tenant.into(), weight: 1, tokens, priority: 0, deadline: None, prefill_ms: 0.0 }
}

fn queue<T>(now: Instant) -> FairQueue<T> {
    FairQueue::new(QueueBounds::default(), Order::default(), now)
}
