//! The queue as a whole: nothing is lost, bounds hold, the order inside a tenant is the one promised.

use std::collections::BTreeSet;

use contract::ids::Incarnation;
use proptest::prelude::*;

use super::*;

#[derive(Clone, Debug)]
enum Step {
    Push {
        tenant: u8,
        tokens: u64,
        priority: i32,
        deadline_ms: Option<u64>,
        prefill_ms: u64,
    },
    Pop,
    /// Places only items whose number has no bit in common with the mask.
    PopWhere(u64),
    Remove(usize),
    Expire,
    Elsewhere {
        tenant: u8,
        tokens: u64,
    },
    Correct {
        tenant: u8,
        charged: u64,
        actual: u64,
    },
    /// These tenants wait at other routers.
    Others(BTreeSet<u8>),
    Advance(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let push = (0..5_u8, 0..500_u64, -6..6_i32, prop::option::of(0..3_000_u64), 0..2_000_u64).prop_map(
        |(tenant, tokens, priority, deadline_ms, prefill_ms)| Step::Push {
            tenant,
            tokens,
            priority,
            deadline_ms,
            prefill_ms,
        },
    );
    prop_oneof![
        8 => push,
        3 => Just(Step::Pop),
        3 => (0..8_u64).prop_map(Step::PopWhere),
        1 => any::<usize>().prop_map(Step::Remove),
        1 => Just(Step::Expire),
        1 => (0..6_u8, 0..900_u64).prop_map(|(tenant, tokens)| Step::Elsewhere { tenant, tokens }),
        1 => (0..6_u8, 0..900_u64, 0..900_u64)
            .prop_map(|(tenant, charged, actual)| Step::Correct { tenant, charged, actual }),
        1 => prop::collection::btree_set(0..6_u8, 0..4).prop_map(Step::Others),
        2 => (0..1_500_u64).prop_map(Step::Advance),
    ]
}

#[derive(Clone, Debug)]
struct Waiting {
    number: u64,
    ticket: Ticket,
    tenant: u8,
    tokens: u64,
    rank: (i64, u64),
    deadline: Option<Instant>,
}

const BOUNDS: QueueBounds = QueueBounds {
    n_requests_max: 12,
    tokens_max: 2_500,
    n_requests_per_tenant_max: 5,
    tokens_per_tenant_max: 1_200,
    n_scan_max: 64,
    n_scan_per_tenant_max: 64,
    n_overtakes_max: u32::MAX,
};

fn name(tenant: u8) -> contract::ids::TenantId {
    format!("t{tenant}").into()
}

/// Whether the bounds leave room, counted anew.
fn has_room(waiting: &[Waiting], tenant: u8, tokens: u64) -> bool {
    let of = |own: bool| waiting.iter().filter(move |other| !own || other.tenant == tenant);
    let fits = |own, n_max, tokens_max| {
        let (n, sum) = (of(own).count(), of(own).map(|other| other.tokens).sum::<u64>());
        n < n_max && (n == 0 || sum + tokens <= tokens_max)
    };
    fits(false, BOUNDS.n_requests_max, BOUNDS.tokens_max)
        && fits(true, BOUNDS.n_requests_per_tenant_max, BOUNDS.tokens_per_tenant_max)
}

/// Takes the item out of the model; it must be the first of its tenant among those that could be placed.
fn taken(waiting: &mut Vec<Waiting>, number: u64, mask: u64) {
    let index = waiting.iter().position(|known| known.number == number).expect("it was pushed and not taken before");
    let item = waiting.remove(index);
    assert_eq!(item.number & mask, 0);
    let is_before =
        |other: &&Waiting| other.tenant == item.tenant && other.number & mask == 0 && other.rank < item.rank;
    assert_eq!(waiting.iter().find(is_before).map(|other| other.number), None, "before {number}");
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn each_request_comes_out_once_in_its_tenants_order_and_bounds_hold(
        steps in prop::collection::vec(step(), 1..150),
        slack in prop_oneof![Just(0.0), 0.0..5.0_f64],
    ) {
        let epoch = daemon::clock::now();
        let order = Order { patience_ms: 2_000, slack };
        let mut queue = FairQueue::new(BOUNDS, order, epoch);
        let mut waiting: Vec<Waiting> = Vec::new();
        let (mut now, mut number) = (epoch, 0);
        for step in steps {
            match step {
                Step::Push { tenant, tokens, priority, deadline_ms, prefill_ms } => {
                    number += 1;
                    let deadline = deadline_ms.map(|after| now + ms(after));
                    let prefill_ms = prefill_ms as f64;
                    let ask = Ask { tenant: name(tenant), weight: u32::from(tenant) + 1, tokens, priority, deadline, prefill_ms };
                    let pushed = queue.push(now, ask, number);
                    prop_assert_eq!(pushed.is_ok(), has_room(&waiting, tenant, tokens.max(1)), "{:?}", pushed);
                    if let Ok(ticket) = pushed {
                        let rank = (order.rank_us(epoch, now, priority, deadline, prefill_ms), number);
                        waiting.push(Waiting { number, ticket, tenant, tokens: tokens.max(1), rank, deadline });
                    }
                }
                Step::Pop => match queue.pop() {
                    Some(number) => taken(&mut waiting, number, 0),
                    None => prop_assert!(waiting.is_empty()),
                },
                Step::PopWhere(mask) => {
                    match queue.pop_where(|&number, _| (number & mask == 0).then_some(number % 300)) {
                        Some(number) => taken(&mut waiting, number, mask),
                        None => prop_assert!(waiting.iter().all(|item| item.number & mask != 0)),
                    }
                }
                Step::Remove(index) if !waiting.is_empty() => {
                    let item = waiting.remove(index % waiting.len());
                    prop_assert_eq!(queue.remove(item.ticket), Some(item.number));
                    prop_assert_eq!(queue.remove(item.ticket), None);
                }
                Step::Remove(_) => {}
                Step::Expire => {
                    while let Some(number) = queue.pop_expired(now) {
                        let index = waiting.iter().position(|known| known.number == number).unwrap();
                        prop_assert!(waiting.remove(index).deadline.unwrap() <= now);
                    }
                    prop_assert!(waiting.iter().all(|item| item.deadline.is_none_or(|deadline| deadline > now)));
                }
                Step::Elsewhere { tenant, tokens } => {
                    queue.charge(Some(Incarnation(u64::from(tenant))), &name(tenant), u32::from(tenant) + 1, tokens);
                }
                Step::Correct { tenant, charged, actual } => {
                    queue.correct(&name(tenant), u32::from(tenant) + 1, charged, actual);
                }
                Step::Others(tenants) => {
                    let at = |tenant: u8| [Incarnation(u64::from(tenant))].into();
                    queue.set_elsewhere(tenants.into_iter().map(|tenant| (name(tenant), at(tenant))).collect());
                }
                Step::Advance(by) => now += ms(by),
            }
            prop_assert_eq!(queue.len(), waiting.len());
            let tenants: BTreeSet<_> = waiting.iter().map(|item| name(item.tenant)).collect();
            prop_assert_eq!(queue.tenants().cloned().collect::<BTreeSet<_>>(), tenants);
            prop_assert_eq!(queue.tokens(), waiting.iter().map(|item| item.tokens).sum::<u64>());
            prop_assert_eq!(queue.next_deadline(), waiting.iter().filter_map(|item| item.deadline).min());
        }
        while let Some(number) = queue.pop() {
            taken(&mut waiting, number, 0);
        }
        prop_assert!(waiting.is_empty());
    }

    #[test]
    fn a_more_urgent_request_goes_first_unless_the_other_waited_for_a_patience(
        urgent in (0..10_000_u64, prop::option::of(0..100_000_u64), 0..100_000_u64),
        other in (0..10_000_u64, prop::option::of(0..100_000_u64), 0..100_000_u64),
        priorities in (-4..4_i32, 1..8_i32),
        slack in 0.0..10.0_f64,
    ) {
        let epoch = daemon::clock::now();
        let order = Order { patience_ms: 3_000, slack };
        let rank = |(at, deadline, prefill_ms): (u64, Option<u64>, u64), priority| {
            let arrival = epoch + ms(at);
            order.rank_us(epoch, arrival, priority, deadline.map(|after| arrival + ms(after)), prefill_ms as f64)
        };
        let (most, less) = (priorities.0, (priorities.0 + priorities.1).min(PRIORITY_MAX));
        prop_assume!(most < less && urgent.0 < other.0 + 3_000);
        prop_assert!(rank(urgent, most) < rank(other, less));
    }
}

#[test]
fn deadlines_come_earliest_first_and_then_who_came_first() {
    let now = daemon::clock::now();
    let mut queue = queue(now);
    let asks = [("none", None), ("late", Some(20_000)), ("soon", Some(5_000)), ("none too", None)];
    for (item, deadline_ms) in asks {
        let deadline = deadline_ms.map(|after| now + ms(after));
        queue.push(now, Ask { deadline, ..ask("a", 1) }, item).unwrap();
    }
    let order: Vec<&str> = std::iter::from_fn(|| queue.pop()).collect();
    assert_eq!(order, ["soon", "late", "none", "none too"]);
}

#[test]
fn slack_lets_short_prefills_go_first_until_long_ones_have_waited() {
    let now = daemon::clock::now();
    let with = |slack, later_ms| {
        let mut queue = FairQueue::new(QueueBounds::default(), Order { slack, ..Order::default() }, now);
        queue.push(now, Ask { prefill_ms: 1_000.0, ..ask("a", 1) }, "long").unwrap();
        queue.push(now + ms(later_ms), Ask { prefill_ms: 100.0, ..ask("a", 1) }, "short").unwrap();
        queue.pop().unwrap()
    };
    assert_eq!((with(0.0, 1), with(2.0, 1), with(2.0, 1_799), with(2.0, 1_801)), ("long", "short", "short", "long"));
}

#[test]
fn no_request_starves_behind_more_urgent_ones_that_keep_coming() {
    let epoch = daemon::clock::now();
    let order = Order { patience_ms: 100, slack: 1.0 };
    let mut queue = FairQueue::new(QueueBounds::default(), order, epoch);
    let last = Ask { priority: PRIORITY_MAX, prefill_ms: 1e9, ..ask("a", 1) };
    queue.push(epoch, last, u64::MAX).unwrap();
    let popped = (0..10_000).find(|&turn| {
        let now = epoch + ms(turn);
        queue.push(now, Ask { priority: -PRIORITY_MAX, deadline: Some(now), ..ask("a", 1) }, turn).unwrap();
        queue.pop().unwrap() == u64::MAX
    });
    let bound_ms = (2 * u64::try_from(PRIORITY_MAX).unwrap() * 3 + 2) * 100;
    assert!(popped.is_some_and(|turn| turn <= bound_ms), "{popped:?}");
}

#[test]
fn a_request_that_waits_for_one_worker_lets_others_by_but_not_for_ever() {
    let now = daemon::clock::now();
    let bounds = QueueBounds { n_overtakes_max: 3, ..QueueBounds::default() };
    let mut queue = FairQueue::new(bounds, Order::default(), now);
    queue.push(now, ask("a", 10), 0).unwrap();
    for number in 1..20 {
        queue.push(now, ask(if number % 2 == 0 { "a" } else { "b" }, 10), number).unwrap();
    }
    let mut n_by = 0;
    while queue.pop_where(|&number, _| (number != 0).then_some(10)).is_some() {
        n_by += 1;
    }
    assert_eq!(n_by, 6, "three of its own tenant, as many of the other, then the search ends at it");
    let taken = queue.pop_where(|&number, turn| (number != 0 || turn.is_overdue).then_some(10));
    assert_eq!(taken, Some(0), "it takes any room");
    assert_eq!(queue.len(), 13);
}

#[test]
fn a_search_looks_at_no_more_than_it_may() {
    let now = daemon::clock::now();
    let bounds = QueueBounds { n_scan_max: 7, n_scan_per_tenant_max: 3, ..QueueBounds::default() };
    let mut queue = FairQueue::new(bounds, Order::default(), now);
    for number in 0..40 {
        queue.push(now, ask(["a", "b", "c", "d"][number % 4], 10), number).unwrap();
    }
    let mut seen = Vec::new();
    let none = queue.pop_where(|&number, _| {
        seen.push(number);
        None
    });
    assert_eq!((none, seen), (None, vec![0, 4, 8, 1, 5, 9, 2]));
}

#[test]
fn a_request_that_is_alone_may_be_larger_than_the_bound() {
    let now = daemon::clock::now();
    let mut queue = FairQueue::new(BOUNDS, Order::default(), now);
    queue.push(now, ask("a", 1_000_000), ()).unwrap();
    assert_eq!(queue.push(now, ask("a", 1), ()), Err(Refused::TenantTokens(1_000_000)));
    assert_eq!(queue.push(now, ask("b", 1), ()), Err(Refused::Tokens(1_000_000)));
}
