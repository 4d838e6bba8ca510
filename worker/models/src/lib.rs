//! Architectures, layers and weights.
