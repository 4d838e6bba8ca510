//! Texts as token ids for SmolLM2, without a tokenizer.

use std::collections::HashMap;

use models::GgufTokenizer;
use serde::Deserialize;

use super::fixture;

#[derive(Deserialize)]
struct Reference {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    prompt_ids: Vec<u32>,
    output_ids: Vec<u32>,
}

/// The prompts of the greedy reference, each with its continuation.
pub fn conversations() -> Vec<Vec<u32>> {
    let text = std::fs::read_to_string(fixture("smollm2_greedy.json")).expect("the fixture is in the repository");
    let reference: Reference = serde_json::from_str(&text).expect("smollm2_greedy.json");
    reference.cases.into_iter().map(|case| [case.prompt_ids, case.output_ids].concat()).collect()
}

/// The paragraphs of `prose.txt`, each by the longest tokens that spell it: near to what a tokenizer gives.
pub fn paragraphs(tokenizer: &GgufTokenizer) -> Vec<Vec<u32>> {
    let text = std::fs::read_to_string(fixture("prose.txt")).expect("the fixture is in the repository");
    assert!(text.is_ascii(), "other bytes are spelled otherwise in the vocabulary");
    let ids: HashMap<&str, u32> = tokenizer.tokens.iter().map(String::as_str).zip(0..).collect();
    let spelled = text.replace(' ', "\u{120}");
    spelled.split("\n\n").map(|paragraph| longest_tokens(&ids, &paragraph.trim().replace('\n', "\u{10a}"))).collect()
}

fn longest_tokens(ids: &HashMap<&str, u32>, mut text: &str) -> Vec<u32> {
    let mut tokens = Vec::new();
    while !text.is_empty() {
        let ends = text.char_indices().map(|(start, c)| start + c.len_utf8()).take(24);
        let found = ends.filter_map(|end| Some((end, *ids.get(&text[..end])?))).last();
        let (end, token) = found.unwrap_or_else(|| panic!("no token begins {text:?}"));
        tokens.push(token);
        text = &text[end..];
    }
    tokens
}
