//! One span for each request, named by the semantic conventions and never holding text of it.

use daemon::telemetry::propagation::Trace;
use http::HeaderMap;
use tracing::field;

use crate::generate::Question;

/// Makes the span of a question as a child of the caller's.
pub(super) fn trace(question: &Question, model: &str, headers: &HeaderMap) -> Trace {
    let operation = question.operation.name();
    let options = &question.options;
    let span = tracing::info_span!(
        "request",
        otel.name = format!("{operation} {model}"),
        otel.kind = "server",
        gen_ai.operation.name = operation,
        gen_ai.provider.name = "tessera",
        gen_ai.request.model = model,
        gen_ai.request.max_tokens = options.max_tokens,
        gen_ai.request.temperature = options.temperature,
        gen_ai.request.top_p = options.top_p,
        gen_ai.request.top_k = options.top_k,
        gen_ai.request.choice.count = options.n,
        gen_ai.request.stream = question.is_stream,
        gen_ai.usage.input_tokens = field::Empty,
        gen_ai.usage.output_tokens = field::Empty,
        gen_ai.usage.cache_read.input_tokens = field::Empty,
        gen_ai.response.finish_reasons = field::Empty,
        tessera.route.engine = field::Empty,
        tessera.route.reason = field::Empty,
        tessera.route.cached_tokens = field::Empty,
        tessera.route.predicted_ms = field::Empty,
        error.type = field::Empty,
    );
    Trace::new(span, headers)
}
