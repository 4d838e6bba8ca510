//! What breaks, drawn by seed: workers crash and come back, routers start anew, links are cut, workers are slow, the
//! scheduler goes, news of caches is late or lost.

use std::time::Duration;

use crate::event::Event;
use crate::network::Network;
use crate::random::Random;

/// A change for the worse or the better.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Fault {
    Crash {
        worker: usize,
    },
    Restart {
        worker: usize,
    },
    /// A router loses all that it knows, and those who asked it lose their requests.
    RestartRouter {
        router: usize,
    },
    Cut {
        router: usize,
        worker: usize,
    },
    Heal {
        router: usize,
        worker: usize,
    },
    Slow {
        worker: usize,
        times: f64,
    },
    SchedulerDown,
    SchedulerUp,
    KvLoss {
        chance: f64,
    },
    /// Nothing breaks from here on.
    Calm,
}

/// Faults on average.
const N_MEAN: f64 = 6.0;

/// Draws faults over `span`, each with its repair, and puts them among what happens; nothing breaks after the time that it
/// returns.
pub(crate) fn draw(
    span: Duration,
    n_routers: usize,
    n_workers: usize,
    random: &mut Random,
    network: &mut Network,
) -> Duration {
    let n = (N_MEAN * random.exponential()).min(4.0 * N_MEAN) as usize + 1;
    for _ in 0..n {
        let begin = span.mul_f64(random.unit());
        let lasts = span.mul_f64(0.3 * random.unit() * random.unit()) + Duration::from_millis(5);
        let (worker, router) = (random.index(n_workers), random.index(n_routers));
        let (fault, repair) = match random.below(11) {
            0..=3 => (Fault::Crash { worker }, Fault::Restart { worker }),
            4..=5 => (Fault::Cut { router, worker }, Fault::Heal { router, worker }),
            6 => (Fault::Slow { worker, times: random.between(2.0, 20.0) }, Fault::Slow { worker, times: 1.0 }),
            7 => (Fault::SchedulerDown, Fault::SchedulerUp),
            8 => (Fault::RestartRouter { router }, Fault::RestartRouter { router }),
            _ => (Fault::KvLoss { chance: random.between(0.01, 0.5) }, Fault::KvLoss { chance: 0.0 }),
        };
        network.at(begin, Event::Fault(fault));
        network.at(begin + lasts, Event::Fault(repair));
    }
    let calm_at = span.mul_f64(1.4);
    network.at(calm_at, Event::Fault(Fault::Calm));
    calm_at
}
