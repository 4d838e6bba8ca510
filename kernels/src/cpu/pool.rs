//! Threads that share one loop at a time: each does its part of it, helpers spin briefly for the next, then sleep.
//! Hot path: no allocation, no log; a lock only to wake a helper that sleeps.
//!
//! A loop costs one store that starts it and one counter that ends it. A thread that waits pauses, then gives its core
//! to whoever else is runnable, then (helpers) sleeps, so that two workers on one machine do not spin against each other.

use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use crate::cpu::affinity;
use crate::error::{Error, Result};

/// Pauses of a waiting thread before it first gives its core away, some ten microseconds.
const PAUSES: u32 = 500;
/// Times that a waiting helper gives its core away before it sleeps, some tens of microseconds on an idle core.
const YIELDS: u32 = 100;

/// Body of a loop: called with the number of the thread and of the chunk.
pub(crate) type Body<'a> = dyn Fn(usize, usize) + Sync + 'a;

/// What one thread does in a loop.
type Job<'a> = dyn Fn(usize) + Sync + 'a;

/// The calling thread (number 0) and helpers (1..).
pub(crate) struct Pool {
    shared: Arc<Shared>,
    helpers: Vec<JoinHandle<()>>,
    /// The next chunk of each thread's run.
    next: Arc<[Line<AtomicUsize>]>,
}

/// A value on a cache line of its own.
#[repr(align(128))]
struct Line<T>(T);

struct Shared {
    /// Number of loops started.
    epoch: Line<AtomicUsize>,
    /// Helpers that are still in the present loop.
    busy: Line<AtomicUsize>,
    /// Written by the caller before it starts a loop, read by helpers in it; all have left when the caller goes on.
    job: UnsafeCell<Option<*const Job<'static>>>,
    panicked: AtomicBool,
    stop: AtomicBool,
    sleepers: AtomicUsize,
    lock: Mutex<()>,
    wake: Condvar,
}

// SAFETY: `job` is written only between loops, see its field; a job is Sync by its type.
unsafe impl Sync for Shared {}
// SAFETY: as above.
unsafe impl Send for Shared {}

impl Pool {
    /// Starts `threads - 1` helpers; the calling thread is the first.
    ///
    /// Where there is exactly one CPU for each thread, helpers are pinned to theirs: they would gain nothing by moving
    /// and lose their caches. With CPUs to spare the system moves them out of others' way.
    pub(crate) fn new(threads: usize) -> Result<Self> {
        let shared = Arc::new(Shared {
            epoch: Line(AtomicUsize::new(0)),
            busy: Line(AtomicUsize::new(0)),
            job: UnsafeCell::new(None),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            lock: Mutex::new(()),
            wake: Condvar::new(),
        });
        let next = (0..threads).map(|_| Line(AtomicUsize::new(0))).collect();
        let mut pool = Self { shared, helpers: Vec::new(), next };
        let places = affinity::one_each(threads);
        for thread in 1..threads {
            let shared = Arc::clone(&pool.shared);
            let place = places.get(thread).copied();
            let builder = std::thread::Builder::new().name(format!("kernels-{thread}"));
            let spawned = builder.spawn(move || {
                place.into_iter().for_each(affinity::pin);
                shared.help(thread);
            });
            pool.helpers
                .push(spawned.map_err(|e| Error::System { what: "start a compute thread", reason: e.to_string() })?);
        }
        Ok(pool)
    }

    /// Number of threads, the calling one included.
    pub(crate) fn threads(&self) -> usize {
        self.helpers.len() + 1
    }

    /// Calls `body` once for each chunk `0..n_chunks`: each thread has an equal run of them, whose memory a kernel
    /// streams through; who is done helps the others, so that a thread whose core is taken holds nobody up for long.
    ///
    /// # Panics
    /// When `body` does.
    pub(crate) fn split(&mut self, n_chunks: usize, body: &Body<'_>) {
        let threads = self.threads();
        if threads == 1 || n_chunks <= 1 {
            return (0..n_chunks).for_each(|chunk| body(0, chunk));
        }
        let start = |part: usize| n_chunks * part / threads;
        for (part, next) in self.next.iter().enumerate() {
            next.0.store(start(part), Ordering::Relaxed);
        }
        let next = Arc::clone(&self.next);
        self.all(&|thread| {
            for part in (thread..threads).chain(0..thread) {
                loop {
                    let chunk = next[part].0.fetch_add(1, Ordering::Relaxed);
                    if chunk >= start(part + 1) {
                        break;
                    }
                    body(thread, chunk);
                }
            }
        });
    }

    /// Calls `body` once for each chunk `0..n_chunks`: each thread takes the next when it has done one, for chunks of
    /// unequal work.
    ///
    /// # Panics
    /// When `body` does.
    pub(crate) fn run(&mut self, n_chunks: usize, body: &Body<'_>) {
        if self.helpers.is_empty() || n_chunks <= 1 {
            return (0..n_chunks).for_each(|chunk| body(0, chunk));
        }
        let next = AtomicUsize::new(0);
        self.all(&|thread| {
            loop {
                let chunk = next.fetch_add(1, Ordering::Relaxed);
                if chunk >= n_chunks {
                    return;
                }
                body(thread, chunk);
            }
        });
    }

    /// Runs a job on all threads, and returns when all are done.
    fn all(&mut self, job: &Job<'_>) {
        let shared = &*self.shared;
        let pointer: *const Job<'_> = job;
        // SAFETY: only the lifetime changes. `finish` waits until no helper is in the job, also when it panics on this
        // thread, so nothing uses the pointer after this call.
        let pointer: *const Job<'static> = unsafe { std::mem::transmute(pointer) };
        // A loop whose caller panicked too has left its helpers' panic unreported; that one is over.
        shared.panicked.store(false, Ordering::Relaxed);
        // SAFETY: no helper is in a loop, and none reads the job before the epoch changes.
        unsafe { *shared.job.get() = Some(pointer) };
        shared.busy.0.store(self.helpers.len(), Ordering::Relaxed);
        shared.start();
        let finish = Finish(shared);
        job(0);
        drop(finish);
        assert!(!shared.panicked.load(Ordering::Relaxed), "a compute thread panicked");
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.shared.start();
        for helper in self.helpers.drain(..) {
            // A helper catches panics of its work, so it has none to report.
            drop(helper.join());
        }
    }
}

impl Shared {
    /// Begins an epoch, and wakes helpers that sleep.
    fn start(&self) {
        // In one order with a helper that counts itself among the sleepers and then looks at the epoch: either it sees
        // the new epoch, or this sees a sleeper.
        self.epoch.0.fetch_add(1, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            drop(self.lock());
            self.wake.notify_all();
        }
    }

    fn lock(&self) -> MutexGuard<'_, ()> {
        self.lock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn help(&self, thread: usize) {
        let mut seen = 0;
        loop {
            seen = self.next_epoch(seen);
            if self.stop.load(Ordering::Relaxed) {
                return;
            }
            // SAFETY: the epoch changed after the job was written, and the caller waits for this helper, so the
            // pointee lives.
            let job = unsafe { (*self.job.get()).map(|job| &*job) };
            if let Some(job) = job
                && catch_unwind(AssertUnwindSafe(|| job(thread))).is_err()
            {
                self.panicked.store(true, Ordering::Relaxed);
            }
            self.busy.0.fetch_sub(1, Ordering::Release);
        }
    }

    /// Waits until the epoch is no longer `seen`.
    fn next_epoch(&self, seen: usize) -> usize {
        let changed = || Some(self.epoch.0.load(Ordering::Acquire)).filter(|&epoch| epoch != seen);
        for turn in 0..PAUSES + YIELDS {
            if let Some(epoch) = changed() {
                return epoch;
            }
            relax(turn);
        }
        let mut guard = self.lock();
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let epoch = loop {
            let epoch = self.epoch.0.load(Ordering::SeqCst);
            if epoch != seen {
                break epoch;
            }
            guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        };
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        epoch
    }
}

/// Waits a little: pauses at first, then lets others run.
fn relax(turn: u32) {
    if turn < PAUSES { std::hint::spin_loop() } else { std::thread::yield_now() }
}

/// Waits for the helpers that are in a loop.
struct Finish<'a>(&'a Shared);

impl Drop for Finish<'_> {
    fn drop(&mut self) {
        let mut turn = 0;
        while self.0.busy.0.load(Ordering::Acquire) > 0 {
            relax(turn);
            turn = turn.saturating_add(1);
        }
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
                let count = |thread: usize, chunk: usize| {
                    assert!(thread < threads);
                    counts[chunk].fetch_add(1, Ordering::Relaxed);
                };
                pool.run(n_chunks, &count);
                pool.split(n_chunks, &count);
                assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 2));
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
    fn helpers_that_went_to_sleep_are_woken() {
        let mut pool = Pool::new(3).unwrap();
        for _ in 0..5 {
            let count = AtomicUsize::new(0);
            pool.split(50, &|_, _| {
                count.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(count.into_inner(), 50);
            while pool.shared.sleepers.load(Ordering::SeqCst) < 2 {
                std::thread::yield_now();
            }
        }
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
