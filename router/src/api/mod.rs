//! The two ways in: gRPC, and HTTP as OpenAI's clients speak it.

pub(crate) mod grpc;
pub(crate) mod openai;
mod span;
