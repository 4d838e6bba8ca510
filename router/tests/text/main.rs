//! The text layer against Hugging Face: templates, real token ids, and streams of random tokens.
#![allow(clippy::unwrap_used, missing_docs, unreachable_pub, reason = "tests")]

mod chat_templates;
mod errors;
mod gguf;
mod prefixes;
mod smollm2;
mod streaming;

use std::path::PathBuf;
use std::sync::Arc;

use models::TokenizerSource;
use router::text::{TextModel, TextSource};

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures").join(name)
}

fn read_json(name: &str) -> serde_json::Value {
    let path = fixture(name);
    let text = std::fs::read(&path).unwrap_or_else(|error| panic!("cannot read {}: {error}", path.display()));
    serde_json::from_slice(&text).unwrap()
}

fn source_of(tokenizer: TokenizerSource) -> TextSource {
    TextSource { tokenizer, chat_template: None, bos: None, eos: None }
}

fn from_json(tokenizer: &serde_json::Value) -> TextSource {
    let json: Arc<[u8]> = tokenizer.to_string().into_bytes().into();
    source_of(TokenizerSource::HuggingFace { json })
}

/// A word-level tokenizer, for tests that need any.
fn words() -> TextSource {
    from_json(&serde_json::json!({
        "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "a": 1, "b": 2, "é": 3}, "unk_token": "[UNK]"},
        "pre_tokenizer": {"type": "Whitespace"},
        "added_tokens": [{"id": 0, "content": "[UNK]", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}]
    }))
}

fn open(source: TextSource) -> Arc<TextModel> {
    Arc::new(TextModel::new(source).unwrap())
}
