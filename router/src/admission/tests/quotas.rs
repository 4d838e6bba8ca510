//! Quotas: never more than the rate and a burst, whatever the shares, and all of it where there is demand.

use std::collections::BTreeMap;
use std::num::NonZeroU64;

use contract::demand::{RouterDemand, TenantDemand};
use contract::ids::{Incarnation, TenantId};
use proptest::prelude::*;

use super::super::share::divide;
use super::*;

fn limits(requests: u64, tokens: u64, at_once: u64) -> TenantLimits {
    TenantLimits {
        requests_per_minute: NonZeroU64::new(requests),
        tokens_per_minute: NonZeroU64::new(tokens),
        n_concurrent_max: NonZeroU64::new(at_once),
        ..TenantLimits::default()
    }
}

fn quotas(limits: TenantLimits, now: Instant) -> Quotas {
    let settings = AdmissionSettings { tenants: [("t".to_owned(), limits)].into(), ..AdmissionSettings::default() };
    Quotas::new(&TenantTable::new(&settings).unwrap(), now)
}

fn tenant() -> TenantId {
    "t".into()
}

/// Checks every window of what was admitted at which millisecond.
fn assert_windows(admitted: &[(u64, u64)], per_minute: u64, burst: f64) {
    for first in 0..admitted.len() {
        let (mut sum, mut largest) = (0.0, 0.0_f64);
        for &(at, n) in &admitted[first..] {
            sum += n as f64;
            largest = largest.max(n as f64);
            let refilled = per_minute as f64 / 60_000.0 * (at - admitted[first].0) as f64;
            assert!(sum <= burst.max(largest) + refilled + 1e-3, "{sum} from {} to {at} ms", admitted[first].0);
        }
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn no_window_holds_more_than_the_rate_and_a_burst(
        steps in prop::collection::vec((0..400_u64, 1..5_000_u64), 1..120),
        per_minute in 60..200_000_u64,
    ) {
        let epoch = daemon::clock::now();
        let mut quotas = quotas(limits(0, per_minute, 0), epoch);
        let (mut at, mut admitted) = (0, Vec::new());
        for (later, tokens) in steps {
            at += later;
            match quotas.charge(epoch + ms(at), &tenant(), tokens) {
                Ok(()) => admitted.push((at, tokens)),
                Err(exceeded) => {
                    let wait_ms = exceeded.retry_after_ms.unwrap();
                    prop_assert!(quotas.charge(epoch + ms(at + wait_ms - 1), &tenant(), tokens).is_err());
                    at += wait_ms;
                    prop_assert_eq!(quotas.charge(epoch + ms(at), &tenant(), tokens), Ok(()), "after {} ms", wait_ms);
                    admitted.push((at, tokens));
                }
            }
        }
        assert_windows(&admitted, per_minute, per_minute as f64 / 6.0);
    }

    #[test]
    fn routers_together_admit_no_more_than_one_would(
        steps in prop::collection::vec((0..300_u64, 0..4_usize), 1..200),
        demand in prop::collection::vec(0.0..30.0_f32, 4),
    ) {
        let epoch = daemon::clock::now();
        let mut all = Routers::new(4, limits(600, 0, 0), epoch);
        for (told, requests_per_s) in all.told.values_mut().zip(demand) {
            told.tenants = vec![TenantDemand { requests_per_s, ..TenantDemand::none(tenant()) }];
        }
        all.hear(epoch);
        let (mut at, mut admitted) = (0, Vec::new());
        for (later, router) in steps {
            at += later;
            if all.quotas[router].enter(epoch + ms(at), &tenant()).is_ok() {
                admitted.push((at, 1));
            }
        }
        // A router whose burst is less than a request may lend itself the rest of one.
        assert_windows(&admitted, 600, 100.0 + 4.0);
    }

    #[test]
    fn shares_are_one_together_and_follow_demand(
        demand in prop::collection::vec(0.0..1e6_f64, 1..9), quota in prop_oneof![Just(0.0), 0.0..1e7_f64],
    ) {
        let shares = divide(&demand, quota);
        prop_assert!((shares.iter().sum::<f64>() - 1.0).abs() < 1e-9);
        prop_assert!(shares.iter().all(|&share| share >= 0.05 / demand.len() as f64 - 1e-12));
        for (a, b) in (0..demand.len()).flat_map(|a| (0..a).map(move |b| (a, b))) {
            prop_assert!(demand[a] < demand[b] || shares[a] >= shares[b] - 1e-12);
        }
        let whole: f64 = demand.iter().sum();
        for (&demand, share) in demand.iter().zip(shares) {
            prop_assert!(whole > quota || share * quota >= 0.95 * demand - 1e-6, "what all ask for together is met");
        }
    }

    #[test]
    fn as_many_run_at_once_as_may(steps in prop::collection::vec(any::<bool>(), 1..200), n_routers in 1..5_u32) {
        let now = daemon::clock::now();
        let mut quotas = quotas(limits(0, 0, 8), now);
        quotas.set_shares(now, Incarnation(0), None, n_routers);
        let (most, mut n_running) = (u64::from(8 / n_routers), 0);
        for enters in steps {
            if enters {
                let entered = quotas.enter(now, &tenant());
                prop_assert_eq!(entered.is_ok(), n_running < most);
                n_running += u64::from(entered.is_ok());
            } else if n_running > 0 {
                quotas.leave(&tenant());
                n_running -= 1;
            }
            prop_assert_eq!(quotas.n_running(&tenant()), n_running);
        }
    }

    /// With reports that are a moment old, routers run together as many as may, whatever they are asked for.
    #[test]
    fn routers_run_together_as_many_as_may(
        most in 1..40_u64,
        n_routers in 1..6_usize,
        asked in prop::collection::vec(0..4_u64, 6),
        moves in prop::collection::vec(0..4_u64, 6),
        lasts in 5..400_u64,
    ) {
        let epoch = daemon::clock::now();
        let mut all = Routers::new(n_routers, limits(0, 0, most), epoch);
        let mut ends: Vec<(u64, usize)> = Vec::new();
        for at in 0..8_000 {
            let now = epoch + ms(at);
            for (_, router) in ends.extract_if(.., |(end, _)| *end <= at) {
                all.quotas[router].leave(&tenant());
            }
            let of = if at < 3_000 { &asked } else { &moves };
            for (router, &every) in of.iter().enumerate().take(n_routers) {
                // One that asks tries every few milliseconds.
                if every > 0 && at % (5 * every) == 0 && all.quotas[router].enter(now, &tenant()).is_ok() {
                    ends.push((at + lasts, router));
                }
            }
            if at % 250 == 0 {
                all.tell(now);
            }
            let is_steady = at % 3_000 > 2_000 && at < 6_000;
            if is_steady {
                let n_running = ends.len() as u64;
                prop_assert!(n_running <= most, "{} of {} at {}", n_running, most, at);
            }
        }
    }
}

/// Routers that tell each other what they are asked for.
struct Routers {
    quotas: Vec<Quotas>,
    told: BTreeMap<Incarnation, RouterDemand>,
}

impl Routers {
    fn new(n: usize, limits: TenantLimits, now: Instant) -> Self {
        let quotas = (0..n).map(|_| quotas(limits.clone(), now)).collect();
        let told = (0..n as u64).map(|id| (Incarnation(id), RouterDemand::default())).collect();
        let mut all = Self { quotas, told };
        all.hear(now);
        all
    }

    /// All report; what they hear is what was reported.
    fn tell(&mut self, now: Instant) {
        for (told, quotas) in self.told.values_mut().zip(&self.quotas) {
            *told = RouterDemand { number: told.number + 1, tenants: quotas.demand(now) };
        }
        self.hear(now);
    }

    fn hear(&mut self, now: Instant) {
        let told: BTreeMap<Incarnation, &RouterDemand> = self.told.iter().map(|(&id, demand)| (id, demand)).collect();
        for (id, quotas) in (0..).zip(&mut self.quotas) {
            quotas.set_shares(now, Incarnation(id), Some(&told), told.len() as u32);
        }
    }

    fn lose(&mut self, now: Instant) {
        for (id, quotas) in (0..).zip(&mut self.quotas) {
            quotas.set_shares(now, Incarnation(id), None, self.told.len() as u32);
        }
    }
}

/// Requests that routers admit from `from_ms` on when they report every 250 ms; each is asked for so many requests a
/// second, by the time.
fn admitted_from(from_ms: u64, until_ms: u64, per_s: impl Fn(u64) -> [u64; 4], has_ledger: bool) -> u64 {
    let epoch = daemon::clock::now();
    let mut all = Routers::new(4, limits(6_000, 0, 0), epoch);
    all.lose(epoch);
    let mut n_admitted = 0;
    for at in 0..until_ms {
        let now = epoch + ms(at);
        for (quotas, per_s) in all.quotas.iter_mut().zip(per_s(at)) {
            let n = (at + 1) * per_s / 1_000 - at * per_s / 1_000;
            let n_entered = (0..n).filter(|_| quotas.enter(now, &tenant()).is_ok()).count() as u64;
            n_admitted += if at >= from_ms { n_entered } else { 0 };
        }
        if has_ledger && at % 250 == 0 {
            all.tell(now);
        }
    }
    n_admitted
}

#[test]
fn shares_follow_demand_within_ten_percent_in_two_seconds() {
    // 100 requests a second are allowed; demand for 400 moves from one router to another after a minute.
    let moves = |at| if at < 60_000 { [400, 0, 0, 0] } else { [0, 0, 300, 100] };
    let n = admitted_from(62_000, 92_000, moves, true);
    assert!((2_700..=3_300).contains(&n), "{n} in 30 s at 100 per second");
    let n = admitted_from(62_000, 64_000, moves, true);
    assert!((180..=220).contains(&n), "{n} in 2 s at 100 per second");
}

#[test]
fn what_does_not_exceed_the_quota_is_let_in_wherever_it_comes() {
    // 80 of 100 a second, which go from router to router.
    let wanders = |at: u64| std::array::from_fn(|router| if (at / 700) % 4 == router as u64 { 80 } else { 0 });
    let n = admitted_from(10_000, 40_000, wanders, true);
    assert!((2_280..=2_420).contains(&n), "{n} in 30 s of 80 per second");
}

#[test]
fn without_a_ledger_each_router_grants_an_equal_share() {
    let n = admitted_from(60_000, 90_000, |_| [400, 0, 400, 0], false);
    assert!((1_480..=1_520).contains(&n), "{n} in 30 s, two of four shares");
}

#[test]
fn a_router_that_told_nothing_keeps_an_equal_share() {
    let now = daemon::clock::now();
    let mut quotas = quotas(limits(240, 0, 8), now);
    let told =
        RouterDemand { number: 1, tenants: vec![TenantDemand { requests_per_s: 9.0, ..TenantDemand::none(tenant()) }] };
    quotas.set_shares(now, Incarnation(5), Some(&[(Incarnation(5), &told)].into()), 4);
    assert_eq!((0..20).filter(|_| quotas.enter(now, &tenant()).is_ok()).count(), 2, "a quarter of 8 at once");
    quotas.set_shares(now, Incarnation(5), Some(&[(Incarnation(5), &told)].into()), 1);
    assert_eq!((0..20).filter(|_| quotas.enter(now, &tenant()).is_ok()).count(), 6, "all of 8 when it is alone");
}

#[test]
fn a_refused_request_counts_nothing_and_a_corrected_one_its_true_cost() {
    let now = daemon::clock::now();
    let mut quotas = quotas(limits(60, 6_000, 0), now);
    (0..10).for_each(|_| quotas.enter(now, &tenant()).unwrap());
    let refused = quotas.enter(now, &tenant()).unwrap_err();
    assert_eq!((refused.quota, refused.limit, refused.retry_after_ms), (Quota::Requests, 60, Some(1_000)));
    assert_eq!(quotas.n_running(&tenant()), 10);
    quotas.charge(now, &tenant(), 1_000).unwrap();
    assert_eq!(quotas.charge(now, &tenant(), 100).unwrap_err().retry_after_ms, Some(1_000));
    quotas.settle(now, &tenant(), 1_000, 700);
    quotas.charge(now, &tenant(), 300).unwrap();
    quotas.settle(now, &tenant(), 300, 500);
    assert_eq!(quotas.charge(now, &tenant(), 100).unwrap_err().retry_after_ms, Some(3_000), "200 over and 100 more");
    let error = quotas.charge(now, &tenant(), 1).unwrap_err().into_error(5);
    assert_eq!(error.to_string(), "tenant t has used its 6000 tokens per minute; retry after 2010 ms");
}
