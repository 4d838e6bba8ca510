//! Quotas: never more than the rate and a burst, whatever the shares, and all of it where there is demand.

use std::num::NonZeroU64;

use contract::ids::TenantId;
use proptest::prelude::*;

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
        demand in prop::collection::vec(0.0..10.0_f64, 4),
    ) {
        let epoch = daemon::clock::now();
        let mut all: Vec<Quotas> = (0..4).map(|_| quotas(limits(600, 0, 0), epoch)).collect();
        for (quotas, share) in all.iter_mut().zip(divide(&demand)) {
            quotas.set_share(epoch, &tenant(), Some(share));
        }
        let (mut at, mut admitted) = (0, Vec::new());
        for (later, router) in steps {
            at += later;
            if all[router].enter(epoch + ms(at), &tenant()).is_ok() {
                admitted.push((at, 1));
            }
        }
        // A router whose burst is less than a request may lend itself the rest of one.
        assert_windows(&admitted, 600, 100.0 + 4.0);
    }

    #[test]
    fn shares_are_one_together_and_follow_demand(demand in prop::collection::vec(0.0..1e6_f64, 1..9)) {
        let shares = divide(&demand);
        prop_assert!((shares.iter().sum::<f64>() - 1.0).abs() < 1e-9);
        prop_assert!(shares.iter().all(|&share| share >= 0.05 / demand.len() as f64 - 1e-12));
        for (a, b) in (0..demand.len()).flat_map(|a| (0..a).map(move |b| (a, b))) {
            prop_assert!(demand[a] < demand[b] || shares[a] >= shares[b] - 1e-12);
        }
    }

    #[test]
    fn as_many_run_at_once_as_may(steps in prop::collection::vec(any::<bool>(), 1..200), n_routers in 1..5_u32) {
        let now = daemon::clock::now();
        let mut quotas = quotas(limits(0, 0, 8), now);
        quotas.set_n_routers(now, n_routers);
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
}

/// Requests that routers admit from `from_ms` on when the ledger tells shares every 100 ms; each is asked for so many
/// requests a second, by the time.
fn admitted_from(from_ms: u64, until_ms: u64, per_s: impl Fn(u64) -> [u64; 4], has_ledger: bool) -> u64 {
    let epoch = daemon::clock::now();
    let mut all: Vec<Quotas> = (0..4).map(|_| quotas(limits(6_000, 0, 0), epoch)).collect();
    all.iter_mut().for_each(|quotas| quotas.set_n_routers(epoch, 4));
    let mut n_admitted = 0;
    for at in 0..until_ms {
        let now = epoch + ms(at);
        for (quotas, per_s) in all.iter_mut().zip(per_s(at)) {
            let n = (at + 1) * per_s / 1_000 - at * per_s / 1_000;
            let n_entered = (0..n).filter(|_| quotas.enter(now, &tenant()).is_ok()).count() as u64;
            n_admitted += if at >= from_ms { n_entered } else { 0 };
        }
        if has_ledger && at % 100 == 0 {
            let demand: Vec<f64> = all.iter().map(|quotas| quotas.demand_per_s(now, &tenant())).collect();
            for (quotas, share) in all.iter_mut().zip(divide(&demand)) {
                quotas.set_share(now, &tenant(), Some(share));
            }
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
}

#[test]
fn without_a_ledger_each_router_grants_an_equal_share() {
    let n = admitted_from(60_000, 90_000, |_| [400, 0, 400, 0], false);
    assert!((1_480..=1_520).contains(&n), "{n} in 30 s, two of four shares");
}

#[test]
fn a_lost_ledger_goes_back_to_equal_shares() {
    let now = daemon::clock::now();
    let mut quotas = quotas(limits(60, 0, 0), now);
    quotas.set_n_routers(now, 4);
    quotas.set_share(now, &tenant(), Some(0.7));
    assert_eq!(quotas.share(&tenant()), 0.7);
    quotas.forget_shares(now);
    assert_eq!(quotas.share(&tenant()), 0.25);
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
