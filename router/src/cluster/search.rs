//! What searches for an engine have found.

use std::time::{Duration, Instant};

use crate::cluster::Backlog;

/// Kept from one search to the next.
#[derive(Default)]
pub(super) struct Search {
    /// Since when there is no engine, if there is none.
    none_since: Option<Instant>,
    /// Of the search that goes on.
    pub(super) backlog: Backlog,
}

impl Search {
    /// A search found an engine, free or busy, or none; or an engine has become ready.
    pub(super) fn found(&mut self, any: bool, now: Instant) {
        self.none_since = if any { None } else { self.none_since.or(Some(now)) };
    }

    /// How much longer requests wait for an engine that they do not find; none when there has not been any for `wait_max`.
    pub(super) fn left(&self, now: Instant, wait_max: Duration) -> Option<Duration> {
        let waited = self.none_since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
        Some(wait_max.saturating_sub(waited)).filter(|left| !left.is_zero())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WAIT_MAX: Duration = Duration::from_secs(10);

    #[test]
    fn the_wait_for_an_engine_begins_anew_with_each_outage() {
        let (mut search, began) = (Search::default(), daemon::clock::now());
        let at = |s| began + Duration::from_secs(s);
        assert_eq!(search.left(at(0), WAIT_MAX), Some(WAIT_MAX));
        search.found(false, at(0));
        search.found(false, at(4));
        assert_eq!(search.left(at(4), WAIT_MAX), Some(Duration::from_secs(6)));
        assert_eq!(search.left(at(10), WAIT_MAX), None);
        // An engine that stood still steps again: nobody has told of it, but a search finds it.
        search.found(true, at(30));
        search.found(false, at(60));
        assert_eq!(search.left(at(61), WAIT_MAX), Some(Duration::from_secs(9)));
    }
}
