//! Who lets go of an order, and when; and links that are slow.

use std::time::Duration;

use daemon::clock;

use super::super::TransferConfig;
use super::super::Way;
use super::pair::{Setup, WAYS, layout, order, wide_layout};
use super::random::Random;
use super::source::Plan;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_fetch_lets_go_of_both_sides_blocks() {
    let mut random = Random::seeded();
    for (way, layout) in WAYS.map(|way| (way, layout())).into_iter().chain([(Way::Pull, wide_layout())]) {
        let plan = Plan { chunk_tokens: 32, pause_us_max: 300, ..Plan::default() };
        let pair = Setup { plan, ..Setup::new(layout, way) }.start(&mut random).await;
        for _ in 0..10 {
            let order = order(500, 0, &mut random);
            let reservation = pair.reserve(&order);
            let patience = Duration::from_micros(random.range(0, 10_000).into());
            let _ = tokio::time::timeout(patience, pair.client.fetch(&pair.peer, &order, &reservation)).await;
            pair.decode.wipe(&reservation.blocks);
            pair.prefill_is_free().await;
            assert!(reservation.blocks.iter().all(|&block| pair.decode.is_untouched(block)), "{way:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_two_threads_pull_comes_whole_or_not_at_all() {
    let mut random = Random::seeded();
    let pair = Setup::new(wide_layout(), Way::Pull).start(&mut random).await;
    for _ in 0..10 {
        let order = order(501, 0, &mut random);
        let (reservation, result) = pair.fetch(&order).await;
        result.unwrap();
        pair.check(&order, &reservation, 32);
        pair.decode.wipe(&reservation.blocks);
        // Dropped in the middle of a copy, more likely than not.
        let reservation = pair.reserve(&order);
        let patience = Duration::from_micros(random.range(500, 3_000).into());
        let _ = tokio::time::timeout(patience, pair.client.fetch(&pair.peer, &order, &reservation)).await;
        pair.decode.wipe(&reservation.blocks);
        tokio::time::sleep(Duration::from_millis(2)).await;
        assert!(reservation.blocks.iter().all(|&block| pair.decode.is_untouched(block)), "nobody writes any more");
        pair.prefill_is_free().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_throttled_worker_sends_no_faster_than_it_may() {
    let mut random = Random::seeded();
    for way in WAYS {
        let mut setup = Setup::new(layout(), way);
        let order = order(16 * 20 + 1, 0, &mut random);
        let n_bytes = 20 * layout().block_bytes_total() as u64;
        setup.config = TransferConfig { bytes_per_s_max: Some(10 * n_bytes), ..setup.config };
        let pair = setup.start(&mut random).await;
        let start = clock::now();
        let (reservation, result) = pair.fetch(&order).await;
        result.unwrap();
        assert!(clock::now() - start >= Duration::from_millis(100), "{way:?}");
        pair.check(&order, &reservation, 20);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn layers_travel_while_later_layers_are_computed() {
    let mut random = Random::seeded();
    // The last layer is never computed.
    let plan = Plan { chunk_tokens: 1_000, hang_after: Some(2), ..Plan::default() };
    let pair = Setup { plan, ..Setup::new(layout(), Way::Tcp) }.start(&mut random).await;
    let mut order = order(500, 0, &mut random);
    order.deadline = Duration::from_millis(300);
    let (reservation, result) = pair.fetch(&order).await;
    assert_eq!(result.expect_err("a layer is missing").blocks_complete, 0);
    for (i, &block) in reservation.blocks.iter().enumerate() {
        assert!((0..2).all(|layer| pair.decode.holds(block, layer, super::source::sequence(&order), i as u32)));
    }
}
