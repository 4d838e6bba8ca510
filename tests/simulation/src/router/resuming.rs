//! Requests whose worker failed go on elsewhere, by the decision that serves; what finds no engine waits for one.

use std::time::Duration;

use contract::error::RequestError;
use router::resume::{self, Budget};
use router::route::placer::Patience;

use super::placing::Wish;
use super::{Router, Surroundings};
use crate::book::{Book, End};
use crate::event::RequestIdx;

/// Generous, so that what fails in a run has failed often.
const BUDGET: Budget = Budget { n_attempts_max: 20, n_migrations_max: 20 };
/// Longest wait for an engine where none is left.
const WAIT_MAX: Duration = Duration::from_secs(10);

/// Requests that wait for an engine, each until its time is over.
#[derive(Default)]
pub(super) struct Resuming(Vec<(RequestIdx, Duration)>);

impl Resuming {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn remove(&mut self, request: RequestIdx) {
        self.0.retain(|&(waiting, _)| waiting != request);
    }

    pub(super) fn into_requests(self) -> impl Iterator<Item = RequestIdx> {
        self.0.into_iter().map(|(request, _)| request)
    }
}

impl Router {
    /// Ends a placement by what its worker said or by its loss; the request goes on with the tokens it has, or not at all.
    pub(super) fn fail(&mut self, request: RequestIdx, error: &RequestError, around: &mut Surroundings<'_>) {
        let Some(flight) = self.land(request, around.network) else { return };
        let now = around.network.now;
        let progress = around.book.of(request);
        progress.refusal = Some(error.code());
        progress.tried.push(flight.work.engine);
        if !progress.course.goes_on(error, progress.n_tokens as usize, &BUDGET) {
            return around.book.end(request, now, End::Badly);
        }
        let waits = resume::waits(error, progress.n_tokens as usize);
        self.resuming.0.push((request, if waits { now + WAIT_MAX } else { now }));
        self.resume(around);
    }

    /// Places what waits for an engine, if there is one now, and gives up what has waited for too long.
    pub(super) fn resume(&mut self, around: &mut Surroundings<'_>) {
        let mut left = std::mem::take(&mut self.resuming.0);
        left.retain(|&(request, until)| {
            let tried = around.book.of(request).tried.clone();
            let wish = Wish { patience: Patience::None, n_before: 0, tried: &tried };
            if self.place(request, &wish, &mut vec![0.0; self.peered.len()], around).is_ok() {
                return false;
            }
            // What failed may be reached again.
            around.book.of(request).tried.clear();
            let is_over = until <= around.network.now;
            if is_over {
                around.book.end(request, around.network.now, End::Badly);
            }
            !is_over
        });
        if let Some(until) = left.iter().map(|&(_, until)| until).min() {
            let wait_ms = (until - around.network.now).as_secs_f64() * 1e3;
            self.retry_after(wait_ms, around.network);
        }
        self.resuming.0 = left;
    }
}

/// Notes a placement; its attempt's number is returned.
pub(super) fn note_placed(book: &mut Book, request: RequestIdx) -> u32 {
    let progress = book.of(request);
    let attempt = progress.course.n_placed();
    progress.course.placed(progress.n_tokens as usize);
    let is_migration = progress.n_tokens > 0;
    book.n_migrated += usize::from(is_migration);
    attempt
}
