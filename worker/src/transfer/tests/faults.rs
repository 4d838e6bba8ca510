//! What goes wrong is named, and no block is taken for complete that is not.

use std::time::Duration;

use contract::error::RequestError;
use contract::kv::{BlockOrder, KvDtype, KvLayout};
use contract::model::Fingerprint;
use daemon::clock;

use super::super::fetch::{FetchError, FetchFailure};
use super::super::receive::Unwanted;
use super::super::{Peer, Share, Way};
use super::pair::{DEADLINE, Pair, Setup, WAYS, engine, layout, order};
use super::proxy::{Fault, Proxy};
use super::random::Random;
use super::source::Plan;

/// A pair with a layer of several frames, and a proxy between them.
async fn through(way: Way, fault: Fault, random: &mut Random) -> (Pair, Proxy, Peer) {
    let layout = KvLayout { n_layers: 2, kv_heads: 16, key_dim: 256, value_dim: 256, dtype: KvDtype::F32, ..layout() };
    let pair = Setup { n_blocks: [24; 2], ..Setup::new(layout, way) }.start(random).await;
    let proxy = Proxy::start(pair.peer.address.clone(), fault, 2).await;
    let peer = Peer { address: proxy.address.clone(), ..pair.peer.clone() };
    (pair, proxy, peer)
}

/// Orders through a fault, checks what is said to be complete, and that both sides are whole again afterwards.
async fn meet(way: Way, fault: Fault, random: &mut Random) -> (Result<(), FetchError>, [u64; 3]) {
    let (pair, proxy, peer) = through(way, fault, random).await;
    let mut order = order(16 * 20 + 1, 0, random);
    if fault == Fault::Deafen {
        // Long enough to pull on a busy machine: blocks that came back before would be found damaged.
        order.lease = Duration::from_secs(2);
    }
    let reservation = pair.reserve(&order);
    let result = pair.client.fetch(&peer, &order, &reservation).await;
    let n_complete = result.as_ref().map_or_else(|error| error.blocks_complete, |()| 20);
    pair.check(&order, &reservation, n_complete);
    assert!(pair.decode.others(&reservation.blocks).all(|block| pair.decode.is_untouched(block)));
    pair.prefill_is_free().await;
    proxy.heal();
    (order.deadline, order.lease) = (DEADLINE, DEADLINE);
    pair.client.fetch(&peer, &order, &reservation).await.unwrap();
    pair.check(&order, &reservation, 20);
    pair.prefill_is_free().await;
    let dropped = [Unwanted::Stale, Unwanted::NotReserved, Unwanted::OutOfOrder];
    (result, dropped.map(|reason| pair.endpoint.metrics.n_dropped(reason)))
}

fn reason(result: Result<(), FetchError>) -> FetchFailure {
    result.expect_err("it went wrong").reason
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damaged_bytes_are_found() {
    let mut random = Random::seeded();
    for way in WAYS {
        let (result, _) = meet(way, Fault::FlipPayload, &mut random).await;
        let reason = reason(result);
        // A flipped number of a block is one that the pool does not have, or one with other bytes.
        let is_unknown_block = way == Way::Pull && matches!(reason, FetchFailure::Lost(_));
        assert!(matches!(reason, FetchFailure::Damaged { .. }) || is_unknown_block, "{way:?}: {reason:?}");
        let (result, _) = meet(way, Fault::FlipHeader, &mut random).await;
        assert!(matches!(self::reason(result), FetchFailure::Lost(_)), "{way:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_frame_leaves_a_gap_that_is_told() {
    let mut random = Random::seeded();
    for way in [Way::Tcp, Way::Pull] {
        let (result, [stale, beyond, out_of_order]) = meet(way, Fault::Lose, &mut random).await;
        let error = result.expect_err("a frame is missing");
        assert!(matches!(error.reason, FetchFailure::Incomplete), "{error:?}");
        assert!(error.blocks_complete < 20 && stale == 0 && beyond == 0 && out_of_order > 0, "{error:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frames_that_nobody_waits_for_are_counted_and_change_nothing() {
    let mut random = Random::seeded();
    let faults = [
        (Fault::StaleLife, [1, 0, 0]),
        (Fault::StaleAttempt, [1, 0, 0]),
        (Fault::NotReserved, [0, 1, 0]),
        (Fault::Double, [0, 0, 1]),
    ];
    for way in [Way::Tcp, Way::Pull] {
        for (fault, expected) in faults {
            let (result, dropped) = meet(way, fault, &mut random).await;
            result.unwrap();
            assert_eq!(dropped, expected, "{way:?} {fault:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_breaks_or_falls_silent_ends_both_sides() {
    let mut random = Random::seeded();
    for way in WAYS {
        let (result, _) = meet(way, Fault::Cut, &mut random).await;
        assert!(matches!(reason(result), FetchFailure::Lost(_)), "{way:?}");
        // Both are noticed long before the deadline.
        for fault in [Fault::Silence, Fault::Stall] {
            let began = clock::now();
            let (result, _) = meet(way, fault, &mut random).await;
            assert!(matches!(reason(result), FetchFailure::Silent(_)), "{way:?} {fault:?}");
            assert!(began.elapsed() < DEADLINE / 2, "{way:?} {fault:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_decode_worker_that_takes_nothing_gets_no_blocks_kept() {
    let mut random = Random::seeded();
    let layout = KvLayout { n_layers: 2, kv_heads: 16, key_dim: 256, value_dim: 256, dtype: KvDtype::F32, ..layout() };
    for way in [Way::Tcp, Way::Ring] {
        let mut setup = Setup { n_blocks: [24; 2], ..Setup::new(layout, way) };
        (setup.config.silence_ms, setup.config.lease_ms) = (DEADLINE.as_millis() as u64, 500);
        let pair = setup.start(&mut random).await;
        let proxy = Proxy::start(pair.peer.address.clone(), Fault::Silence, 0).await;
        let peer = Peer { address: proxy.address.clone(), ..pair.peer.clone() };
        let order = order(16 * 20 + 1, 0, &mut random);
        let reservation = pair.reserve(&order);
        let let_go = async {
            pair.prefill_holds().await;
            pair.prefill_is_free().await;
        };
        tokio::select! {
            result = pair.client.fetch(&peer, &order, &reservation) => panic!("the decode worker waits: {result:?}"),
            () = let_go => {}
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_that_nobody_acknowledges_come_back_when_the_lease_ends() {
    let mut random = Random::seeded();
    for way in [Way::Tcp, Way::Pull] {
        let (result, _) = meet(way, Fault::Deafen, &mut random).await;
        result.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_engine_says_reaches_the_peer_and_the_connection_lives_on() {
    let mut random = Random::seeded();
    for way in WAYS {
        let plan = Plan { chunk_tokens: 64, fail_after: Some(4), ..Plan::default() };
        let pair = Setup { plan, ..Setup::new(layout(), way) }.start(&mut random).await;
        for _ in 0..3 {
            let order = order(500, 0, &mut random);
            let (reservation, result) = pair.fetch(&order).await;
            let error = result.expect_err("the engine fails");
            let expected = RequestError::Overloaded { reason: "the test says so".into(), retry_after_ms: 9 };
            assert!(matches!(&error.reason, FetchFailure::Refused(refused) if *refused == expected), "{error:?}");
            // A chunk of all three layers was complete.
            assert_eq!(error.blocks_complete, 4);
            pair.check(&order, &reservation, 4);
            pair.prefill_is_free().await;
            pair.decode.wipe(&reservation.blocks);
        }
        assert_eq!(pair.tasks.count(), 2, "one connection served all");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_hangs_is_left_at_the_deadline() {
    let mut random = Random::seeded();
    let plan = Plan { chunk_tokens: 64, hang_after: Some(4), ..Plan::default() };
    let pair = Setup { plan, ..Setup::new(layout(), Way::Tcp) }.start(&mut random).await;
    let mut order = order(500, 0, &mut random);
    order.deadline = Duration::from_secs(1);
    order.lease = Duration::from_secs(1);
    let (reservation, result) = pair.fetch(&order).await;
    let error = result.expect_err("the engine hangs");
    assert!(matches!(error.reason, FetchFailure::Late) && error.blocks_complete == 4, "{error:?}");
    pair.check(&order, &reservation, 4);
    pair.prefill_is_free().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pools_that_do_not_fit_are_refused_and_both_values_named() {
    let mut random = Random::seeded();
    let ours = layout();
    let others = [
        (KvLayout { dtype: KvDtype::F16, ..ours }, ["bf16", "f16"]),
        (KvLayout { order: BlockOrder::TokensFirst, ..ours }, ["HeadsFirst", "TokensFirst"]),
        (KvLayout { n_layers: 4, ..ours }, ["3", "4"]),
        (KvLayout { key_dim: 32, ..ours }, ["64", "32"]),
        (KvLayout { block_size: 32, ..ours }, ["16", "32"]),
        (KvLayout { kv_heads: 1, ..ours }, ["0..2", "0..1"]),
    ];
    for (theirs, values) in others {
        let shares = [theirs, ours].map(Share::whole);
        let pair = Setup { shares, ..Setup::new(ours, Way::Tcp) }.start(&mut random).await;
        let (_, result) = pair.fetch(&order(100, 0, &mut random)).await;
        let FetchFailure::Refused(RequestError::StalePlacement(text)) = reason(result) else {
            panic!("{theirs:?} is refused");
        };
        assert!(values.iter().all(|value| text.contains(value)), "{text}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_life_or_another_model_is_refused() {
    let mut random = Random::seeded();
    let pair = Setup::new(layout(), Way::Tcp).start(&mut random).await;
    let order = order(100, 0, &mut random);
    let reservation = pair.reserve(&order);
    let earlier = Peer { engine: engine("prefill", 1), ..pair.peer.clone() };
    let refused = reason(pair.client.fetch(&earlier, &order, &reservation).await);
    let text = format!("{refused:?}");
    assert!(text.contains("0000000000000001") && text.contains(&pair.peer.engine.incarnation.to_string()), "{text}");
    let client = pair.client_with(|identity| identity.model = Fingerprint([9; 16]));
    let text = format!("{:?}", reason(client.fetch(&pair.peer, &order, &reservation).await));
    assert!(text.contains("model fingerprint") && text.contains("0909") && text.contains("0101"), "{text}");
    let client = pair.client_with(|identity| identity.hash_key = Fingerprint([9; 16]));
    let text = format!("{:?}", reason(client.fetch(&pair.peer, &order, &reservation).await));
    assert!(text.contains("hash key fingerprint"), "{text}");
    let nobody = Peer { address: "127.0.0.1:1".into(), ..pair.peer.clone() };
    let refused = reason(pair.client.fetch(&nobody, &order, &reservation).await);
    assert!(matches!(refused, FetchFailure::Unreachable { .. }), "{refused:?}");
    assert!(reservation.blocks.iter().all(|&block| pair.decode.is_untouched(block)));
}
