//! Fixtures, GGUF files made of them, and a runner that feeds a model through the paged cache.
#![allow(dead_code, reason = "each test binary uses a part")]

pub mod company;
pub mod convert;
pub mod defect;
pub mod device;
pub mod english;
pub mod gguf_writer;
pub mod mode;
pub mod quantise;
pub mod random_model;
pub mod requantise;
pub mod runner;

use std::fs;
use std::hash::{BuildHasher as _, RandomState};
use std::path::{Path, PathBuf};

use models::ModelFiles;
use serde::Deserialize;
use tempfile::TempDir;

/// What Hugging Face transformers computed for a tiny checkpoint.
#[derive(Deserialize)]
pub struct Golden {
    /// Prompt ids.
    pub prompt: Vec<u32>,
    /// Greedy continuation.
    pub greedy: Vec<u32>,
    /// Logits at the first position.
    pub first_logits: Vec<f32>,
    /// Logits at the last position of the prompt.
    pub last_logits: Vec<f32>,
    /// Gap between the two best logits at each greedy token.
    pub top2_gap: Vec<f32>,
}

/// Names of the tiny checkpoints.
pub const TINY: [&str; 8] =
    ["llama", "llama3_rope", "llama_bias", "mistral", "qwen2", "qwen2_yarn", "qwen3", "gemma3_text"];

/// A folder or file of `tests/fixtures`.
pub fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(name)
}

/// A tiny checkpoint.
pub fn tiny(name: &str) -> PathBuf {
    fixture("tiny").join(name)
}

/// Its reference.
pub fn golden(name: &str) -> Golden {
    let text = fs::read_to_string(tiny(name).join("golden.json")).expect("the fixture is in the repository");
    serde_json::from_str(&text).expect("golden.json")
}

/// A seed from SEED, else the given one; printed so that a failure can be replayed.
pub fn seed(default: u64) -> u64 {
    let seed = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(default);
    println!("SEED={seed}");
    seed
}

/// A seed from SEED, else another one in each run; printed.
pub fn rotating_seed() -> u64 {
    seed(RandomState::new().hash_one(0))
}

/// Whether the full size of counted tests is asked for.
pub fn is_full() -> bool {
    std::env::var_os("TESSERA_FULL").is_some()
}

/// Small random numbers (splitmix64).
pub struct Random(pub u64);

impl Random {
    /// The next 64 bits.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound`.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }

    /// Puts values into random order.
    pub fn shuffle<T>(&mut self, values: &mut [T]) {
        for index in (1..values.len()).rev() {
            values.swap(index, self.below(index + 1));
        }
    }
}

/// Opens what must not open, and looks for `expected` in the error.
pub fn assert_error(path: &Path, expected: &[&str]) {
    let error = ModelFiles::open(path).map(|files| files.path().to_owned()).expect_err("it must not open").to_string();
    for part in expected {
        assert!(error.contains(part), "{error:?} does not say {part:?}");
    }
}

/// A tiny checkpoint's folder to change.
pub fn copy_of(name: &str) -> TempDir {
    let folder = TempDir::new().unwrap();
    for entry in fs::read_dir(tiny(name)).unwrap() {
        let entry: PathBuf = entry.unwrap().path();
        fs::copy(&entry, folder.path().join(entry.file_name().unwrap())).unwrap();
    }
    folder
}

/// Changes `config.json`.
pub fn edit_config(folder: &Path, edit: impl FnOnce(&mut serde_json::Map<String, serde_json::Value>)) {
    let path = folder.join("config.json");
    let mut config = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    edit(&mut config);
    fs::write(&path, serde_json::to_vec(&config).unwrap()).unwrap();
}
