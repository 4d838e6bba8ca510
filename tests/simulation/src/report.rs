//! What a run showed, as text and as JSON.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use engine::Counters;
use serde::Serialize;

use crate::book::Progress;
use crate::cluster::Finished;
use crate::distribution::Distribution;
use crate::options::{Goals, Options};
use crate::prepared::Prepared;
use crate::worker::{Tally, Worker};
use crate::workload::Request;

/// What a run showed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// What was asked.
    pub workload: String,
    /// How requests were placed.
    pub policy: String,
    /// Workers.
    pub workers: usize,
    /// Routers.
    pub routers: usize,
    /// What workers did of requests: `mixed`, `auto`, or numbers of those that compute prompts and of the others.
    pub roles: String,
    /// How much faster than the workload requests arrived.
    pub speed: f64,
    /// Repeats the run.
    pub seed: u64,
    /// Requests.
    pub requests: usize,
    /// Requests whose clients went away.
    pub aborted: usize,
    /// Requests that ended badly.
    pub failed: usize,
    /// How many of them by what the last worker that refused one said.
    pub failures: BTreeMap<&'static str, usize>,
    /// Virtual time from the first arrival to the last end, in seconds.
    pub duration_s: f64,
    /// Time to the first token, in seconds; times that no request had are left out.
    #[serde(skip_serializing_if = "Distribution::is_empty")]
    pub ttft_s: Distribution,
    /// Mean time between two tokens of a request, in seconds.
    #[serde(skip_serializing_if = "Distribution::is_empty")]
    pub tpot_s: Distribution,
    /// Time between two tokens, over all tokens, in seconds; percentiles are off by 1 % at most.
    #[serde(skip_serializing_if = "Distribution::is_empty")]
    pub itl_s: Distribution,
    /// Time to the last token, in seconds.
    #[serde(skip_serializing_if = "Distribution::is_empty")]
    pub e2e_s: Distribution,
    /// What a good request reaches.
    pub goals: Goals,
    /// Part of requests that are good.
    pub goodput: f64,
    /// Good requests per second.
    pub goodput_requests_per_s: f64,
    /// Part of prompt tokens that were cached.
    pub hit_rate: f64,
    /// Requests of the worker that had most, over the mean.
    pub requests_max_over_mean: f64,
    /// Tokens of all prompts.
    pub prompt_tokens: u64,
    /// Tokens generated.
    pub output_tokens: u64,
    /// How well times to first token were predicted when requests were placed.
    pub calibration: Calibration,
    /// Placements of which one worker was to compute the prompt for another.
    pub n_split: usize,
    /// Placements of requests that had tokens from another worker.
    pub n_migrated: usize,
    /// How prompts came that moved between workers.
    pub moved: Moved,
    /// Running requests that lost their blocks to others.
    pub preemptions: u64,
    /// Steps of all engines.
    pub steps: u64,
    /// Events simulated.
    pub events: u64,
    /// Each request that ended well, in the order of the workload.
    #[serde(skip)]
    pub served: Vec<Served>,
    /// Times to first token in seconds with times of arrival, for plots.
    #[serde(skip)]
    pub(crate) first_tokens: Vec<(f64, f64)>,
    #[serde(skip)]
    pub(crate) times_per_token: Vec<f64>,
}

/// A request that ended well.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Served {
    /// Who asked.
    pub tenant: u32,
    /// When, in seconds.
    pub arrived_s: f64,
    /// When its first token came, in seconds.
    pub first_token_s: f64,
    /// Prompt tokens that were computed for it.
    pub tokens_new: u32,
}

/// How prompts came that moved between workers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Moved {
    /// As a whole.
    pub n_whole: usize,
    /// In part or not at all, so that the rest was computed where they were wanted.
    pub n_broken: usize,
    /// Of these, in part.
    pub n_partial: usize,
    /// Not wanted any more.
    pub n_cancelled: usize,
    /// Frames that were dropped.
    pub n_frames_dropped: usize,
    /// Requests that leaving workers handed over.
    pub n_handed_over: usize,
}

/// Predicted less actual time from placement to first token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Calibration {
    /// Mean error in seconds; below 0 predictions are too short.
    pub error_mean_s: f64,
    /// Mean size of the error in seconds.
    pub error_abs_mean_s: f64,
    /// Mean size of the error over the mean time.
    pub error_relative: f64,
}

impl Report {
    pub(crate) fn of(finished: &Finished, prepared: &Prepared, options: &Options) -> Self {
        let all = &finished.book.progress;
        let ended = || all.iter().zip(prepared.requests()).filter(|(progress, _)| progress.finished.is_some());
        let mut ttft: Vec<f64> = ended().filter_map(|(progress, _)| progress.ttft_s()).collect();
        let mut tpot: Vec<f64> = ended().filter_map(|(progress, _)| progress.tpot_s()).collect();
        let mut e2e: Vec<f64> = ended().filter_map(|(progress, _)| progress.e2e_s()).collect();
        let first_tokens = all.iter().filter_map(|progress| Some((progress.arrived.as_secs_f64(), progress.ttft_s()?)));
        let n_good = ended().filter(|(progress, _)| progress.is_good(&options.goals)).count();
        let prompt_tokens: u64 = ended().map(|(_, request)| u64::from(request.n_prompt)).sum();
        let cached_tokens: u64 = ended().map(|(progress, _)| u64::from(progress.n_cached)).sum();
        let counters = || finished.workers.iter().map(|worker| worker.engine.counters());
        let sum = |of: fn(Counters) -> u64| counters().map(of).sum();
        let mut failures = BTreeMap::new();
        for progress in all.iter().filter(|progress| progress.has_failed) {
            *failures.entry(progress.refusal.unwrap_or("worker_lost")).or_default() += 1;
        }
        let duration_s = finished.took.as_secs_f64();
        Self {
            workload: prepared.workload().name().to_owned(),
            policy: options.policy.name().to_owned(),
            workers: options.n_workers,
            routers: options.n_routers,
            roles: options.roles.name(),
            speed: options.speed,
            seed: options.seed,
            requests: all.len(),
            aborted: all.iter().filter(|progress| progress.is_aborted).count(),
            failed: failures.values().sum(),
            failures,
            duration_s,
            served: ended().filter_map(|(progress, request)| progress.served(request)).collect(),
            first_tokens: first_tokens.collect(),
            times_per_token: tpot.clone(),
            ttft_s: Distribution::of(&mut ttft),
            tpot_s: Distribution::of(&mut tpot),
            itl_s: finished.book.gaps.distribution(),
            e2e_s: Distribution::of(&mut e2e),
            goals: options.goals,
            goodput: ratio(n_good as f64, all.len() as f64),
            goodput_requests_per_s: ratio(n_good as f64, duration_s),
            hit_rate: ratio(cached_tokens as f64, prompt_tokens as f64),
            requests_max_over_mean: imbalance(all, options.n_workers),
            prompt_tokens,
            output_tokens: all.iter().map(|progress| u64::from(progress.n_tokens)).sum(),
            calibration: Calibration::of(all),
            n_split: finished.book.n_split,
            n_migrated: finished.book.n_migrated,
            moved: Moved::of(&finished.workers),
            preemptions: sum(|counters| counters.preemptions),
            steps: sum(|counters| counters.steps),
            events: finished.n_events,
        }
    }

    /// Whether there were requests and none was answered.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.requests > 0 && self.failed == self.requests
    }

    /// How many failed, and why.
    #[must_use]
    pub fn failed_text(&self) -> String {
        let reasons: Vec<String> = self.failures.iter().map(|(reason, n)| format!("{n} {reason}")).collect();
        if reasons.is_empty() { "0".to_owned() } else { format!("{} ({})", self.failed, reasons.join(", ")) }
    }

    /// The report for people.
    #[must_use]
    pub fn text(&self) -> String {
        let Self { workload, policy, workers, routers, roles, speed, seed, .. } = self;
        let mut text = format!(
            "{workload} at {speed}x on {workers} workers ({roles}), {routers} routers, {policy}, seed {seed}\n\n"
        );
        if self.has_failed() {
            let _ = write!(text, "no request was answered, {} failed", self.failed_text());
            return text;
        }
        let _ = writeln!(text, "{:<24}{:>10}{:>10}{:>10}{:>10}", "seconds", "mean", "p50", "p90", "p99");
        let times = [
            ("time to first token", &self.ttft_s),
            ("time per output token", &self.tpot_s),
            ("between two tokens", &self.itl_s),
            ("end to end", &self.e2e_s),
        ];
        for (name, d) in times.into_iter().filter(|(_, d)| !d.is_empty()) {
            let _ = writeln!(text, "{name:<24}{:>10.3}{:>10.3}{:>10.3}{:>10.3}", d.mean, d.p50, d.p90, d.p99);
        }
        let percent = |part: f64| format!("{:.1} %", part * 100.0);
        let goals = format!("{} within {} s and {} s", percent(self.goodput), self.goals.ttft_s, self.goals.tpot_s);
        let rows = [
            ("requests", format!("{} in {:.0} s, {} failed", self.requests, self.duration_s, self.failed_text())),
            ("tokens", format!("{} of prompts, {} generated", self.prompt_tokens, self.output_tokens)),
            ("good", format!("{goals}, {:.2} per second", self.goodput_requests_per_s)),
            ("prompt tokens cached", percent(self.hit_rate)),
            ("busiest over mean", format!("{:.3} requests", self.requests_max_over_mean)),
            (
                "predictions",
                format!(
                    "off by {:.3} s on average ({}), {:+.3} s in sum",
                    self.calibration.error_abs_mean_s,
                    percent(self.calibration.error_relative),
                    self.calibration.error_mean_s
                ),
            ),
            (
                "moved",
                format!(
                    "{} placements split, {} prompts whole, {} not; {} migrations",
                    self.n_split, self.moved.n_whole, self.moved.n_broken, self.n_migrated
                ),
            ),
            ("engines", format!("{} steps, {} preemptions", self.steps, self.preemptions)),
        ];
        text.push('\n');
        for (name, value) in rows {
            let _ = writeln!(text, "{name:<24}{value}");
        }
        text.truncate(text.trim_end().len());
        text
    }
}

impl Progress {
    fn ttft_s(&self) -> Option<f64> {
        Some((self.first_token? - self.arrived).as_secs_f64())
    }

    fn served(&self, request: &Request) -> Option<Served> {
        Some(Served {
            tenant: request.tenant,
            arrived_s: self.arrived.as_secs_f64(),
            first_token_s: self.first_token?.as_secs_f64(),
            tokens_new: request.n_prompt.saturating_sub(self.n_cached),
        })
    }

    fn tpot_s(&self) -> Option<f64> {
        let after_first = (self.finished? - self.first_token?).as_secs_f64();
        (self.n_tokens > 1).then(|| after_first / f64::from(self.n_tokens - 1))
    }

    fn e2e_s(&self) -> Option<f64> {
        Some((self.finished? - self.arrived).as_secs_f64())
    }

    fn is_good(&self, goals: &Goals) -> bool {
        self.ttft_s().is_some_and(|ttft| ttft <= goals.ttft_s) && self.tpot_s().is_none_or(|tpot| tpot <= goals.tpot_s)
    }
}

impl Moved {
    fn of(workers: &[Worker]) -> Self {
        let sum = |of: fn(&Tally) -> usize| workers.iter().map(|worker| of(&worker.tally)).sum();
        Self {
            n_whole: sum(|tally| tally.n_whole),
            n_broken: sum(|tally| tally.n_broken),
            n_partial: sum(|tally| tally.n_partial),
            n_cancelled: sum(|tally| tally.n_cancelled),
            n_frames_dropped: sum(|tally| tally.n_frames_dropped),
            n_handed_over: sum(|tally| tally.n_handed_over),
        }
    }
}

impl Calibration {
    fn of(all: &[Progress]) -> Self {
        let waited: Vec<(f64, f64)> = all
            .iter()
            .filter(|progress| progress.first_token.is_some())
            .map(|progress| (progress.predicted_ms / 1e3, progress.waited_ms / 1e3))
            .collect();
        let n = waited.len() as f64;
        let sum = |of: fn(&(f64, f64)) -> f64| waited.iter().map(of).sum::<f64>();
        let error_abs = sum(|(predicted, actual)| (predicted - actual).abs());
        Self {
            error_mean_s: ratio(sum(|(predicted, actual)| predicted - actual), n),
            error_abs_mean_s: ratio(error_abs, n),
            error_relative: ratio(error_abs, sum(|(_, actual)| *actual)),
        }
    }
}

/// Requests of the worker that had most, over the mean.
fn imbalance(all: &[Progress], n_workers: usize) -> f64 {
    let mut counts = vec![0_u32; n_workers];
    all.iter().filter_map(|progress| progress.worker).for_each(|worker| counts[worker] += 1);
    let n: u32 = counts.iter().sum();
    ratio(f64::from(counts.iter().copied().max().unwrap_or(0)) * n_workers as f64, f64::from(n))
}

/// 0 of nothing.
fn ratio(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}
