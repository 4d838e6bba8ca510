//! The state against a naive model.
