//! Several routers, each with a queue of its own, against one queue for all: who is served, and how much.

use std::collections::{BTreeSet, VecDeque};

use contract::ids::{Incarnation, TenantId};
use proptest::prelude::*;

use super::super::fair_queue::N_BEFORE_MAX;
use super::*;

/// A tenant that always has two requests waiting at each of its routers.
#[derive(Clone, Debug)]
struct Saturating {
    weight: u32,
    costs: Vec<u64>,
    routers: BTreeSet<usize>,
}

/// Queues of routers that share workers: at each turn there is room for one request, which all see, in any order; and
/// what one places the others hear of some turns later.
struct Routers {
    queues: Vec<FairQueue<usize>>,
    tenants: Vec<Saturating>,
    n_served: Vec<usize>,
    served: Vec<u64>,
    news: VecDeque<(usize, usize, usize, u64)>,
    n_delay: usize,
    now: Instant,
}

impl Routers {
    fn new(n_routers: usize, n_delay: usize, tenants: &[Saturating]) -> Self {
        let now = daemon::clock::now();
        let mut all = Self {
            queues: (0..n_routers).map(|_| queue(now)).collect(),
            n_served: vec![0; tenants.len()],
            served: vec![0; tenants.len()],
            tenants: tenants.to_vec(),
            news: VecDeque::new(),
            n_delay,
            now,
        };
        for (index, tenant) in tenants.iter().enumerate() {
            tenant.routers.iter().for_each(|&router| (0..2).for_each(|_| all.push(router, index)));
        }
        for router in 0..n_routers {
            let others = |tenant: &Saturating| -> BTreeSet<Incarnation> {
                tenant.routers.iter().filter(|&&at| at != router).map(|&at| Incarnation(at as u64)).collect()
            };
            let elsewhere = tenants.iter().enumerate().map(|(index, tenant)| (name(index), others(tenant)));
            all.queues[router].set_elsewhere(elsewhere.filter(|(_, routers)| !routers.is_empty()).collect());
        }
        all
    }

    fn push(&mut self, router: usize, index: usize) {
        let ask = Ask { weight: self.tenants[index].weight, ..ask(name(index).as_str(), 1) };
        self.queues[router].push(self.now, ask, index).unwrap();
    }

    /// Of a tenant's next request.
    fn cost(&self, index: usize) -> u64 {
        let costs = &self.tenants[index].costs;
        costs[self.n_served[index] % costs.len()]
    }

    /// Whoever sees the room first takes it, but who has rivals looks only after all that have fewer.
    fn turn(&mut self, turn: usize, first: usize) {
        while self.news.front().is_some_and(|&(at, ..)| at + self.n_delay <= turn) {
            let (_, placed_by, index, cost) = self.news.pop_front().expect("it was just seen");
            let weight = self.tenants[index].weight;
            let others = self.queues.iter_mut().enumerate().filter(|&(router, _)| router != placed_by);
            let by = Some(Incarnation(placed_by as u64));
            others.for_each(|(_, queue)| queue.charge(by, &name(index), weight, cost));
        }
        let n = self.queues.len();
        let costs: Vec<u64> = (0..self.tenants.len()).map(|index| self.cost(index)).collect();
        let looks = (0..=N_BEFORE_MAX).flat_map(|late| (0..n).map(move |index| (late, (first + index) % n)));
        for (late, router) in looks {
            let taken = self.queues[router].pop_where(|&index, turn| (turn.n_before <= late).then(|| costs[index]));
            if let Some(index) = taken {
                let cost = costs[index];
                self.n_served[index] += 1;
                self.served[index] += cost;
                self.news.push_back((turn, router, index, cost));
                self.push(router, index);
                return;
            }
        }
    }
}

fn name(index: usize) -> TenantId {
    index.to_string().into()
}

fn tenants(n_routers: usize) -> impl Strategy<Value = Vec<Saturating>> {
    let tenant = (
        1..5_u32,
        prop::collection::vec(50..5_000_u64, 1..6),
        prop::collection::btree_set(0..n_routers, 1..=n_routers),
    )
        .prop_map(|(weight, costs, routers)| Saturating { weight, costs, routers });
    prop::collection::vec(tenant, 2..6)
}

proptest! {
    #![proptest_config(config())]

    /// However long it goes on, each tenant's service differs from that of one queue for all by a few requests at most,
    /// wherever its requests come in.
    #[test]
    fn several_routers_serve_as_one_does_wherever_requests_come_in(
        (n_routers, tenants) in (1..5_usize).prop_flat_map(|n| (Just(n), tenants(n))),
        n_delay in 0..4_usize,
        firsts in prop::collection::vec(0..5_usize, 600),
    ) {
        let mut routers = Routers::new(n_routers, n_delay, &tenants);
        let alone: Vec<Saturating> = tenants.iter().map(|tenant| Saturating { routers: [0].into(), ..tenant.clone() }).collect();
        let mut one = Routers::new(1, 0, &alone);
        for (turn, first) in firsts.into_iter().enumerate() {
            routers.turn(turn, first % n_routers);
            let whole: u64 = routers.served.iter().sum();
            while one.served.iter().sum::<u64>() < whole {
                one.turn(turn, 0);
            }
            let largest = tenants.iter().map(|tenant| {
                *tenant.costs.iter().max().unwrap() as f64 / f64::from(tenant.weight)
            }).fold(0.0, f64::max);
            for (index, tenant) in tenants.iter().enumerate() {
                let off = routers.served[index] as f64 - one.served[index] as f64;
                let bound = (n_delay + 2) as f64 * largest * f64::from(tenant.weight);
                prop_assert!(off.abs() <= 3.0 * bound, "{}: {} of {:?} {:?}", index, off, routers.served, one.served);
            }
        }
    }
}

#[test]
fn a_tenant_of_one_router_of_four_gets_as_much_as_one_of_all() {
    let tenant = |costs: &[u64], routers: &[usize]| Saturating {
        weight: 1,
        costs: costs.to_vec(),
        routers: routers.iter().copied().collect(),
    };
    let tenants = [tenant(&[10_000], &[0]), tenant(&[1_000], &[0, 1, 2, 3])];
    let mut routers = Routers::new(4, 3, &tenants);
    for turn in 0..20_000 {
        // The first router is last to see any room.
        routers.turn(turn, 1 + turn % 3);
    }
    let [long, short] = [0, 1].map(|index| routers.served[index] as f64);
    assert!((long / short - 1.0).abs() < 0.02, "{long} {short}");
}

#[test]
fn a_tenant_that_comes_to_one_router_is_next_at_all() {
    let tenant = Saturating { weight: 1, costs: vec![1_000], routers: (0..4).collect() };
    let mut routers = Routers::new(4, 2, &[tenant]);
    (0..50).for_each(|turn| routers.turn(turn, turn % 4));
    let now = routers.now;
    routers.queues[3].push(now, ask("new", 10), usize::MAX).unwrap();
    let at = |tenant: &str, router| (tenant.into(), [Incarnation(router)].into());
    for queue in &mut routers.queues[..3] {
        queue.set_elsewhere([at("new", 3)].into());
        assert!(queue.pop_where(|_, turn| (turn.n_before == 0).then_some(1)).is_none());
        assert_eq!([queue.newcomer(&"0".into()).n_before, queue.newcomer(&"another".into()).n_before], [1, 1]);
    }
    assert_eq!(routers.queues[3].pop(), Some(usize::MAX));
    routers.queues[0].charge(Some(Incarnation(3)), &"new".into(), 1, 10);
    routers.queues[0].set_elsewhere([at("0", 1)].into());
    routers.queues[0].charge(Some(Incarnation(1)), &"0".into(), 1, 10);
    assert_eq!(routers.queues[0].newcomer(&"0".into()).n_before, 0);
    routers.queues[0].pop();
    assert_eq!(routers.queues[0].newcomer(&"0".into()).n_before, 1, "the other has placed longer ago");
}

#[test]
fn who_waits_elsewhere_keeps_what_it_lags_behind() {
    let now = daemon::clock::now();
    let mut queue = queue(now);
    for _ in 0..20 {
        queue.push(now, ask("here", 1_000), "here").unwrap();
    }
    queue.set_elsewhere([("there".into(), [Incarnation(1)].into())].into());
    // The other router has no room for it meanwhile.
    for _ in 0..5 {
        assert_eq!(queue.pop(), Some("here"));
    }
    let next: Vec<_> = (0..4)
        .filter_map(|_| {
            queue.push(now, ask("there", 2_000), "there").unwrap();
            queue.pop()
        })
        .collect();
    assert_eq!(next, ["there", "there", "there", "here"], "5,000 tokens behind");
}
