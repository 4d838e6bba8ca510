//! Waits until everything can answer, and says so.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

/// How often a role is asked.
const POLL: Duration = Duration::from_millis(50);
/// Every how many questions without a yes a line is logged.
const N_POLLS_QUIET: u32 = 200;
/// Longest wait for one answer.
const ANSWER_MAX: Duration = Duration::from_secs(5);
/// Longest wait for a yes; a large model takes minutes to load.
const READY_MAX: Duration = Duration::from_secs(1_800);

/// A cluster that can answer.
pub(super) struct Ready {
    /// The OpenAI HTTP API.
    pub(super) http: SocketAddr,
    /// The router's gRPC.
    pub(super) grpc: SocketAddr,
    /// The name clients ask for.
    pub(super) model: String,
    /// Whether the model can chat.
    pub(super) has_template: bool,
}

impl Ready {
    /// What is printed; the last line is for programs.
    pub(super) fn lines(&self) -> Vec<String> {
        let (http, grpc, model) = (reachable(self.http), reachable(self.grpc), &self.model);
        // Greedy, so that a small model shows its best side and the same answer every time.
        let mut body = serde_json::json!({"model": model, "max_tokens": 64, "temperature": 0});
        let path = if self.has_template {
            body["messages"] = serde_json::json!([{"role": "user", "content": "What is the capital of France?"}]);
            "chat/completions"
        } else {
            body["prompt"] = serde_json::json!("The capital of France is");
            "completions"
        };
        // A single quote ends the shell's string, stands alone, and begins it again.
        let body = body.to_string().replace('\'', r"'\''");
        vec![
            format!("OpenAI API  http://{http}/v1   (also /livez /readyz /metrics)"),
            format!("gRPC        {grpc}   tessera.inference.v1.Inference, with reflection"),
            "Try:".to_owned(),
            format!("curl http://{http}/v1/{path} -H 'content-type: application/json' -d '{body}'"),
            format!("ready http={http} grpc={grpc} model={model}"),
        ]
    }
}

/// An address to connect to, also where the server listens on all.
pub(super) fn reachable(address: SocketAddr) -> SocketAddr {
    let ip = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(ip) if ip.is_unspecified() => IpAddr::V6(Ipv6Addr::LOCALHOST),
        ip => ip,
    };
    SocketAddr::new(ip, address.port())
}

/// Waits until each of `members` (name and an address that speaks HTTP) is ready.
pub(super) async fn until_ready(members: &[(String, SocketAddr)]) -> Result<()> {
    let client = crate::http::client("http://127.0.0.1").no_proxy().timeout(ANSWER_MAX).build()?;
    let all = async {
        for (name, address) in members {
            let url = format!("http://{}/readyz", reachable(*address));
            for n_polls in 1u32.. {
                match ask(&client, &url).await {
                    Ok(()) => break,
                    Err(reason) if n_polls.is_multiple_of(N_POLLS_QUIET) => {
                        tracing::info!("waiting for {name}: {reason:#}");
                    }
                    Err(_) => {}
                }
                tokio::time::sleep(POLL).await;
            }
        }
    };
    tokio::time::timeout(READY_MAX, all)
        .await
        .with_context(|| format!("not everything is ready after {} s", READY_MAX.as_secs()))
}

async fn ask(client: &reqwest::Client, url: &str) -> Result<()> {
    let answer = client.get(url).send().await?;
    if answer.status().is_success() {
        return Ok(());
    }
    bail!("{}", answer.text().await.unwrap_or_default().trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_printed_line_can_be_pasted_whatever_the_model_is_called() {
        let http = "0.0.0.0:8080".parse().unwrap();
        let grpc = "[::]:50051".parse().unwrap();
        let ready = Ready { http, grpc, model: "it's".to_owned(), has_template: true };
        let lines = ready.lines();
        let base = Ready { has_template: false, model: "base".to_owned(), ..ready };
        assert!(base.lines().iter().any(|line| line.starts_with("curl http://127.0.0.1:8080/v1/completions ")));
        let curl = lines.iter().find(|line| line.starts_with("curl ")).unwrap();
        let output = std::process::Command::new("sh")
            .args(["-c", &curl.replacen("curl", "printf '%s\\n'", 1)])
            .output()
            .unwrap();
        let words: Vec<_> = std::str::from_utf8(&output.stdout).unwrap().lines().collect();
        assert_eq!(words[0], "http://127.0.0.1:8080/v1/chat/completions");
        let body: serde_json::Value = serde_json::from_str(words[4]).unwrap();
        assert_eq!(body["model"], "it's");
        assert_eq!(lines.last().unwrap(), "ready http=127.0.0.1:8080 grpc=[::1]:50051 model=it's");
    }
}
