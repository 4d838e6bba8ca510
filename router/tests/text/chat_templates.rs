//! Renderings equal those of Jinja2 in the environment that transformers makes.

use router::text::{ChatMessage, ChatOptions, TextError, TextModel};
use serde_json::Value;

use crate::{fixture, read_json, words};

fn options(goldens: &Value, variant: &Value) -> ChatOptions {
    let mut variables = variant.as_object().unwrap().clone();
    let add_generation_prompt = variables.remove("add_generation_prompt").unwrap().as_bool().unwrap();
    let tools = variables.remove("tools").map(|tools| tools.as_array().unwrap().clone());
    let now_unix_ms = goldens["now_unix_ms"].as_u64().unwrap();
    ChatOptions { add_generation_prompt, now_unix_ms, tools, variables }
}

#[test]
fn renderings_equal_those_of_jinja2() {
    let goldens = read_json("chat_templates/goldens.json");
    let mut n_texts = 0;
    for case in goldens["cases"].as_array().unwrap() {
        let name = |key: &str| case[key].as_str().unwrap().to_owned();
        let path = fixture("chat_templates").join(name("template") + ".jinja");
        let mut source = words();
        source.chat_template = Some(std::fs::read_to_string(path).unwrap());
        source.bos = Some("<s>".to_owned());
        source.eos = Some("</s>".to_owned());
        let messages: Vec<ChatMessage> =
            serde_json::from_value(goldens["conversations"][&name("conversation")].clone()).unwrap();
        let options = options(&goldens, &goldens["variants"][&name("variant")]);
        let rendered = TextModel::new(source).unwrap().render_chat(&messages, &options);
        let about = format!("{} / {} / {}", name("template"), name("conversation"), name("variant"));
        match (rendered, case["text"].as_str()) {
            (Ok(text), Some(expected)) => assert_eq!(text, expected, "{about}"),
            (Err(TextError::MessagesRefused { message, line }), None) => {
                assert_eq!(message, case["error"], "{about}");
                assert!(line.is_some(), "{about}");
            }
            (rendered, _) => panic!("{about}: {rendered:?}, expected {case}"),
        }
        n_texts += usize::from(case["text"].is_string());
    }
    assert!(n_texts >= 100, "{n_texts} renderings");
}

#[test]
fn a_model_without_a_template_says_so_and_still_encodes() {
    let model = TextModel::new(words()).unwrap();
    assert!(!model.has_chat_template());
    assert_eq!(model.render_chat(&[], &ChatOptions::default()), Err(TextError::MissingChatTemplate));
    assert_eq!(model.encode("a b", None), Ok(vec![1, 2]));
}

#[test]
fn a_broken_template_fails_with_its_line_and_the_model_still_encodes() {
    let mut source = words();
    source.chat_template = Some("{{ ok }}\n{% for x %}".to_owned());
    let model = TextModel::new(source).unwrap();
    let error = model.render_chat(&[], &ChatOptions::default()).unwrap_err();
    assert!(matches!(error, TextError::Template { line: Some(2), .. }), "{error:?}");
    assert_eq!(model.encode("b", None), Ok(vec![2]));
}

#[test]
fn no_messages_are_an_error_of_the_template_and_no_panic() {
    let mut source = words();
    source.chat_template = Some("{{ messages[0].role.upper() }}".to_owned());
    let error = TextModel::new(source).unwrap().render_chat(&[], &ChatOptions::default()).unwrap_err();
    assert!(matches!(error, TextError::Template { line: Some(1), .. }), "{error:?}");
}
