//! Whether a prompt is better computed on another engine than on the one that goes on with it.

use super::{Candidate, Prediction, Situation};

/// From the end of a prefill elsewhere to the step that goes on with it, in milliseconds: the last layer's way and the news
/// of it; what is before it overlaps with the prefill.
const HAND_OVER_MS: f64 = 2.0;
/// What a millisecond costs in which a request that decodes waits for another's prompt, in milliseconds of first-token
/// time.
const STALL_PRICE: f64 = 0.1;

/// Chooses who computes a prompt for `decode`, of which `alone` is expected, of candidates that compute for others and
/// what is expected of each pair: the one that is done soonest, if that serves all better than computing it on `decode`; and who does when that one
/// fails, which is the next one of which the same is true. Yields their indices.
///
/// A prompt that is computed beside requests that decode holds up each of them, so that a pair may take longer than the
/// engine alone and still be better.
pub(super) fn choose(
    situation: &Situation<'_>,
    (decode, alone): (&Candidate<'_>, Prediction),
    prefills: &[Candidate<'_>],
    pairs: &[Prediction],
) -> [Option<usize>; 2] {
    let alone_ms = alone.first_token_ms + STALL_PRICE * alone.prefill_ms * f64::from(decode.load.n_decoding);
    let is_better = |&index: &usize| has_room(situation, &prefills[index]) && pairs[index].first_token_ms < alone_ms;
    let soonest = |but: Option<usize>| {
        let others = (0..prefills.len()).filter(|&index| Some(index) != but);
        let better = others.filter(is_better);
        better.min_by(|&one, &two| pairs[one].first_token_ms.total_cmp(&pairs[two].first_token_ms))
    };
    let first = soonest(None);
    [first, first.and_then(|_| soonest(first))]
}

/// What is expected where each of `prefills` computes the prompt for `decode`, of which `alone` is expected.
///
/// A prompt moves while it is computed, so that the slower of both counts.
pub(super) fn predict_pairs(
    situation: &Situation<'_>,
    (decode, alone): (&Candidate<'_>, Prediction),
    prefills: &[Candidate<'_>],
) -> Vec<Prediction> {
    let decode_ms = alone.decode_ms;
    let pair = |prefill: &Candidate<'_>| {
        let computed = situation.predict(prefill);
        let moved_ms = moved_ms(decode, prefill, situation.n_prompt_tokens);
        let there_ms = computed.first_token_ms.max(computed.wait_ms + moved_ms);
        Prediction { first_token_ms: there_ms + HAND_OVER_MS + decode_ms, decode_ms, ..computed }
    };
    prefills.iter().map(pair).collect()
}

/// Chooses who sends `decode` what it has cached of a prompt, of engines that leave: the one by which the first token comes
/// soonest, if not to compute that saves more than the hand-over takes. Yields its index, its tokens, and what is expected then.
pub(super) fn choose_lender(
    situation: &Situation<'_>,
    decode: &Candidate<'_>,
    lenders: &[Candidate<'_>],
) -> Option<(usize, u64, Prediction)> {
    // What is only promised may come later than what is lent, or not at all.
    let held = |one: &Candidate<'_>| one.tokens_cached - one.tokens_promised;
    let decode = Candidate { tokens_cached: held(decode), tokens_promised: 0, ..*decode };
    let alone = situation.predict(&decode);
    let lent = |(index, lender): (usize, &Candidate<'_>)| {
        let tokens_cached = held(lender);
        let helped = situation.predict(&Candidate { tokens_cached, ..decode });
        let moves_ms = moved_ms(&decode, lender, tokens_cached) + HAND_OVER_MS;
        let expected = Prediction { first_token_ms: helped.first_token_ms + moves_ms, ..helped };
        (alone.prefill_ms - helped.prefill_ms > moves_ms).then_some((index, tokens_cached, expected))
    };
    let all = lenders.iter().enumerate().filter_map(lent);
    all.min_by(|(.., one), (.., two)| one.first_token_ms.total_cmp(&two.first_token_ms))
}

/// What it takes to move the first tokens of a prompt, of which `decode` has some.
fn moved_ms(decode: &Candidate<'_>, from: &Candidate<'_>, n_tokens: u64) -> f64 {
    let n_moved = n_tokens.saturating_sub(decode.tokens_cached);
    n_moved as f64 * decode.transfer_ms_per_token.max(from.transfer_ms_per_token)
}

fn has_room(situation: &Situation<'_>, prefill: &Candidate<'_>) -> bool {
    let new = situation.n_prompt_tokens.saturating_sub(prefill.tokens_cached);
    prefill.blocks.is_none_or(|room| room.tokens_available >= new)
}

#[cfg(test)]
mod tests {
    use contract::cost::CostCoefficients;
    use contract::ids::{DataRank, EngineId, Incarnation};
    use contract::ledger::EngineLoad;

    use super::*;

    const COST: CostCoefficients = CostCoefficients {
        prefill_base_ms: 0.0,
        prefill_per_token_ms: 1.0,
        prefill_per_token_context_ms: 0.0,
        decode_base_ms: 10.0,
        decode_per_sequence_ms: 0.0,
        decode_per_context_token_ms: 0.0,
    };

    fn candidate(engine: &EngineId, wait_ms: f64, n_decoding: u32, tokens_cached: u64) -> Candidate<'_> {
        Candidate {
            engine,
            load: EngineLoad { wait_ms, n_decoding, n_prefilling: u32::from(wait_ms > 0.0), ..EngineLoad::default() },
            tokens_queued: 0,
            n_reported: 0,
            slots: 0,
            tokens_running: 0,
            blocks: None,
            cost: COST,
            step_tokens: 1_000,
            transfer_ms_per_token: 0.0,
            n_recent: 0.0,
            backlog_ms: 0.0,
            tokens_cached,
            tokens_promised: 0,
        }
    }

    fn situation(n_prompt_tokens: u64) -> Situation<'static> {
        let decode_ms_goal = f64::INFINITY;
        Situation { candidates: &[], n_prompt_tokens, session: 0, decode_ms_goal, turn: 0, random: 0 }
    }

    #[test]
    fn who_leaves_lends_where_that_saves_more_than_it_takes() {
        let engine = EngineId { worker: "w".into(), incarnation: Incarnation(1), data_rank: DataRank(0) };
        let of = |cached| candidate(&engine, 0.0, 0, cached);
        let lender = |decode: u64, lenders: &[u64]| {
            let lenders: Vec<_> = lenders.iter().map(|&cached| of(cached)).collect();
            choose_lender(&situation(100), &of(decode), &lenders).map(|(index, tokens, _)| (index, tokens))
        };
        assert_eq!(lender(0, &[16, 64, 32]), Some((1, 64)), "who has most");
        assert_eq!(lender(64, &[64]), None, "all of it is there");
        assert_eq!(lender(64, &[66]), None, "two tokens are computed sooner");
        assert_eq!(lender(64, &[67]), Some((0, 67)));
        assert_eq!(lender(0, &[]), None);
        let promised = Candidate { tokens_promised: 60, ..of(64) };
        let (_, tokens, expected) = choose_lender(&situation(100), &of(0), &[promised]).unwrap();
        assert_eq!((tokens, expected.prefill_ms), (4, 96.0), "what was only promised is not lent");
    }

    #[test]
    fn a_prompt_is_computed_elsewhere_where_that_serves_all_better() {
        let engine = EngineId { worker: "w".into(), incarnation: Incarnation(1), data_rank: DataRank(0) };
        let of = |wait_ms, n_decoding, cached| candidate(&engine, wait_ms, n_decoding, cached);
        let situation = situation(100);
        let both = |decode: Candidate<'_>, prefills: &[Candidate<'_>]| {
            let alone = situation.predict(&decode);
            choose(&situation, (&decode, alone), prefills, &predict_pairs(&situation, (&decode, alone), prefills))
        };
        let index = |decode: Candidate<'_>, prefills: &[Candidate<'_>]| both(decode, prefills)[0];
        assert_eq!(index(of(0.0, 0, 0), &[of(0.0, 0, 0)]), None, "an idle engine needs nobody");
        assert_eq!(index(of(0.0, 8, 0), &[of(0.0, 0, 0)]), Some(0), "eight would wait for it");
        assert_eq!(index(of(0.0, 8, 90), &[of(0.0, 0, 0)]), None, "most is there already");
        assert_eq!(index(of(0.0, 8, 0), &[of(0.0, 0, 0), of(0.0, 0, 50)]), Some(1), "who holds a part is done sooner");
        assert_eq!(index(of(0.0, 8, 0), &[of(500.0, 0, 0)]), None, "who has much to do is no help");
        assert_eq!(index(of(300.0, 0, 0), &[of(0.0, 0, 0)]), Some(0), "an engine with much to do lets others");
        assert_eq!(index(of(0.0, 8, 0), &[]), None);
        let behind = |transfer_ms_per_token| Candidate { transfer_ms_per_token, ..of(0.0, 0, 0) };
        assert_eq!(index(of(0.0, 8, 0), &[behind(1.0)]), Some(0), "it moves as fast as it is computed");
        assert_eq!(index(of(0.0, 8, 0), &[behind(5.0)]), None, "the way is slow");
        let busy = Candidate { transfer_ms_per_token: 5.0, ..of(300.0, 0, 0) };
        assert_eq!(index(busy, &[of(0.0, 0, 0)]), None, "so it is where the other end says so");
        assert_eq!(index(of(0.0, 8, 0), &[behind(5.0), of(20.0, 0, 0)]), Some(1), "another's is not");
        let three = [of(20.0, 0, 0), of(500.0, 0, 0), of(0.0, 0, 0)];
        assert_eq!(both(of(0.0, 8, 0), &three), [Some(2), Some(0)], "when one fails the next is asked");
        assert_eq!(both(of(0.0, 8, 0), &three[1..]), [Some(1), None], "unless that one has too much to do");
        let full =
            Candidate { blocks: Some(crate::route::Room { tokens_available: 50, tokens_total: 100 }), ..of(0.0, 0, 0) };
        assert_eq!(index(of(0.0, 8, 0), &[full]), None, "it has no room");
    }
}
