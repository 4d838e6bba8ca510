//! `tessera explain`: why a request went to its worker, or where a prompt would go.

use anyhow::{Context as _, Result, bail};
use daemon::client::{ChannelOptions, channel};
use proto::inference::v1::explain_request::Subject;
use proto::inference::v1::inference_client::InferenceClient;
use proto::inference::v1::{ExplainRequest, ExplainResponse, GenerateRequest, PlacementDecision, generate_request};

use super::generate::{explain_status, read_prompt};
use crate::output;

const EXAMPLES: &str = "\
Examples:
  tessera explain --prompt \"The capital of France is\"    Where this would go now; nothing is placed
  tessera explain --prompt - < question.txt               The prompt from standard input
  tessera explain cmpl-0f3a…                              Why this one of the router's last requests went where it did

Each line is a worker as the router saw it: tokens of the prompt that it holds (or was promised, as they are just being
computed there), tokens that wait before it, and the predicted times. The chosen one comes first.";

/// What `tessera explain` takes.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES, group = clap::ArgGroup::new("subject").required(true).args(["request", "prompt"]))]
pub(crate) struct Args {
    /// A request's id, as its answer has it
    request: Option<String>,
    /// A prompt to place in thought; - reads it from standard input
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,
    /// Router to ask
    #[arg(long, value_name = "ADDR", default_value = crate::serve::DEFAULT_GRPC)]
    grpc: String,
    /// Model to ask for; the only one served if there is but one
    #[arg(long, default_value = "")]
    model: String,
}

/// Asks and prints.
pub(crate) async fn run(args: Args) -> Result<()> {
    let subject = match (args.request, &args.prompt) {
        (Some(id), _) => Subject::RequestId(id),
        (None, Some(prompt)) => {
            let prompt = Some(generate_request::Prompt::Text(read_prompt(prompt)?));
            Subject::Prompt(GenerateRequest { model: args.model, prompt, options: None })
        }
        (None, None) => bail!("give a request's id or --prompt"),
    };
    let mut client = InferenceClient::new(channel(&args.grpc, &ChannelOptions::default())?);
    let answer = client.explain(ExplainRequest { subject: Some(subject) }).await;
    let answer = answer.map_err(|status| explain_status(&args.grpc, &status))?.into_inner();
    output::line(&text(&answer).context("the router explained nothing")?)
}

fn text(answer: &ExplainResponse) -> Option<String> {
    let mut parts: Vec<String> =
        answer.decisions.iter().map(|decision| decision_text(&answer.policy, decision)).collect();
    if answer.n_left_out > 0 {
        parts.push(format!("and {} later placements, which the router does not remember", answer.n_left_out));
    }
    (!parts.is_empty()).then(|| parts.join("\n\n"))
}

fn decision_text(policy: &str, decision: &PlacementDecision) -> String {
    let chosen = decision.candidates.first();
    let name = chosen.map_or("no worker", |chosen| chosen.engine.as_str());
    let mut lines = vec![format!("{name} by {policy}, for its {}", because(&decision.reason))];
    let is_split = !decision.prefill_engine.is_empty();
    if is_split {
        lines.push(format!("its prompt is computed on {}", decision.prefill_engine));
    }
    if !decision.lending_engine.is_empty() {
        lines.push(format!("{} leaves and sends {} tokens", decision.lending_engine, decision.lent_tokens));
    }
    let computes = decision.candidates.get(usize::from(is_split));
    if let (Some(computes), Some(actual)) = (computes, decision.actual_first_token_ms) {
        lines.push(format!("first token after {actual:.1} ms, predicted {:.1} ms", computes.first_token_ms));
    }
    if !decision.failure.is_empty() {
        let after = decision.failed_after_ms.unwrap_or_default();
        lines.push(format!("failed after {after:.1} ms: {}", decision.failure));
    }
    let width = decision.candidates.iter().map(|one| one.engine.len()).max().unwrap_or(0).max("worker".len());
    lines.push(format!(
        "{:<width$}  {:>8}  {:>8}  {:>8}  {:>8}  {:>9}  {:>10}  {:>12}  {:>9}",
        "worker", "cached", "promised", "queued", "requests", "wait ms", "prefill ms", "1st token ms", "decode ms"
    ));
    for one in &decision.candidates {
        lines.push(format!(
            "{:<width$}  {:>8}  {:>8}  {:>8}  {:>8}  {:>9.1}  {:>10.1}  {:>12.1}  {:>9.1}",
            one.engine,
            one.cached_tokens,
            one.promised_tokens,
            one.queued_tokens,
            one.n_requests,
            one.wait_ms,
            one.prefill_ms,
            one.first_token_ms,
            one.decode_ms
        ));
    }
    let n_left_out = decision.n_candidates as usize - decision.candidates.len().min(decision.n_candidates as usize);
    if n_left_out > 0 {
        lines.push(format!("and {n_left_out} more"));
    }
    lines.join("\n")
}

/// A reason's label as words.
fn because(reason: &str) -> &str {
    match reason {
        "only" => "being the only one",
        "turn" => "turn",
        "load" => "least load",
        "prefix" => "cached prefix",
        "balance" => "sooner first token than where more is cached",
        "session" => "session",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use proto::inference::v1::PlacementCandidate;

    use super::*;
    use crate::command::parse;

    #[test]
    fn takes_an_id_or_a_prompt_but_one_of_them() {
        assert!(parse::<Args>(&["cmpl-00"]).is_ok());
        assert!(parse::<Args>(&["--prompt", "Hi"]).is_ok());
        let Err(error) = parse::<Args>(&[]) else { panic!("nothing is explained") };
        assert!(error.to_string().contains("--prompt"), "{error}");
        assert!(parse::<Args>(&["cmpl-00", "--prompt", "Hi"]).is_err());
    }

    #[test]
    fn shows_who_was_chosen_why_and_how_well_it_was_foreseen() {
        let candidate = |engine: &str, cached_tokens, first_token_ms| PlacementCandidate {
            engine: engine.to_owned(),
            cached_tokens,
            first_token_ms,
            ..PlacementCandidate::default()
        };
        let decision = PlacementDecision {
            reason: "prefix".to_owned(),
            candidates: vec![candidate("w1", 992, 12.0), candidate("w0", 0, 90.5)],
            n_candidates: 5,
            actual_first_token_ms: Some(13.25),
            ..PlacementDecision::default()
        };
        let answer = ExplainResponse { policy: "prefix_latency".to_owned(), decisions: vec![decision], n_left_out: 0 };
        let text = text(&answer).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "w1 by prefix_latency, for its cached prefix");
        assert_eq!(lines[1], "first token after 13.2 ms, predicted 12.0 ms");
        assert!(lines[3].starts_with("w1") && lines[3].contains("992"), "{text}");
        assert_eq!(lines.last(), Some(&"and 3 more"));
        assert!(super::text(&ExplainResponse::default()).is_none());
    }

    #[test]
    fn a_placement_that_failed_and_what_is_not_remembered_are_told() {
        let failed = PlacementDecision {
            reason: "load".to_owned(),
            candidates: vec![PlacementCandidate { engine: "w1".to_owned(), ..PlacementCandidate::default() }],
            n_candidates: 1,
            failure: "worker_lost".to_owned(),
            failed_after_ms: Some(2_000.04),
            lending_engine: "w2".to_owned(),
            lent_tokens: 48,
            ..PlacementDecision::default()
        };
        let answer = ExplainResponse { policy: "least_loaded".to_owned(), decisions: vec![failed], n_left_out: 24 };
        let text = text(&answer).unwrap();
        assert_eq!(text.lines().nth(1), Some("w2 leaves and sends 48 tokens"), "{text}");
        assert_eq!(text.lines().nth(2), Some("failed after 2000.0 ms: worker_lost"), "{text}");
        assert!(text.ends_with("\n\nand 24 later placements, which the router does not remember"), "{text}");
    }
}
