//! Asks a Tessera router over gRPC.

use daemon::client::{ChannelOptions, channel};
use daemon::clock;
use proto::inference::v1::inference_client::InferenceClient;
use proto::inference::v1::{
    ChatRequest, GenerateRequest, ListModelsRequest, Message, Options, TokenIds, generate_request,
};
use tonic::transport::Channel;
use tonic::{Code, Status};

use super::ServeError;
use super::client::{Live, Pool};
use super::record::{Failure, Timeline};
use super::sse::Usage;
use super::workload::{Ask, Prompt};

type Client = InferenceClient<Channel>;

/// A router and the connections to it that wait for a request.
pub(crate) struct GrpcClient {
    address: String,
    model: String,
    ignore_eos: bool,
    idle: Pool<Client>,
}

/// A request of either method.
pub(crate) enum GrpcRequest {
    Generate(GenerateRequest),
    Chat(ChatRequest),
}

impl GrpcClient {
    /// Finds the model's name unless it is given.
    pub(crate) async fn new(address: &str, model: Option<&str>, ignore_eos: bool) -> Result<Self, ServeError> {
        let idle = Pool::default();
        let mut client = Self { address: address.to_owned(), model: String::new(), ignore_eos, idle };
        client.model = match model {
            Some(model) => model.to_owned(),
            None => {
                let mut first = client.connect()?;
                let url = address.to_owned();
                let listed = first.list_models(ListModelsRequest {}).await;
                let listed =
                    listed.map_err(|status| ServeError::Models { url: url.clone(), failure: failure(&status) })?;
                let name = listed.into_inner().models.into_iter().next().map(|model| model.name);
                let none = || Failure::Malformed("no model is listed".to_owned());
                name.ok_or_else(|| ServeError::Models { url, failure: none() })?
            }
        };
        Ok(client)
    }

    pub(crate) fn model(&self) -> &str {
        &self.model
    }

    /// Makes the request, so that this costs nothing once the clock runs.
    pub(crate) fn write(&self, ask: Ask) -> GrpcRequest {
        let options = Some(Options {
            max_tokens: Some(ask.output_len),
            temperature: Some(0.0),
            ignore_eos: self.ignore_eos,
            ..Options::default()
        });
        let model = self.model.clone();
        let generate = |prompt| {
            GrpcRequest::Generate(GenerateRequest {
                model: model.clone(),
                prompt: Some(prompt),
                options: options.clone(),
            })
        };
        match ask.prompt {
            Prompt::Tokens(ids) => generate(generate_request::Prompt::Tokens(TokenIds { ids })),
            Prompt::Text(text) => generate(generate_request::Prompt::Text(text)),
            Prompt::Chat(content) => {
                let messages = vec![Message { role: "user".to_owned(), content, name: String::new() }];
                GrpcRequest::Chat(ChatRequest { model, messages, options, add_generation_prompt: None })
            }
        }
    }

    /// Sends a request and reads its answer to the end.
    pub(crate) async fn run(&self, request: GrpcRequest, timeline: &mut Timeline, live: &Live) -> Result<(), Failure> {
        let mut client = match self.idle.take() {
            Some(client) => client,
            None => self.connect().map_err(|error| Failure::Connect(error.to_string()))?,
        };
        let answer = match request {
            GrpcRequest::Generate(request) => client.generate(request).await,
            GrpcRequest::Chat(request) => client.chat(request).await,
        };
        let mut stream = answer.map_err(|status| failure(&status))?.into_inner();
        let mut finished = false;
        while let Some(part) = stream.message().await.map_err(|status| failure(&status))? {
            let now = clock::now();
            if !part.tokens.is_empty() || !part.text.is_empty() {
                timeline.part(now);
                live.part();
            }
            finished |= !part.finish_reason.is_empty();
            if let Some(usage) = part.usage {
                let [prompt_tokens, completion_tokens] = [usage.prompt_tokens, usage.completion_tokens].map(u64::from);
                timeline.usage(Usage { prompt_tokens, completion_tokens });
            }
        }
        if !finished {
            return Err(Failure::Disconnected("the stream has no end".to_owned()));
        }
        timeline.end(clock::now());
        self.idle.put(client);
        Ok(())
    }

    fn connect(&self) -> Result<Client, ServeError> {
        let channel = channel(&self.address, &ChannelOptions::default())?;
        Ok(InferenceClient::new(channel))
    }
}

fn failure(status: &Status) -> Failure {
    let message = || format!("{}: {}", status.code().description(), status.message());
    // A status that was received has no source; one that the transport made has.
    match (status.code(), std::error::Error::source(status).is_some()) {
        (Code::Unavailable, true) => Failure::Connect(message()),
        (_, true) => Failure::Disconnected(message()),
        _ => Failure::Stream(message()),
    }
}
