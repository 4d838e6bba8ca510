//! Whether a choice goes on elsewhere when its worker fails: pure, for routers in real and in virtual time.

use contract::error::RequestError;
use contract::ids::Token;
use contract::request::StopParams;
use contract::stream::FinishReason;

/// How often one choice may be placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Placements while it has no token, at least one.
    pub n_attempts_max: u32,
    /// Migrations, which are placements with tokens of earlier ones; 0 lets a choice end with its worker.
    pub n_migrations_max: u32,
}

/// How often a choice was placed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Course {
    n_attempts: u32,
    n_migrations: u32,
}

impl Course {
    /// Counts a placement of a choice that has `n_tokens`.
    pub fn placed(&mut self, n_tokens: usize) {
        let count = if n_tokens == 0 { &mut self.n_attempts } else { &mut self.n_migrations };
        *count += 1;
    }

    /// Placements so far.
    pub fn n_placed(&self) -> u32 {
        self.n_attempts + self.n_migrations
    }

    /// Whether a choice that has `n_tokens` is placed again after `error`, with its tokens; if not, the error is its end.
    pub fn goes_on(&self, error: &RequestError, n_tokens: usize, budget: &Budget) -> bool {
        let (n, n_max) = match n_tokens {
            0 => (self.n_attempts, budget.n_attempts_max),
            _ => (self.n_migrations, budget.n_migrations_max),
        };
        is_of_the_worker(error) && n < n_max
    }
}

/// Whether a choice that has `n_tokens` waits for an engine when none is left after `error`: one that comes back makes good
/// for one that was lost, while a choice that was refused and has nothing to lose may as well come back later.
pub fn waits(error: &RequestError, n_tokens: usize) -> bool {
    n_tokens > 0 || !matches!(error, RequestError::Overloaded { .. })
}

/// How a choice with these tokens has ended, if it has, though its worker could not say so any more.
pub fn ended(generated: &[Token], stop: &StopParams) -> Option<FinishReason> {
    let last = generated.last()?;
    if generated.len() > stop.min_tokens as usize && stop.token_ids.contains(last) {
        return Some(FinishReason::Stop);
    }
    (generated.len() >= stop.max_tokens as usize).then_some(FinishReason::Length)
}

/// Whether another worker may do better; all else would happen there as well.
fn is_of_the_worker(error: &RequestError) -> bool {
    matches!(
        error,
        RequestError::StalePlacement(_)
            | RequestError::WorkerLost { .. }
            | RequestError::ShuttingDown(_)
            | RequestError::Overloaded { .. }
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUDGET: Budget = Budget { n_attempts_max: 2, n_migrations_max: 3 };

    #[test]
    fn attempts_and_migrations_have_a_budget_each() {
        let lost = RequestError::ShuttingDown("worker w".to_owned());
        let mut course = Course::default();
        course.placed(0);
        assert!(course.goes_on(&lost, 0, &BUDGET));
        course.placed(0);
        assert!(!course.goes_on(&lost, 0, &BUDGET), "both attempts are used");
        for n_tokens in [1, 5, 9] {
            assert!(course.goes_on(&lost, n_tokens, &BUDGET));
            course.placed(n_tokens);
        }
        assert!(!course.goes_on(&lost, 10, &BUDGET));
        assert_eq!(course.n_placed(), 5);
        assert!(!Course::default().goes_on(&lost, 1, &Budget { n_migrations_max: 0, ..BUDGET }), "it is switched off");
    }

    #[test]
    fn only_a_failure_of_the_worker_is_made_good() {
        let goes_on = |error| Course::default().goes_on(&error, 1, &BUDGET);
        let overloaded = RequestError::Overloaded { reason: String::new(), retry_after_ms: 1 };
        assert!(goes_on(RequestError::StalePlacement(String::new())) && goes_on(overloaded.clone()));
        let own = [
            RequestError::Cancelled,
            RequestError::DeadlineExceeded { n_tokens: 1 },
            RequestError::SlowReader(9),
            RequestError::Internal("it would fail there as well".to_owned()),
        ];
        assert!(own.into_iter().all(|error| !goes_on(error)));
        assert!(!waits(&overloaded, 0) && waits(&overloaded, 1));
        assert!(waits(&RequestError::StalePlacement(String::new()), 0));
    }

    #[test]
    fn a_choice_that_has_all_its_tokens_has_ended() {
        let stop = StopParams { token_ids: vec![7], min_tokens: 2, max_tokens: 4 };
        assert_eq!(ended(&[], &stop), None);
        assert_eq!(ended(&[1, 7], &stop), None, "before the least number of tokens nothing stops it");
        assert_eq!(ended(&[1, 2, 7], &stop), Some(FinishReason::Stop));
        assert_eq!(ended(&[1, 2, 3], &stop), None);
        assert_eq!(ended(&[1, 2, 3, 4], &stop), Some(FinishReason::Length));
    }
}
