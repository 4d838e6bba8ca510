//! The default policy against its rivals on the same loads: mean time to first token in each cell of load, speed and seeds.

use std::fmt::Write as _;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};

use router::route::RoutePolicy;
use router::route::policy::{LeastLoaded, PrefixThreshold};
use serde::Serialize;

use crate::options::Options;
use crate::prepared::Prepared;
use crate::report::Report;
use crate::rivals::{BlockCount, LeastPredicted, SGLANG_RULES, THRESHOLDS};
use crate::{SimulationError, simulate};

/// A load at a speed, with what each policy made of it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Cell {
    /// What was asked.
    pub workload: String,
    /// How much faster than the workload.
    pub speed: f64,
    /// Each policy, the default one first.
    pub results: Vec<CellResult>,
}

/// What a policy made of a cell.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CellResult {
    /// Its name, with its thresholds where they are the best of several.
    pub policy: String,
    /// Mean time to first token over all seeds, in seconds.
    pub ttft_mean_s: f64,
    /// The 99th percentile of it, the mean over all seeds.
    pub ttft_p99_s: f64,
    /// Part of prompt tokens that were cached.
    pub hit_rate: f64,
}

/// Cells of loads and speeds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// Seeds of each mean.
    pub seeds: Vec<u64>,
    /// In the order of loads, then speeds.
    pub cells: Vec<Cell>,
}

/// Runs every cell for every policy; rivals send requests at once, as they do. `n_done` counts runs.
///
/// # Errors
/// The first run that failed.
pub fn compare(
    loads: &[Prepared],
    speeds: &[f64],
    seeds: &[u64],
    base: &Options,
    n_threads: usize,
    n_done: &AtomicUsize,
) -> Result<Comparison, SimulationError> {
    let mut cells = Vec::new();
    for load in loads {
        for &speed in speeds {
            let cell = Contest { load, seeds, base: Options { speed, ..base.clone() }, n_threads, n_done }.cell()?;
            cells.push(cell);
        }
    }
    Ok(Comparison { seeds: seeds.to_vec(), cells })
}

/// Runs of [`compare`] over so many cells and seeds.
#[must_use]
pub fn n_runs(n_cells: usize, n_seeds: usize) -> usize {
    // The default policy and five rivals for each seed, and before that all thresholds of two for the first.
    n_cells * (6 * n_seeds + THRESHOLDS.len() + SGLANG_RULES.len())
}

/// Runs all, on threads, in any order; results are in the order of `jobs`.
///
/// # Errors
/// The first run that failed.
pub fn run_all(
    jobs: &[(&Prepared, Options)],
    n_threads: usize,
    n_done: &AtomicUsize,
) -> Result<Vec<Report>, SimulationError> {
    let next = AtomicUsize::new(0);
    let results: Mutex<Vec<Option<Result<Report, SimulationError>>>> = Mutex::new(vec![None; jobs.len()]);
    std::thread::scope(|scope| {
        for _ in 0..n_threads.clamp(1, jobs.len().max(1)) {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some((prepared, options)) = jobs.get(index) else { return };
                    let result = simulate(prepared, options, &AtomicUsize::new(0));
                    results.lock().unwrap_or_else(PoisonError::into_inner)[index] = Some(result);
                    n_done.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    let results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    results.into_iter().map(|result| result.expect("every job was run")).collect()
}

/// One cell while it is run.
struct Contest<'a> {
    load: &'a Prepared,
    seeds: &'a [u64],
    base: Options,
    n_threads: usize,
    n_done: &'a AtomicUsize,
}

impl Contest<'_> {
    fn cell(&self) -> Result<Cell, SimulationError> {
        let ours = self.base.policy;
        let sglang = self.best(&SGLANG_RULES)?;
        let threshold = self.best(&THRESHOLDS)?;
        let rival = |policy: &'static dyn RoutePolicy, name: String| (self.immediate(policy), name);
        let contenders = [
            (self.base.clone(), ours.name().to_owned()),
            rival(sglang, named("sglang", &sglang.0)),
            rival(threshold, named("prefix_threshold", threshold)),
            rival(&LeastLoaded, "least_tokens".to_owned()),
            rival(&BlockCount::USUAL, "block_count".to_owned()),
            rival(&LeastPredicted, "least_predicted".to_owned()),
        ];
        let jobs: Vec<(&Prepared, Options)> = contenders
            .iter()
            .flat_map(|(options, _)| self.seeds.iter().map(|&seed| (self.load, Options { seed, ..options.clone() })))
            .collect();
        let reports = run_all(&jobs, self.n_threads, self.n_done)?;
        let results = contenders.into_iter().zip(reports.chunks(self.seeds.len())).map(|((_, policy), reports)| {
            let mean = |of: fn(&Report) -> f64| reports.iter().map(of).sum::<f64>() / reports.len() as f64;
            CellResult {
                policy,
                ttft_mean_s: mean(|report| report.ttft_s.mean),
                ttft_p99_s: mean(|report| report.ttft_s.p99),
                hit_rate: mean(|report| report.hit_rate),
            }
        });
        Ok(Cell {
            workload: self.load.workload().name().to_owned(),
            speed: self.base.speed,
            results: results.collect(),
        })
    }

    /// The thresholds that do best with the first seed.
    fn best<P: RoutePolicy>(&self, rivals: &'static [P]) -> Result<&'static P, SimulationError> {
        let jobs: Vec<(&Prepared, Options)> = rivals
            .iter()
            .map(|policy| (self.load, Options { seed: self.seeds[0], ..self.immediate(policy) }))
            .collect();
        let reports = run_all(&jobs, self.n_threads, self.n_done)?;
        let best = reports.iter().enumerate().min_by(|(_, a), (_, b)| a.ttft_s.mean.total_cmp(&b.ttft_s.mean));
        Ok(&rivals[best.map_or(0, |(index, _)| index)])
    }

    fn immediate(&self, policy: &'static dyn RoutePolicy) -> Options {
        Options { policy, waiting: None, ..self.base.clone() }
    }
}

fn named(name: &str, thresholds: &PrefixThreshold) -> String {
    let PrefixThreshold { share_min, imbalance_requests, imbalance_ratio } = thresholds;
    format!("{name} ({share_min}, {imbalance_requests}, {imbalance_ratio})")
}

impl Cell {
    /// How far the default policy's mean is below that of each rival, as a part of the rival's.
    #[must_use]
    pub fn reductions(&self) -> Vec<f64> {
        let ours = self.results[0].ttft_mean_s;
        self.results[1..].iter().map(|rival| 1.0 - ours / rival.ttft_mean_s).collect()
    }
}

impl Comparison {
    /// How far the default policy's mean is below that of the last rival, in geometric mean over all cells.
    #[must_use]
    pub fn geometric_reduction(&self) -> f64 {
        let logs = self.cells.iter().filter_map(|cell| Some((1.0 - cell.reductions().last()?).ln()));
        1.0 - (logs.sum::<f64>() / self.cells.len().max(1) as f64).exp()
    }

    /// A table for people.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = String::new();
        for cell in &self.cells {
            let _ = writeln!(text, "{} at {}x, mean of {} seeds", cell.workload, cell.speed, self.seeds.len());
            let _ = writeln!(text, "  {:<36}{:>9}{:>9}{:>9}{:>10}", "policy", "ttft", "p99", "hits", "ours is");
            for (index, result) in cell.results.iter().enumerate() {
                let reduction = cell
                    .reductions()
                    .get(index.wrapping_sub(1))
                    .map_or(String::new(), |r| format!("{:+.1} %", -r * 100.0));
                let CellResult { policy, ttft_mean_s, ttft_p99_s, hit_rate } = result;
                let hits = hit_rate * 100.0;
                let _ =
                    writeln!(text, "  {policy:<36}{ttft_mean_s:>7.3} s{ttft_p99_s:>7.2} s{hits:>7.1} %{reduction:>10}");
            }
        }
        let _ = write!(
            text,
            "against the last one in geometric mean over all cells: {:+.1} %",
            -self.geometric_reduction() * 100.0
        );
        text
    }
}
