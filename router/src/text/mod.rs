//! Everything between text and tokens: tokenizers, chat templates, incremental detokenising and stop strings.
//!
//! Pure: files are read by `models`, time comes in as an argument, and nothing here waits.

mod added;
mod chat_template;
mod cuts;
mod detokenizer;
mod error;
mod frame;
mod gguf_tokenizer;
mod model;
mod output;
mod parts;
mod pieces;
mod pre_tokenizer;
mod python_json;
mod sentencepiece;
mod stop;
mod strftime;
mod token_bytes;
mod tokenizer;
mod words;

pub use chat_template::{ChatMessage, ChatOptions};
pub use error::TextError;
pub use model::{TextModel, TextSource};
pub use output::{OutputOptions, OutputText, StopHit, TextDelta};
