//! Model files, architectures and weights: from a folder or a GGUF file to logits.

pub mod architectures;
pub mod config;
mod decoder;
pub mod files;
mod kv_cache;
mod layers;
mod load;
mod model;
mod names;
pub mod rope;
mod tokenizer;

pub use config::{LayerKind, ModelConfig};
pub use files::error::OpenError;
pub use files::{FileKind, GenerationDefaults, ModelFiles};
pub use kv_cache::{KvCache, KvSpec};
pub use load::{LoadError, LoadOptions, load};
pub use model::Model;
pub use tokenizer::{GgufTokenizer, GgufTokenizerModel, TokenType, TokenizerSource};
