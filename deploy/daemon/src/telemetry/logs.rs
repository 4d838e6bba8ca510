//! Sets up the process's log output and trace export.

use std::io::IsTerminal as _;
use std::time::Duration;

use opentelemetry::KeyValue;
use opentelemetry::trace::TracerProvider as _;
use opentelemetry_otlp::{ExporterBuildError, SpanExporter, WithExportConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{Sampler, SdkTracerProvider};
use serde::{Deserialize, Serialize};
use tracing_subscriber::filter::{FilterExt as _, LevelFilter, ParseError, filter_fn};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::{SubscriberInitExt as _, TryInitError};
use tracing_subscriber::{EnvFilter, Layer};

/// The `[telemetry]` table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct TelemetryConfig {
    /// What is logged, as `level` or `target=level,…`; the environment's `TESSERA_LOG`, then `RUST_LOG`, win.
    pub filter: String,
    /// How a log line is written.
    pub format: LogFormat,
    /// Where spans go (OTLP over gRPC), such as `http://127.0.0.1:4317`; nowhere when neither this nor
    /// the environment's `OTEL_EXPORTER_OTLP_ENDPOINT` is set.
    pub otlp_endpoint: Option<String>,
    /// Share of new traces that are sampled, 0 to 1; a request that comes with a trace follows its caller.
    pub sample_ratio: f64,
    /// Longest time to export a batch of spans, and to flush at the end.
    pub export_timeout_ms: u64,
}

/// How a log line is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// One line for people.
    #[default]
    Pretty,
    /// One JSON object for machines.
    Json,
}

impl Default for TelemetryConfig {
    fn default() -> Self {
        Self {
            filter: "info".to_owned(),
            format: LogFormat::default(),
            otlp_endpoint: None,
            sample_ratio: 1.0,
            export_timeout_ms: 3_000,
        }
    }
}

/// Why telemetry could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum InitError {
    /// The filter cannot be parsed.
    #[error("cannot parse log filter {filter:?}")]
    Filter {
        /// The filter as given.
        filter: String,
        /// Why not.
        source: ParseError,
    },
    /// The span exporter cannot be made.
    #[error("cannot export traces to {endpoint:?}")]
    Exporter {
        /// The endpoint as given.
        endpoint: String,
        /// Why not.
        source: ExporterBuildError,
    },
    /// The process has set up telemetry before.
    #[error("cannot set up telemetry twice in one process")]
    Twice(#[from] TryInitError),
}

/// Flushes what is still unsent when the process ends.
#[derive(Debug)]
#[must_use = "telemetry is flushed when this is dropped"]
pub struct Guard {
    provider: Option<SdkTracerProvider>,
    timeout: Duration,
}

impl Drop for Guard {
    fn drop(&mut self) {
        // A collector that is down is no reason to fail.
        let Some(provider) = &self.provider else { return };
        if let Err(error) = provider.shutdown_with_timeout(self.timeout) {
            tracing::warn!(%error, "traces may be incomplete: the last batch could not be exported");
        }
    }
}

/// Starts logging to stderr and, if configured, the export of spans, for this process and in the name of `role`.
///
/// # Errors
/// When the filter or endpoint is unusable, or this was called before.
///
/// # Panics
/// Outside a tokio runtime when spans are exported.
pub fn init(config: &TelemetryConfig, role: &'static str) -> Result<Guard, InitError> {
    let provider = tracer_provider(config, role)?;
    // A process that exports no spans makes none, and hands on the trace context that a request came with.
    let layer = |provider: &SdkTracerProvider| {
        tracing_opentelemetry::layer()
            .with_tracer(provider.tracer("tessera"))
            .with_location(false)
            .with_threads(false)
            // Entering a span is done at every poll, so it costs nothing here.
            .with_tracked_inactivity(false)
            .with_context_activation(false)
            .with_filter(LevelFilter::INFO)
    };
    let traces = provider.as_ref().map(layer);
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    let lines = match config.format {
        LogFormat::Pretty => lines.compact().with_ansi(std::io::stderr().is_terminal()).boxed(),
        LogFormat::Json => lines.json().flatten_event(true).with_current_span(true).with_span_list(false).boxed(),
    };
    let filter = filter(config)?;
    // Lines for people name the request only where more is asked for: its span is not made for nobody.
    let with_spans =
        config.format == LogFormat::Json || filter.max_level_hint().is_some_and(|most| most > LevelFilter::INFO);
    let lines = lines.with_filter(filter.and(filter_fn(move |metadata| with_spans || metadata.is_event())));
    // A span is left out where no layer wants it, but not by a layer that may be absent, nor by a filter for all.
    let layers: Vec<_> = [Some(lines.boxed()), traces.map(Layer::boxed)].into_iter().flatten().collect();
    tracing_subscriber::registry().with(layers).try_init()?;
    Ok(Guard { provider, timeout: Duration::from_millis(config.export_timeout_ms) })
}

/// Takes the filter of the environment, else the configured one.
fn filter(config: &TelemetryConfig) -> Result<EnvFilter, InitError> {
    let text = ["TESSERA_LOG", "RUST_LOG"]
        .iter()
        .find_map(|name| std::env::var(name).ok().filter(|text| !text.is_empty()))
        .unwrap_or_else(|| config.filter.clone());
    EnvFilter::try_new(&text).map_err(|source| InitError::Filter { filter: text, source })
}

/// What exports spans, if they are to go anywhere.
fn tracer_provider(config: &TelemetryConfig, role: &'static str) -> Result<Option<SdkTracerProvider>, InitError> {
    let service = std::env::var("OTEL_SERVICE_NAME").unwrap_or_else(|_| format!("tessera-{role}"));
    let resource = Resource::builder().with_service_name(service).with_attribute(KeyValue::new("tessera.role", role));
    let sampler = Sampler::ParentBased(Box::new(Sampler::TraceIdRatioBased(config.sample_ratio)));
    let builder = SdkTracerProvider::builder().with_resource(resource.build()).with_sampler(sampler);
    let endpoint = config
        .otlp_endpoint
        .clone()
        .or_else(|| std::env::var("OTEL_EXPORTER_OTLP_ENDPOINT").ok())
        .filter(|endpoint| !endpoint.is_empty());
    let Some(endpoint) = endpoint else { return Ok(None) };
    let exporter = SpanExporter::builder()
        .with_tonic()
        .with_endpoint(&endpoint)
        .with_timeout(Duration::from_millis(config.export_timeout_ms))
        .build()
        .map_err(|source| InitError::Exporter { endpoint, source })?;
    Ok(Some(builder.with_batch_exporter(exporter).build()))
}
