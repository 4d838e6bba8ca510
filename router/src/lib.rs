//! Front door: gRPC and OpenAI HTTP, text, placement, streaming.
