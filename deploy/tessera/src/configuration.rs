//! The flags that choose and override the configuration, the same for every role.

use std::path::PathBuf;

use anyhow::{Context as _, Result};
use daemon::config::{Document, judge_unknown};
use daemon::telemetry::{self, TelemetryConfig};

use crate::role::{self, Role};

/// Top-level names of the document: one table for each role, and what all of them share.
const NAMES: [&str; 4] = ["scheduler", "router", "worker", "telemetry"];

/// The flags.
#[derive(clap::Args, Clone, Debug, Default)]
pub(crate) struct Flags {
    #[arg(
        long,
        value_name = "FILE",
        help = "TOML document with the tables [scheduler] [router] [worker] [membership] [telemetry]"
    )]
    config: Option<PathBuf>,
    /// Override one value, such as worker.threads=4 or router.policy=round_robin; may be given several times
    #[arg(long = "set", value_name = "PATH=VALUE")]
    sets: Vec<String>,
    /// Check the configuration, unknown keys included, and exit
    #[arg(long)]
    check_config: bool,
}

impl Flags {
    /// Overrides one more value, after those that were given.
    pub(crate) fn set(&mut self, path: &str, text: &str) {
        self.sets.push(format!("{path}={}", toml::Value::from(text)));
    }

    /// Reads the document.
    ///
    /// # Errors
    /// Says which file, override or key is wrong.
    pub(crate) fn load(&self) -> Result<Document> {
        Ok(Document::load(self.config.as_deref(), &self.sets)?)
    }

    /// Whether to check only.
    pub(crate) fn is_check(&self) -> bool {
        self.check_config
    }

    /// Starts telemetry for `name` and judges what of `document` means nothing.
    ///
    /// # Errors
    /// When telemetry or one of `roles` cannot be configured, or a key is unknown and this is a check.
    pub(crate) fn begin(&self, document: &Document, name: &'static str, roles: &[Role]) -> Result<telemetry::Guard> {
        let section = document.section::<TelemetryConfig>("telemetry")?;
        let guard = telemetry::init(&section.value, name).context("cannot set up telemetry")?;
        let mut unknown = section.unknown;
        unknown.extend(document.unknown_names(&[&NAMES[..], &role::SHARED[..]].concat()));
        for role in roles {
            unknown.extend(role::configure(document, *role)?.unknown);
        }
        judge_unknown(unknown, self.check_config)?;
        Ok(guard)
    }
}
