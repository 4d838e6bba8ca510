//! What opening model files tells, and that no damage to them panics or allocates without bound.
#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs, unreachable_pub, reason = "a test")]

mod support;

use std::fs;
use std::path::Path;
use std::sync::Arc;

use kernels::{DryRun, StepLimits};
use models::files::gguf::{Gguf, GgufError, Value};
use models::rope::RopeScaling;
use models::{FileKind, GgufTokenizerModel, LayerKind, LoadOptions, ModelFiles, OpenError, TokenizerSource, load};
use support::gguf_writer::{GgufWriter, Meta};
use support::{Random, TINY, assert_error, convert, copy_of, edit_config, seed, tiny};
use tempfile::TempDir;

#[test]
fn folders_of_every_architecture_open() {
    for name in TINY {
        let files = ModelFiles::open(tiny(name)).unwrap();
        let config = files.config();
        assert_eq!(files.kind(), FileKind::HuggingFace);
        assert_eq!((config.hidden_size, config.vocab_size, config.context_length), (64, 256, 512), "{name}");
        assert_eq!(files.stop_token_ids(), [2]);
        assert_eq!((files.bos_text(), files.eos_text()), (Some("t1"), Some("t2")));
        assert_eq!(files.suggested_name(), name);
        assert_eq!(config.tie_embeddings, matches!(name, "llama3_rope" | "gemma3_text"));
    }
    let llama3 = ModelFiles::open(tiny("llama3_rope")).unwrap();
    assert!(matches!(llama3.config().rope_full.scaling, RopeScaling::Llama3 { factor: 8.0, .. }));
    let gemma = ModelFiles::open(tiny("gemma3_text")).unwrap();
    assert_eq!(gemma.config().layers[4..], [LayerKind::Sliding, LayerKind::Full]);
    assert_eq!((gemma.config().rope_full.theta, gemma.config().rope_sliding.theta), (1e6, 1e4));
    assert!(ModelFiles::open(tiny("qwen2")).unwrap().config().qkv_bias);
    assert_eq!(ModelFiles::open(tiny("qwen3")).unwrap().config().head_dim, 32);
    assert_eq!(ModelFiles::open(tiny("mistral")).unwrap().config().window(0), Some(16));
}

#[test]
fn published_rope_keys_mean_what_rope_parameters_mean() {
    for name in ["llama3_rope", "gemma3_text"] {
        let written = ModelFiles::open(tiny(name)).unwrap();
        let folder = copy_of(name);
        edit_config(folder.path(), |config| {
            config.remove("rope_parameters");
            config.remove("layer_types");
            if name == "gemma3_text" {
                config.insert("rope_theta".into(), 1e6.into());
                config.insert("rope_local_base_freq".into(), 1e4.into());
            } else {
                config.insert("rope_theta".into(), 5e5.into());
                let scaling = serde_json::json!({"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0, "original_max_position_embeddings": 128});
                config.insert("rope_scaling".into(), scaling);
            }
        });
        let published = ModelFiles::open(folder.path()).unwrap();
        assert_eq!(published.config(), written.config());
        assert_eq!(published.model_fingerprint(), written.model_fingerprint());
    }
}

#[test]
fn a_language_model_nested_in_a_multimodal_config_opens() {
    let folder = copy_of("gemma3_text");
    edit_config(folder.path(), |config| {
        let text = serde_json::Value::Object(config.clone());
        config.clear();
        config.insert("model_type".into(), "gemma3".into());
        config.insert("text_config".into(), text);
    });
    let nested = ModelFiles::open(folder.path()).unwrap();
    assert_eq!(nested.config(), ModelFiles::open(tiny("gemma3_text")).unwrap().config());
}

#[test]
fn chat_templates_are_found_in_all_three_places() {
    let folder = copy_of("llama");
    assert_eq!(ModelFiles::open(folder.path()).unwrap().chat_template(), None);
    let settings = folder.path().join("tokenizer_config.json");
    fs::write(&settings, r#"{"chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}], "eos_token": {"content": "t9"}}"#).unwrap();
    let files = ModelFiles::open(folder.path()).unwrap();
    assert_eq!((files.chat_template(), files.eos_text()), (Some("D"), Some("t9")));
    fs::write(&settings, r#"{"chat_template": "S"}"#).unwrap();
    let of_settings = ModelFiles::open(folder.path()).unwrap();
    assert_eq!(of_settings.chat_template(), Some("S"));
    fs::write(folder.path().join("chat_template.jinja"), "J").unwrap();
    let of_file = ModelFiles::open(folder.path()).unwrap();
    assert_eq!(of_file.chat_template(), Some("J"));
    assert_ne!(of_settings.tokenizer_fingerprint(), of_file.tokenizer_fingerprint());
    assert_eq!(of_settings.model_fingerprint(), of_file.model_fingerprint());
}

#[test]
fn stop_tokens_come_from_all_files() {
    let folder = copy_of("llama");
    edit_config(folder.path(), |config| drop(config.insert("eos_token_id".into(), vec![5, 7, 300].into())));
    fs::write(
        folder.path().join("generation_config.json"),
        r#"{"eos_token_id": [7, 9], "top_k": 40, "temperature": 0.6}"#,
    )
    .unwrap();
    let files = ModelFiles::open(folder.path()).unwrap();
    assert_eq!(files.stop_token_ids(), [5, 7, 9], "300 is beyond the vocabulary");
    let defaults = files.generation_defaults();
    assert_eq!((defaults.top_k, defaults.temperature, defaults.top_p), (Some(40), Some(0.6), None));
}

#[test]
fn sharded_weights_are_one_table() {
    let whole = ModelFiles::open(tiny("llama")).unwrap();
    let folder = sharded_llama();
    let sharded = ModelFiles::open(folder.path()).unwrap();
    assert_eq!(sharded.weight_bytes(), whole.weight_bytes());
    assert_eq!(sharded.model_fingerprint(), whole.model_fingerprint());
}

#[test]
fn damaged_indexes_are_named() {
    let folder = sharded_llama();
    let index = folder.path().join("model.safetensors.index.json");
    let original = fs::read_to_string(&index).unwrap();
    fs::write(&index, original.replace("lm_head.weight", "lm_tail.weight")).unwrap();
    assert_error(folder.path(), &["index.json", "lm_tail.weight"]);
    fs::write(&index, original.replace("b.safetensors", "../b.safetensors")).unwrap();
    assert_error(folder.path(), &["weight_map", "../b.safetensors"]);
    fs::write(&index, original.replace("b.safetensors", "c.safetensors")).unwrap();
    assert_error(folder.path(), &["c.safetensors"]);
    fs::write(&index, "{").unwrap();
    assert_error(folder.path(), &["index.json", "JSON"]);
}

#[test]
fn what_is_missing_or_unknown_is_named() {
    let empty = TempDir::new().unwrap();
    assert_error(empty.path(), &["config.json"]);
    assert!(matches!(ModelFiles::open(empty.path().join("none")), Err(OpenError::Io { .. })));
    let text = empty.path().join("notes.txt");
    fs::write(&text, "hello").unwrap();
    assert_error(&text, &["notes.txt", "GGUF"]);
    for (key, value, expected) in [
        ("hidden_size", None, vec!["config.json", "hidden_size"]),
        ("model_type", None, vec!["model_type"]),
        ("model_type", Some("mamba".into()), vec!["mamba", "llama", "qwen3", "gemma3_text"]),
        ("num_key_value_heads", Some(3.into()), vec!["3", "4 attention heads"]),
        ("num_hidden_layers", Some((1u64 << 60).into()), vec!["num_hidden_layers", "4096"]),
        ("rms_norm_eps", Some("small".into()), vec!["rms_norm_eps", "small"]),
        ("rope_parameters", Some(serde_json::json!({"rope_type": "longrope"})), vec!["longrope", "yarn"]),
        ("quantization_config", Some(serde_json::json!({"bits": 4})), vec!["quantization_config"]),
    ] {
        let folder = copy_of("llama");
        edit_config(folder.path(), |config| match value {
            None => drop(config.remove(key)),
            Some(value) => drop(config.insert(key.into(), value)),
        });
        assert_error(folder.path(), &expected);
    }
    for file in ["tokenizer.json", "model.safetensors"] {
        let folder = copy_of("llama");
        fs::remove_file(folder.path().join(file)).unwrap();
        assert_error(folder.path(), &[file]);
    }
}

#[test]
fn gguf_metadata_becomes_configuration_and_tokenizer() {
    let folder = TempDir::new().unwrap();
    for name in ["llama", "qwen2", "qwen3", "gemma3_text"] {
        let source = ModelFiles::open(tiny(name)).unwrap();
        let path = folder.path().join(format!("{name}.gguf"));
        fs::write(&path, convert::to_gguf(&source).bytes()).unwrap();
        let files = ModelFiles::open(&path).unwrap();
        let (ours, theirs) = (files.config(), source.config());
        assert_eq!(files.kind(), FileKind::Gguf);
        assert_eq!(files.suggested_name(), format!("tiny {}", theirs.architecture));
        assert_eq!((ours.layers.clone(), ours.head_dim), (theirs.layers.clone(), theirs.head_dim), "{name}");
        assert_eq!(
            (ours.qkv_bias, ours.qk_norm, ours.tie_embeddings),
            (theirs.qkv_bias, theirs.qk_norm, theirs.tie_embeddings)
        );
        assert_eq!(ours.norm_weight_offset, 0.0, "conversion adds it");
        let TokenizerSource::Gguf(tokenizer) = files.tokenizer() else { panic!("a GGUF tokenizer") };
        assert_eq!(tokenizer.model, GgufTokenizerModel::Llama);
        assert_eq!((tokenizer.tokens.len(), tokenizer.bos, tokenizer.add_bos), (256, Some(1), false));
        assert_eq!((files.eos_text(), files.stop_token_ids()), (Some("t2"), &[2][..]));
    }
}

/// Changes or removes a metadata value.
fn key(writer: &mut GgufWriter, key: &str, value: Option<Meta>) {
    let index = writer.metadata.iter().position(|(name, _)| name == key).unwrap();
    match value {
        None => drop(writer.metadata.remove(index)),
        Some(value) => writer.metadata[index].1 = value,
    }
}

#[test]
fn wrong_gguf_values_are_named() {
    let source = ModelFiles::open(tiny("llama")).unwrap();
    type Change = Box<dyn Fn(&mut GgufWriter)>;
    let cases: Vec<(Change, &[&str])> = vec![
        (Box::new(|w| w.version = 4), &["version 4"]),
        (Box::new(|w| w.version = 3u32.swap_bytes()), &["little-endian"]),
        (Box::new(|w| key(w, "general.architecture", Some(Meta::Text("rwkv".into())))), &["rwkv", "gemma3"]),
        (Box::new(|w| key(w, "llama.block_count", None)), &["llama.block_count"]),
        (Box::new(|w| key(w, "llama.block_count", Some(Meta::U32(u32::MAX)))), &["block_count", "4294967295"]),
        (Box::new(|w| key(w, "llama.block_count", Some(Meta::U32(1)))), &["block_count is 1", "blk.1"]),
        (Box::new(|w| key(w, "llama.attention.head_count", Some(Meta::U32(0)))), &["head_count", "0"]),
        (Box::new(|w| key(w, "tokenizer.ggml.model", None)), &["tokenizer.ggml.model"]),
        (Box::new(|w| key(w, "tokenizer.ggml.model", Some(Meta::Text("bert".into())))), &["bert", "gpt2"]),
        (Box::new(|w| key(w, "tokenizer.ggml.model", Some(Meta::Text("gpt2".into())))), &["merges"]),
        (Box::new(|w| key(w, "tokenizer.ggml.eos_token_id", Some(Meta::U32(256)))), &["eos_token_id", "256"]),
        (Box::new(|w| key(w, "tokenizer.ggml.scores", Some(Meta::F32s(vec![0.0])))), &["scores", "256"]),
        (
            Box::new(|w| w.metadata.push(("general.architecture".into(), Meta::U32(1)))),
            &["general.architecture occurs twice"],
        ),
        (Box::new(|w| w.metadata.push(("general.alignment".into(), Meta::U32(0)))), &["general.alignment"]),
        (Box::new(|w| w.tensors[0].2 = 20), &["20", "Q4_K"]),
        (Box::new(|w| w.tensors[0].1 = vec![u64::MAX, u64::MAX]), &["shape", "18446744073709551615"]),
        (Box::new(|w| w.tensors[0].1 = vec![1 << 40, 1 << 40]), &["shape"]),
        (Box::new(|w| w.tensors[0].1 = vec![1; 5]), &["dimension count", "5"]),
        (Box::new(|w| w.tensors[0].1 = vec![1 << 40]), &["needs 4398046511104 bytes"]),
        (Box::new(|w| w.tensors[1].0 = w.tensors[0].0.clone()), &["twice"]),
        (Box::new(|w| w.tensors[3].3.clear()), &["overlap", "blk.0."]),
        (
            Box::new(|w| w.metadata.push(("llama.hidden_activation".into(), Meta::Text("relu".into())))),
            &["llama.hidden_activation", "relu", "silu"],
        ),
    ];
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("model.gguf");
    for (change, expected) in cases {
        let mut writer = convert::to_gguf(&source);
        change(&mut writer);
        fs::write(&path, writer.bytes()).unwrap();
        assert_error(&path, expected);
    }
}

#[test]
fn counts_larger_than_the_file_allocate_nothing() {
    let mut bytes = GgufWriter::new().bytes();
    for at in [8, 16] {
        let mut damaged = bytes.clone();
        damaged[at..at + 8].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(Gguf::parse(&damaged).unwrap_err().to_string().contains("needs"));
    }
    let mut writer = GgufWriter::new();
    writer.meta("k", Meta::I32s(vec![1, 2, 3]));
    bytes = writer.bytes();
    let Some(Value::Array(array)) = Gguf::parse(&bytes).unwrap().get("k") else { panic!("an array") };
    assert_eq!(array.iter().collect::<Vec<_>>(), [Value::Signed(1), Value::Signed(2), Value::Signed(3)]);
    let len_at = bytes.len() - 12 - 8;
    bytes[len_at..len_at + 8].copy_from_slice(&(1u64 << 62).to_le_bytes());
    assert!(Gguf::parse(&bytes).unwrap_err().to_string().contains("elements of k"));
}

#[test]
fn truncated_and_flipped_gguf_never_panics() {
    let writer = convert::to_gguf(&ModelFiles::open(tiny("llama")).unwrap());
    let bytes = writer.bytes();
    let header = bytes.len() - writer.tensors.iter().map(|tensor| tensor.3.len()).sum::<usize>();
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("model.gguf");
    damage(&bytes, header, |bytes| {
        let _ = Gguf::parse(bytes);
    });
    damage_few(&bytes, header, |bytes| {
        fs::write(&path, bytes).unwrap();
        open_and_load(&path);
    });
}

#[test]
fn truncated_and_flipped_safetensors_never_panic() {
    let folder = copy_of("llama");
    let path = folder.path().join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    for len in [0, 1, 7, 8, 9, header - 1, header, bytes.len() - 1] {
        fs::write(&path, &bytes[..len]).unwrap();
        assert_error(folder.path(), &["model.safetensors"]);
    }
    damage_few(&bytes, header, |bytes| {
        fs::write(&path, bytes).unwrap();
        open_and_load(folder.path());
    });
}

#[test]
fn versions_2_and_3_are_read() {
    for version in [2, 3] {
        let mut writer = GgufWriter::new();
        writer.version = version;
        writer.meta("k", Meta::Texts(vec!["a".into(), "ä".into()])).f32s("w", &[2, 3], &[1.0; 6]);
        let bytes = writer.bytes();
        let gguf = Gguf::parse(&bytes).unwrap();
        assert_eq!((gguf.version(), gguf.tensors()[0].shape.as_slice()), (version, &[2, 3][..]));
        let place = gguf.tensors()[0].offset..gguf.tensors()[0].offset + gguf.tensors()[0].len;
        assert_eq!(bytes[place], 1.0f32.to_le_bytes().repeat(6));
        let Some(Value::Array(texts)) = gguf.get("k") else { panic!("an array") };
        assert_eq!(texts.iter().collect::<Vec<_>>(), [Value::Text("a"), Value::Text("ä")]);
    }
}

#[test]
fn tensors_may_touch_and_empty_ones_lie_anywhere() {
    let mut writer = GgufWriter::new();
    writer.f32s("empty", &[0, 4], &[]).f32s("a", &[8], &[1.0; 8]).f32s("b", &[8], &[2.0; 8]);
    let offsets: Vec<usize> =
        Gguf::parse(&writer.bytes()).unwrap().tensors().iter().map(|tensor| tensor.offset).collect();
    assert_eq!((offsets[1], offsets[2]), (offsets[0], offsets[0] + 32));
    // The first now ends one block into the second.
    writer.tensors[1].1 = vec![9];
    let error = Gguf::parse(&writer.bytes()).unwrap_err();
    assert_eq!(error, GgufError::Overlap { first: "a".into(), second: "b".into() });
}

#[test]
fn every_truncation_of_a_gguf_header_is_an_error() {
    let writer = convert::to_gguf(&ModelFiles::open(tiny("qwen3")).unwrap());
    let bytes = writer.bytes();
    for len in (0..bytes.len()).step_by(97).chain([bytes.len() - 1]) {
        assert!(Gguf::parse(&bytes[..len]).is_err(), "{len} of {} bytes", bytes.len());
    }
    assert!(Gguf::parse(&bytes).is_ok());
}

#[test]
fn odd_values_in_any_config_key_never_panic() {
    let odd =
        serde_json::json!([null, true, -1, 0, 1, 3, 0.5, 1e300, 4096, 16_777_216, u64::MAX, "x", "", [], [1], {}]);
    for name in ["llama3_rope", "qwen2_yarn", "gemma3_text"] {
        let folder = copy_of(name);
        let path = folder.path().join("config.json");
        let original: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        let mut pointers = Vec::new();
        list_pointers(&original, String::new(), &mut pointers);
        assert!(pointers.len() > 20);
        for pointer in &pointers {
            for value in odd.as_array().unwrap() {
                let mut changed = original.clone();
                *changed.pointer_mut(pointer).unwrap() = value.clone();
                fs::write(&path, changed.to_string()).unwrap();
                open_and_load(folder.path());
            }
        }
    }
}

/// JSON pointers of everything inside.
fn list_pointers(value: &serde_json::Value, at: String, out: &mut Vec<String>) {
    for (key, inner) in value.as_object().into_iter().flatten() {
        list_pointers(inner, format!("{at}/{key}"), out);
        out.push(format!("{at}/{key}"));
    }
}

/// Opens, and when that works loads onto a device that computes nothing.
fn open_and_load(path: &Path) {
    let limits = StepLimits { tokens: 4, sequences: 1, block_entries: 1, logits_rows: 1, block_size: 16 };
    if let Ok(files) = ModelFiles::open(path) {
        drop(load(&files, Arc::new(DryRun), LoadOptions { limits, positions_max: Some(64) }));
    }
}

fn damage(bytes: &[u8], header: usize, check: impl FnMut(&[u8])) {
    damage_times(3000, bytes, header, check);
}

fn damage_few(bytes: &[u8], header: usize, check: impl FnMut(&[u8])) {
    damage_times(300, bytes, header, check);
}

/// Truncates, flips and overwrites, mostly in the header.
fn damage_times(times: usize, bytes: &[u8], header: usize, mut check: impl FnMut(&[u8])) {
    let mut random = Random(seed(7));
    for _ in 0..times {
        let mut damaged = bytes.to_vec();
        if random.below(4) == 0 {
            damaged.truncate(random.below(bytes.len()));
        }
        for _ in 0..=random.below(4) {
            let within = if random.below(8) == 0 { damaged.len() } else { header.min(damaged.len()) };
            let at = random.below(within);
            match random.below(3) {
                _ if damaged.is_empty() => {}
                0 => damaged[at] ^= 1 << random.below(8),
                1 => damaged[at] = random.next() as u8,
                _ => {
                    let word = [u64::MAX, 1 << 63, 1 << 40, 0][random.below(4)].to_le_bytes();
                    let end = damaged.len().min(at + 8);
                    damaged[at..end].copy_from_slice(&word[..end - at]);
                }
            }
        }
        check(&damaged);
    }
}

/// The llama checkpoint with its weights in two files.
fn sharded_llama() -> TempDir {
    let folder = copy_of("llama");
    let path = folder.path().join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let whole = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut map = serde_json::Map::new();
    for (file, wanted) in [("a.safetensors", true), ("b.safetensors", false)] {
        let part: Vec<_> = whole.iter().filter(|(name, _)| name.contains("layers.0") == wanted).collect();
        map.extend(part.iter().map(|(name, _)| ((*name).to_owned(), file.into())));
        safetensors::serialize_to_file(part, None, &folder.path().join(file)).unwrap();
    }
    let index = serde_json::json!({"metadata": {}, "weight_map": map});
    fs::write(folder.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
    fs::remove_file(path).unwrap();
    folder
}
