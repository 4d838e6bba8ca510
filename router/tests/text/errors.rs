//! Broken tokenizer.json files are errors, never panics.

use std::sync::Arc;

use models::TokenizerSource;
use router::text::{TextError, TextModel};
use serde_json::json;

use crate::{from_json, source_of, words};

#[test]
fn what_is_not_json_or_no_tokenizer_is_invalid() {
    for json in [&b""[..], b"{", b"[]", b"\xff\xfe", b"{\"model\": {\"type\": \"BPE\"}}", b"{\"version\": \"1.0\"}"] {
        let source = source_of(TokenizerSource::HuggingFace { json: Arc::from(json) });
        let error = TextModel::new(source).unwrap_err();
        assert!(matches!(error, TextError::InvalidTokenizer { .. }), "{error:?}");
    }
}

#[test]
fn merges_longer_than_any_token_are_invalid() {
    let source = from_json(&json!({"model": {"type": "BPE", "vocab": {"aaa": 0, "bbb": 1}, "merges": ["aaa bbb"]}}));
    let error = TextModel::new(source).unwrap_err();
    assert!(matches!(error, TextError::InvalidTokenizer { .. }), "{error:?}");
}

#[test]
fn an_id_beyond_reason_allocates_nothing() {
    let source = from_json(&json!({"model": {"type": "BPE", "vocab": {"a": 4_000_000_000u32}, "merges": []}}));
    let error = TextModel::new(source).unwrap_err();
    assert!(error.to_string().contains("4000000000"), "{error}");
}

#[test]
fn a_decoder_that_needs_neighbours_is_named() {
    let source = from_json(&json!({
        "model": {"type": "WordPiece", "vocab": {"[UNK]": 0, "a": 1}, "unk_token": "[UNK]",
            "continuing_subword_prefix": "##", "max_input_chars_per_word": 100},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true}
    }));
    let error = TextModel::new(source).unwrap_err();
    assert!(error.to_string().contains("WordPiece") && error.to_string().contains("ByteLevel"), "{error}");
}

#[test]
fn tokens_that_do_not_exist_have_no_text() {
    let model = TextModel::new(words()).unwrap();
    assert_eq!(model.decode(&[1, 99, 2, u32::MAX], false), "a b");
    assert_eq!(model.token_text(99), (String::new(), Vec::new()));
    assert!(!model.is_special(u32::MAX));
    assert_eq!(model.vocab_size(), 4);
}

#[test]
fn a_long_text_is_known_as_such() {
    let model = TextModel::new(words()).unwrap();
    assert!(!model.is_long("short"));
    assert!(model.is_long(&"x".repeat(100_000)));
}
