//! Operators of the CPU: each file holds an operator's contract, its plain reference and its dispatch.

pub(crate) mod activation;
pub(crate) mod attention;
pub(crate) mod elementwise;
pub(crate) mod embed;
pub(crate) mod feed_forward;
pub(crate) mod kv;
pub(crate) mod matmul;
pub(crate) mod norm;
pub(crate) mod qkv;
pub(crate) mod rope;
