//! Packed weights between starts: a warm start computes the same bits, and a changed model is packed again.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use contract::ids::{BlockId, SlotId, StepId};
use contract::plan::{BlockTableDelta, ForwardPlan, QueryToken, SamplingSpec, SequencePlan};
use contract::request::SamplingParams;

use super::harness::config;
use super::model::fixture;
use crate::Config;
use crate::config::WeightDtype;
use crate::load::load;

/// Tensor to change, which is larger than what of it is sampled.
const TENSOR: &str = "model.layers.0.mlp.down_proj.weight";

/// A model of its own in `folder`, and a place for its packed weights there.
fn tiny(folder: &Path, dtype: WeightDtype) -> Config {
    let model = folder.join("model");
    fs::create_dir_all(&model).unwrap();
    for entry in fs::read_dir(fixture("llama")).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), model.join(entry.file_name())).unwrap();
    }
    let packed_cache = Some(folder.join("packed"));
    Config { model, packed_cache, dtype, threads: 1, n_blocks: Some(16), max_running: 2, ..config() }
}

/// Loads the model and keeps its packed weights; returns the bits of its likeliest tokens and whether it was warm.
fn start(config: &Config) -> (Vec<(u32, u32)>, bool) {
    let mut loaded = load(config).unwrap();
    let is_warm = loaded.unwritten.is_none();
    if let Some(unwritten) = loaded.unwritten {
        unwritten.write_now(&AtomicBool::new(false));
    }
    let spec = SamplingSpec {
        params: SamplingParams { temperature: 0.0, ..SamplingParams::default() },
        logprobs: Some(20),
        n_prompt: 4,
        min_tokens: 0,
        stop_token_ids: Vec::new(),
        history: Vec::new(),
    };
    let sequence = SequencePlan {
        slot: SlotId(0),
        query: [5, 77, 23, 140].map(QueryToken::Value).to_vec(),
        position: 0,
        blocks: BlockTableDelta { keep: 0, append: vec![BlockId(0)] },
        logits_rows: 3..4,
        start: Some(Arc::new(spec)),
        adapter: None,
        mask: None,
    };
    let plan = ForwardPlan { step: StepId(0), padded_tokens: 4, sequences: vec![sequence] };
    let output = loaded.executor.run(&plan).unwrap();
    let top = &output.sequences[0].tokens[0].top;
    assert_eq!(top.len(), 20);
    (top.iter().map(|(token, logprob)| (*token, logprob.to_bits())).collect(), is_warm)
}

/// Turns the sign of a weight that no sample reads, and gives the file its time of modification back.
fn change(file: &Path) {
    let bytes = fs::read(file).unwrap();
    let data = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap());
    let header = std::str::from_utf8(&bytes[8..data as usize]).unwrap();
    let entry = &header[header.find(TENSOR).unwrap()..];
    let offsets = &entry[entry.find("data_offsets").unwrap()..];
    let (offsets, _) = offsets[offsets.find('[').unwrap() + 1..].split_once(']').unwrap();
    let (start, end) = offsets.split_once(',').unwrap();
    let [start, end]: [u64; 2] = [start, end].map(|number| number.trim().parse().unwrap());
    assert!(end - start > 4 * 4096, "samples leave a gap");
    let place = data + start + (end - start) / 4 / 4 * 4 + 3;
    let before = fs::metadata(file).unwrap();
    let output = File::options().write(true).open(file).unwrap();
    // The time of a change cannot be set back; it is another one after a tick of the clock.
    let is_same = |now: fs::Metadata| (now.ctime(), now.ctime_nsec()) == (before.ctime(), before.ctime_nsec());
    while is_same(fs::metadata(file).unwrap()) {
        output.write_all_at(&[bytes[place as usize] ^ 0x80], place).unwrap();
        output.set_modified(before.modified().unwrap()).unwrap();
    }
}

#[test]
fn a_warm_start_computes_the_bits_of_a_cold_one_and_a_changed_model_is_packed_again() {
    for dtype in [WeightDtype::Stored, WeightDtype::Bf16, WeightDtype::F32, WeightDtype::Int8] {
        let folder = tempfile::tempdir().unwrap();
        let config = tiny(folder.path(), dtype);
        let (cold, is_warm) = start(&config);
        assert!(!is_warm, "{dtype:?}");
        assert_eq!(start(&config), (cold.clone(), true), "{dtype:?}");
        change(&config.model.join("model.safetensors"));
        let (changed, is_warm) = start(&config);
        assert!(!is_warm && changed != cold, "{dtype:?}: the weights of before the change");
        assert_eq!(start(&Config { packed_cache: None, ..config.clone() }).0, changed, "{dtype:?}");
        assert_eq!(start(&config), (changed, true), "{dtype:?}");
    }
}

#[test]
fn a_damaged_file_is_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let config = tiny(folder.path(), WeightDtype::Bf16);
    let (cold, _) = start(&config);
    let file = fs::read_dir(folder.path().join("packed")).unwrap().next().unwrap().unwrap().path();
    let len = fs::metadata(&file).unwrap().len();
    File::options().write(true).open(&file).unwrap().write_all_at(&[0x5a; 64], len - 64).unwrap();
    assert_eq!(start(&config), (cold.clone(), false));
    assert_eq!(start(&config), (cold, true));
}

#[test]
fn workers_that_start_at_once_share_a_folder() {
    let folder = tempfile::tempdir().unwrap();
    let config = tiny(folder.path(), WeightDtype::Bf16);
    let all: Vec<_> = std::thread::scope(|scope| {
        let workers = [(); 3].map(|()| scope.spawn(|| start(&config).0));
        workers.map(|worker| worker.join().unwrap()).into()
    });
    let (last, is_warm) = start(&config);
    assert!(is_warm);
    assert!(all.iter().all(|bits| *bits == last));
    let left = fs::read_dir(folder.path().join("packed")).unwrap().count();
    assert_eq!(left, 1, "one file, and nothing half written");
}

#[test]
fn a_folder_that_is_a_file_keeps_nothing_and_stops_nobody() {
    let folder = tempfile::tempdir().unwrap();
    let config = Config { packed_cache: Some(folder.path().join("file")), ..tiny(folder.path(), WeightDtype::Bf16) };
    fs::write(folder.path().join("file"), "mine").unwrap();
    start(&config);
    assert_eq!(fs::read_to_string(folder.path().join("file")).unwrap(), "mine");
}
