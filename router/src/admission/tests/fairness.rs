//! Shares of service: between tenants that always ask, for one that comes back, and over several routers.

use std::collections::{HashMap, VecDeque};

use contract::ids::TenantId;
use proptest::prelude::*;

use super::*;

/// Keeps tenants saturated and notes who was served how much: each has a weight and the costs it cycles through.
struct Saturated {
    queue: FairQueue<(usize, u64)>,
    tenants: Vec<(u32, Vec<u64>)>,
    n_pushed: Vec<usize>,
    now: Instant,
}

impl Saturated {
    fn new(tenants: Vec<(u32, Vec<u64>)>) -> Self {
        let now = daemon::clock::now();
        let mut all = Self { queue: queue(now), n_pushed: vec![0; tenants.len()], tenants, now };
        for index in 0..all.tenants.len() {
            all.push(index);
            all.push(index);
        }
        all
    }

    fn push(&mut self, index: usize) {
        let (weight, costs) = &self.tenants[index];
        let tokens = costs[self.n_pushed[index] % costs.len()];
        self.n_pushed[index] += 1;
        let ask = Ask { weight: *weight, ..ask(&index.to_string(), tokens) };
        self.queue.push(self.now, ask, (index, tokens)).unwrap();
    }

    fn serve(&mut self) -> (usize, u64) {
        let (index, tokens) = self.queue.pop().unwrap();
        self.push(index);
        (index, tokens)
    }
}

fn tenants() -> impl Strategy<Value = Vec<(u32, Vec<u64>)>> {
    prop::collection::vec((1..6_u32, prop::collection::vec(50..5_000_u64, 1..6)), 2..6)
}

proptest! {
    #![proptest_config(config())]

    /// The bound of start-time fair queueing: over any window, service by weight differs by no more than the largest
    /// request of either by its weight.
    #[test]
    fn service_by_weight_is_equal_over_every_window_up_to_one_request_of_each(tenants in tenants()) {
        let mut all = Saturated::new(tenants.clone());
        let mut served = vec![vec![0.0_f64; tenants.len()]];
        for _ in 0..300 {
            let (index, tokens) = all.serve();
            let mut next = served.last().unwrap().clone();
            next[index] += tokens as f64 / f64::from(tenants[index].0);
            served.push(next);
        }
        let largest = |index: usize| {
            let (weight, costs) = &tenants[index];
            *costs.iter().max().unwrap() as f64 / f64::from(*weight)
        };
        for (a, b) in (0..tenants.len()).flat_map(|a| (0..a).map(move |b| (a, b))) {
            let ahead = served.iter().map(|served| served[a] - served[b]);
            let (low, high) = ahead.fold((f64::MAX, f64::MIN), |(low, high), x| (low.min(x), high.max(x)));
            prop_assert!(high - low <= largest(a) + largest(b) + 1e-6, "{a} {b}: {}", high - low);
        }
    }

    #[test]
    fn a_tenant_that_was_idle_is_next(tenants in tenants(), n in 5..200_usize, tokens in 1..5_000_u64) {
        let mut all = Saturated::new(tenants);
        for _ in 0..n {
            all.serve();
        }
        all.queue.push(all.now, ask("idle", tokens), (usize::MAX, tokens)).unwrap();
        prop_assert_eq!(all.queue.pop().unwrap().0, usize::MAX);
        // It saved up nothing: its next request waits until the others have caught up.
        all.queue.push(all.now, ask("idle", 1), (usize::MAX, 1)).unwrap();
        let mut between = HashMap::new();
        loop {
            match all.queue.pop().unwrap() {
                (usize::MAX, _) => break,
                (index, cost) => {
                    *between.entry(index).or_insert(0) += cost;
                    all.push(index);
                }
            }
        }
        for (index, (weight, costs)) in all.tenants.iter().enumerate() {
            let largest = costs.iter().max().unwrap();
            let by_weight = (between.get(&index).copied().unwrap_or(0) + largest) / u64::from(*weight);
            prop_assert!(by_weight + 1 >= tokens.saturating_sub(*largest), "{index}: {by_weight} {tokens}");
        }
    }

    #[test]
    fn a_correction_is_as_good_as_the_true_cost_at_once(costs in prop::collection::vec((1..900_u64, 1..900_u64), 1..100)) {
        let now = daemon::clock::now();
        let (mut late, mut at_once) = (queue(now), queue(now));
        for queue in [&mut late, &mut at_once] {
            for _ in 0..=costs.len() {
                queue.push(now, ask("a", 1), "a").unwrap();
                queue.push(now, Ask { weight: 3, ..ask("b", 1) }, "b").unwrap();
            }
        }
        for (guess, actual) in costs {
            let first = late.pop_where(|_, _| Some(guess)).unwrap();
            late.correct(&first.into(), if first == "a" { 1 } else { 3 }, guess, actual);
            prop_assert_eq!(at_once.pop_where(|_, _| Some(actual)), Some(first));
        }
    }
}

fn shares_of(window: &[(usize, u64)]) -> [u64; 2] {
    [0, 1].map(|tenant| window.iter().filter(|served| served.0 == tenant).map(|served| served.1).sum())
}

#[test]
fn ten_times_longer_prompts_get_the_same_tokens() {
    let mut all = Saturated::new(vec![(1, vec![8_000, 10_000, 12_000]), (1, vec![800, 1_000, 1_200])]);
    let served: Vec<_> = (0..5_000).map(|_| all.serve()).collect();
    for window in served.windows(600) {
        let [long, short] = shares_of(window).map(|tokens| tokens as f64);
        assert!((long / short - 1.0).abs() < 0.05, "{long} {short}");
    }
}

#[test]
fn a_tenant_that_asks_one_at_a_time_gets_no_more_than_its_share() {
    let now = daemon::clock::now();
    let mut queue = queue(now);
    let mut served = [0; 2];
    for _ in 0..50 {
        queue.push(now, ask("many", 1_000), 0).unwrap();
    }
    queue.push(now, ask("one", 10_000), 1).unwrap();
    for _ in 0..2_000 {
        let index = queue.pop().unwrap();
        served[index] += [1_000, 10_000][index];
        // It asks again only once it was served, so its queue is empty in between.
        queue.push(now, ask(["many", "one"][index], [1_000, 10_000][index]), index).unwrap();
    }
    let [many, one] = served.map(f64::from);
    assert!((one / many - 1.0).abs() < 0.05, "{one} {many}");
}

/// Routers that take turns by `pick` and learn of each other's placements some turns later.
fn routers(tenants_of: &[&[&str]], n_delay: usize, pick: impl Fn(u64) -> usize) -> HashMap<TenantId, u64> {
    let now = daemon::clock::now();
    let cost = |tenant: &str| if tenant.starts_with("long") { 10_000 } else { 1_000 };
    let mut queues: Vec<FairQueue<&str>> = tenants_of.iter().map(|_| queue(now)).collect();
    for (queue, tenants) in queues.iter_mut().zip(tenants_of) {
        for tenant in *tenants {
            for _ in 0..2 {
                queue.push(now, ask(tenant, cost(tenant)), *tenant).unwrap();
            }
        }
    }
    let (mut served, mut ledger) = (HashMap::new(), VecDeque::new());
    for turn in 0..20_000 {
        let router = pick(turn);
        let Some(tenant) = queues[router].pop() else { continue };
        queues[router].push(now, ask(tenant, cost(tenant)), tenant).unwrap();
        *served.entry(tenant.into()).or_insert(0) += cost(tenant);
        ledger.push_back((router, tenant));
        if ledger.len() > n_delay {
            let (placed_by, tenant) = ledger.pop_front().unwrap();
            let others = queues.iter_mut().enumerate().filter(|&(other, _)| other != placed_by);
            others.for_each(|(_, queue)| queue.charge(None, &tenant.into(), 1, cost(tenant)));
        }
    }
    served
}

fn assert_equal_shares(served: &HashMap<TenantId, u64>, a: &str, b: &str) {
    let [a, b] = [a, b].map(|tenant| served[&tenant.into()] as f64);
    assert!((a / b - 1.0).abs() < 0.05, "{served:?}");
}

fn random(turn: u64) -> usize {
    let mixed = (turn + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    ((mixed >> 32) % 4) as usize
}

#[test]
fn four_routers_share_as_one_does() {
    let both: [&[&str]; 4] = [&["long", "short"]; 4];
    assert_equal_shares(&routers(&both, 4, random), "long", "short");
    assert_equal_shares(&routers(&both, 0, random), "long", "short");
}

#[test]
fn a_tenant_of_one_router_gets_as_much_as_a_tenant_of_four() {
    let uneven: [&[&str]; 4] = [&["long", "short"], &["short"], &["short"], &["short"]];
    // The first router has the room for it: every other turn.
    let served = routers(&uneven, 4, |turn| if turn % 2 == 0 { 0 } else { random(turn) });
    assert_equal_shares(&served, "long", "short");
}

#[test]
fn others_queues_delay_a_tenant_by_no_more_than_its_share() {
    let now = daemon::clock::now();
    let mut queue = queue(now);
    for _ in 0..100 {
        queue.push(now, ask("flood", 1_000), ()).unwrap();
    }
    queue.push(now, ask("small", 10), ()).unwrap();
    assert_eq!(
        queue.tokens_ahead(&"new".into(), 1, 500),
        500 + 10,
        "as much of the flood as of its own, all of the small"
    );
    assert_eq!(queue.tokens_ahead(&"new".into(), 5, 500), 100 + 10);
    assert_eq!(queue.tokens_ahead(&"flood".into(), 1, 500), 100_000 + 10);
}
