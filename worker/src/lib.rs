//! One model replica: gRPC service, engine thread, executor and sampler.

pub mod sampler;
