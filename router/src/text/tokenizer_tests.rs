//! Texts in parts have the tokens of the whole, for every kind of tokenizer and texts made to be hard to cut.

use std::sync::LazyLock;

use models::{GgufTokenizer, GgufTokenizerModel, TokenType};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use serde_json::{Value, json};

use super::*;
use crate::text::token_bytes::byte_of_char;

/// What texts are put together from.
const PIECES: &[&str] = &[
    "a",
    "be",
    "cat",
    "The",
    "x",
    "é",
    "e\u{301}",
    "\u{301}",
    "ñ",
    " ",
    " ",
    "  ",
    "   \t",
    "\n",
    "\n",
    "\n\n",
    "\r\n",
    " \n ",
    "'s",
    "'LL",
    " 're",
    "'",
    "1",
    "12345",
    " 77",
    "٣",
    "½",
    ".",
    ",",
    ". ",
    "...",
    "!?",
    "\"",
    "(",
    "_",
    "-",
    "/",
    "\\",
    "=",
    "{}",
    "日本",
    "語。",
    "，",
    "中文",
    "한국",
    "\u{1100}\u{1161}",
    "\u{1161}",
    "😀",
    "👩\u{200d}👧",
    "\u{a0}",
    "\u{3000}",
    "\u{212a}",
    "ſ",
    "İ",
    "\u{0}",
    "\u{1b}",
    "\u{feff}",
    "مرحبا",
    "Ελλάς",
    "привет",
    "<|end|>",
    "<|en",
    "d|>",
    "end",
    "then. ",
    "n.",
    " then.",
    "<",
    "|",
    ">",
    "\u{2581}",
    "\u{2581}a",
    "t0",
    " t255",
];

/// Tokenizers that are cut, by name.
static CUT: LazyLock<Vec<(&str, Tokenizer)>> = LazyLock::new(|| {
    let names = ["gpt-2", "smollm", "llama-bpe", "qwen2", "stablelm2", "tekken", "gpt-4o", "deepseek-v3"];
    let mut tokenizers: Vec<_> = names.map(|name| (name, from_gguf(byte_level(name)))).into();
    tokenizers.push(("sentencepiece", from_gguf(sentencepiece(false))));
    tokenizers.push(("sentencepiece with a mark", from_gguf(sentencepiece(true))));
    tokenizers.push(("spaces", from_json(&words("WhitespaceSplit"))));
    tokenizers.push(("words", from_json(&words("Whitespace"))));
    tokenizers
});

/// Tokenizers that are not.
static UNCUT: LazyLock<Vec<(&str, Tokenizer)>> =
    LazyLock::new(|| ["deepseek-llm", "deepseek-coder"].map(|name| (name, from_gguf(byte_level(name)))).into());

fn from_gguf(source: GgufTokenizer) -> Tokenizer {
    Tokenizer::open(&TokenizerSource::Gguf(Box::new(source))).unwrap()
}

fn from_json(json: &Value) -> Tokenizer {
    Tokenizer::open(&TokenizerSource::HuggingFace { json: json.to_string().into_bytes().into() }).unwrap()
}

/// Merges any two bytes of [`PIECES`] in the order of the text, so that tokens tell where each piece begins.
fn byte_level(pre: &str) -> GgufTokenizer {
    let bytes: Vec<char> = ('\0'..'\u{144}').filter(|&char| byte_of_char(char).is_some()).collect();
    let is_used = |char: &&char| PIECES.concat().into_bytes().contains(&byte_of_char(**char).unwrap());
    let used: Vec<char> = bytes.iter().filter(is_used).copied().collect();
    let pairs = || used.iter().flat_map(|left| used.iter().map(move |right| (left, right)));
    let mut tokens: Vec<String> = bytes.iter().map(char::to_string).collect();
    tokens.extend(pairs().map(|(left, right)| format!("{left}{right}")));
    let merges = pairs().map(|(left, right)| format!("{left} {right}")).collect();
    gguf(GgufTokenizerModel::Gpt2, pre, tokens, merges)
}

/// Merges letters and spaces before them; one letter also with a space after it.
fn sentencepiece(add_space_prefix: bool) -> GgufTokenizer {
    let chars: Vec<char> = "abcdehlnorstxT.,123\n▁日本語。".chars().collect();
    let mut tokens: Vec<String> = (0..=255).map(|byte| format!("<0x{byte:02X}>")).collect();
    tokens.extend(chars.iter().map(char::to_string));
    tokens.extend(["e▁", "e▁b", "a.", "▁▁", "\n\n", "▁\n"].map(str::to_owned));
    for right in chars.iter().filter(|char| char.is_alphabetic()) {
        tokens.extend(chars[..12].iter().chain(['▁', '\n', '.'].iter()).map(|left| format!("{left}{right}")));
    }
    GgufTokenizer { add_space_prefix, ..gguf(GgufTokenizerModel::Llama, "default", tokens, Vec::new()) }
}

fn gguf(model: GgufTokenizerModel, pre: &str, mut tokens: Vec<String>, merges: Vec<String>) -> GgufTokenizer {
    let is_byte = |text: &String| text.starts_with("<0x");
    let kind = |text: &String| if is_byte(text) { TokenType::Byte } else { TokenType::Normal };
    let mut token_types: Vec<TokenType> = tokens.iter().map(kind).collect();
    let scores = (0..tokens.len() as u16 + 3).map(|rank| -f32::from(rank)).collect();
    tokens.extend(["<|end|>", "then. ", "<unk>"].map(str::to_owned));
    token_types.extend([TokenType::Control, TokenType::UserDefined, TokenType::Unknown]);
    let last = tokens.len() as u32 - 1;
    GgufTokenizer {
        model,
        pre: pre.to_owned(),
        tokens,
        scores,
        token_types,
        merges,
        bos: Some(last - 2),
        eos: Some(last - 2),
        unk: Some(last),
        pad: None,
        add_bos: true,
        add_eos: true,
        add_space_prefix: false,
    }
}

fn words(pre_tokenizer: &str) -> Value {
    let words = ["[UNK]", "a", "be", "cat", "The", "t0", "t255", "1", "12345", ".", "cat.", "a_"];
    let vocab: serde_json::Map<_, _> =
        words.iter().zip(0..).map(|(word, id)| ((*word).to_owned(), json!(id))).collect();
    let added = json!({"id": 0, "content": "[UNK]", "single_word": false, "lstrip": true, "rstrip": true, "normalized": false, "special": true});
    json!({
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"},
        "pre_tokenizer": {"type": pre_tokenizer},
        "added_tokens": [added],
    })
}

fn texts() -> impl Strategy<Value = String> {
    let pieces = (prop::sample::select(PIECES), 1..4_usize).prop_map(|(piece, times)| piece.repeat(times));
    prop::collection::vec(pieces, 0..60).prop_map(|pieces| pieces.concat())
}

fn whole(tokenizer: &Tokenizer, text: &str) -> Vec<Token> {
    tokenizer.encode_by_library(text, false).unwrap()
}

fn joined(tokenizer: &Tokenizer, parts: &[&str]) -> Vec<Token> {
    let mut tokens = whole(tokenizer, parts[0]);
    for pair in parts.windows(2) {
        let before = pair[0].chars().next_back().filter(|_| cuts(tokenizer).is_start_marked);
        tokens.extend(
            before.map_or_else(|| whole(tokenizer, pair[1]), |char| tokenizer.encode_after(char, pair[1]).unwrap()),
        );
    }
    tokens
}

fn cuts(tokenizer: &Tokenizer) -> &Cuts {
    tokenizer.cuts.as_ref().expect("it can be cut")
}

proptest! {
    #[test]
    fn a_text_in_all_its_parts_has_the_tokens_of_the_whole(text in texts()) {
        for (name, tokenizer) in &*CUT {
            let parts = cuts(tokenizer).split(&text, 1).unwrap();
            prop_assert_eq!(parts.concat(), &*text);
            prop_assert_eq!(joined(tokenizer, &parts), whole(tokenizer, &text), "{} {:?}", name, parts);
        }
    }

    #[test]
    fn a_text_has_the_tokens_that_the_library_gives(text in texts(), add_special: bool) {
        for (name, tokenizer) in CUT.iter().chain(&*UNCUT) {
            let expected = tokenizer.encode_by_library(&text, add_special).unwrap();
            prop_assert_eq!(tokenizer.encode(&text, add_special).unwrap(), expected, "{}", name);
        }
    }

    #[test]
    fn what_is_remembered_of_other_texts_changes_no_token(
        texts in prop::collection::vec((texts(), 0..400_usize), 1..5),
        bytes_max in 1..40_000_usize,
    ) {
        let mut before = String::new();
        let tokenizers = CUT.iter().map(|(_, tokenizer)| (tokenizer, Parts::new(bytes_max)));
        let tokenizers: Vec<_> = tokenizers.collect();
        for (text, n_shared) in texts {
            let text = before[..before.floor_char_boundary(n_shared)].to_owned() + &text;
            for (tokenizer, parts) in &tokenizers {
                let mut found = Vec::new();
                let is_cut = tokenizer.append_parts(&text, 16, parts, &mut found).is_some();
                prop_assert_eq!(is_cut, text.len() > 32);
                if is_cut {
                    prop_assert_eq!(found, whole(tokenizer, &text));
                }
            }
            before = text;
        }
    }
}

#[test]
fn cuts_one_character_too_late_are_found_by_these_texts() {
    let mut runner = TestRunner::deterministic();
    let mut n_found = vec![0; CUT.len()];
    for _ in 0..100 {
        let text = texts().new_tree(&mut runner).unwrap().current();
        for ((_, tokenizer), n_found) in CUT.iter().zip(&mut n_found) {
            let mut parts = cuts(tokenizer).split(&text, 1).unwrap();
            for index in 1..parts.len() {
                let (late, rest) = parts[index].split_at(parts[index].chars().next().map_or(0, char::len_utf8));
                let start = parts[..index].concat().len() - parts[index - 1].len();
                parts[index - 1] = &text[start..start + parts[index - 1].len() + late.len()];
                parts[index] = rest;
            }
            assert_eq!(parts.concat(), text);
            *n_found += usize::from(joined(tokenizer, &parts) != whole(tokenizer, &text));
        }
    }
    for ((name, _), n_found) in CUT.iter().zip(n_found) {
        // Beside white space there is nothing to get wrong.
        assert!(n_found > 20 || *name == "spaces" || *name == "words", "{name}: {n_found} of 100");
    }
}

#[test]
fn shared_parts_are_encoded_once() {
    let tokenizer = from_gguf(byte_level("llama-bpe")).remembering(1 << 20);
    let shared = "All of this is shared, word for word. ".repeat(200);
    let first = format!("{shared}One end");
    assert_eq!(tokenizer.encode(&first, true).unwrap(), tokenizer.encode_by_library(&first, true).unwrap());
    let bytes = tokenizer.parts.bytes();
    let other = format!("{shared}Another end");
    assert_eq!(tokenizer.encode(&other, true).unwrap(), tokenizer.encode_by_library(&other, true).unwrap());
    assert!(bytes > 0 && tokenizer.parts.bytes() < bytes + 6 * PART_BYTES, "only the last part is new");
}

#[test]
fn a_text_without_a_cut_is_encoded_whole() {
    let tokenizer = from_gguf(byte_level("llama-bpe")).remembering(1 << 20);
    let text = "a cat".to_owned() + &" ".repeat(100_000) + "a cat";
    assert!(tokenizer.append_parts(&text, PART_BYTES, &tokenizer.parts, &mut Vec::new()).is_none());
    assert_eq!(tokenizer.encode(&text, true).unwrap(), tokenizer.encode_by_library(&text, true).unwrap());
}

#[test]
fn tokenizers_that_need_the_whole_text_are_not_cut() {
    let single_word = |json: &mut Value| json["added_tokens"][0]["single_word"] = json!(true);
    let strips = |json: &mut Value| json["added_tokens"][0]["content"] = json!("UNK");
    let lowers = |json: &mut Value| json["normalizer"] = json!({"type": "Lowercase"});
    let prefixes = |json: &mut Value| {
        json["pre_tokenizer"] =
            json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true})
    };
    let marks = |json: &mut Value| {
        json["pre_tokenizer"] =
            json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true})
    };
    let unknown = |json: &mut Value| {
        json["pre_tokenizer"] =
            json!({"type": "Split", "pattern": {"Regex": "(?<=a)b"}, "behavior": "Isolated", "invert": false})
    };
    let digits = |json: &mut Value| json["pre_tokenizer"] = json!({"type": "Digits", "individual_digits": true});
    let changes: [&dyn Fn(&mut Value); 7] = [&single_word, &strips, &lowers, &prefixes, &marks, &unknown, &digits];
    for (index, change) in changes.into_iter().enumerate() {
        let mut json = words("WhitespaceSplit");
        change(&mut json);
        assert!(from_json(&json).cuts.is_none(), "change {index}");
    }
    assert!(from_gguf(byte_level("deepseek-llm")).cuts.is_none(), "its patterns look for the end of the text");
}
