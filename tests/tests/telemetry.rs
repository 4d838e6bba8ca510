//! One trace crosses router and worker, and holds no prompt text.

#![allow(
    clippy::disallowed_methods,
    clippy::print_stderr,
    clippy::unwrap_used,
    missing_docs,
    reason = "tests: a failed step panics, and real time is what they measure"
)]

use std::time::Duration;

use serde_json::json;
use tests::cluster::{Cluster, Plan};
use tests::otlp::{Receiver, Span};
use tests::{client, wait};

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";

fn parents<'a>(spans: &'a [Span], of: &Span) -> Option<&'a Span> {
    spans.iter().find(|span| span.id == of.parent)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_is_one_trace_from_client_through_router_to_worker() {
    let receiver = Receiver::start().await;
    let mut telemetry = toml::Table::new();
    telemetry.insert("otlp_endpoint".to_owned(), receiver.endpoint.clone().into());
    let cluster = Cluster::start(Plan { telemetry, ..Plan::default() }).await;
    let url = format!("http://{}/v1/completions", cluster.routers[0].http);
    let body = json!({"model": "tiny", "prompt": "t17 t18 t19", "max_tokens": 3, "temperature": 0});
    let parent = format!("00-{TRACE}-b7ad6b7169203331-01");
    let answer = client::http().post(url).header("traceparent", parent).json(&body).send().await.unwrap();
    assert_eq!(answer.status(), 200);
    let spans = wait::until("both spans arrive", Duration::from_secs(30), async || {
        let all = receiver.spans();
        let of_trace: Vec<Span> = all.iter().filter(|span| hex(&span.trace) == TRACE).cloned().collect();
        if of_trace.len() >= 2 { Ok(of_trace) } else { Err(format!("of all spans {all:?}")) }
    })
    .await;
    let router = spans.iter().find(|span| span.name == "text_completion tiny").unwrap_or_else(|| panic!("{spans:?}"));
    assert_eq!(router.attributes["gen_ai.request.model"], "tiny");
    assert_eq!(router.attributes["gen_ai.usage.input_tokens"], "3");
    assert_eq!(router.attributes["gen_ai.usage.output_tokens"], "3");
    let worker = spans.iter().find(|span| parents(&spans, span).is_some()).unwrap_or_else(|| panic!("{spans:?}"));
    assert!(!worker.id.is_empty() && worker.id != router.id);
    for span in &spans {
        assert!(!format!("{span:?}").contains("t17"), "no prompt text in telemetry: {span:?}");
    }
}
