//! Model files, architectures and weights: from a folder or a GGUF file to logits.

pub mod architectures;
pub mod config;
pub mod files;
mod names;
pub mod rope;
pub mod tokenizer;

pub use config::{LayerKind, ModelConfig};
pub use files::error::OpenError;
pub use files::{FileKind, GenerationDefaults, ModelFiles};
pub use tokenizer::{GgufTokenizer, GgufTokenizerModel, TokenType, TokenizerSource};
