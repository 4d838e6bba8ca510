//! Tensor, Ops and the CPU implementation.
