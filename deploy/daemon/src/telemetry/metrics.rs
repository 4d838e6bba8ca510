//! The process's metrics registry and its Prometheus text.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

pub use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::{Family, MetricConstructor};
pub use prometheus_client::metrics::gauge::Gauge;
pub use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use super::names::{Kind, Metric};
use super::process;

/// Content type of [`render`]'s text.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Series that one metric may have in one process; beyond it, label values become `_OTHER`.
const SERIES_MAX: usize = 1_000;

/// Value that stands for all label values beyond the bound.
const OTHER: &str = "_OTHER";

/// Makes metrics that carry one role's and one member's labels.
#[derive(Clone, Debug)]
pub struct Scope {
    role: &'static str,
    instance: String,
}

/// Makes the scope of `instance` (a member's name; empty when there is but one) of `role`.
#[must_use]
pub fn scope(role: &'static str, instance: &str) -> Scope {
    Scope { role, instance: instance.to_owned() }
}

impl Scope {
    /// Gets the counter of `metric` with these label values, in the order of `metric.labels`.
    ///
    /// Getting costs a lock and an allocation; on hot paths keep the counter.
    ///
    /// # Panics
    /// When `metric` is no counter or the number of values differs from that of its labels.
    #[must_use]
    pub fn counter(&self, metric: &'static Metric, values: &[&str]) -> Counter {
        match self.get(metric, values) {
            Series::Counter(counter) => counter,
            _ => panic!("{} is no counter", metric.name),
        }
    }

    /// Gets the gauge of `metric` with these label values, in the order of `metric.labels`.
    ///
    /// # Panics
    /// When `metric` is no gauge or the number of values differs from that of its labels.
    #[must_use]
    pub fn gauge(&self, metric: &'static Metric, values: &[&str]) -> Gauge {
        match self.get(metric, values) {
            Series::Gauge(gauge) => gauge,
            _ => panic!("{} is no gauge", metric.name),
        }
    }

    /// Gets the histogram of `metric` with these label values, in the order of `metric.labels`.
    ///
    /// # Panics
    /// When `metric` is no histogram or the number of values differs from that of its labels.
    #[must_use]
    pub fn histogram(&self, metric: &'static Metric, values: &[&str]) -> Histogram {
        match self.get(metric, values) {
            Series::Histogram(histogram) => histogram,
            _ => panic!("{} is no histogram", metric.name),
        }
    }

    /// Removes every series of this scope, when its member is gone for good.
    pub fn retire(&self) {
        let mut store = store();
        for family in store.families.values_mut() {
            let gone: Vec<Labels> = family
                .known
                .iter()
                .filter(|labels| labels[0].1 == self.role && labels[1].1 == self.instance)
                .cloned()
                .collect();
            for labels in gone {
                family.known.remove(&labels);
                match &family.series {
                    Families::Counter(family) => family.remove(&labels),
                    Families::Gauge(family) => family.remove(&labels),
                    Families::Histogram(family) => family.remove(&labels),
                };
            }
        }
    }

    fn get(&self, metric: &'static Metric, values: &[&str]) -> Series {
        assert_eq!(metric.labels.len(), values.len(), "{} has the labels {:?}", metric.name, metric.labels);
        let mut store = store();
        let store = &mut *store;
        let family = store.families.entry(metric.name).or_insert_with(|| Known::new(metric, &mut store.registry));
        let mut labels = self.labels(metric, values);
        if !family.known.contains(&labels) {
            if family.known.len() >= SERIES_MAX {
                labels = self.labels(metric, &vec![OTHER; values.len()]);
            }
            family.known.insert(labels.clone());
        }
        match &family.series {
            Families::Counter(family) => Series::Counter(family.get_or_create_owned(&labels)),
            Families::Gauge(family) => Series::Gauge(family.get_or_create_owned(&labels)),
            Families::Histogram(family) => Series::Histogram(family.get_or_create_owned(&labels)),
        }
    }

    fn labels(&self, metric: &Metric, values: &[&str]) -> Labels {
        let own = [("role".to_owned(), self.role.to_owned()), ("instance".to_owned(), self.instance.clone())];
        let names = metric.labels.iter().map(|name| name.replace('.', "_"));
        own.into_iter().chain(names.zip(values.iter().map(|value| (*value).to_owned()))).collect()
    }
}

/// Writes all metrics in Prometheus' text format.
#[must_use]
pub fn render() -> String {
    process::observe();
    let mut text = String::new();
    prometheus_client::encoding::text::encode_registry(&mut text, &store().registry)
        .expect("writing to a string cannot fail");
    to_prometheus(&text)
}

/// Name and value of every label of one series; the first two are the scope's.
type Labels = Vec<(String, String)>;

struct Store {
    registry: Registry,
    families: BTreeMap<&'static str, Known>,
}

struct Known {
    series: Families,
    known: BTreeSet<Labels>,
}

enum Families {
    Counter(Family<Labels, Counter>),
    Gauge(Family<Labels, Gauge>),
    Histogram(Family<Labels, Histogram, Buckets>),
}

enum Series {
    Counter(Counter),
    Gauge(Gauge),
    Histogram(Histogram),
}

#[derive(Clone, Debug)]
struct Buckets(&'static [f64]);

impl MetricConstructor<Histogram> for Buckets {
    fn new_metric(&self) -> Histogram {
        Histogram::new(self.0.iter().copied())
    }
}

impl Known {
    fn new(metric: &'static Metric, registry: &mut Registry) -> Self {
        let name = metric.prometheus_name();
        let series = match metric.kind {
            Kind::Counter => {
                let family = Family::default();
                registry.register(name, metric.help, family.clone());
                Families::Counter(family)
            }
            Kind::Gauge => {
                let family = Family::default();
                registry.register(name, metric.help, family.clone());
                Families::Gauge(family)
            }
            Kind::Histogram => {
                let family = Family::new_with_constructor(Buckets(metric.buckets));
                registry.register(name, metric.help, family.clone());
                Families::Histogram(family)
            }
        };
        Self { series, known: BTreeSet::new() }
    }
}

fn store() -> MutexGuard<'static, Store> {
    static STORE: OnceLock<Mutex<Store>> = OnceLock::new();
    let store = STORE.get_or_init(|| {
        process::started();
        Mutex::new(Store { registry: Registry::default(), families: BTreeMap::new() })
    });
    store.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Turns OpenMetrics text into Prometheus' older format, whose counters are described under their `_total` name.
fn to_prometheus(openmetrics: &str) -> String {
    let mut text = String::with_capacity(openmetrics.len() + 1024);
    let mut help = None;
    for line in openmetrics.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            help = rest.split_once(' ');
        } else if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' ')) {
            let suffix = if kind == "counter" { "_total" } else { "" };
            let help = help.take().map_or("", |(_, help)| help);
            let _ = writeln!(text, "# HELP {name}{suffix} {help}\n# TYPE {name}{suffix} {kind}");
        } else if !line.starts_with('#') {
            let _ = writeln!(text, "{line}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::names;
    use super::*;

    /// The value of the series whose line starts with `series`.
    fn value(text: &str, series: &str) -> Option<f64> {
        text.lines().find_map(|line| line.strip_prefix(series)?.trim().parse().ok())
    }

    #[test]
    fn members_share_a_family_and_are_told_apart_by_label() {
        scope("worker", "a").counter(&names::ENGINE_PREEMPTIONS, &[]).inc_by(2);
        scope("worker", "b").counter(&names::ENGINE_PREEMPTIONS, &[]).inc();
        scope("worker", "a").counter(&names::ENGINE_PREEMPTIONS, &[]).inc();
        let text = render();
        let name = "tessera_engine_preemptions_total";
        assert_eq!(value(&text, &format!(r#"{name}{{role="worker",instance="a"}}"#)), Some(3.0), "{text}");
        assert_eq!(value(&text, &format!(r#"{name}{{role="worker",instance="b"}}"#)), Some(1.0), "{text}");
        assert_eq!(text.matches(&format!("# TYPE {name} counter")).count(), 1, "{text}");
        assert_eq!(text.matches(&format!("# HELP {name} ")).count(), 1, "{text}");
    }

    #[test]
    fn every_line_parses_and_every_series_is_described() {
        let scope = scope("router", "every \"line\"\\");
        for metric in names::ALL {
            let values = vec!["x y=\"z\"\n"; metric.labels.len()];
            match metric.kind {
                Kind::Counter => drop(scope.counter(metric, &values).inc()),
                Kind::Gauge => drop(scope.gauge(metric, &values).set(-3)),
                Kind::Histogram => scope.histogram(metric, &values).observe(0.3),
            }
        }
        let text = render();
        let mut described = BTreeMap::new();
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("# TYPE ") {
                let (name, kind) = rest.split_once(' ').unwrap();
                assert_eq!(described.insert(name, kind), None, "{name} described twice");
            } else if !line.starts_with("# HELP ") {
                let (series, number) = line.rsplit_once(' ').unwrap();
                number.parse::<f64>().unwrap();
                let name = series.split('{').next().unwrap();
                let family = ["_bucket", "_sum", "_count"]
                    .iter()
                    .find_map(|suffix| {
                        name.strip_suffix(suffix).filter(|name| described.get(name) == Some(&"histogram"))
                    })
                    .unwrap_or(name);
                assert!(described.contains_key(family), "{line}");
            }
        }
        for metric in names::ALL {
            let suffix = if metric.kind == Kind::Counter { "_total" } else { "" };
            assert!(described.contains_key(format!("{}{suffix}", metric.prometheus_name()).as_str()));
        }
    }

    #[test]
    fn series_are_bounded_whatever_labels_are_given() {
        let scope = scope("router", "bounded");
        for index in 0..SERIES_MAX * 2 {
            scope.counter(&names::ADMISSION_REJECTIONS, &[&format!("reason {index}")]).inc();
        }
        let text = render();
        let series = text.lines().filter(|line| line.starts_with("tessera_admission_rejections_total{")).count();
        assert!(series <= SERIES_MAX + 2, "{series}");
        let others = r#"tessera_admission_rejections_total{role="router",instance="bounded",reason="_OTHER"}"#;
        assert!(value(&text, others).unwrap() >= SERIES_MAX as f64 / 2.0);
    }

    #[test]
    fn a_retired_member_leaves_no_series() {
        let (gone, stays) = (scope("worker", "gone"), scope("worker", "stays"));
        gone.gauge(&names::KV_CACHE_BLOCKS, &["free"]).set(1);
        stays.gauge(&names::KV_CACHE_BLOCKS, &["free"]).set(1);
        gone.retire();
        let text = render();
        assert!(!text.contains(r#"instance="gone""#) && text.contains(r#"instance="stays""#));
    }

    #[test]
    fn process_metrics_are_read_at_render_time() {
        let text = render();
        let own = r#"{role="process",instance=""}"#;
        assert!(value(&text, &format!("process_memory_usage_bytes{own}")).unwrap() > 1e6, "{text}");
        assert!(value(&text, &format!("process_unix_file_descriptor_count{own}")).unwrap() >= 3.0);
        assert!(value(&text, &format!("tessera_runtime_tasks{own}")).is_some());
    }
}
