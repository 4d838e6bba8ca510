//! How many requests each engine got of late: what came long ago counts less.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use contract::ids::EngineId;

/// After so long a placement counts 1/e.
const FADES_IN: Duration = Duration::from_secs(300);
/// Engines with less than this are forgotten when another comes.
const COUNT_MIN: f64 = 0.01;

/// Fading counts of placements.
#[derive(Debug, Default)]
pub(super) struct Recent {
    counts: HashMap<EngineId, (f64, Instant)>,
}

impl Recent {
    /// Counts a placement.
    pub(super) fn add(&mut self, engine: &EngineId, now: Instant) {
        let n = self.of(engine, now) + 1.0;
        if let Some(count) = self.counts.get_mut(engine) {
            *count = (n, now);
            return;
        }
        self.counts.retain(|_, count| faded(*count, now) >= COUNT_MIN);
        self.counts.insert(engine.clone(), (n, now));
    }

    /// Placements on an engine, those of long ago less.
    pub(super) fn of(&self, engine: &EngineId, now: Instant) -> f64 {
        self.counts.get(engine).map_or(0.0, |&count| faded(count, now))
    }
}

fn faded((n, since): (f64, Instant), now: Instant) -> f64 {
    n * (-now.saturating_duration_since(since).as_secs_f64() / FADES_IN.as_secs_f64()).exp()
}

#[cfg(test)]
mod tests {
    use contract::ids::{DataRank, Incarnation};

    use super::*;

    fn engine(n: u64) -> EngineId {
        EngineId { worker: "w".into(), incarnation: Incarnation(n), data_rank: DataRank(0) }
    }

    #[test]
    fn counts_fade_and_what_has_faded_is_forgotten() {
        let (mut recent, start) = (Recent::default(), daemon::clock::now());
        for n in 0..3 {
            recent.add(&engine(n), start);
        }
        recent.add(&engine(0), start + FADES_IN);
        assert!((recent.of(&engine(0), start + FADES_IN) - 1.0 - (-1.0_f64).exp()).abs() < 1e-9);
        assert!((recent.of(&engine(1), start + 2 * FADES_IN) - (-2.0_f64).exp()).abs() < 1e-9);
        recent.add(&engine(9), start + 10 * FADES_IN);
        assert_eq!(recent.counts.len(), 1, "what was placed long ago takes no memory");
    }
}
