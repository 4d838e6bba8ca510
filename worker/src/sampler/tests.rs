//! The sampler against a naive one in f64, and against the distribution it claims to draw from.

use proptest::prelude::*;

use super::*;

fn spec(params: SamplingParams) -> SamplingSpec {
    SamplingSpec { params, logprobs: None, n_prompt: 0, min_tokens: 0, stop_token_ids: vec![], history: vec![] }
}

fn sample(logits: &[f32], spec: &SamplingSpec, position: u32) -> SampledToken {
    Sampler::new(logits.len()).sample(logits, spec, &counts(spec), position)
}

fn counts(spec: &SamplingSpec) -> TokenCounts {
    let mut counts = TokenCounts::default();
    for (index, &token) in spec.history.iter().enumerate() {
        if index < spec.n_prompt as usize { counts.add_prompt(token) } else { counts.add_output(token) }
    }
    counts
}

/// Logits after everything but temperature and filters, in f64.
fn naive_adjusted(logits: &[f32], spec: &SamplingSpec, position: u32) -> Vec<f64> {
    let mut adjusted: Vec<f64> = logits.iter().map(|&logit| f64::from(logit)).collect();
    if position - spec.n_prompt < spec.min_tokens {
        spec.stop_token_ids.iter().for_each(|&token| adjusted[token as usize] = f64::NEG_INFINITY);
    }
    for &(token, bias) in &spec.params.logit_bias {
        adjusted[token as usize] += f64::from(bias);
    }
    let output = &spec.history[spec.n_prompt as usize..];
    for (token, logit) in adjusted.iter_mut().enumerate() {
        if spec.history.contains(&(token as Token)) {
            let penalty = f64::from(spec.params.repetition_penalty);
            *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
        }
        let n = output.iter().filter(|&&other| other as usize == token).count();
        *logit -= f64::from(spec.params.frequency_penalty) * n as f64;
        *logit -= f64::from(spec.params.presence_penalty) * f64::from(u8::from(n > 0));
    }
    adjusted
}

/// Probability of each token after temperature and filters, with `slack` to move thresholds by.
fn naive_probabilities(adjusted: &[f64], params: &SamplingParams, slack: f64) -> Vec<f64> {
    let max = adjusted.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = adjusted.iter().map(|l| ((l - max) / f64::from(params.temperature)).exp()).collect();
    let mut order: Vec<usize> = (0..adjusted.len()).collect();
    order.sort_by(|&a, &b| adjusted[b].total_cmp(&adjusted[a]).then(a.cmp(&b)));
    order.retain(|&token| weights[token] >= f64::from(params.min_p) * (1.0 - slack));
    if params.top_k > 0 {
        order.truncate(params.top_k as usize);
    }
    let total: f64 = order.iter().map(|&token| weights[token]).sum();
    let mut kept = vec![0.0; adjusted.len()];
    let mut mass = 0.0;
    for &token in &order {
        kept[token] = weights[token];
        mass += weights[token];
        if params.top_p < 1.0 && mass >= total * (f64::from(params.top_p) + slack) {
            break;
        }
    }
    kept.iter().map(|weight| weight / mass).collect()
}

fn params() -> impl Strategy<Value = SamplingParams> {
    let filters = (prop_oneof![Just(0_u32), 1_u32..40], prop_oneof![Just(1.0_f32), 0.05_f32..1.0]);
    let min_p = prop_oneof![Just(0.0_f32), 0.001_f32..0.5];
    let penalties = (prop_oneof![Just(1.0_f32), 0.5_f32..2.0], -2.0_f32..2.0, -2.0_f32..2.0);
    let bias = proptest::collection::vec((0_u32..200, -5.0_f32..5.0), 0..4);
    (0.2_f32..3.0, filters, min_p, penalties, bias, any::<u64>()).prop_map(
        |(temperature, (top_k, top_p), min_p, penalties, logit_bias, seed)| SamplingParams {
            temperature,
            top_k,
            top_p,
            min_p,
            repetition_penalty: penalties.0,
            presence_penalty: penalties.1,
            frequency_penalty: penalties.2,
            logit_bias,
            seed,
        },
    )
}

proptest! {
    #[test]
    fn draws_only_what_a_naive_sampler_may_draw(
        logits in proptest::collection::vec(-8.0_f32..8.0, 200..400),
        params in params(),
        history in proptest::collection::vec(0_u32..200, 0..20),
        stop_token_ids in proptest::collection::vec(0_u32..200, 0..3),
        min_tokens in 0_u32..2,
    ) {
        let n_prompt = history.len() as u32 / 2;
        let spec = SamplingSpec { params, logprobs: None, n_prompt, min_tokens, stop_token_ids, history };
        let position = spec.n_prompt;
        let token = sample(&logits, &spec, position).token;
        let adjusted = naive_adjusted(&logits, &spec, position);
        let probability = naive_probabilities(&adjusted, &spec.params, 1e-5)[token as usize];
        prop_assert!(probability > 0.0, "token {token} may not be drawn");
    }

    #[test]
    fn greedy_equals_the_naive_maximum(
        logits in proptest::collection::vec((-3_i32..3).prop_map(|l| l as f32), 1..2_000),
    ) {
        let greedy = spec(SamplingParams { temperature: 0.0, ..SamplingParams::default() });
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let lowest = logits.iter().position(|&logit| logit == max).unwrap() as Token;
        prop_assert_eq!(sample(&logits, &greedy, 7).token, lowest);
    }

    #[test]
    fn logprobs_come_from_the_raw_logits(
        logits in proptest::collection::vec(-20.0_f32..20.0, 2..300),
        n in 0_u32..20,
        bias in -3.0_f32..3.0,
    ) {
        let mut spec = spec(SamplingParams { temperature: 0.7, logit_bias: vec![(1, bias)], top_k: 3, ..SamplingParams::default() });
        spec.logprobs = Some(n);
        let sampled = sample(&logits, &spec, 3);
        let sum: f64 = logits.iter().map(|&l| f64::from(l).exp()).sum();
        let truth = |token: Token| f64::from(logits[token as usize]) - sum.ln();
        prop_assert!((f64::from(sampled.logprob) - truth(sampled.token)).abs() < 1e-5);
        let mut order: Vec<Token> = (0..logits.len() as Token).collect();
        order.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b)));
        order.truncate(n as usize);
        prop_assert_eq!(sampled.top.iter().map(|top| top.0).collect::<Vec<_>>(), order);
        for (token, logprob) in sampled.top {
            prop_assert!((f64::from(logprob) - truth(token)).abs() < 1e-5);
        }
    }

    #[test]
    fn whatever_comes_in_a_token_of_the_vocabulary_comes_out(
        logits in proptest::collection::vec(prop_oneof![any::<f32>(), Just(f32::NAN), Just(f32::INFINITY), Just(f32::NEG_INFINITY)], 1..100),
        params in params(),
        temperature in prop_oneof![Just(0.0_f32), Just(f32::MIN_POSITIVE), Just(100.0)],
    ) {
        let mut spec = spec(SamplingParams { temperature, ..params });
        spec.logprobs = Some(5);
        spec.min_tokens = 1;
        spec.stop_token_ids = vec![0, 5];
        prop_assert!((sample(&logits, &spec, 0).token as usize) < logits.len());
    }
}

/// Draws at many positions and compares frequencies with the naive probabilities by a chi-square sum.
fn assert_fits(logits: &[f32], params: SamplingParams) {
    const DRAWS: u32 = 20_000;
    let spec = spec(params);
    let probabilities = naive_probabilities(&naive_adjusted(logits, &spec, 0), &spec.params, 0.0);
    let mut seen = vec![0_u32; logits.len()];
    let mut sampler = Sampler::new(logits.len());
    for position in 0..DRAWS {
        seen[sampler.sample(logits, &spec, &TokenCounts::default(), position).token as usize] += 1;
    }
    let (mut chi_square, mut degrees) = (0.0, 0.0);
    for (&n, &probability) in seen.iter().zip(&probabilities) {
        let expected = probability * f64::from(DRAWS);
        if expected == 0.0 {
            assert_eq!(n, 0, "drew a filtered token");
        } else if expected > 5.0 {
            chi_square += (f64::from(n) - expected).powi(2) / expected;
            degrees += 1.0;
        }
    }
    // Mean `degrees`, deviation √(2 degrees): five deviations are beyond chance, and the seed is fixed anyway.
    assert!(chi_square < degrees + 5.0 * f64::sqrt(2.0 * degrees) + 5.0, "{chi_square} with {degrees} degrees");
}

#[test]
fn frequencies_follow_the_distribution_with_and_without_filters() {
    let logits: Vec<f32> = (0..150_u32).map(|i| ((i * 61) % 150) as f32 / 30.0).collect();
    let base = SamplingParams { seed: 42, ..SamplingParams::default() };
    assert_fits(&logits, base.clone());
    assert_fits(&logits, SamplingParams { temperature: 0.5, ..base.clone() });
    assert_fits(&logits, SamplingParams { top_k: 10, ..base.clone() });
    assert_fits(&logits, SamplingParams { top_p: 0.8, ..base.clone() });
    assert_fits(&logits, SamplingParams { min_p: 0.3, ..base.clone() });
    assert_fits(&logits, SamplingParams { top_k: 100, top_p: 0.7, min_p: 0.05, ..base });
}

#[test]
fn the_largest_logit_is_found_wherever_it_is() {
    assert_eq!(argmax(&[]), 0);
    for n in [1, 511, 512, 513, 2000] {
        for at in [0, n / 2, n - 1] {
            let mut logits = vec![-1.0; n];
            logits[at] = 2.0;
            // A later equal one and what is no number change nothing.
            logits[n - 1] = 2.0;
            assert_eq!(argmax(&logits), at as Token, "{at} of {n}");
            logits.iter_mut().filter(|logit| **logit < 0.0).for_each(|logit| *logit = f32::NAN);
            assert_eq!(argmax(&logits), at as Token, "{at} of {n} among what is no number");
        }
        let mut logits = vec![f32::NAN; n];
        logits[n - 1] = f32::NEG_INFINITY;
        assert_eq!(argmax(&logits), n as Token - 1);
    }
}

#[test]
fn a_sample_depends_on_seed_and_position_alone() {
    let logits: Vec<f32> = (0..1000_u32).map(|i| ((i * 7) % 13) as f32 / 9.0).collect();
    let at =
        |seed, position| sample(&logits, &spec(SamplingParams { seed, ..SamplingParams::default() }), position).token;
    assert_eq!(at(1, 5), at(1, 5));
    let draws: std::collections::BTreeSet<Token> = (0..50).map(|position| at(1, position)).collect();
    assert!(draws.len() > 40, "positions draw independently: {}", draws.len());
    assert!((0..50).any(|position| at(1, position) != at(2, position)));
}

#[test]
fn stop_tokens_cannot_come_before_min_tokens() {
    let mut spec = spec(SamplingParams { temperature: 0.0, ..SamplingParams::default() });
    (spec.n_prompt, spec.min_tokens, spec.stop_token_ids) = (10, 2, vec![1]);
    let logits = [0.0, 9.0, 5.0];
    let tokens: Vec<Token> = (10..14).map(|position| sample(&logits, &spec, position).token).collect();
    assert_eq!(tokens, [2, 2, 1, 1]);
}

#[test]
fn penalties_count_prompt_and_output_as_they_should() {
    let mut spec = spec(SamplingParams { temperature: 0.0, presence_penalty: 1.5, ..SamplingParams::default() });
    (spec.n_prompt, spec.history) = (1, vec![0, 1]);
    assert_eq!(sample(&[3.0, 3.5, 1.0], &spec, 2).token, 0, "presence looks at the output only");
    spec.params = SamplingParams { temperature: 0.0, repetition_penalty: 2.0, ..SamplingParams::default() };
    assert_eq!(sample(&[3.0, 3.5, 1.8], &spec, 2).token, 2, "repetition looks at the prompt too");
}
