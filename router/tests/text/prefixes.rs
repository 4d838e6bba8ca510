//! Texts that share their beginning are encoded as if each were the first, only faster.

use std::sync::{Arc, LazyLock};
use std::time::Instant;

use models::ModelFiles;
use proptest::prelude::*;
use router::text::TextModel;

use crate::fixture;
use crate::smollm2::{MODEL, open_model};

static REMEMBERING: LazyLock<Arc<TextModel>> = LazyLock::new(|| Arc::new(open_model().remembering(1 << 20)));

const PIECES: &[&str] = &[
    "The ferry left the harbour",
    " a little",
    " after six",
    ", ",
    ". ",
    "\n",
    "\n\n",
    "    return n * f(n - 1)\n",
    "<|im_end|>\n",
    "<|im_start|>user\n",
    "12,345.67",
    " ",
    "    ",
    "naïve",
    "日本語。",
    "中文，",
    "😀",
    "it's",
    "'",
    "\t",
    "e\u{301}",
    "\u{0}",
];

fn texts() -> impl Strategy<Value = String> {
    let piece = (prop::sample::select(PIECES), 1..30_usize).prop_map(|(piece, times)| piece.repeat(times));
    prop::collection::vec(piece, 0..100).prop_map(|pieces| pieces.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn a_remembered_beginning_changes_no_token(first in texts(), share in 0.0..1.0_f64, second in texts()) {
        let n_shared = first.floor_char_boundary((first.len() as f64 * share) as usize);
        let second = first[..n_shared].to_owned() + &second;
        for text in [&first, &second, &first] {
            for add_special in [None, Some(false)] {
                prop_assert_eq!(REMEMBERING.encode(text, add_special), MODEL.encode(text, add_special));
            }
        }
    }
}

/// About `n_bytes` of prose in an order and with numbers that `seed` decides.
fn prose(n_bytes: usize, mut seed: u64) -> String {
    let prose = std::fs::read_to_string(fixture("prose.txt")).unwrap();
    let sentences: Vec<&str> = prose.split_inclusive(". ").collect();
    let mut text = String::new();
    while text.len() < n_bytes {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        text.push_str(sentences[(seed >> 33) as usize % sentences.len()]);
        text.push_str(&format!("Item {:x} of {}: ", seed >> 40, seed >> 50));
    }
    text
}

#[test]
#[ignore = "prints speeds; wants an idle core"]
#[expect(clippy::disallowed_methods, clippy::print_stderr, reason = "a measurement is about time and is printed")]
fn speed_of_prompts_that_share_nine_tenths() {
    let path = std::env::var_os("TOKENIZER").or_else(|| std::env::var_os("TESSERA_TEST_MODEL")).unwrap();
    let files = ModelFiles::open(path).unwrap();
    let (plain, remembering) =
        (TextModel::open(&files).unwrap(), TextModel::open(&files).unwrap().remembering(64 << 20));
    let shared = prose(198_000, 1);
    let prompts: Vec<String> = (2..22).map(|seed| shared.clone() + &prose(22_000, seed)).collect();
    for (name, model) in [("plain", &plain), ("remembering", &remembering)] {
        model.encode(&prompts[0], None).unwrap();
        let start = Instant::now();
        let n_tokens: usize = prompts[1..].iter().map(|prompt| model.encode(prompt, None).unwrap().len()).sum();
        let seconds = start.elapsed().as_secs_f64();
        let n_prompts = (prompts.len() - 1) as f64;
        eprintln!("{name}: {:.1} prompts/s, {:.0} tokens each", n_prompts / seconds, n_tokens as f64 / n_prompts);
    }
    for short in [&prompts[2][shared.len()..][..600], "Hi."] {
        let start = Instant::now();
        for _ in 0..1_000 {
            plain.encode(short, None).unwrap();
        }
        eprintln!("{} bytes: {:.1} µs", short.len(), start.elapsed().as_secs_f64() * 1e3);
    }
}
