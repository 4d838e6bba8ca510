//! The gRPC API with the same answers and typed errors.

use proto::inference::v1::generate_request::Prompt;
use proto::inference::v1::{
    ChatRequest, DetokenizeRequest, GenerateRequest, GenerateResponse, Message, Options, TokenIds, TokenizeRequest,
};
use tonic::Code;

use crate::place::Place;

fn options() -> Options {
    Options { max_tokens: Some(3), ..Options::default() }
}

async fn all(mut stream: tonic::Streaming<GenerateResponse>) -> Vec<GenerateResponse> {
    let mut parts = Vec::new();
    while let Some(part) = stream.message().await.unwrap() {
        parts.push(part);
    }
    parts
}

#[tokio::test(flavor = "multi_thread")]
async fn generates_and_chats_with_usage_last() {
    let place = Place::start(1).await;
    let mut client = place.inference().await;
    let tokens = client.tokenize(TokenizeRequest { text: "t3 t4".to_owned(), ..TokenizeRequest::default() }).await;
    assert_eq!(tokens.unwrap().into_inner().tokens, [3, 4]);
    let text = client.detokenize(DetokenizeRequest { tokens: vec![3, 4], ..DetokenizeRequest::default() }).await;
    assert_eq!(text.unwrap().into_inner().text, "t3 t4");
    let prompt = Some(Prompt::Tokens(TokenIds { ids: vec![3, 4] }));
    let request = GenerateRequest { model: String::new(), prompt, options: Some(options()) };
    let parts = all(client.generate(request).await.unwrap().into_inner()).await;
    assert_eq!(parts.iter().flat_map(|part| part.tokens.clone()).collect::<Vec<_>>(), [10, 11, 12]);
    assert_eq!(parts.last().unwrap().usage.as_ref().unwrap().completion_tokens, 3);
    let message = Message { role: "user".to_owned(), content: "t3".to_owned(), name: String::new() };
    let request = ChatRequest { messages: vec![message], options: Some(options()), ..ChatRequest::default() };
    let parts = all(client.chat(request).await.unwrap().into_inner()).await;
    assert_eq!(parts.iter().map(|part| part.text.as_str()).collect::<String>(), "t10 t11 t12");
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_are_typed() {
    let place = Place::start(1).await;
    let mut client = place.inference().await;
    let text = |text: &str| Some(Prompt::Text(text.to_owned()));
    let with = |options| Some(options);
    for (model, prompt, options, code) in [
        ("other", text("t3"), None, Code::NotFound),
        ("", text(""), None, Code::InvalidArgument),
        ("", None, None, Code::InvalidArgument),
        ("", text("t3"), with(Options { temperature: Some(-1.0), ..options() }), Code::InvalidArgument),
        ("", text("t3"), with(Options { n: Some(0), ..options() }), Code::InvalidArgument),
        ("", text("t3"), with(Options { adapter: "a".to_owned(), ..options() }), Code::Unimplemented),
    ] {
        let request = GenerateRequest { model: model.to_owned(), prompt, options };
        assert_eq!(client.generate(request).await.unwrap_err().code(), code);
    }
}
