//! Packed matrices keep their bytes: files that an earlier build has written are read by those that follow.
#![allow(clippy::unwrap_used, missing_docs, reason = "a test")]

use std::sync::atomic::AtomicBool;

use kernels::{ComputeDtype, CpuOps, CpuOptions, Ops, PackedFile, RawWeight, Shape, WeightFormat, WeightRole};

#[test]
#[cfg(target_endian = "little")]
fn the_same_weights_are_packed_to_the_same_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let mut hasher = blake3::Hasher::new();
    for dtype in [ComputeDtype::Stored, ComputeDtype::F32, ComputeDtype::Bf16, ComputeDtype::Int8] {
        let ops = CpuOps::new(&CpuOptions { dtype, ..CpuOptions::default() }).unwrap();
        let file = PackedFile::in_folder(folder.path(), b"golden", dtype);
        assert!(ops.begin_packing(&file).is_err(), "there is none yet");
        // Every format under every way to compute, so that every layout is among them.
        for format in WeightFormat::ALL {
            let shape = Shape::from([35, 256]);
            let bytes = bytes(35 * format.row_bytes(256).unwrap());
            ops.load_weight(RawWeight { bytes: &bytes, format, shape }, WeightRole::Matrix).unwrap();
        }
        ops.finish_packing().unwrap().write(&file, &AtomicBool::new(false)).unwrap();
        hasher.update(&std::fs::read(file.path()).unwrap());
    }
    assert_eq!(
        hasher.finalize().to_hex().as_str(),
        "716f09dc959b6d2bcbbc2c7b7c09e3a55904b00818ce13b13005d97a96117a79",
        "raise VERSION in packed_file.rs when packed bytes change, then this digest"
    );
}

/// Numbers in any format: no exponent is that of infinity.
fn bytes(len: usize) -> Vec<u8> {
    let mut state = 20_261_129u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8 & 0xbb
    };
    (0..len).map(|_| next()).collect()
}
