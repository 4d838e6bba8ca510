//! Random layouts, prompts, chunks, delays, aborts and faults; `SEED=n` replays, `TESSERA_FULL=1` tries many more.

use std::time::Duration;

use contract::kv::{BlockOrder, KvDtype, KvLayout};

use super::super::{Peer, Share, TransferConfig};
use super::pair::{Pair, Setup, WAYS, order};
use super::proxy::{Fault, Proxy};
use super::random::Random;
use super::source::Plan;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_wrong_block_is_taken_and_none_is_lost_whatever_happens() {
    let mut random = Random::seeded();
    let n_pairs = if std::env::var_os("TESSERA_FULL").is_some() { 1_000 } else { 30 };
    for _ in 0..n_pairs {
        let seed = random.next();
        one_pair(&mut Random(seed)).await;
    }
}

async fn one_pair(random: &mut Random) {
    let setup = setup(random);
    let block_size = setup.shares[0].layout.block_size;
    let pair = setup.start(random).await;
    let faults = [Fault::FlipPayload, Fault::FlipHeader, Fault::Double, Fault::StaleLife, Fault::Cut, Fault::Lose];
    for _ in 0..5 {
        let fault = if random.range(0, 2) == 0 { Fault::None } else { random.of(&faults) };
        let proxy = Proxy::start(pair.peer.address.clone(), fault, random.range(0, 12)).await;
        let peer = Peer { address: proxy.address.clone(), ..pair.peer.clone() };
        let n_prompt = random.range(1, 40 * block_size);
        let first_block = random.range(0, (n_prompt - 1).div_ceil(block_size) + 1);
        let mut order = order(n_prompt, first_block, random);
        // A frame that is lost on the way to a ring leaves no room in it.
        order.deadline = if fault == Fault::Lose { Duration::from_secs(1) } else { order.deadline };
        let abort_us = (random.range(0, 4) == 0).then(|| random.range(0, 5_000));
        one_order(&pair, &peer, &order, abort_us, fault == Fault::None).await;
    }
    pair.prefill_is_free().await;
}

async fn one_order(pair: &Pair, peer: &Peer, order: &super::super::Order, abort_us: Option<u32>, must_end_well: bool) {
    let reservation = pair.reserve(order);
    let fetch = pair.client.fetch(peer, order, &reservation);
    let abort = Duration::from_micros(abort_us.map_or(60_000_000, u64::from));
    match tokio::time::timeout(abort, fetch).await {
        Ok(Ok(())) => pair.check(order, &reservation, reservation.blocks.len() as u32),
        Ok(Err(error)) => {
            assert!(!must_end_well, "{order:?}: {error:?}");
            pair.check(order, &reservation, error.blocks_complete);
        }
        Err(_) => assert!(abort_us.is_some(), "a fetch hangs"),
    }
    assert!(pair.decode.others(&reservation.blocks).all(|block| pair.decode.is_untouched(block)));
    // From here on the blocks are another sequence's: whatever still comes must not reach them.
    pair.decode.wipe(&reservation.blocks);
    tokio::task::yield_now().await;
    assert!(reservation.blocks.iter().all(|&block| pair.decode.is_untouched(block)));
}

fn setup(random: &mut Random) -> Setup {
    let layout = KvLayout {
        order: random.of(&[BlockOrder::HeadsFirst, BlockOrder::TokensFirst]),
        n_layers: random.range(1, 6),
        kv_heads: random.range(1, 5),
        block_size: random.of(&[1, 4, 16]),
        key_dim: 8 * random.range(1, 17),
        value_dim: 8 * random.range(1, 17),
        dtype: random.of(&[KvDtype::F32, KvDtype::Bf16, KvDtype::F16, KvDtype::Int8]),
    };
    let plan = Plan {
        chunk_tokens: random.of(&[0, 1 + layout.block_size / 2, 64, 1_000]),
        pause_us_max: random.of(&[0, 0, 200]),
        fail_after: None,
        hang_after: None,
    };
    // The decode worker may hold some of the heads only.
    let first_head = random.range(0, layout.kv_heads);
    let kv_heads = random.range(1, layout.kv_heads - first_head + 1);
    let part = Share { layout: KvLayout { kv_heads, ..layout }, first_head };
    let config = TransferConfig { ways: vec![random.of(&WAYS)], ..TransferConfig::default() };
    // Aborted orders keep blocks of the prefill worker until it has noticed.
    Setup { shares: [Share::whole(layout), part], n_blocks: [400, 64], plan, config }
}
