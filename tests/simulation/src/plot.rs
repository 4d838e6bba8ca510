//! The report as one HTML page with plots as SVG, which needs nothing else.

use std::fmt::Write as _;

use crate::report::Report;

const WIDTH: f64 = 560.0;
const HEIGHT: f64 = 260.0;
const LEFT: f64 = 56.0;
const BOTTOM: f64 = 40.0;
const TOP: f64 = 10.0;
const RIGHT: f64 = 20.0;
/// Most points drawn of a series.
const POINTS_MAX: usize = 800;

const STYLE: &str = "\
:root{color-scheme:light dark;--ink:#1c2128;--soft:#67707d;--paper:#fff;--rule:#dfe3e8;--c0:#2563c9;--c1:#c2571a;--c2:#2a8a57;--c3:#8a4bb8}\
@media(prefers-color-scheme:dark){:root{--ink:#e3e7ec;--soft:#97a1ad;--paper:#14181d;--rule:#2b323a;--c0:#6ea3f5;--c1:#ee9257;--c2:#5fc48f;--c3:#bd8be4}}\
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:74rem;margin:2rem auto;padding:0 1rem}\
h1{font-size:1.4rem}pre{overflow-x:auto}.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(22rem,1fr));gap:1.5rem}\
figure{margin:0}figcaption{font-weight:600}svg{width:100%;height:auto}svg text{fill:var(--soft);font-size:11px}\
.grid{stroke:var(--rule);fill:none}.line{fill:none;stroke-width:1.8}\
.s0{stroke:var(--c0);color:var(--c0)}.s1{stroke:var(--c1);color:var(--c1)}.s2{stroke:var(--c2);color:var(--c2)}.s3{stroke:var(--c3);color:var(--c3)}\
ul{list-style:none;display:flex;flex-wrap:wrap;gap:1rem;padding:0;font-size:13px}";

/// Writes one page with the text of each run and its plots.
#[must_use]
pub fn page(reports: &[Report]) -> String {
    let names: Vec<String> = reports.iter().map(|report| format!("{}, seed {}", report.policy, report.seed)).collect();
    let curves = |of: fn(&Report) -> Vec<f64>| reports.iter().map(|report| cumulative(of(report))).collect::<Vec<_>>();
    let over_time = reports.iter().map(|report| moving_mean(&report.first_tokens)).collect::<Vec<_>>();
    let first = |report: &Report| report.first_tokens.iter().map(|&(_, ttft)| ttft).collect();
    let plots = [
        figure("Time to first token", ("seconds", "part of requests"), &curves(first), &names),
        figure(
            "Time per output token",
            ("seconds", "part of requests"),
            &curves(|report| report.times_per_token.clone()),
            &names,
        ),
        figure("Time to first token by arrival", ("seconds", "mean, seconds"), &over_time, &names),
    ];
    let texts: String = reports.iter().map(|report| format!("<pre>{}</pre>\n", escape(&report.text()))).collect();
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\"><title>Simulation</title>\
         <style>{STYLE}</style></head><body>\n<h1>Simulation</h1>\n{texts}<div class=\"plots\">\n{}</div>\n</body></html>\n",
        plots.concat()
    )
}

/// The part of values that are no larger.
fn cumulative(mut values: Vec<f64>) -> Vec<(f64, f64)> {
    values.sort_unstable_by(f64::total_cmp);
    // The last percent would squeeze the rest against the axis.
    let n = values.len() as f64;
    let shown = (values.len() * 99).div_ceil(100);
    values.iter().take(shown).enumerate().map(|(rank, &value)| (value, (rank + 1) as f64 / n)).collect()
}

/// Means over hundredths of the time.
fn moving_mean(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let end = points.iter().map(|&(x, _)| x).fold(0.0, f64::max);
    let mut bins = [(0.0, 0_u32); 100];
    for &(x, y) in points {
        let bin = &mut bins[((x / end.max(1e-9) * 100.0) as usize).min(99)];
        *bin = (bin.0 + y, bin.1 + 1);
    }
    let middle = |bin: usize| (bin as f64 + 0.5) / 100.0 * end;
    let filled = bins.iter().enumerate().filter(|(_, (_, n))| *n > 0);
    filled.map(|(bin, &(sum, n))| (middle(bin), sum / f64::from(n))).collect()
}

fn figure(title: &str, (x, y): (&str, &str), all: &[Vec<(f64, f64)>], names: &[String]) -> String {
    let most = |of: fn(&(f64, f64)) -> f64| all.iter().flatten().map(of).fold(1e-9, f64::max);
    let (x_max, y_max) = (round_up(most(|point| point.0)), round_up(most(|point| point.1)));
    let (bottom, right) = (HEIGHT - BOTTOM, WIDTH - RIGHT);
    let place = |(a, b): (f64, f64)| (LEFT + a / x_max * (right - LEFT), bottom - b / y_max * (bottom - TOP));
    let mut svg = format!(
        "<figure><figcaption>{title}</figcaption><svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{title}\">"
    );
    for tick in 0..=5 {
        let part = f64::from(tick) / 5.0;
        let (at_x, at_y) = place((part * x_max, part * y_max));
        let _ = write!(
            svg,
            "<path class=\"grid\" d=\"M{LEFT} {at_y:.1}H{right}M{at_x:.1} {TOP}V{bottom}\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{:.3}</text>\
             <text x=\"{at_x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{:.3}</text>",
            LEFT - 6.0,
            at_y + 4.0,
            part * y_max,
            bottom + 15.0,
            part * x_max,
        );
    }
    let _ = write!(
        svg,
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{x}</text>\
         <text transform=\"translate(12 {:.1}) rotate(-90)\" text-anchor=\"middle\">{y}</text>",
        f64::midpoint(LEFT, right),
        HEIGHT - 6.0,
        f64::midpoint(TOP, bottom)
    );
    for (index, points) in all.iter().enumerate() {
        let step = points.len().div_ceil(POINTS_MAX).max(1);
        let path: Vec<String> =
            points.iter().step_by(step).map(|&point| place(point)).map(|(x, y)| format!("{x:.1} {y:.1}")).collect();
        let _ = write!(svg, "<polyline class=\"line s{}\" points=\"{}\"/>", index % 4, path.join(" "));
    }
    svg.push_str("</svg>");
    if names.len() > 1 {
        let items = names.iter().enumerate().map(|(i, name)| format!("<li class=\"s{}\">{}</li>", i % 4, escape(name)));
        let _ = write!(svg, "<ul>{}</ul>", items.collect::<String>());
    }
    svg.push_str("</figure>\n");
    svg
}

/// The next number of one digit that is 1, 2 or 5.
fn round_up(max: f64) -> f64 {
    let power = 10_f64.powf(max.log10().floor());
    [1.0, 2.0, 5.0].into_iter().map(|digit| digit * power).find(|round| max <= *round).unwrap_or(10.0 * power)
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_end_at_round_numbers_and_curves_climb() {
        assert_eq!([0.3, 1.0, 7.0, 21.0].map(round_up), [0.5, 1.0, 10.0, 50.0]);
        let curve = cumulative(vec![3.0, 1.0, 2.0]);
        assert_eq!(curve.iter().map(|&(x, _)| x).collect::<Vec<_>>(), [1.0, 2.0, 3.0]);
        assert_eq!(moving_mean(&[(0.0, 2.0), (100.0, 4.0), (100.0, 8.0)]), [(0.5, 2.0), (99.5, 6.0)]);
    }
}
