//! `tessera generate`: one prompt through a router's gRPC, streamed to the terminal.

use std::io::Read as _;

use anyhow::{Context as _, Result, bail};
use daemon::client::{ChannelOptions, channel};
use proto::inference::v1::inference_client::InferenceClient;
use proto::inference::v1::{ChatRequest, GenerateRequest, GenerateResponse, Message, Options, Usage, generate_request};
use tonic::{Code, Status, Streaming};

use crate::output;

const EXAMPLES: &str = "\
Examples:
  tessera generate \"The capital of France is\"
  tessera generate --chat --system \"Answer in one word.\" \"What is the capital of France?\"
  tessera generate --temperature 0.8 --seed 7 --max-tokens 200 \"Once upon a time\"
  cat question.txt | tessera generate --chat -

Greedy unless --temperature is given: the same prompt gives the same text.";

/// Longest prompt read from standard input.
const PROMPT_BYTES_MAX: u64 = 16 << 20;

/// What `tessera generate` takes.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The text to continue; - reads it from standard input
    prompt: String,
    /// Router to ask
    #[arg(long, value_name = "ADDR", default_value = crate::serve::DEFAULT_GRPC)]
    grpc: String,
    /// Model to ask for; the only one served if there is but one
    #[arg(long, default_value = "")]
    model: String,
    /// Longest continuation in tokens
    #[arg(long, value_name = "N", default_value_t = 128)]
    max_tokens: u32,
    /// 0 always takes the likeliest token; higher varies more
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    temperature: f32,
    /// Sample among the likeliest tokens that together have this probability
    #[arg(long, value_name = "P")]
    top_p: Option<f32>,
    /// Sample among this many likeliest tokens
    #[arg(long, value_name = "K")]
    top_k: Option<u32>,
    /// Makes a sampled continuation repeatable
    #[arg(long)]
    seed: Option<u64>,
    /// Text that ends the continuation; may be given several times
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Ask as a user, with the model's chat template, instead of continuing the text
    #[arg(long)]
    chat: bool,
    /// What the model is told before the user's message
    #[arg(long, value_name = "TEXT", requires = "chat")]
    system: Option<String>,
    /// Print token counts to standard error at the end
    #[arg(long)]
    usage: bool,
}

/// Asks and streams.
pub(crate) async fn run(args: Args) -> Result<()> {
    let prompt = read_prompt(&args.prompt)?;
    let channel = channel(&args.grpc, &ChannelOptions::default())?;
    let mut client = InferenceClient::new(channel);
    let stream = if args.chat {
        client.chat(chat_request(&args, prompt)).await
    } else {
        client.generate(generate_request(&args, prompt)).await
    };
    let stream = stream.map_err(|status| explain_status(&args.grpc, &status))?.into_inner();
    let usage = print(&args.grpc, stream).await?;
    if let Some(usage) = usage.filter(|_| args.usage) {
        let Usage { prompt_tokens, cached_tokens, completion_tokens } = usage;
        output::error(&format!(
            "prompt {prompt_tokens} (cached {cached_tokens}), generated {completion_tokens} tokens"
        ));
    }
    Ok(())
}

pub(super) fn read_prompt(prompt: &str) -> Result<String> {
    if prompt != "-" {
        return Ok(prompt.to_owned());
    }
    let mut text = String::new();
    let mut input = std::io::stdin().take(PROMPT_BYTES_MAX + 1);
    input.read_to_string(&mut text).context("cannot read the prompt from standard input")?;
    if text.len() as u64 > PROMPT_BYTES_MAX {
        bail!("the prompt on standard input is longer than {PROMPT_BYTES_MAX} bytes");
    }
    Ok(text)
}

fn generate_request(args: &Args, prompt: String) -> GenerateRequest {
    let prompt = Some(generate_request::Prompt::Text(prompt));
    GenerateRequest { model: args.model.clone(), prompt, options: Some(options(args)) }
}

fn chat_request(args: &Args, prompt: String) -> ChatRequest {
    let message = |role: &str, content: String| Message { role: role.to_owned(), content, name: String::new() };
    let system = args.system.clone().map(|text| message("system", text));
    let messages = system.into_iter().chain([message("user", prompt)]).collect();
    ChatRequest { model: args.model.clone(), messages, options: Some(options(args)), add_generation_prompt: None }
}

fn options(args: &Args) -> Options {
    Options {
        max_tokens: Some(args.max_tokens),
        temperature: Some(args.temperature),
        top_p: args.top_p,
        top_k: args.top_k,
        seed: args.seed,
        stop: args.stop.clone(),
        ..Options::default()
    }
}

/// Prints text as it comes; a reader of ours that goes ends the request too.
async fn print(address: &str, mut stream: Streaming<GenerateResponse>) -> Result<Option<Usage>> {
    let mut usage = None;
    while let Some(piece) = stream.message().await.map_err(|status| explain_status(address, &status))? {
        if !output::piece(&piece.text)? {
            return Ok(None);
        }
        usage = piece.usage.or(usage);
    }
    output::line("")?;
    Ok(usage)
}

/// Tells a router that is not there from one that refuses.
pub(super) fn explain_status(address: &str, status: &Status) -> anyhow::Error {
    // A status that was received has no source; one that the transport made has.
    if status.code() == Code::Unavailable && std::error::Error::source(status).is_some() {
        return anyhow::anyhow!(
            "nothing answers at {address}; start `tessera serve`, or give a router's address with --grpc"
        );
    }
    anyhow::anyhow!("{}", if status.message().is_empty() { status.code().description() } else { status.message() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::parse;

    fn args(line: &[&str]) -> Args {
        parse(line).unwrap()
    }

    #[test]
    fn is_greedy_and_bounded_unless_told_otherwise() {
        let request = generate_request(&args(&["Hi"]), "Hi".to_owned());
        assert_eq!(request.prompt, Some(generate_request::Prompt::Text("Hi".to_owned())));
        let options = request.options.unwrap();
        assert_eq!((options.temperature, options.max_tokens, options.top_p), (Some(0.0), Some(128), None));
    }

    #[test]
    fn a_chat_has_the_system_message_first() {
        let args = args(&["Hi", "--chat", "--system", "Be brief.", "--seed", "7"]);
        let request = chat_request(&args, "Hi".to_owned());
        let messages: Vec<_> = request.messages.iter().map(|m| (m.role.as_str(), m.content.as_str())).collect();
        assert_eq!(messages, [("system", "Be brief."), ("user", "Hi")]);
        assert_eq!(request.options.unwrap().seed, Some(7));
        assert!(parse::<Args>(&["Hi", "--system", "without chat"]).is_err());
    }

    #[tokio::test]
    async fn a_router_that_is_not_there_is_named_with_the_way_out() {
        let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        let error = run(args(&["Hi", "--grpc", &nobody])).await.unwrap_err().to_string();
        assert!(error.contains(&nobody) && error.contains("tessera serve"), "{error}");
    }
}
