//! Real models from GGUF: SmolLM2 token for token, Gemma 3 by what it knows.
#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs, unreachable_pub, reason = "a test")]

mod support;

use models::{GgufTokenizer, GgufTokenizerModel, ModelFiles, TokenType, TokenizerSource};
use serde::Deserialize;
use support::runner::{Runner, best};
use support::{fixture, seed};

/// Gap between the reference's two best logits above which the choice must be the same.
const GAP_MIN: f32 = 0.25;

#[derive(Deserialize)]
struct Reference {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    prompt: String,
    prompt_ids: Vec<u32>,
    output_ids: Vec<u32>,
    top2_gap: Vec<f32>,
}

fn smollm2() -> ModelFiles {
    let Some(path) = std::env::var_os("TESSERA_TEST_MODEL") else {
        panic!("TESSERA_TEST_MODEL is not set: run this through `cargo xtask test`, which fetches the model");
    };
    ModelFiles::open(path).unwrap()
}

fn smollm2_follows_the_reference(f32_mode: bool) {
    let files = smollm2();
    let text = std::fs::read_to_string(fixture("smollm2_greedy.json")).unwrap();
    let reference: Reference = serde_json::from_str(&text).unwrap();
    let longest = reference.cases.iter().map(|case| case.prompt_ids.len() + case.output_ids.len()).max().unwrap();
    let mut runner = Runner::new(&files, f32_mode, longest, seed(5));
    assert_eq!(reference.cases.len(), 6);
    for case in &reference.cases {
        runner.restart();
        let (n_prompt, n_output) = (case.prompt_ids.len(), case.output_ids.len());
        let mut tokens = case.prompt_ids.clone();
        tokens.extend(&case.output_ids[..n_output - 1]);
        let choices: Vec<u32> =
            runner.run(&tokens, n_prompt - 1..tokens.len()).iter().map(|logits| best(logits)).collect();
        let compared = (0..n_output).filter(|&index| case.top2_gap[index] > GAP_MIN);
        let wrong: Vec<usize> = compared.clone().filter(|&index| choices[index] != case.output_ids[index]).collect();
        println!("{:?}: {} of {n_output} tokens compared", case.prompt, compared.count());
        assert!(wrong.is_empty(), "{:?}: other choices at {wrong:?}: {choices:?}", case.prompt);
    }
}

#[test]
fn smollm2_in_f32_follows_the_reference() {
    smollm2_follows_the_reference(true);
}

#[test]
fn smollm2_in_bf16_follows_the_reference() {
    smollm2_follows_the_reference(false);
}

#[test]
fn smollm2_tells_tokenizer_template_and_stop_tokens() {
    let files = smollm2();
    let TokenizerSource::Gguf(tokenizer) = files.tokenizer() else { panic!("a GGUF tokenizer") };
    assert_eq!((tokenizer.model, tokenizer.pre.as_str()), (GgufTokenizerModel::Gpt2, "smollm"));
    assert_eq!((tokenizer.tokens.len(), tokenizer.merges.len()), (49152, 48900));
    assert_eq!((tokenizer.bos, tokenizer.eos, tokenizer.unk, tokenizer.pad), (Some(1), Some(2), Some(0), Some(2)));
    assert!(!tokenizer.add_bos && !tokenizer.add_eos && !tokenizer.add_space_prefix);
    assert_eq!(tokenizer.token_types[..3], [TokenType::Control; 3]);
    assert_eq!((files.bos_text(), files.eos_text()), (Some("<|im_start|>"), Some("<|im_end|>")));
    assert_eq!(files.stop_token_ids(), [0, 2], "end of text and end of turn");
    assert!(files.chat_template().unwrap().contains("<|im_start|>"));
    let config = files.config();
    assert_eq!((config.n_layers(), config.n_heads, config.n_kv_heads, config.head_dim), (30, 9, 3, 64));
    assert_eq!((config.context_length, config.vocab_size, config.tie_embeddings), (8192, 49152, true));
    assert_eq!(smollm2().model_fingerprint(), files.model_fingerprint());
}

#[test]
fn gemma3_knows_the_capital_of_france() {
    let Some(path) = std::env::var_os("TESSERA_TEST_GEMMA") else {
        println!("skipped: TESSERA_TEST_GEMMA is not set (`cargo xtask setup --tests` fetches that model)");
        return;
    };
    let files = ModelFiles::open(path).unwrap();
    let TokenizerSource::Gguf(tokenizer) = files.tokenizer() else { panic!("a GGUF tokenizer") };
    let mut prompt = vec![tokenizer.bos.expect("gemma has one")];
    let words =
        "The| capital| of| Germany| is| Berlin|.| The| capital| of| Italy| is| Rome|.| The| capital| of| France| is";
    prompt.extend(words.split('|').map(|word| token(tokenizer, word)));
    for f32_mode in [false, true] {
        let mut runner = Runner::new(&files, f32_mode, 64, seed(5));
        let last = runner.run(&prompt, prompt.len() - 1..prompt.len()).remove(0);
        let answer: String =
            runner.greedy(last, 12).iter().map(|&id| tokenizer.tokens[id as usize].replace('\u{2581}', " ")).collect();
        println!("{answer:?}");
        assert!(answer.starts_with(" Paris."), "{answer:?}");
    }
}

/// SentencePiece writes a space as U+2581.
fn token(tokenizer: &GgufTokenizer, word: &str) -> u32 {
    let piece = word.replace(' ', "\u{2581}");
    tokenizer.tokens.iter().position(|token| *token == piece).expect("a common word is one token") as u32
}
