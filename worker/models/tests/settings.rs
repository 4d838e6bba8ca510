//! Settings that would change what a model computes, or what reading it costs, are honoured or refused by name.
#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs, unreachable_pub, reason = "a test")]

mod support;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;
use std::sync::mpsc;
use std::time::Duration;

use models::{LayerKind, ModelFiles, OpenError};
use serde_json::{Value, json};
use support::{TINY, assert_error, copy_of, edit_config, tiny};

#[test]
fn activations_are_the_ones_that_are_computed_or_refused() {
    for name in TINY {
        let gemma = name == "gemma3_text";
        let (right, wrong): (&[Value], &[Value]) = match gemma {
            true => (&[json!("gelu_pytorch_tanh"), Value::Null], &[json!("gelu"), json!("silu")]),
            false => (&[json!("silu"), json!("swish"), Value::Null], &[json!("gelu"), json!("gelu_pytorch_tanh")]),
        };
        let expected = ModelFiles::open(tiny(name)).unwrap();
        for key in ["hidden_act", "hidden_activation"] {
            let changed = |value: &Value| {
                let folder = copy_of(name);
                edit_config(folder.path(), |config| drop(config.insert(key.into(), value.clone())));
                folder
            };
            for value in right {
                let folder = changed(value);
                assert_eq!(
                    ModelFiles::open(folder.path()).unwrap().config(),
                    expected.config(),
                    "{name} {key} {value}"
                );
            }
            for value in wrong.iter().chain([&json!("relu"), &json!(["silu"]), &json!(1)]) {
                assert_error(changed(value).path(), &["config.json", key, value.as_str().unwrap_or_default()]);
            }
        }
    }
}

#[test]
fn a_nested_activation_is_read_too() {
    let folder = copy_of("gemma3_text");
    edit_config(folder.path(), |config| {
        let mut text = config.clone();
        text.insert("hidden_activation".into(), "relu".into());
        *config = json!({"model_type": "gemma3", "text_config": text}).as_object().unwrap().clone();
    });
    assert_error(folder.path(), &["hidden_activation", "relu", "gelu_pytorch_tanh"]);
}

#[test]
fn layers_slide_from_max_window_layers_on() {
    use LayerKind::{Full, Sliding};
    let open = |first: Value| {
        let folder = copy_of("qwen2");
        edit_config(folder.path(), |config| {
            config.remove("layer_types");
            config.insert("use_sliding_window".into(), true.into());
            config.insert("sliding_window".into(), 8.into());
            config.insert("max_window_layers".into(), first);
        });
        ModelFiles::open(folder.path()).map(|files| files.config().layers.clone())
    };
    let n_layers = ModelFiles::open(tiny("qwen2")).unwrap().config().n_layers();
    assert_eq!(open(0.into()).unwrap(), vec![Sliding; n_layers]);
    let mut upper = vec![Sliding; n_layers];
    upper[0] = Full;
    assert_eq!(open(1.into()).unwrap(), upper);
    assert_eq!(open(4096.into()).unwrap(), vec![Full; n_layers]);
    for wrong in [json!(-1), json!(4097), json!("all")] {
        let error = open(wrong).unwrap_err().to_string();
        assert!(error.contains("max_window_layers") && error.contains("from 0 to 4096"), "{error}");
    }
}

#[test]
fn scalings_that_turn_no_position_are_refused() {
    let cases = [
        (json!({"rope_type": "linear", "factor": 1e-300}), "rope frequency"),
        (json!({"rope_type": "linear", "factor": 1e-38}), "rope frequency"),
        (
            json!({"rope_type": "llama3", "factor": 1e-300, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8}),
            "rope frequency",
        ),
        (json!({"rope_type": "yarn", "factor": 1e-300, "original_max_position_embeddings": 128}), "rope frequency"),
        (json!({"rope_type": "yarn", "factor": 4.0, "attention_factor": 1e300}), "rope amplitude"),
        (json!({"rope_type": "yarn", "factor": 4.0, "attention_factor": 1e-300}), "rope amplitude"),
    ];
    for (scaling, key) in cases {
        let folder = copy_of("llama");
        edit_config(folder.path(), |config| {
            config.remove("rope_parameters");
            config.insert("rope_scaling".into(), scaling);
        });
        assert_error(folder.path(), &[key]);
    }
    let folder = copy_of("qwen3");
    edit_config(folder.path(), |config| drop(config.insert("head_dim".into(), (1 << 20).into())));
    assert_error(folder.path(), &["head dimension", "1048576"]);
}

#[test]
fn devices_pipes_and_folders_are_not_read() {
    let settings =
        ["config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"];
    let others = ["generation_config.json", "model.safetensors"];
    type Put = fn(&Path);
    let puts: [Put; 3] = [
        |path| symlink("/dev/zero", path).unwrap(),
        |path| assert!(Command::new("mkfifo").arg(path).status().unwrap().success()),
        |path| fs::create_dir(path).unwrap(),
    ];
    for file in settings.into_iter().chain(others) {
        for put in puts {
            let folder = copy_of("llama");
            let path = folder.path().join(file);
            drop(fs::remove_file(&path));
            put(&path);
            match open_in_time(folder.path()) {
                OpenError::NotAFile { path: named } => assert_eq!(named, path),
                OpenError::Io { path: named, source } => {
                    assert_eq!((file, named), ("model.safetensors", path));
                    assert_eq!(source.kind(), std::io::ErrorKind::InvalidInput);
                }
                other => panic!("{file}: {other}"),
            }
        }
    }
}

/// Opens on another thread, since what waits for a pipe never comes back.
fn open_in_time(path: &Path) -> OpenError {
    let (sender, receiver) = mpsc::channel();
    let path = path.to_owned();
    std::thread::spawn(move || sender.send(ModelFiles::open(path).map(|_| ())));
    receiver.recv_timeout(Duration::from_secs(60)).expect("opening does not wait").expect_err("it must not open")
}
