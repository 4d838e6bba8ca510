//! The report as one HTML page that needs nothing else.

use super::record::Record;
use super::report::{PointReport, ServeReport};
use crate::plot::{Mark, N_COLOURS, Plot, Series, cumulative, escape, histogram};
use crate::table::number;

/// Bins of the histogram.
const N_BINS: usize = 40;

const STYLE: &str = "\
:root{color-scheme:light dark;--ink:#1c2128;--soft:#67707d;--paper:#fff;--rule:#dfe3e8;\
--c0:#2563c9;--c1:#c2571a;--c2:#2a8a57;--c3:#8a4bb8;--c4:#b0344d;--c5:#5d6b1f;\
--c6:#0e8a9a;--c7:#a67c00;--c8:#d0409c;--c9:#4a5568;--c10:#7a4a28;--c11:#3fae2a}\
@media(prefers-color-scheme:dark){:root{--ink:#e3e7ec;--soft:#97a1ad;--paper:#14181d;--rule:#2b323a;\
--c0:#6ea3f5;--c1:#ee9257;--c2:#5fc48f;--c3:#bd8be4;--c4:#ec7d93;--c5:#b3c463;\
--c6:#45c2d3;--c7:#d9b23a;--c8:#ee7fc4;--c9:#a3b1c6;--c10:#c79468;--c11:#7fd66b}}\
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:74rem;margin:2rem auto;padding:0 1rem}\
h1{font-size:1.4rem;margin:0}p{color:var(--soft);margin:.2rem 0 1.2rem}\
.scroll{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums;margin:0 0 1.5rem}\
th,td{padding:.25rem .8rem;text-align:right;border-bottom:1px solid var(--rule);white-space:nowrap}\
th:first-child,td:first-child{text-align:left;padding-left:0}th{color:var(--soft);font-weight:500}\
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(22rem,1fr));gap:1.5rem}\
figure{margin:0}figcaption{font-weight:600}svg{width:100%;height:auto}svg text{fill:var(--soft);font-size:11px}\
.grid{stroke:var(--rule);fill:none}.line{fill:none;stroke-width:1.8}.dot{fill-opacity:.75}\
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:.2rem 1rem;padding:0;margin:.2rem 0;font-size:13px}\
.legend li::before{content:'';display:inline-block;width:.8em;height:.8em;border-radius:2px;margin-right:.4em;background:currentColor}";

impl ServeReport {
    /// One page with tables and plots, light or dark as the reader has it.
    #[must_use]
    pub fn html(&self) -> String {
        let mut style = STYLE.to_owned();
        for n in 0..N_COLOURS {
            style.push_str(&format!(
                ".line.s{n}{{stroke:var(--c{n})}}.dot.s{n}{{fill:var(--c{n})}}.legend .s{n}{{color:var(--c{n})}}"
            ));
        }
        let title = format!("{} at {}", self.model, self.target);
        let plots: String = self.plots().iter().map(Plot::figure).collect();
        format!(
            "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
             <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\"><title>{title}</title>\
             <style>{style}</style></head><body>\n<h1>{title}</h1>\n<p>{}</p>\n{}{}{}<div class=\"plots\">\n{plots}</div>\n</body></html>\n",
            escape(&self.summary()),
            self.delivered(),
            self.latencies(),
            self.remarks(),
            title = escape(&title),
        )
    }

    fn summary(&self) -> String {
        let Self { api, input_len, output_len, shared_prefix, seed, .. } = self;
        let prefix = if *shared_prefix > 0 { format!("{shared_prefix} shared and ") } else { String::new() };
        let lengths = match &self.trace {
            Some(trace) => format!("{prefix}lengths of {trace}"),
            None => format!("{prefix}{input_len} tokens in, {output_len} out"),
        };
        let interrupted = if self.interrupted { "; interrupted" } else { "" };
        format!("{api}; {lengths}; seed {seed}{interrupted}")
    }

    fn delivered(&self) -> String {
        let head = ["load", "completed", "failed", "seconds", "output tokens/s", "all tokens/s", "requests/s", "good"];
        let rows = self.points.iter().map(|point| {
            let mut row = vec![point.label(), point.completed.to_string(), point.n_errors().to_string()];
            let numbers = [point.duration_s, point.output_tokens_per_s, point.total_tokens_per_s, point.requests_per_s];
            row.extend(numbers.map(number));
            row.push(self.good(point));
            row
        });
        table(&head, rows)
    }

    fn latencies(&self) -> String {
        let rows = self.points.iter().flat_map(|point| {
            point.latencies().map(|(name, d)| {
                let values = [d.mean, d.p50, d.p90, d.p99, d.max].map(number);
                [vec![format!("{name}, {}", point.label())], values.to_vec()].concat()
            })
        });
        table(&["latency in ms", "mean", "p50", "p90", "p99", "max"], rows)
    }

    fn remarks(&self) -> String {
        let remarks: String = self.notes().iter().map(|note| format!("<li>{}</li>\n", escape(note))).collect();
        if remarks.is_empty() { remarks } else { format!("<ul>\n{remarks}</ul>\n") }
    }

    fn plots(&self) -> Vec<Plot> {
        let distribution = |title: &str, time: fn(&Record) -> Option<f64>| {
            let series = self.points.iter().map(|point| cumulative(&point.label(), times(point, time)));
            plot(title, ("ms", "part of requests"), Mark::Steps, series.collect())
        };
        let over_time = self.points.iter().map(|point| {
            let first = |record: &Record| record.ttft_ms.map(|ttft| (record.start_s, ttft));
            Series { name: point.label(), points: completed(point).filter_map(first).collect() }
        });
        let gaps = self.points.iter().map(|point| {
            let gaps: Vec<f64> =
                completed(point).flat_map(|record| record.gaps_ms.iter().map(|&gap| gap.into())).collect();
            histogram(&point.label(), &gaps, N_BINS)
        });
        let mut plots = vec![
            distribution("Time to first token", |record| record.ttft_ms),
            distribution("Time per output token", |record| record.tpot_ms),
            distribution("End to end", |record| Some(record.e2e_ms)),
            plot("Time to first token over time", ("seconds", "ms"), Mark::Dots, over_time.collect()),
        ];
        plots.extend(gaps.map(|series| {
            let title = format!("Times between tokens, {}", series.name);
            plot(&title, ("ms", "tokens"), Mark::Bars, vec![series])
        }));
        plots.extend(self.throughput());
        plots
    }

    /// Output tokens per second against what was asked for, when there are points to compare.
    fn throughput(&self) -> Option<Plot> {
        let against = |load: fn(&PointReport) -> Option<f64>| -> Vec<(f64, f64)> {
            self.points.iter().filter_map(|point| Some((load(point)?, point.output_tokens_per_s))).collect()
        };
        let closed = against(|point| point.concurrency.map(|n| n as f64));
        let (x, mut points) = if closed.len() > 1 {
            ("concurrency", closed)
        } else {
            ("requests/s asked for", against(|point| point.rate))
        };
        points.sort_by(|(a, _), (b, _)| a.total_cmp(b));
        let series = vec![Series { name: "output".to_owned(), points }];
        let has_any = self.points.iter().any(|point| point.completed > 0);
        (has_any && series[0].points.len() > 1).then(|| plot("Throughput", (x, "output tokens/s"), Mark::Line, series))
    }
}

fn plot(title: &str, (x, y): (&'static str, &'static str), mark: Mark, series: Vec<Series>) -> Plot {
    Plot { title: title.to_owned(), x, y, mark, series }
}

fn completed(point: &PointReport) -> impl Iterator<Item = &Record> {
    point.records.iter().filter(|record| record.failure.is_none())
}

fn times(point: &PointReport, time: fn(&Record) -> Option<f64>) -> Vec<f64> {
    completed(point).filter_map(time).collect()
}

fn table(head: &[&str], rows: impl Iterator<Item = Vec<String>>) -> String {
    let head: String = head.iter().map(|cell| format!("<th>{}</th>", escape(cell))).collect();
    let row = |cells: Vec<String>| {
        let cells: String = cells.iter().map(|cell| format!("<td>{}</td>", escape(cell))).collect();
        format!("<tr>{cells}</tr>\n")
    };
    let rows: String = rows.map(row).collect();
    format!("<div class=\"scroll\"><table><thead><tr>{head}</tr></thead><tbody>\n{rows}</tbody></table></div>\n")
}
