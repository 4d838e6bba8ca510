//! Loads a server and measures what its clients would see.

mod client;
mod grpc;
mod html;
mod http;
mod load;
mod options;
mod processor;
mod progress;
mod record;
mod report;
mod sse;
mod trace;
mod workload;

use std::sync::Arc;
use std::time::Duration;

use daemon::client::AddressError;
use daemon::clock;
use daemon::shutdown::Shutdown;
use thiserror::Error;

use client::Client;
use load::Point;
pub use options::{Amount, Goals, Lengths, Load, PromptKind, ServeOptions, Target};
pub use record::{Failure, Record};
pub use report::{PointReport, ServeReport};
pub use trace::{TRACE_BLOCK_TOKENS, TraceEntry, TraceError, read_trace};
use workload::Workload;

/// Number of the point whose prompts warm up.
const WARMUP: u32 = u32::MAX >> 1;

/// Longest time to ask for the model; less when a request may take less.
const MODELS_TIMEOUT: Duration = Duration::from_secs(10);

/// Why nothing can be measured.
#[derive(Debug, Error)]
pub enum ServeError {
    /// The URL is not one that we can ask.
    #[error("{url:?} cannot be asked: give http://HOST:PORT (TLS is not spoken)")]
    Url {
        /// What was given.
        url: String,
    },
    /// The key cannot be sent in a header.
    #[error("the API key has characters that no header may have")]
    ApiKey,
    /// The gRPC address is none.
    #[error("no such address")]
    Address(#[from] AddressError),
    /// The target does not tell its models.
    #[error("cannot ask {url} which model it serves; start it, or name one with --model")]
    Models {
        /// Who was asked.
        url: String,
        /// What went wrong.
        #[source]
        failure: Failure,
    },
}

/// Runs every point of load, one after the other, until `shutdown`; what was measured until then is reported.
///
/// # Errors
/// When the target cannot be asked at all; requests that fail are part of the report.
pub async fn serve(options: &ServeOptions, shutdown: &Shutdown) -> Result<ServeReport, ServeError> {
    let started_unix_ms = clock::unix_ms();
    let client = Arc::new(ask_for_model(options, shutdown).await?);
    let workload = Arc::new(Workload::new(options));
    warm_up(options, &client, &workload, shutdown).await;
    let mut points = Vec::with_capacity(options.points.len());
    for (number, load) in (0u32..).zip(&options.points) {
        if shutdown.is_triggered() {
            break;
        }
        points.push(measure(options, &client, &workload, shutdown, number, load).await);
    }
    let api = match (&options.target, options.prompt) {
        (Target::Http { .. }, PromptKind::Chat) => "chat",
        (Target::Http { .. }, _) => "completions",
        (Target::Grpc(_), _) => "grpc",
    };
    Ok(ServeReport {
        bench: "serve",
        target: options.target.to_string(),
        api,
        model: client.model().to_owned(),
        trace: options.trace_name.clone(),
        goals: options.goals,
        input_len: options.lengths.input,
        output_len: options.lengths.output,
        shared_prefix: options.lengths.shared_prefix,
        seed: options.seed,
        started_unix_ms,
        interrupted: shutdown.is_triggered(),
        points,
    })
}

/// Gets ready to ask; the target may be slow to tell its models, or never do so.
async fn ask_for_model(options: &ServeOptions, shutdown: &Shutdown) -> Result<Client, ServeError> {
    let failed = |failure| ServeError::Models { url: options.target.to_string(), failure };
    let limit = options.timeout.min(MODELS_TIMEOUT);
    tokio::select! {
        client = tokio::time::timeout(limit, Client::new(options)) => {
            client.unwrap_or_else(|_| Err(failed(Failure::Timeout(limit))))
        }
        () = shutdown.triggered() => Err(failed(Failure::Interrupted)),
    }
}

async fn warm_up(options: &ServeOptions, client: &Arc<Client>, workload: &Arc<Workload>, shutdown: &Shutdown) {
    if options.warmup == 0 {
        return;
    }
    let first = options.points.first().and_then(Load::concurrency).unwrap_or(1);
    let load = Load::Closed { concurrency: first.min(options.warmup) };
    let point = Point::new(client, workload, shutdown, (options.connections_max, options.timeout), WARMUP);
    let n_requests = Some(options.warmup as u64);
    tokio::select! {
        _ = point.run(&load, Amount::Requests(options.warmup)) => {}
        () = progress::show("warm-up".to_owned(), Arc::clone(&point.live), n_requests) => {}
    }
}

async fn measure(
    options: &ServeOptions,
    client: &Arc<Client>,
    workload: &Arc<Workload>,
    shutdown: &Shutdown,
    number: u32,
    load: &Load,
) -> PointReport {
    let label = PointReport::new(load, &options.goals, Vec::new(), None).label();
    let n_requests = match options.amount {
        Amount::For(_) => None,
        amount => Some(workload.n_requests(load, amount) as u64),
    };
    let processor_before = processor::seconds();
    let point = Point::new(client, workload, shutdown, (options.connections_max, options.timeout), number);
    let (records, window_s) = tokio::select! {
        seen = point.run(load, options.amount) => seen,
        () = progress::show(label, Arc::clone(&point.live), n_requests) => (Vec::new(), None),
    };
    let seconds = clock::now().duration_since(point.began).as_secs_f64();
    let mut report = PointReport::new(load, &options.goals, records, window_s);
    report.client_cpu_fraction = processor_before
        .zip(processor::seconds())
        .filter(|_| seconds > 0.0)
        .map(|(before, after)| (after - before) / seconds);
    report
}
