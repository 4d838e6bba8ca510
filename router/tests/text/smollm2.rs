//! The tokenizer rebuilt from SmolLM2's GGUF file gives the tokens, prompts and texts of Hugging Face.

use std::sync::{Arc, LazyLock};

use models::ModelFiles;
use proptest::prelude::*;
use router::text::{ChatMessage, ChatOptions, OutputOptions, OutputText, TextModel};
use serde_json::Value;

use crate::read_json;
use crate::streaming::{in_pieces, stream};

pub static MODEL: LazyLock<Arc<TextModel>> = LazyLock::new(|| Arc::new(open_model()));

pub fn open_model() -> TextModel {
    let Some(path) = std::env::var_os("TESSERA_TEST_MODEL") else {
        panic!("TESSERA_TEST_MODEL is not set: run this through `cargo xtask test`, which fetches the model");
    };
    TextModel::open(&ModelFiles::open(path).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

#[test]
fn prompts_of_the_reference_have_its_text_and_ids() {
    let reference = read_json("smollm2_greedy.json");
    for case in reference["cases"].as_array().unwrap() {
        let prompt = case["prompt"].as_str().unwrap();
        let text = match case["kind"] == "chat" {
            true => MODEL.render_chat(&[ChatMessage::new("user", prompt)], &ChatOptions::default()).unwrap(),
            false => prompt.to_owned(),
        };
        assert_eq!(text, case["text"]);
        assert_eq!(MODEL.encode(&text, Some(false)).unwrap(), ids(&case["prompt_ids"]), "{prompt:?}");
        assert_eq!(MODEL.encode(&text, None).unwrap(), ids(&case["prompt_ids"]), "the model adds no BOS");
    }
}

#[test]
fn outputs_of_the_reference_decode_to_its_text() {
    let reference = read_json("smollm2_greedy.json");
    for case in reference["cases"].as_array().unwrap() {
        let expected = case["output_text"].as_str().unwrap();
        let output = ids(&case["output_ids"]);
        assert_eq!(MODEL.decode(&output, false), expected);
        assert_eq!(stream(&MODEL, OutputOptions::default(), &[&output]), expected);
    }
}

#[test]
fn odd_strings_have_the_ids_of_hugging_face_and_come_back_whole() {
    let cases = read_json("tokenizer/smollm2_ids.json");
    for case in cases.as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        let expected = ids(&case["ids"]);
        assert_eq!(MODEL.encode(text, Some(false)).unwrap(), expected, "{text:?}");
        assert_eq!(MODEL.decode(&expected, false), text);
    }
}

#[test]
fn special_tokens_are_known_and_left_out_on_request() {
    let tokens = MODEL.encode("a<|im_end|>b", None).unwrap();
    assert_eq!(tokens.iter().map(|&token| MODEL.is_special(token)).collect::<Vec<_>>(), [false, true, false]);
    assert_eq!(MODEL.decode(&tokens, true), "ab");
    assert_eq!(MODEL.token_text(tokens[1]), ("<|im_end|>".to_owned(), b"<|im_end|>".to_vec()));
    assert_eq!(MODEL.vocab_size(), 49152);
}

#[test]
fn the_token_that_completes_a_stop_string_is_counted() {
    let tokens = MODEL.encode("The answer is 42. Next question: 43", None).unwrap();
    let stop = vec!["never".to_owned(), ". Next".to_owned()];
    let mut output = OutputText::new(Arc::clone(&MODEL), OutputOptions { stop, ..OutputOptions::default() });
    let delta = output.push(&tokens);
    assert_eq!(delta.text, "The answer is 42");
    let hit = delta.stopped.unwrap();
    assert_eq!(hit.stop, ". Next");
    assert_eq!(MODEL.decode(&tokens[..hit.n_tokens], false), "The answer is 42. Next");
    assert_eq!(output.push(&tokens), router::text::TextDelta::default());
    assert_eq!(output.finish(), "");
}

proptest! {
    #[test]
    fn any_text_survives_encoding_and_decoding(text in "\\PC{0,60}") {
        let tokens = MODEL.encode(&text, Some(false)).unwrap();
        prop_assert_eq!(MODEL.decode(&tokens, false), text);
    }

    #[test]
    fn streamed_text_is_the_decoded_text_however_tokens_arrive(
        tokens in prop::collection::vec(0u32..49152, 0..40),
        sizes in prop::collection::vec(0usize..5, 0..20),
        skip_special: bool,
    ) {
        let options = OutputOptions { skip_special, ..OutputOptions::default() };
        let streamed = stream(&MODEL, options, &in_pieces(&tokens, &sizes));
        prop_assert_eq!(streamed, MODEL.decode(&tokens, skip_special));
    }
}
