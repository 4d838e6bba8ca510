//! Plots as inline SVG whose colours follow the page.

use std::fmt::Write as _;

const WIDTH: f64 = 560.0;
const HEIGHT: f64 = 280.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 26.0;
const TOP: f64 = 10.0;
const BOTTOM: f64 = 42.0;
/// Ticks of an axis, about.
const N_TICKS: f64 = 5.0;
/// Colours that a page has; lines of further series are dashed.
pub(crate) const N_COLOURS: usize = 12;
/// Most points drawn of a series.
const POINTS_MAX: usize = 600;

/// How a series is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mark {
    Line,
    /// A line that keeps its height up to the next point, and begins at nothing.
    Steps,
    Dots,
    Bars,
}

/// One series of a plot.
#[derive(Clone, Debug)]
pub(crate) struct Series {
    pub(crate) name: String,
    pub(crate) points: Vec<(f64, f64)>,
}

/// Axes and series.
#[derive(Clone, Debug)]
pub(crate) struct Plot {
    pub(crate) title: String,
    pub(crate) x: &'static str,
    pub(crate) y: &'static str,
    pub(crate) mark: Mark,
    pub(crate) series: Vec<Series>,
}

impl Plot {
    /// A `<figure>`; empty when there is nothing to draw.
    pub(crate) fn figure(&self) -> String {
        let finite = |&(x, y): &(f64, f64)| x.is_finite() && y.is_finite();
        let all = || self.series.iter().flat_map(|series| series.points.iter().copied().filter(|point| finite(point)));
        if all().next().is_none() {
            return String::new();
        }
        let axis = |values: &mut dyn Iterator<Item = f64>| Axis::over(values.fold(0.0, f64::max));
        let (x, y) = (axis(&mut all().map(|(x, _)| x)), axis(&mut all().map(|(_, y)| y)));
        let mut svg = format!(
            "<figure><figcaption>{}</figcaption><svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{0}\">",
            escape(&self.title)
        );
        grid(&mut svg, &x, &y, self);
        for (index, series) in self.series.iter().enumerate() {
            let points: Vec<(f64, f64)> = thin(&series.points)
                .filter(|point| finite(point))
                .map(|(a, b)| (place_x(&x, a), place_y(&y, b)))
                .collect();
            draw(&mut svg, self.mark, index, &points);
        }
        svg.push_str("</svg>");
        if self.series.len() > 1 {
            svg.push_str("<ul class=\"legend\">");
            for (index, series) in self.series.iter().enumerate() {
                let _ = write!(svg, "<li class=\"s{}\">{}</li>", index % N_COLOURS, escape(&series.name));
            }
            svg.push_str("</ul>");
        }
        svg.push_str("</figure>\n");
        svg
    }
}

/// The part of values that are no larger, as a series: every value in order against its rank.
pub(crate) fn cumulative(name: &str, mut values: Vec<f64>) -> Series {
    values.sort_unstable_by(f64::total_cmp);
    let n = values.len() as f64;
    let points = values.iter().enumerate().map(|(rank, &value)| (value, (rank + 1) as f64 / n)).collect();
    Series { name: name.to_owned(), points }
}

/// Counts of values in `n` equal bins from 0 to the largest, at the bins' middles; nothing of no values.
pub(crate) fn histogram(name: &str, values: &[f64], n: usize) -> Series {
    let max = values.iter().copied().filter(|value| value.is_finite()).fold(0.0, f64::max);
    let mut counts = vec![0u32; if values.is_empty() { 0 } else { n.max(1) }];
    let width = if max > 0.0 { max / counts.len() as f64 } else { 1.0 };
    for &value in values.iter().filter(|value| value.is_finite() && **value >= 0.0) {
        let last = counts.len() - 1;
        counts[((value / width) as usize).min(last)] += 1;
    }
    let points = counts.iter().enumerate().map(|(bin, &count)| ((bin as f64 + 0.5) * width, count.into())).collect();
    Series { name: name.to_owned(), points }
}

/// Makes text safe inside HTML.
pub(crate) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// An axis from 0 to a round number.
struct Axis {
    max: f64,
    step: f64,
}

impl Axis {
    fn over(max: f64) -> Self {
        let max = if max > 0.0 { max } else { 1.0 };
        let raw = max / N_TICKS;
        let power = 10f64.powf(raw.log10().floor());
        let step = power * [1.0, 2.0, 5.0, 10.0].into_iter().find(|step| raw <= step * power).unwrap_or(10.0);
        Self { max: (max / step).ceil() * step, step }
    }

    fn ticks(&self) -> impl Iterator<Item = f64> {
        let n = (self.max / self.step).round() as u32;
        (0..=n).map(move |tick| f64::from(tick) * self.step)
    }

    /// A tick with as many decimals as the step has.
    fn label(&self, tick: f64) -> String {
        let decimals = (-(self.step * 1.000_001).log10().floor()).max(0.0) as usize;
        format!("{tick:.decimals$}")
    }
}

fn place_x(axis: &Axis, value: f64) -> f64 {
    LEFT + value / axis.max * (WIDTH - LEFT - RIGHT)
}

fn place_y(axis: &Axis, value: f64) -> f64 {
    HEIGHT - BOTTOM - value / axis.max * (HEIGHT - TOP - BOTTOM)
}

fn grid(svg: &mut String, x: &Axis, y: &Axis, plot: &Plot) {
    let (bottom, right) = (HEIGHT - BOTTOM, WIDTH - RIGHT);
    for tick in y.ticks() {
        let at = place_y(y, tick);
        let _ = write!(
            svg,
            "<path class=\"grid\" d=\"M{LEFT} {at:.1}H{right}\"/><text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            LEFT - 6.0,
            at + 4.0,
            y.label(tick)
        );
    }
    for tick in x.ticks() {
        let at = place_x(x, tick);
        let _ = write!(
            svg,
            "<path class=\"grid\" d=\"M{at:.1} {TOP}V{bottom}\"/><text x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            bottom + 16.0,
            x.label(tick)
        );
    }
    let middle = (LEFT + right) / 2.0;
    let _ = write!(
        svg,
        "<text x=\"{middle:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>\
         <text transform=\"translate(12 {:.1}) rotate(-90)\" text-anchor=\"middle\">{}</text>",
        HEIGHT - 8.0,
        escape(plot.x),
        (TOP + bottom) / 2.0,
        escape(plot.y)
    );
}

fn draw(svg: &mut String, mark: Mark, index: usize, points: &[(f64, f64)]) {
    let class = index % N_COLOURS;
    match mark {
        Mark::Line | Mark::Steps => {
            let points = if mark == Mark::Steps { &steps(points) } else { points };
            let path: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1} {y:.1}")).collect();
            let dashes = if index < N_COLOURS { "" } else { " stroke-dasharray=\"5 3\"" };
            let _ = write!(svg, "<polyline class=\"line s{class}\"{dashes} points=\"{}\"/>", path.join(" "));
            if let [(x, y)] = points {
                let _ = write!(svg, "<circle class=\"dot s{class}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\"/>");
            }
        }
        Mark::Dots => {
            for (x, y) in points {
                let _ = write!(svg, "<circle class=\"dot s{class}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"2.5\"/>");
            }
        }
        Mark::Bars => {
            let width = points.windows(2).map(|pair| pair[1].0 - pair[0].0).fold(f64::INFINITY, f64::min).min(20.0);
            for (x, y) in points {
                let height = (HEIGHT - BOTTOM - y).max(0.0);
                let left = x - width * 0.45;
                let _ = write!(
                    svg,
                    "<rect class=\"dot s{class}\" x=\"{left:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{height:.1}\"/>",
                    width * 0.9
                );
            }
        }
    }
}

/// At most [`POINTS_MAX`] of the points, evenly, the last among them.
fn thin(points: &[(f64, f64)]) -> impl Iterator<Item = (f64, f64)> {
    let step = points.len().div_ceil(POINTS_MAX).max(1);
    let last = points.len().saturating_sub(1);
    points.iter().enumerate().filter(move |(index, _)| index % step == 0 || *index == last).map(|(_, point)| *point)
}

/// The corners of steps from the origin through placed points.
fn steps(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let mut corners = vec![(LEFT, HEIGHT - BOTTOM)];
    let mut height = HEIGHT - BOTTOM;
    for &(x, y) in points {
        corners.extend([(x, height), (x, y)]);
        height = y;
    }
    corners
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_end_at_round_numbers() {
        let axis = |max| (Axis::over(max).max, Axis::over(max).step);
        assert_eq!(axis(97.0), (100.0, 20.0));
        assert_eq!(axis(0.0), (1.0, 0.2));
        assert!((axis(0.0034).0 - 0.004).abs() < 1e-12);
        let labels = |max| Axis::over(max).ticks().map(|tick| Axis::over(max).label(tick)).collect::<Vec<_>>();
        assert_eq!(labels(0.0004), ["0.0000", "0.0001", "0.0002", "0.0003", "0.0004"]);
        assert_eq!(labels(97.0), ["0", "20", "40", "60", "80", "100"]);
    }

    #[test]
    fn distributions_climb_in_steps_from_nothing() {
        let bottom = HEIGHT - BOTTOM;
        assert_eq!(
            steps(&[(80.0, 9.0), (90.0, 5.0)]),
            [(LEFT, bottom), (80.0, bottom), (80.0, 9.0), (90.0, 9.0), (90.0, 5.0)]
        );
        assert!(histogram("h", &[], 5).points.is_empty());
    }

    #[test]
    fn a_plot_has_axes_series_and_a_legend_and_nothing_unescaped() {
        let series =
            |name: &str| Series { name: name.to_owned(), points: vec![(1.0, 2.0), (3.0, f64::NAN), (4.0, 1.0)] };
        let plot =
            Plot { title: "a<b".to_owned(), x: "s", y: "ms", mark: Mark::Line, series: vec![series("x"), series("y")] };
        let svg = plot.figure();
        assert_eq!(svg.matches("<polyline").count(), 2);
        assert!(svg.contains("a&lt;b") && svg.contains("legend") && !svg.contains("NaN"));
        assert_eq!(Plot { series: vec![], ..plot }.figure(), "");
    }

    #[test]
    fn histograms_count_everything_and_thousands_of_points_are_thinned() {
        let histogram = histogram("h", &[0.0, 1.0, 9.9, 10.0], 5);
        assert_eq!(histogram.points.iter().map(|(_, count)| count).sum::<f64>(), 4.0);
        let points: Vec<(f64, f64)> = (0..10_000).map(|n| (f64::from(n), 0.0)).collect();
        let thinned: Vec<_> = thin(&points).collect();
        assert!(thinned.len() <= POINTS_MAX + 1);
        assert_eq!(thinned.last(), points.last());
        let cumulative = cumulative("c", vec![2.0, 1.0]);
        assert_eq!(cumulative.points, [(1.0, 0.5), (2.0, 1.0)]);
    }
}
