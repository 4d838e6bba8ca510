//! The fit against synthetic steps whose costs are known.

use proptest::prelude::*;

use super::*;

/// SplitMix64 (Steele, Lea and Flood), numbers in [0, 1).
struct Random(u64);

impl Random {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
    }

    fn within(&mut self, least: f64, most: f64) -> f64 {
        least + (most - least) * self.next()
    }

    /// A step of a busy engine: prompts, decoding or both.
    fn load(&mut self) -> StepLoad {
        let mut load = StepLoad::default();
        let kind = self.next();
        if kind < 0.6 {
            load.add_prefill(self.within(4.0, 11.0).exp2() as u64, self.within(0.0, 60_000.0) as u64);
        }
        if kind > 0.4 {
            let batch = self.within(1.0, 64.0) as u64;
            load.add_decode(batch, (batch as f64 * self.within(100.0, 20_000.0)) as u64);
        }
        load
    }

    /// Costs between those of a small model on a CPU and of a large one on an accelerator.
    fn costs(&mut self) -> CostCoefficients {
        CostCoefficients {
            prefill_base_ms: self.within(10.0, 30.0),
            prefill_per_token_ms: self.within(0.1, 0.3),
            prefill_per_token_context_ms: self.within(2e-6, 5e-6),
            decode_base_ms: self.within(10.0, 30.0),
            decode_per_sequence_ms: self.within(0.4, 0.8),
            decode_per_context_token_ms: self.within(0.5e-4, 2e-4),
        }
    }
}

/// Lets `fit` see `n` steps that cost what `truth` says, 5 % more or less, and one in a hundred fifty times that.
fn run(fit: &mut CostFit, random: &mut Random, truth: &CostCoefficients, n: usize) {
    for _ in 0..n {
        let load = random.load();
        let outlier = if random.next() < 0.01 { 50.0 } else { 1.0 };
        let ms = truth.step_ms(&load) * random.within(0.95, 1.05) * outlier;
        fit.observe(&load, Duration::from_secs_f64(ms / 1e3));
    }
}

/// Largest relative error of a coefficient.
fn error(fit: &CostFit, truth: &CostCoefficients) -> f64 {
    let pairs = coefficients(&fit.coefficients()).into_iter().zip(coefficients(truth));
    pairs.map(|(is, wanted)| (is / wanted - 1.0).abs()).fold(0.0, f64::max)
}

/// Mean relative error of predicted steps.
fn prediction_error(fit: &CostFit, truth: &CostCoefficients, random: &mut Random) -> f64 {
    let errors = (0..100).map(|_| {
        let load = random.load();
        (fit.coefficients().step_ms(&load) / truth.step_ms(&load) - 1.0).abs()
    });
    errors.sum::<f64>() / 100.0
}

fn scaled(cost: &CostCoefficients, by: f64) -> CostCoefficients {
    CostCoefficients {
        prefill_base_ms: cost.prefill_base_ms * by,
        prefill_per_token_ms: cost.prefill_per_token_ms * by,
        prefill_per_token_context_ms: cost.prefill_per_token_context_ms * by,
        decode_base_ms: cost.decode_base_ms * by,
        decode_per_sequence_ms: cost.decode_per_sequence_ms * by,
        decode_per_context_token_ms: cost.decode_per_context_token_ms * by,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn converges_to_the_true_costs(seed: u64) {
        let mut random = Random(seed);
        let (truth, mut fit) = (random.costs(), CostFit::default());
        run(&mut fit, &mut random, &truth, 3_000);
        let error = error(&fit, &truth);
        // As noisy as steps are here, one seed in some thousands is 0.05 off in one coefficient.
        prop_assert!(error < 0.08, "{} off: {:?} of {:?}", error, fit.coefficients(), truth);
    }

    #[test]
    fn predicts_soon(seed: u64) {
        let mut random = Random(seed);
        let (truth, mut fit) = (random.costs(), CostFit::default());
        run(&mut fit, &mut random, &truth, 100);
        let error = prediction_error(&fit, &truth, &mut random);
        prop_assert!(error < 0.1, "predictions are {} off", error);
    }

    #[test]
    fn follows_a_machine_that_becomes_twice_as_slow_or_fast(seed: u64, is_slower: bool) {
        let mut random = Random(seed);
        let (truth, mut fit) = (random.costs(), CostFit::default());
        run(&mut fit, &mut random, &truth, 3_000);
        let truth = scaled(&truth, if is_slower { 2.0 } else { 0.5 });
        run(&mut fit, &mut random, &truth, 200);
        let error = prediction_error(&fit, &truth, &mut random);
        prop_assert!(error < 0.1, "predictions are {} off", error);
    }

    #[test]
    fn a_load_that_never_changes_spoils_nothing(seed: u64, is_prefill: bool) {
        let mut random = Random(seed);
        let (truth, mut fit) = (random.costs(), CostFit::default());
        run(&mut fit, &mut random, &truth, 2_000);
        let mut load = StepLoad::default();
        if is_prefill { load.add_prefill(512, 0) } else { load.add_decode(8, 8_000) }
        for _ in 0..20_000 {
            let ms = truth.step_ms(&load) * random.within(0.95, 1.05);
            fit.observe(&load, Duration::from_secs_f64(ms / 1e3));
        }
        let error = prediction_error(&fit, &truth, &mut random);
        prop_assert!(error < 0.1, "predictions are {} off", error);
    }

    #[test]
    fn is_never_negative_and_always_a_number(
        steps in prop::collection::vec((any::<[u64; 3]>(), prop_oneof![any::<f64>(), 0.0..1e9], any::<u64>(), 0..64), 1..60),
    ) {
        let mut fit = CostFit::default();
        for ([prefill_tokens, decode_sequences, decode_context], prefill_pairs, nanos, shift) in steps {
            let load = StepLoad {
                prefill_tokens: prefill_tokens >> shift,
                prefill_pairs,
                decode_sequences: decode_sequences >> shift,
                decode_context: decode_context >> shift,
            };
            fit.observe(&load, Duration::from_nanos(nanos >> shift));
            let costs = coefficients(&fit.coefficients());
            prop_assert!(costs.iter().all(|cost| *cost >= 0.0 && cost.is_finite()), "{:?}", costs);
        }
    }
}

#[test]
fn nothing_is_published_before_enough_is_known() {
    let mut fit = CostFit::default();
    let mut load = StepLoad::default();
    load.add_decode(1, 100);
    for n in 1..10 {
        assert_eq!(fit.coefficients(), CostCoefficients::default(), "before step {n}");
        fit.observe(&load, Duration::from_millis(10));
        fit.observe(&StepLoad::default(), Duration::from_millis(10));
        fit.observe(&load, Duration::MAX);
    }
    for _ in 0..10 {
        fit.observe(&load, Duration::from_millis(10));
    }
    let cost = fit.coefficients();
    assert!((cost.decode_ms(1, 100) - 10.0).abs() < 0.5, "{cost:?}");
    assert_eq!(cost.prefill_ms(100, 0), 0.0, "no prompt was seen");
}

#[test]
fn steady_noise_is_not_news() {
    let mut random = Random(7);
    let (truth, mut fit) = (random.costs(), CostFit::default());
    run(&mut fit, &mut random, &truth, 3_000);
    let mut n_changes = 0;
    for _ in 0..1_000 {
        let before = fit.coefficients();
        run(&mut fit, &mut random, &truth, 1);
        n_changes += u32::from(fit.coefficients() != before);
    }
    assert!(n_changes < 50, "{n_changes} changes in 1,000 steps");
}

#[test]
fn an_instant_engine_costs_nothing() {
    let (mut random, mut fit) = (Random(1), CostFit::default());
    for _ in 0..1_000 {
        fit.observe(&random.load(), Duration::ZERO);
    }
    assert_eq!(fit.coefficients(), CostCoefficients::default());
}
