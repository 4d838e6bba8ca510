//! Reads a Prometheus text page.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};

/// Samples by name with labels as written.
#[derive(Clone, Debug, Default)]
pub struct Metrics(BTreeMap<String, f64>);

impl Metrics {
    /// Fetches `http://address/metrics`.
    pub async fn fetch(address: &str) -> Result<Self> {
        let page = crate::client::http().get(format!("http://{address}/metrics")).send().await?;
        Self::parse(&page.error_for_status()?.text().await?)
    }

    pub fn parse(page: &str) -> Result<Self> {
        let mut samples = BTreeMap::new();
        for line in page.lines().filter(|line| !line.starts_with('#') && !line.is_empty()) {
            let (name, value) = line.rsplit_once(' ').with_context(|| format!("no value in {line:?}"))?;
            samples.insert(name.to_owned(), value.parse().with_context(|| format!("no number in {line:?}"))?);
        }
        Ok(Self(samples))
    }

    /// Sum of all samples of `name` whose labels contain each of `labels` (`key="value"`).
    pub fn sum(&self, name: &str, labels: &[&str]) -> f64 {
        self.matching(name, labels).map(|(_, value)| value).sum()
    }

    /// Whether there is any such sample.
    pub fn has(&self, name: &str) -> bool {
        self.matching(name, &[]).next().is_some()
    }

    /// How many series there are in all.
    pub fn n_series(&self) -> usize {
        self.0.len()
    }

    fn matching<'a>(&'a self, name: &'a str, labels: &'a [&str]) -> impl Iterator<Item = (&'a String, f64)> {
        let of_name =
            move |key: &str| key.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('{'));
        let all = self.0.iter().filter(move |(key, _)| of_name(key) && labels.iter().all(|label| key.contains(label)));
        all.map(|(key, value)| (key, *value))
    }
}

/// Blocks of one worker's pool.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Blocks {
    pub total: f64,
    pub allocated: f64,
    pub cached: f64,
    pub free: f64,
}

impl Blocks {
    pub fn of(metrics: &Metrics) -> Self {
        let count = |state: &str| metrics.sum("tessera_kv_cache_blocks", &[&format!("state=\"{state}\"")]);
        Self { total: count("total"), allocated: count("allocated"), cached: count("cached"), free: count("free") }
    }

    /// `Ok` when nothing is allocated and nothing is lost.
    pub fn at_rest(self) -> Result<(), Self> {
        let conserved = self.allocated + self.cached + self.free == self.total;
        if self.total > 0.0 && self.allocated == 0.0 && conserved { Ok(()) } else { Err(self) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "# HELP tessera_kv_cache_blocks Blocks.\n\
        tessera_kv_cache_blocks{state=\"total\",role=\"worker\"} 10\n\
        tessera_kv_cache_blocks{state=\"allocated\",role=\"worker\"} 0\n\
        tessera_kv_cache_blocks{state=\"cached\",role=\"worker\"} 4\n\
        tessera_kv_cache_blocks{state=\"free\",role=\"worker\"} 6\n\
        tessera_kv_cache_blocks_other 3\n";

    #[test]
    fn sums_by_name_and_label() {
        let metrics = Metrics::parse(PAGE).unwrap();
        assert_eq!(metrics.sum("tessera_kv_cache_blocks", &["state=\"cached\""]), 4.0);
        assert_eq!(
            metrics.sum("tessera_kv_cache_blocks", &[]),
            20.0,
            "another metric with the same start does not count"
        );
        assert_eq!(Blocks::of(&metrics).at_rest(), Ok(()));
    }

    #[test]
    fn a_lost_or_held_block_is_not_at_rest() {
        let rest = Blocks { total: 10.0, allocated: 0.0, cached: 4.0, free: 6.0 };
        assert!(Blocks { free: 5.0, ..rest }.at_rest().is_err());
        assert!(Blocks { allocated: 1.0, free: 5.0, ..rest }.at_rest().is_err());
        assert!(Blocks::of(&Metrics::default()).at_rest().is_err(), "no metric is no proof");
    }
}
