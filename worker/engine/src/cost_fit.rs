//! Fits the cost of steps to their measured times, so that others can predict them.
//!
//! A step's time is linear in six features of its load. They are fitted by recursive least squares on relative errors,
//! with exponential forgetting:
//!
//! - only features that a step has are forgotten in it, and never below what was known before the first step, so a load
//!   that never changes winds nothing up and what was learnt of other loads stays;
//! - a step that took much longer than predicted counts by its own time, and its error is clipped to a few times the
//!   running mean of errors, so that single outliers move little;
//! - where errors keep their sign, the machine has changed, and the past is forgotten fast;
//! - what is published is the best fit without negative costs, and only while errors are small enough; a fit whose
//!   errors do not become so begins anew.
//!
//! Hot path: no allocation, no lock, no log.

use std::time::Duration;

use contract::cost::{CostCoefficients, StepLoad};

const N: usize = 6;
type Vector = [f64; N];
type Matrix = [Vector; N];

/// What features are counted in, so that all are near 1: prefill, tokens, pairs, decode, sequences, tokens of context.
const UNITS: Vector = [1.0, 1e3, 1e7, 1.0, 1e1, 1e4];
/// Milliseconds that a unit of each may well cost, before anything is known.
const PRIOR_MS: Vector = [50.0, 1e3, 5e3, 100.0, 100.0, 100.0];
/// Relative error of a step's time that the prior is weighed with.
const PRIOR_ERROR: f64 = 0.05;
/// Share of what is known of a step's features that is kept, and while errors keep their sign.
const KEPT: f64 = 0.998;
const KEPT_IN_CHANGE: f64 = 0.9;
/// Errors keep their sign while their mean is so much of the mean of their amounts.
const CHANGE_SIGN: f64 = 0.7;
/// Relative errors beyond so many times their running mean are clipped: steps that take too long may have any reason.
const CLIP: f64 = 4.0;
/// Share of the newest error in running means, and the least that they become.
const ERROR_RATE: f64 = 0.05;
const DEVIATION_MIN: f64 = 0.01;
/// Errors of shorter steps are taken relative to this.
const STEP_MS_MIN: f64 = 1.0;
/// Longer steps are no measurements.
const STEP_MS_MAX: f64 = 1e6;
/// Larger features are none either, nor are larger costs of a unit.
const UNITS_MAX: f64 = 1e9;
/// Mean relative error of a fit that is worth publishing, and steps that it may take to become one.
const DEVIATION_MAX: f64 = 0.5;
const TRIAL_STEPS: u32 = 30;
/// Share by which a coefficient moves before it is published anew.
const CHANGE_MIN: f64 = 1.0 / 32.0;
/// Least share of a pivot that counts as information.
const PIVOT_MIN: f64 = 1e-12;

/// The fit of one engine.
#[derive(Clone, Debug)]
pub struct CostFit {
    /// Milliseconds for a unit of each feature; a negative one means that others explain it.
    costs: Vector,
    /// Inverse of their covariance.
    information: Matrix,
    /// Running mean of the amounts of relative errors.
    deviation: f64,
    /// Running mean of relative errors.
    bias: f64,
    n_steps: u32,
    published: CostCoefficients,
}

impl Default for CostFit {
    fn default() -> Self {
        let mut information = Matrix::default();
        for (i, row) in information.iter_mut().enumerate() {
            row[i] = prior(i);
        }
        let published = CostCoefficients::default();
        Self { costs: Vector::default(), information, deviation: 1.0, bias: 0.0, n_steps: 0, published }
    }
}

impl CostFit {
    /// Takes a step's load and time; what cannot be a measurement is ignored.
    pub fn observe(&mut self, load: &StepLoad, took: Duration) {
        let ms = took.as_secs_f64() * 1e3;
        let Some(features) = features(load).filter(|_| ms <= STEP_MS_MAX) else { return };
        let predicted = dot(&self.costs, &features);
        // No step is much shorter than it should be: then the prediction is wrong, and this corrects it with full weight.
        let scale = predicted.min(2.0 * ms).max(ms).max(STEP_MS_MIN);
        let clip = CLIP * self.deviation;
        let error = ((ms - predicted) / scale).min(clip);
        let clipped = error.max(-clip);
        self.deviation += ERROR_RATE * (clipped.abs() - self.deviation);
        self.deviation = self.deviation.max(DEVIATION_MIN);
        self.bias += ERROR_RATE * (clipped - self.bias);
        self.learn(&features.map(|feature| feature / scale), error);
        self.n_steps = self.n_steps.saturating_add(1);
        let is_fit = self.deviation < DEVIATION_MAX;
        let is_finite = self.costs.iter().all(|cost| cost.abs() <= UNITS_MAX);
        if !is_finite || (!is_fit && self.n_steps >= TRIAL_STEPS) {
            *self = Self { published: self.published, ..Self::default() };
        } else if is_fit {
            self.publish();
        }
    }

    /// The costs of a step, none negative; all 0 while too little is known, and those of prompts or of decoding while
    /// there was none.
    pub fn coefficients(&self) -> CostCoefficients {
        self.published
    }

    fn learn(&mut self, x: &Vector, error: f64) {
        let kept = if self.bias.abs() > CHANGE_SIGN * self.deviation { KEPT_IN_CHANGE } else { KEPT };
        let kept = x.map(|feature| if feature > 0.0 { kept.sqrt() } else { 1.0 });
        for i in 0..N {
            for j in 0..N {
                self.information[i][j] = kept[i] * kept[j] * self.information[i][j] + x[i] * x[j];
            }
            self.information[i][i] += (1.0 - kept[i] * kept[i]) * prior(i);
        }
        let direction = solve(&self.information, x, &[true; N]);
        for (cost, step) in self.costs.iter_mut().zip(direction) {
            *cost += step * error;
        }
    }

    /// Replaces what is published by the present fit where it has moved.
    fn publish(&mut self) {
        let costs = self.without_negative();
        if !costs.iter().all(|cost| (0.0..=UNITS_MAX).contains(cost)) {
            return;
        }
        let cost = |i: usize| costs[i] / UNITS[i];
        let fitted = CostCoefficients {
            prefill_base_ms: cost(0),
            prefill_per_token_ms: cost(1),
            prefill_per_token_context_ms: cost(2),
            decode_base_ms: cost(3),
            decode_per_sequence_ms: cost(4),
            decode_per_context_token_ms: cost(5),
        };
        let moved = |was: f64, is: f64| (was - is).abs() > CHANGE_MIN * was.max(is);
        let pairs = coefficients(&self.published).into_iter().zip(coefficients(&fitted));
        if { pairs }.any(|(was, is)| moved(was, is)) {
            self.published = fitted;
        }
    }

    /// The costs, or the most likely ones without those that are negative: the most negative is set to 0, the others
    /// take over what it explained, until none is negative.
    fn without_negative(&self) -> Vector {
        let explained = self.information.map(|row| dot(&row, &self.costs));
        let mut active = [true; N];
        let mut costs = self.costs;
        loop {
            let certainty = |i: usize| costs[i] * self.information[i][i].sqrt();
            let negative = (0..N).filter(|&i| costs[i] < 0.0);
            let Some(worst) = negative.min_by(|&a, &b| certainty(a).total_cmp(&certainty(b))) else { return costs };
            active[worst] = false;
            costs = solve(&self.information, &explained, &active);
        }
    }
}

/// Information about a cost before anything is known.
fn prior(i: usize) -> f64 {
    (PRIOR_ERROR / PRIOR_MS[i]).powi(2)
}

/// What the time of a step depends on, in `UNITS`; none of an empty step or of one that cannot be.
fn features(load: &StepLoad) -> Option<Vector> {
    let any = |n: u64| if n > 0 { 1.0 } else { 0.0 };
    let mut features = [
        any(load.prefill_tokens),
        load.prefill_tokens as f64,
        load.prefill_pairs,
        any(load.decode_sequences),
        load.decode_sequences as f64,
        load.decode_context as f64,
    ];
    for (feature, unit) in features.iter_mut().zip(UNITS) {
        *feature /= unit;
    }
    let is_step = load.prefill_tokens > 0 || load.decode_sequences > 0;
    let is_plausible = features.iter().all(|feature| (0.0..=UNITS_MAX).contains(feature));
    (is_step && is_plausible).then_some(features)
}

fn coefficients(cost: &CostCoefficients) -> Vector {
    [
        cost.prefill_base_ms,
        cost.prefill_per_token_ms,
        cost.prefill_per_token_context_ms,
        cost.decode_base_ms,
        cost.decode_per_sequence_ms,
        cost.decode_per_context_token_ms,
    ]
}

fn dot(a: &Vector, b: &Vector) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Solves `a x = b` for the active unknowns, where the others are 0, by Cholesky factors; `a` is positive definite.
fn solve(a: &Matrix, b: &Vector, active: &[bool; N]) -> Vector {
    let mut factor = Matrix::default();
    let mut x = Vector::default();
    for i in (0..N).filter(|&i| active[i]) {
        for j in (0..=i).filter(|&j| active[j]) {
            let rest = a[i][j] - (0..j).map(|k| factor[i][k] * factor[j][k]).sum::<f64>();
            // Rounding may leave nothing, or less, of a pivot.
            factor[i][j] = if i == j { rest.max(PIVOT_MIN * a[i][i]).sqrt() } else { rest / factor[j][j] };
        }
        x[i] = (b[i] - (0..i).map(|k| factor[i][k] * x[k]).sum::<f64>()) / factor[i][i];
    }
    for i in (0..N).rev().filter(|&i| active[i]) {
        x[i] = (x[i] - (i + 1..N).map(|k| factor[k][i] * x[k]).sum::<f64>()) / factor[i][i];
    }
    x
}

#[cfg(test)]
mod tests;
