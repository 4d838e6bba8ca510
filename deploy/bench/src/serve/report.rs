//! Sums a load up: the JSON that scripts read, and the tables that people read.

use std::collections::BTreeMap;

use serde::Serialize;

use super::options::{Goals, Load};
use super::record::{Failure, Record};
use crate::statistics::Distribution;
use crate::table::{Table, number};

/// All that `tessera bench serve` found; its JSON is described in the crate's documentation.
#[derive(Clone, Debug, Serialize)]
pub struct ServeReport {
    /// Always `"serve"`.
    pub bench: &'static str,
    /// URL or gRPC address.
    pub target: String,
    /// `completions`, `chat` or `grpc`.
    pub api: &'static str,
    /// Name of the model that was asked for.
    pub model: String,
    /// Name of the trace that was copied.
    pub trace: Option<String>,
    /// What a request had to reach to count as good.
    pub goals: Goals,
    /// Tokens of a prompt that was asked for, shared prefix not included; a trace has its own.
    pub input_len: u32,
    /// Tokens of an output that was asked for; a trace has its own.
    pub output_len: u32,
    /// Tokens that all prompts begin with.
    pub shared_prefix: u32,
    /// The seed of prompts and arrivals.
    pub seed: u64,
    /// When it began, in milliseconds since the Unix epoch.
    pub started_unix_ms: u64,
    /// Whether it was interrupted.
    pub interrupted: bool,
    /// One entry for each point of load.
    pub points: Vec<PointReport>,
}

/// What one point of load found.
#[derive(Clone, Debug, Serialize)]
pub struct PointReport {
    /// Requests at once, of a closed loop.
    pub concurrency: Option<usize>,
    /// Mean requests per second, of Poisson arrivals.
    pub rate: Option<f64>,
    /// Factor on the times of a trace.
    pub speed: Option<f64>,
    /// Requests sent.
    pub requests: usize,
    /// Requests answered to the end.
    pub completed: usize,
    /// Requests answered to the end with fewer tokens than asked for.
    pub short: usize,
    /// Requests cut off by an interrupt.
    pub interrupted: usize,
    /// Requests that failed, by kind.
    pub errors: BTreeMap<String, usize>,
    /// The first failure of each kind, in words.
    pub error_examples: BTreeMap<String, String>,
    /// From the first request's start to the last one's end; arrivals count from the beginning of the time that was
    /// given to them, and at least to its end.
    pub duration_s: f64,
    /// Prompt tokens of completed requests.
    pub input_tokens: u64,
    /// Generated tokens of completed requests.
    pub output_tokens: u64,
    /// Generated tokens of completed requests over the duration.
    pub output_tokens_per_s: f64,
    /// Prompt and generated tokens of completed requests over the duration.
    pub total_tokens_per_s: f64,
    /// Completed requests over the duration.
    pub requests_per_s: f64,
    /// Completed requests within the goals over the duration.
    pub goodput_requests_per_s: f64,
    /// Part of all requests sent, interrupted ones apart, that completed within the goals.
    pub goodput_fraction: f64,
    /// Time from sending to the first part with tokens.
    pub ttft_ms: Distribution,
    /// Time per output token after the first, a value for each request.
    pub tpot_ms: Distribution,
    /// Time between parts with tokens, over all requests.
    pub itl_ms: Distribution,
    /// Time from sending to the end of the answer.
    pub e2e_ms: Distribution,
    /// Processor time this client used over the duration; none where the system does not tell.
    pub client_cpu_fraction: Option<f64>,
    /// The requests, for plots.
    #[serde(skip)]
    pub records: Vec<Record>,
}

impl PointReport {
    /// Sums up what was seen of a point's requests; `window_s` is the end of the time given to arrivals.
    #[must_use]
    pub fn new(load: &Load, goals: &Goals, records: Vec<Record>, window_s: Option<f64>) -> Self {
        let starts = records.iter().map(|record| record.start_s);
        let last_end = records.iter().map(|record| record.end_s).fold(0.0, f64::max);
        let duration_s = match window_s {
            Some(window_s) => last_end.max(window_s),
            None => (last_end - starts.fold(f64::INFINITY, f64::min)).max(0.0),
        };
        let completed: Vec<&Record> = records.iter().filter(|record| record.failure.is_none()).collect();
        let interrupted = records.iter().filter(|record| record.failure == Some(Failure::Interrupted)).count();
        let good = completed.iter().filter(|record| is_good(record, goals)).count();
        let (errors, error_examples) = errors(&records);
        let sum = |count: fn(&Record) -> u64| completed.iter().map(|record| count(record)).sum::<u64>();
        let (input_tokens, output_tokens) = (sum(|record| record.input_tokens), sum(|record| record.output_tokens));
        let per_s = |n: f64| if duration_s > 0.0 { n / duration_s } else { 0.0 };
        let times = |time: fn(&Record) -> Option<f64>| {
            Distribution::of(&mut completed.iter().filter_map(|record| time(record)).collect())
        };
        let mut gaps = completed.iter().flat_map(|record| record.gaps_ms.iter().map(|&gap| gap.into())).collect();
        let (rate, speed) = match load {
            Load::Closed { .. } => (None, None),
            Load::Open { rate } => (Some(*rate), None),
            Load::Replayed { speed } => (None, Some(*speed)),
        };
        Self {
            concurrency: load.concurrency(),
            rate,
            speed,
            requests: records.len(),
            completed: completed.len(),
            short: completed.iter().filter(|record| record.is_short).count(),
            interrupted,
            errors,
            error_examples,
            duration_s,
            input_tokens,
            output_tokens,
            output_tokens_per_s: per_s(output_tokens as f64),
            total_tokens_per_s: per_s((input_tokens + output_tokens) as f64),
            requests_per_s: per_s(completed.len() as f64),
            goodput_requests_per_s: per_s(good as f64),
            goodput_fraction: good as f64 / (records.len() - interrupted).max(1) as f64,
            ttft_ms: times(|record| record.ttft_ms),
            tpot_ms: times(|record| record.tpot_ms),
            itl_ms: Distribution::of(&mut gaps),
            e2e_ms: times(|record| Some(record.e2e_ms)),
            client_cpu_fraction: None,
            records,
        }
    }

    /// Requests that failed; interrupted ones did not.
    #[must_use]
    pub fn n_errors(&self) -> usize {
        self.errors.values().sum()
    }

    /// The point in a few words.
    #[must_use]
    pub fn label(&self) -> String {
        match (self.concurrency, self.rate, self.speed) {
            (Some(concurrency), ..) => format!("concurrency {concurrency}"),
            (None, Some(rate), _) => format!("{} requests/s", number(rate)),
            (None, None, speed) => format!("trace x{}", number(speed.unwrap_or(1.0))),
        }
    }

    /// The latencies by name.
    pub(crate) fn latencies(&self) -> [(&'static str, &Distribution); 4] {
        [("TTFT", &self.ttft_ms), ("TPOT", &self.tpot_ms), ("ITL", &self.itl_ms), ("E2E", &self.e2e_ms)]
    }
}

impl ServeReport {
    /// Two tables: what each point delivered, and how long it took.
    #[must_use]
    pub fn text(&self) -> String {
        let mut delivered =
            Table::new(&["load", "completed", "failed", "seconds", "out tok/s", "all tok/s", "req/s", "good"]);
        let mut latencies = Table::new(&["latency in ms", "mean", "p50", "p90", "p99", "max"]);
        for point in &self.points {
            delivered.row(vec![
                point.label(),
                point.completed.to_string(),
                point.n_errors().to_string(),
                number(point.duration_s),
                number(point.output_tokens_per_s),
                number(point.total_tokens_per_s),
                number(point.requests_per_s),
                self.good(point),
            ]);
            for (name, d) in point.latencies() {
                let values = [d.mean, d.p50, d.p90, d.p99, d.max].map(number);
                latencies.row([vec![format!("{name}, {}", point.label())], values.to_vec()].concat());
            }
        }
        let model = format!("{} at {} ({})", self.model, self.target, self.api);
        let parts = [model, delivered.render(), latencies.render(), self.notes().join("\n")];
        parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join("\n\n")
    }

    /// What a reader of the tables must know beside the numbers.
    pub(crate) fn notes(&self) -> Vec<String> {
        let goal = |name, goal: Option<f64>| goal.map(|ms| format!("{name} of at most {} ms", number(ms)));
        let goals = [goal("TTFT", self.goals.ttft_ms), goal("TPOT", self.goals.tpot_ms)];
        let goals = goals.into_iter().flatten().collect::<Vec<_>>().join(" and ");
        let goals = (!goals.is_empty()).then(|| format!("good is a {goals}"));
        goals.into_iter().chain(self.points.iter().flat_map(notes)).collect()
    }

    /// The part of requests that is good, if there are goals.
    pub(crate) fn good(&self, point: &PointReport) -> String {
        match self.goals {
            Goals { ttft_ms: None, tpot_ms: None } => number(f64::NAN),
            _ => format!("{:.0}%", 100.0 * point.goodput_fraction),
        }
    }
}

/// What a reader of the tables must know of a point beside the numbers.
fn notes(point: &PointReport) -> Vec<String> {
    let label = point.label();
    let mut notes: Vec<String> = (point.errors.iter())
        .map(|(kind, n)| format!("{label}: {n} failed ({kind}): {}", point.error_examples[kind]))
        .collect();
    if point.short > 0 {
        notes.push(format!("{label}: {} answers had fewer tokens than asked for", point.short));
    }
    if point.interrupted > 0 {
        notes.push(format!("{label}: {} requests were interrupted and count for nothing", point.interrupted));
    }
    notes
}

fn is_good(record: &Record, goals: &Goals) -> bool {
    let within = |value: Option<f64>, goal: Option<f64>| match (value, goal) {
        (_, None) => true,
        (Some(value), Some(goal)) => value <= goal,
        (None, Some(_)) => false,
    };
    // One token has no time per token, and so no such goal.
    within(record.ttft_ms, goals.ttft_ms) && within(record.tpot_ms.or(Some(0.0)), goals.tpot_ms)
}

fn errors(records: &[Record]) -> (BTreeMap<String, usize>, BTreeMap<String, String>) {
    let (mut counts, mut examples) = (BTreeMap::new(), BTreeMap::new());
    let failures = records.iter().filter_map(|record| record.failure.as_ref());
    for failure in failures.filter(|failure| **failure != Failure::Interrupted) {
        *counts.entry(failure.kind()).or_default() += 1;
        examples.entry(failure.kind()).or_insert_with(|| failure.to_string());
    }
    (counts, examples)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(start_s: f64, ttft_ms: f64, tpot_ms: Option<f64>, failure: Option<Failure>) -> Record {
        let (end_s, e2e_ms) = (start_s + 1.0, 1000.0);
        let gaps_ms = vec![1.0, 3.0];
        let ttft_ms = failure.is_none().then_some(ttft_ms);
        let is_short = false;
        Record {
            start_s,
            end_s,
            ttft_ms,
            tpot_ms,
            e2e_ms,
            gaps_ms,
            input_tokens: 10,
            output_tokens: 5,
            is_short,
            failure,
        }
    }

    const CLOSED: Load = Load::Closed { concurrency: 2 };

    #[test]
    fn goodput_counts_requests_within_both_goals_and_failures_against_it() {
        let goals = Goals { ttft_ms: Some(100.0), tpot_ms: Some(20.0) };
        let records = vec![
            record(0.0, 50.0, Some(10.0), None),
            record(0.0, 150.0, Some(10.0), None),
            record(1.0, 50.0, Some(30.0), None),
            record(1.0, 50.0, None, None),
            record(1.0, 0.0, None, Some(Failure::Connect("refused".to_owned()))),
            record(1.0, 0.0, None, Some(Failure::Interrupted)),
        ];
        let point = PointReport::new(&CLOSED, &goals, records, None);
        assert_eq!((point.requests, point.completed, point.interrupted), (6, 4, 1));
        assert_eq!((point.duration_s, point.goodput_requests_per_s, point.goodput_fraction), (2.0, 1.0, 0.4));
        assert_eq!(point.errors, BTreeMap::from([("connect".to_owned(), 1)]));
        assert_eq!((point.output_tokens, point.output_tokens_per_s, point.total_tokens_per_s), (20, 10.0, 30.0));
        assert_eq!((point.ttft_ms.n, point.itl_ms.n, point.itl_ms.mean), (4, 8, 2.0));
    }

    #[test]
    fn arrivals_are_counted_over_the_time_in_which_they_could_come() {
        let point = |window_s| {
            let records = vec![record(0.0, 50.0, None, None)];
            PointReport::new(&Load::Open { rate: 0.1 }, &Goals::default(), records, Some(window_s))
        };
        assert_eq!((point(10.0).duration_s, point(10.0).requests_per_s), (10.0, 0.1));
        assert_eq!(point(0.5).duration_s, 1.0);
    }

    #[test]
    fn nothing_measured_is_no_time_at_all() {
        let point = PointReport::new(&CLOSED, &Goals::default(), Vec::new(), None);
        assert_eq!((point.duration_s, point.output_tokens_per_s, point.goodput_fraction), (0.0, 0.0, 0.0));
        let json = serde_json::to_value(&point).unwrap();
        assert!(json["ttft_ms"]["p50"].is_null() && json["tpot_ms"]["mean"].is_null(), "{json}");
    }
}
