//! The thread that owns the executor, and the desk where plans wait for it: the next lies there while one runs.
//! Hot path: no allocation, no log; one short lock to take a plan.

use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use contract::cost::StepLoad;
use contract::plan::{ForwardPlan, StepOutput};
use daemon::clock;
use engine::PLANS_IN_FLIGHT_MAX;

use super::EngineFailure;
use crate::executor::Executor;
use crate::inbox::{Event, Inbox};
use crate::lent::{Layers, Watched};

/// A step that has run.
#[derive(Debug)]
pub(crate) struct Stepped {
    /// What was asked for.
    pub(crate) plan: ForwardPlan,
    /// What its time depends on.
    pub(crate) load: StepLoad,
    /// What came of it; after a failure nothing is run any more.
    pub(crate) result: Result<StepOutput, EngineFailure>,
    /// Time from taking the plan to its output.
    pub(crate) took: Duration,
    /// Time around the step in which nothing was computed, though there was work.
    pub(crate) overhead: Duration,
}

/// Where plans wait; clones are the same desk.
#[derive(Clone, Debug, Default)]
pub(super) struct Desk(Arc<(Mutex<State>, Condvar)>);

#[derive(Debug, Default)]
struct State {
    /// At most [`PLANS_IN_FLIGHT_MAX`], oldest first.
    plans: VecDeque<Waiting>,
    closed: bool,
    /// Of the plan that runs.
    running: Option<StepLoad>,
    n_begun: u64,
}

#[derive(Debug)]
struct Waiting {
    plan: ForwardPlan,
    load: StepLoad,
    /// Whether another plan was in flight when it was made, so that the executor has no reason to be idle before it.
    follows: bool,
    /// Whose progress others follow.
    watched: Vec<Watched>,
}

/// The executor's thread; dropping it lets a running step finish, and only that.
#[derive(Debug)]
pub(super) struct ExecutorThread {
    desk: Desk,
    thread: Option<JoinHandle<()>>,
}

impl ExecutorThread {
    /// Starts the thread, which tells `inbox` of each step.
    pub(super) fn start(executor: Box<dyn Executor>, inbox: Inbox) -> std::io::Result<Self> {
        let desk = Desk::default();
        let (ours, builder) = (desk.clone(), std::thread::Builder::new().name("executor".to_owned()));
        let thread = builder.spawn(move || serve(executor, &ours, &inbox))?;
        Ok(Self { desk, thread: Some(thread) })
    }

    /// Puts a plan behind those that wait; `follows` when one is in flight.
    pub(super) fn put(&self, plan: ForwardPlan, follows: bool, watched: Vec<Watched>) {
        let mut state = self.desk.lock();
        debug_assert!(state.plans.len() < PLANS_IN_FLIGHT_MAX, "the engine bounds plans in flight");
        let load = StepLoad::of(&plan);
        state.plans.push_back(Waiting { plan, load, follows, watched });
        drop(state);
        self.desk.0.1.notify_one();
    }

    /// Replaces the plan put last by what `change` makes of it, unless it has been begun; nobody begins it meanwhile.
    pub(super) fn amend(&self, change: impl FnOnce(ForwardPlan) -> (ForwardPlan, Vec<Watched>)) {
        let mut state = self.desk.lock();
        if let Some(Waiting { plan, follows, .. }) = state.plans.pop_back() {
            let (plan, watched) = change(plan);
            let load = StepLoad::of(&plan);
            state.plans.push_back(Waiting { plan, load, follows, watched });
        }
    }

    /// Where its plans wait.
    pub(super) fn desk(&self) -> Desk {
        self.desk.clone()
    }
}

impl Drop for ExecutorThread {
    fn drop(&mut self) {
        let mut state = self.desk.lock();
        state.closed = true;
        state.plans.clear();
        drop(state);
        self.desk.0.1.notify_one();
        if let Some(thread) = self.thread.take() {
            // It catches the executor's panics.
            let _ = thread.join();
        }
    }
}

impl Desk {
    /// The step that runs, by its number in this life.
    pub(super) fn running(&self) -> Option<(u64, StepLoad)> {
        let state = self.lock();
        state.running.map(|load| (state.n_begun, load))
    }

    /// Waits for the next plan, since the last one has run; none when the desk is closed.
    fn take(&self) -> Option<Waiting> {
        let mut state = self.lock();
        state.running = None;
        loop {
            if state.closed {
                return None;
            }
            if let Some(waiting) = state.plans.pop_front() {
                state.running = Some(waiting.load);
                state.n_begun += 1;
                return Some(waiting);
            }
            state = self.0.1.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn serve(mut executor: Box<dyn Executor>, desk: &Desk, inbox: &Inbox) {
    let mut last_ended: Option<Instant> = None;
    let layers = Arc::new(Layers::default());
    executor.tell(Arc::clone(&layers));
    while let Some(Waiting { plan, load, follows, watched }) = desk.take() {
        let began = clock::now();
        layers.begin(watched);
        let result = execute(executor.as_mut(), &plan);
        if result.is_ok() {
            layers.end();
        }
        let ended = clock::now();
        let took = ended.duration_since(began);
        let idle = last_ended.filter(|_| follows).map_or(Duration::ZERO, |last| began.duration_since(last));
        let overhead = idle + took.saturating_sub(executor.computed());
        last_ended = Some(ended);
        let failed = result.is_err();
        let stepped = Event::Stepped(Stepped { plan, load, result, took, overhead });
        // A loop that has closed its inbox wants no more.
        if inbox.push(stepped).is_err() || failed {
            return;
        }
    }
}

fn execute(executor: &mut dyn Executor, plan: &ForwardPlan) -> Result<StepOutput, EngineFailure> {
    match catch_unwind(AssertUnwindSafe(|| executor.run(plan))) {
        Ok(Ok(output)) => Ok(output),
        Ok(Err(error)) => Err(EngineFailure(format!("step {}: {error}", plan.step.0))),
        Err(panic) => Err(EngineFailure(format!("step {} panicked: {}", plan.step.0, panic_text(panic.as_ref())))),
    }
}

/// What a panic says.
pub(super) fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&'static str>().copied()).unwrap_or("no message")
}
