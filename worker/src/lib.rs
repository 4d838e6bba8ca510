//! One model replica: gRPC service and engine thread.
