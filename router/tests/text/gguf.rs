//! Tokenizers rebuilt from GGUF metadata, on vocabularies small enough to check by hand.

use models::{GgufTokenizer, GgufTokenizerModel, TokenType, TokenizerSource};
use router::text::{TextError, TextModel};

use crate::source_of;

fn sentencepiece() -> GgufTokenizer {
    let mut tokens = vec![("<unk>".to_owned(), 0.0, TokenType::Unknown), ("<s>".to_owned(), 0.0, TokenType::Control)];
    tokens.push(("</s>".to_owned(), 0.0, TokenType::Control));
    tokens.push(("  ".to_owned(), 0.0, TokenType::UserDefined));
    tokens.extend((0..=255).map(|byte| (format!("<0x{byte:02X}>"), 0.0, TokenType::Byte)));
    let pieces = ["▁", "a", "b", "c", "bc", "ab", "▁a", "▁ab", "abc"];
    tokens.extend(
        pieces.iter().zip(1i16..).map(|(text, rank)| ((*text).to_owned(), -f32::from(rank), TokenType::Normal)),
    );
    GgufTokenizer {
        model: GgufTokenizerModel::Llama,
        pre: "default".to_owned(),
        tokens: tokens.iter().map(|(text, ..)| text.clone()).collect(),
        scores: tokens.iter().map(|(_, score, _)| *score).collect(),
        token_types: tokens.iter().map(|(.., kind)| *kind).collect(),
        merges: Vec::new(),
        bos: Some(1),
        eos: Some(2),
        unk: Some(0),
        pad: None,
        add_bos: true,
        add_eos: false,
        add_space_prefix: true,
    }
}

fn open(source: GgufTokenizer) -> Result<TextModel, TextError> {
    TextModel::new(source_of(TokenizerSource::Gguf(Box::new(source))))
}

fn spell(model: &TextModel, text: &str, add_special: Option<bool>) -> Vec<String> {
    let tokens = model.encode(text, add_special).unwrap();
    tokens.iter().map(|&token| model.token_spelling(token).into_owned()).collect()
}

#[test]
fn sentencepiece_merges_by_score_and_falls_back_to_bytes() {
    let model = open(sentencepiece()).unwrap();
    assert_eq!(spell(&model, "abc", None), ["<s>", "▁a", "bc"]);
    assert_eq!(spell(&model, "abc ab", Some(false)), ["▁a", "bc", "▁ab"]);
    assert_eq!(spell(&model, "é", Some(false)), ["▁", "<0xC3>", "<0xA9>"]);
    for text in ["abc ab", "é a", " a", "x</s>"] {
        assert_eq!(model.decode(&model.encode(text, Some(false)).unwrap(), false), text);
    }
}

#[test]
fn without_a_space_prefix_added_spaces_come_back_as_they_were() {
    let model = open(GgufTokenizer { add_space_prefix: false, ..sentencepiece() }).unwrap();
    assert_eq!(spell(&model, "a  b", Some(false)), ["a", "  ", "b"]);
    assert_eq!(model.decode(&model.encode("  a  b ", Some(false)).unwrap(), false), "  a  b ");
}

#[test]
fn added_tokens_are_matched_whole_and_control_tokens_are_special() {
    let model = open(sentencepiece()).unwrap();
    assert_eq!(spell(&model, "a</s>b", Some(false)), ["▁a", "</s>", "▁", "b"]);
    let tokens = model.encode("a  </s>", Some(false)).unwrap();
    assert_eq!(tokens.iter().map(|&token| model.is_special(token)).collect::<Vec<_>>(), [false, false, true]);
}

#[test]
fn bos_and_eos_are_added_as_the_file_says() {
    let with_eos = GgufTokenizer { add_bos: false, add_eos: true, add_space_prefix: false, ..sentencepiece() };
    assert_eq!(spell(&open(with_eos).unwrap(), "a", None), ["a", "</s>"]);
    let with_neither = GgufTokenizer { add_bos: false, ..sentencepiece() };
    assert_eq!(spell(&open(with_neither).unwrap(), "a", None), ["▁a"]);
}

fn byte_level() -> GgufTokenizer {
    let tokens = ["a", "b", "1", "Ġ", "ab", "Ġab", "<|end|>"].map(str::to_owned).to_vec();
    let mut token_types = vec![TokenType::Normal; tokens.len()];
    token_types[6] = TokenType::Control;
    GgufTokenizer {
        model: GgufTokenizerModel::Gpt2,
        pre: "smollm".to_owned(),
        scores: Vec::new(),
        merges: ["a b", "Ġ ab"].map(str::to_owned).to_vec(),
        add_bos: false,
        add_space_prefix: false,
        tokens,
        token_types,
        unk: None,
        ..sentencepiece()
    }
}

#[test]
fn byte_level_merges_and_cuts_as_the_named_pre_tokenizer_does() {
    let model = open(byte_level()).unwrap();
    assert_eq!(spell(&model, "ab ab11<|end|>", None), ["ab", "Ġab", "1", "1", "<|end|>"]);
    assert_eq!(model.token_text(5), (" ab".to_owned(), b" ab".to_vec()));
    assert_eq!(model.decode(&[5, 6], true), " ab");
}

#[test]
fn a_pre_tokenizer_that_is_not_known_is_named() {
    let error = open(GgufTokenizer { pre: "porridge".to_owned(), ..byte_level() }).unwrap_err();
    assert!(matches!(&error, TextError::UnsupportedTokenizer { found, .. } if found == "porridge"), "{error:?}");
}

#[test]
fn metadata_that_contradicts_itself_is_an_error() {
    let merges =
        |merges: &[&str]| GgufTokenizer { merges: merges.iter().map(|&m| m.to_owned()).collect(), ..byte_level() };
    let broken = [
        GgufTokenizer { tokens: Vec::new(), ..byte_level() },
        GgufTokenizer { token_types: vec![TokenType::Normal], ..byte_level() },
        GgufTokenizer { scores: vec![0.0], ..sentencepiece() },
        GgufTokenizer { scores: Vec::new(), ..sentencepiece() },
        GgufTokenizer { bos: Some(7), ..byte_level() },
        GgufTokenizer { bos: None, ..sentencepiece() },
        merges(&[]),
        merges(&["a"]),
        merges(&["a "]),
        merges(&["a z"]),
        merges(&["<|end|> <|end|>"]),
    ];
    for source in broken {
        let about = format!("{source:?}");
        match open(source) {
            Err(TextError::InvalidTokenizer { .. } | TextError::MissingTokenizer { .. }) => {}
            other => panic!("{:?} from {about:.300}", other.map(|_| ())),
        }
    }
}

#[test]
fn two_tokens_of_one_text_both_decode() {
    let mut source = byte_level();
    source.tokens.push("ab".to_owned());
    source.token_types.push(TokenType::Normal);
    let model = open(source).unwrap();
    assert_eq!(model.encode("ab", None), Ok(vec![4]));
    assert_eq!(model.decode(&[4, 7], false), "abab");
}
