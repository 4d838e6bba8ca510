//! Threads that share one loop at a time: chunks are claimed, helpers spin briefly for the next loop, then sleep.
//! Hot path: no allocation, no log; one uncontended lock where a loop starts and where it ends.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use crate::error::{Error, Result};

/// Pauses a waiting thread makes before it sleeps, some tens of microseconds.
const SPINS: u32 = 1_000;

/// Body of a loop: called with the number of the thread and of the chunk.
pub(crate) type Body<'a> = dyn Fn(usize, usize) + Sync + 'a;

/// The calling thread (number 0) and helpers (1..).
pub(crate) struct Pool {
    shared: Arc<Shared>,
    helpers: Vec<JoinHandle<()>>,
}

struct Shared {
    state: Mutex<State>,
    wake: Condvar,
    idle: Condvar,
    epoch: AtomicU64,
    active: AtomicUsize,
    panicked: AtomicBool,
}

#[derive(Default)]
struct State {
    job: Option<Job>,
    stop: bool,
}

/// A loop in progress. The pointers are valid while `State::job` holds it or a helper is counted in `active`.
#[derive(Clone, Copy)]
struct Job {
    body: *const Body<'static>,
    next: *const AtomicUsize,
    n_chunks: usize,
}

// SAFETY: both pointees are Sync (`Body` by its bound) and outlive all uses, see `Pool::run`.
unsafe impl Send for Job {}

impl Pool {
    /// Starts `threads - 1` helpers; the calling thread is the first.
    pub(crate) fn new(threads: usize) -> Result<Self> {
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            wake: Condvar::new(),
            idle: Condvar::new(),
            epoch: AtomicU64::new(0),
            active: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
        });
        let mut pool = Self { shared, helpers: Vec::new() };
        for thread in 1..threads {
            let shared = Arc::clone(&pool.shared);
            let builder = std::thread::Builder::new().name(format!("kernels-{thread}"));
            let spawned = builder.spawn(move || shared.help(thread));
            pool.helpers
                .push(spawned.map_err(|e| Error::System { what: "start a compute thread", reason: e.to_string() })?);
        }
        Ok(pool)
    }

    /// Number of threads, the calling one included.
    pub(crate) fn threads(&self) -> usize {
        self.helpers.len() + 1
    }

    /// Calls `body` once for each chunk `0..n_chunks`, on any thread and in any order, and returns when all are done.
    ///
    /// # Panics
    /// When `body` does.
    pub(crate) fn run(&mut self, n_chunks: usize, body: &Body<'_>) {
        if self.helpers.is_empty() || n_chunks <= 1 {
            (0..n_chunks).for_each(|chunk| body(0, chunk));
            return;
        }
        let next = AtomicUsize::new(0);
        let body_ptr: *const Body<'_> = body;
        // SAFETY: only the lifetime changes. `finish` takes the job away and waits until no helper is in it, also when
        // `body` panics on this thread, so nothing uses the pointer after this call.
        let body_ptr: *const Body<'static> = unsafe { std::mem::transmute(body_ptr) };
        let job = Job { body: body_ptr, next: &raw const next, n_chunks };
        let mut state = self.shared.lock();
        // A loop whose caller panicked too has left its helpers' panic unreported; that one is over.
        self.shared.panicked.store(false, Ordering::Release);
        state.job = Some(job);
        // Under the lock, or a helper on its way to sleep would miss the call.
        self.shared.epoch.fetch_add(1, Ordering::Release);
        drop(state);
        self.shared.wake.notify_all();
        let finish = Finish(&self.shared);
        claim(&next, n_chunks, 0, body);
        drop(finish);
        assert!(!self.shared.panicked.swap(false, Ordering::AcqRel), "a compute thread panicked");
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.epoch.fetch_add(1, Ordering::Release);
        self.shared.wake.notify_all();
        for helper in self.helpers.drain(..) {
            // A helper catches panics of its work, so it has none to report.
            drop(helper.join());
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn help(&self, thread: usize) {
        let mut seen = 0;
        loop {
            for _ in 0..SPINS {
                if self.epoch.load(Ordering::Acquire) != seen {
                    break;
                }
                std::hint::spin_loop();
            }
            let mut state = self.lock();
            while self.epoch.load(Ordering::Acquire) == seen && !state.stop {
                state = self.wake.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            seen = self.epoch.load(Ordering::Acquire);
            if state.stop {
                return;
            }
            let Some(job) = state.job else { continue };
            // Counted under the lock that `finish` takes the job away with.
            self.active.fetch_add(1, Ordering::AcqRel);
            drop(state);
            // SAFETY: this helper is counted, so `Pool::run` has not returned and both pointees live.
            let (next, body) = unsafe { (&*job.next, &*job.body) };
            if catch_unwind(AssertUnwindSafe(|| claim(next, job.n_chunks, thread, body))).is_err() {
                self.panicked.store(true, Ordering::Release);
            }
            if self.active.fetch_sub(1, Ordering::AcqRel) == 1 {
                drop(self.lock());
                self.idle.notify_all();
            }
        }
    }
}

/// Takes the job away and waits for the helpers that are in it.
struct Finish<'a>(&'a Shared);

impl Drop for Finish<'_> {
    fn drop(&mut self) {
        self.0.lock().job = None;
        for _ in 0..SPINS {
            if self.0.active.load(Ordering::Acquire) == 0 {
                return;
            }
            std::hint::spin_loop();
        }
        let mut state = self.0.lock();
        while self.0.active.load(Ordering::Acquire) > 0 {
            state = self.0.idle.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

fn claim(next: &AtomicUsize, n_chunks: usize, thread: usize, body: &Body<'_>) {
    loop {
        let chunk = next.fetch_add(1, Ordering::Relaxed);
        if chunk >= n_chunks {
            return;
        }
        body(thread, chunk);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_chunk_runs_exactly_once() {
        for threads in 1..=4 {
            let mut pool = Pool::new(threads).unwrap();
            assert_eq!(pool.threads(), threads);
            for n_chunks in (0..200).chain([0, 1, 5000]) {
                let counts: Vec<AtomicUsize> = (0..n_chunks).map(|_| AtomicUsize::new(0)).collect();
                pool.run(n_chunks, &|thread, chunk| {
                    assert!(thread < threads);
                    counts[chunk].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let mut pool = Pool::new(3).unwrap();
        let result = catch_unwind(AssertUnwindSafe(|| pool.run(50, &|_, chunk| assert_ne!(chunk, 20))));
        assert!(result.is_err());
        let sum = AtomicUsize::new(0);
        pool.run(50, &|_, chunk| {
            sum.fetch_add(chunk, Ordering::Relaxed);
        });
        assert_eq!(sum.into_inner(), 49 * 50 / 2);
    }

    #[test]
    fn panics_of_caller_and_helper_do_not_fail_the_next_loop() {
        let mut pool = Pool::new(2).unwrap();
        let both = std::sync::Barrier::new(2);
        let body = |_: usize, _: usize| {
            // Each thread has one of the two chunks, so both panic.
            both.wait();
            panic!("on purpose");
        };
        assert!(catch_unwind(AssertUnwindSafe(|| pool.run(2, &body))).is_err());
        let count = AtomicUsize::new(0);
        pool.run(50, &|_, _| {
            count.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(count.into_inner(), 50);
    }
}
