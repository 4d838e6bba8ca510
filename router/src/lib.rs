//! Front door: gRPC and OpenAI HTTP, text, placement, streaming.

pub mod text;
