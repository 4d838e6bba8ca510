//! Heads of one rank to several and back.

use contract::ids::BlockId;
use contract::kv::{BlockOrder, KvDtype, KvLayout};

use super::super::Share;
use super::super::ring::Ring;
use super::pair::{Setup, WAYS, layout, order};
use super::pool::Pool;
use super::random::Random;

fn eight(order: BlockOrder, dtype: KvDtype) -> KvLayout {
    KvLayout { order, kv_heads: 8, key_dim: 24, value_dim: 16, dtype, ..layout() }
}

fn half(layout: KvLayout, first_head: u32) -> Share {
    Share { layout: KvLayout { kv_heads: 4, ..layout }, first_head }
}

/// Moves the heads that both hold, through memory.
fn copy(from: &Pool, to: &Pool, blocks: [&[BlockId]; 2]) {
    let heads = from.share.shared_heads(&to.share);
    let (mut source, mut target) = (from.memory.runs(), to.memory.runs());
    for layer in 0..from.share.layout.n_layers {
        from.share.list(&heads, layer, blocks[0], &mut source).unwrap();
        to.share.list(&heads, layer, blocks[1], &mut target).unwrap();
        assert_eq!(source.n_bytes(), target.n_bytes());
        let (mut ring, offer) = Ring::create(source.n_bytes() as u64).unwrap();
        let mut opened = Ring::open(&offer).unwrap();
        assert_eq!(ring.put(&source), opened.take(&target));
    }
}

#[test]
fn eight_heads_become_twice_four_and_eight_again() {
    let mut random = Random::seeded();
    for order in [BlockOrder::HeadsFirst, BlockOrder::TokensFirst] {
        for dtype in [KvDtype::Bf16, KvDtype::Int8] {
            let layout = eight(order, dtype);
            let mut pool = |share| Pool::new(share, 9, &mut random);
            let (whole, again) = (pool(Share::whole(layout)), pool(Share::whole(layout)));
            let halves = [pool(half(layout, 0)), pool(half(layout, 4))];
            let blocks = whole.take(5);
            for (layer, (i, &block)) in (0..3).flat_map(|layer| blocks.iter().enumerate().map(move |at| (layer, at))) {
                whole.compute(block, layer, 77, i as u32);
            }
            let back = again.take(5);
            for part in &halves {
                let taken = part.take(5);
                copy(&whole, part, [&blocks, &taken]);
                for (layer, (i, &block)) in (0..3).flat_map(|layer| taken.iter().enumerate().map(move |at| (layer, at)))
                {
                    assert!(part.holds(block, layer, 77, i as u32), "{order:?} {dtype:?}");
                }
                assert!(part.others(&taken).all(|block| part.is_untouched(block)));
                copy(part, &again, [&taken, &back]);
            }
            for (layer, (i, &block)) in (0..3).flat_map(|layer| back.iter().enumerate().map(move |at| (layer, at))) {
                assert!(again.holds(block, layer, 77, i as u32), "{order:?} {dtype:?}");
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rank_of_four_heads_takes_its_part_of_eight() {
    let mut random = Random::seeded();
    for way in WAYS {
        for block_order in [BlockOrder::HeadsFirst, BlockOrder::TokensFirst] {
            let layout = eight(block_order, KvDtype::Bf16);
            let shares = [Share::whole(layout), half(layout, 4)];
            let pair = Setup { shares, ..Setup::new(layout, way) }.start(&mut random).await;
            let order = order(333, 2, &mut random);
            let (reservation, result) = pair.fetch(&order).await;
            result.unwrap();
            pair.check(&order, &reservation, reservation.blocks.len() as u32);
        }
    }
}
