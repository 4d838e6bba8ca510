//! Deltas of a stream of random tokens add up to what Hugging Face decodes from all of them.

use std::sync::{Arc, LazyLock};

use proptest::prelude::*;
use router::text::{OutputOptions, OutputText, TextModel};
use serde_json::{Value, json};
use tokenizers::Tokenizer;

use crate::{fixture, from_json, open};

/// All text of a stream whose tokens arrive in `pieces`; checks that no piece ends inside a character.
pub fn stream(model: &Arc<TextModel>, options: OutputOptions, pieces: &[&[u32]]) -> String {
    let mut output = OutputText::new(Arc::clone(model), options);
    let mut text: String = pieces.iter().map(|piece| output.push(piece).text).collect();
    text.push_str(&output.finish());
    text
}

/// Cuts `tokens` into pieces of `sizes`, then the rest.
pub fn in_pieces<'a>(tokens: &'a [u32], sizes: &[usize]) -> Vec<&'a [u32]> {
    let mut rest = tokens;
    let mut pieces = Vec::new();
    for &size in sizes {
        let (piece, after) = rest.split_at(size.min(rest.len()));
        pieces.push(piece);
        rest = after;
    }
    pieces.push(rest);
    pieces
}

struct Pair {
    ours: Arc<TextModel>,
    theirs: Tokenizer,
}

fn pair(json: &Value) -> Pair {
    Pair { ours: open(from_json(json)), theirs: Tokenizer::from_bytes(json.to_string()).unwrap() }
}

fn special(id: usize, content: &str) -> Value {
    json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": true})
}

/// Byte-level: all 256 bytes and a special token.
static BYTES: LazyLock<Pair> = LazyLock::new(|| {
    let mut alphabet: Vec<char> = tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet().into_iter().collect();
    alphabet.sort_unstable();
    let mut vocab: serde_json::Map<String, Value> =
        alphabet.iter().enumerate().map(|(id, char)| (char.to_string(), json!(id))).collect();
    vocab.insert("Ġthe".to_owned(), json!(256));
    vocab.insert("ðŁ".to_owned(), json!(257));
    pair(&json!({
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "added_tokens": [special(258, "<|end|>"), special(259, "<｜全 é｜>")]
    }))
});

/// SentencePiece: words with marks for spaces, then the 256 bytes.
static PIECES: LazyLock<Pair> = LazyLock::new(|| {
    let mut vocab: serde_json::Map<String, Value> = ["▁", "▁a", "b", "é", "▁▁", "c▁d"]
        .iter()
        .enumerate()
        .map(|(id, text)| ((*text).to_owned(), json!(id)))
        .collect();
    vocab.extend((0..256).map(|byte| (format!("<0x{byte:02X}>"), json!(byte + FIRST_BYTE))));
    pair(&json!({
        "model": {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": true},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}
        ]},
        "added_tokens": [special(300, "</s>")]
    }))
});
const FIRST_BYTE: u32 = 6;

static METASPACE: LazyLock<Pair> = LazyLock::new(|| {
    let vocab = json!([["<unk>", 0.0], ["▁", -1.0], ["▁a", -2.0], ["b", -3.0], ["▁▁", -4.0], ["c▁d", -5.0]]);
    pair(&json!({
        "model": {"type": "Unigram", "vocab": vocab, "unk_id": 0},
        "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true},
        "added_tokens": [special(0, "<unk>")]
    }))
});

static WORDS: LazyLock<Pair> = LazyLock::new(|| {
    let path = fixture("tiny/llama/tokenizer.json");
    pair(&serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap())
});

fn check(pair: &Pair, tokens: &[u32], sizes: &[usize], skip_special: bool) -> Result<(), TestCaseError> {
    let decoded = pair.ours.decode(tokens, skip_special);
    let options = OutputOptions { skip_special, ..OutputOptions::default() };
    prop_assert_eq!(&stream(&pair.ours, options, &in_pieces(tokens, sizes)), &decoded);
    prop_assert_eq!(decoded, pair.theirs.decode(tokens, skip_special).unwrap());
    Ok(())
}

/// Tokens of SentencePiece text; a run of bytes is one character, whole or cut off.
fn runs() -> impl Strategy<Value = Vec<u32>> {
    let bytes = |char: char, n_bytes: usize| {
        let mut buffer = [0; 4];
        let text = char.encode_utf8(&mut buffer).as_bytes();
        text[..n_bytes.min(text.len())].iter().map(|&byte| u32::from(byte) + FIRST_BYTE).collect::<Vec<_>>()
    };
    let run = prop_oneof![
        prop::collection::vec(0u32..FIRST_BYTE, 1..3),
        (any::<char>(), 1usize..5, 0u32..FIRST_BYTE).prop_map(move |(char, n_bytes, next)| {
            let mut run = bytes(char, n_bytes);
            run.push(next);
            run
        }),
        Just(vec![300]),
    ];
    (prop::collection::vec(run, 0..8), any::<char>(), 0usize..5).prop_map(move |(runs, last, n_bytes)| {
        let mut tokens = runs.concat();
        // A special token that is left out would join two runs.
        if tokens.last() != Some(&300) {
            tokens.extend(bytes(last, n_bytes));
        }
        tokens
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn byte_level_streams_equal_hugging_face(
        tokens in prop::collection::vec(0u32..262, 0..24),
        sizes in prop::collection::vec(0usize..4, 0..12),
        skip_special: bool,
    ) {
        check(&BYTES, &tokens, &sizes, skip_special)?;
    }

    #[test]
    fn sentencepiece_streams_equal_hugging_face(
        tokens in runs(),
        sizes in prop::collection::vec(0usize..4, 0..12),
        skip_special: bool,
    ) {
        check(&PIECES, &tokens, &sizes, skip_special)?;
    }

    #[test]
    fn metaspace_streams_equal_hugging_face(
        tokens in prop::collection::vec(0u32..7, 0..12),
        sizes in prop::collection::vec(0usize..4, 0..12),
        skip_special: bool,
    ) {
        check(&METASPACE, &tokens, &sizes, skip_special)?;
    }

    #[test]
    fn word_streams_equal_hugging_face(
        tokens in prop::collection::vec(0u32..260, 0..12),
        sizes in prop::collection::vec(0usize..4, 0..12),
        skip_special: bool,
    ) {
        check(&WORDS, &tokens, &sizes, skip_special)?;
    }

    #[test]
    fn streams_of_any_bytes_equal_the_decoded_text(
        tokens in prop::collection::vec(0u32..262, 0..24),
        sizes in prop::collection::vec(0usize..4, 0..12),
    ) {
        let decoded = PIECES.ours.decode(&tokens, false);
        prop_assert_eq!(stream(&PIECES.ours, OutputOptions::default(), &in_pieces(&tokens, &sizes)), decoded);
    }

    #[test]
    fn a_stop_string_ends_the_text_where_a_search_over_all_of_it_would(
        tokens in prop::collection::vec(prop_oneof![0u32..8, 60u32..70, Just(195 + FIRST_BYTE), Just(169 + FIRST_BYTE)], 0..24),
        sizes in prop::collection::vec(0usize..4, 0..12),
        stop in prop::collection::vec("[ abé6]{1,3}", 1..4),
        include_stop: bool,
    ) {
        let whole = PIECES.ours.decode(&tokens, false);
        let first = (0..=whole.len()).filter(|&end| whole.is_char_boundary(end)).find_map(|end| {
            let ending = stop.iter().filter(|stop| whole[..end].ends_with(stop.as_str()));
            ending.map(String::len).max().map(|n_bytes| (end - n_bytes, end))
        });
        let expected = first.map_or(whole.as_str(), |(start, end)| &whole[..if include_stop { end } else { start }]);
        let options = OutputOptions { stop, include_stop, ..OutputOptions::default() };
        prop_assert_eq!(stream(&PIECES.ours, options, &in_pieces(&tokens, &sizes)), expected);
    }
}

#[test]
fn a_character_over_four_tokens_appears_whole_with_its_last_byte() {
    let tokens = "🦊".bytes().map(|byte| u32::from(byte) + FIRST_BYTE).collect::<Vec<_>>();
    let mut output = OutputText::new(Arc::clone(&PIECES.ours), OutputOptions::default());
    let texts: Vec<String> = tokens.iter().map(|&token| output.push(&[token]).text).collect();
    assert_eq!(texts, ["", "", "", "🦊"]);
    assert_eq!(output.finish(), "");
}

#[test]
fn a_character_cut_off_by_the_end_becomes_the_replacement_character() {
    let tokens = "é🦊".bytes().take(4).map(|byte| u32::from(byte) + FIRST_BYTE).collect::<Vec<_>>();
    let mut output = OutputText::new(Arc::clone(&PIECES.ours), OutputOptions::default());
    assert_eq!(output.push(&tokens).text, "é");
    assert_eq!(output.finish(), "\u{FFFD}\u{FFFD}", "one for each byte, as Hugging Face has it");
}

#[test]
fn a_text_that_goes_on_keeps_its_leading_space() {
    let continues = OutputOptions { continues: true, ..OutputOptions::default() };
    assert_eq!(stream(&PIECES.ours, continues.clone(), &[&[1, 1]]), " a a");
    assert_eq!(stream(&PIECES.ours, OutputOptions::default(), &[&[1, 1]]), "a a");
    assert_eq!(stream(&METASPACE.ours, continues, &[&[2, 2]]), " a a");
}
