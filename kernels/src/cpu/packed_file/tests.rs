//! A second load gives the bytes of the first, and a file that is not what was written is never believed.

use std::fs;

use super::*;
use crate::cpu::CpuOptions;
use crate::cpu::panels::Packed;
use crate::ops::Ops as _;
use crate::tensor::Shape;
use crate::weight::{WeightFormat, WeightRole};

/// A raw matrix that owns its bytes.
struct Raw {
    format: WeightFormat,
    shape: [usize; 2],
    bytes: Vec<u8>,
}

/// Matrices of several formats; two differ in their bytes only, and the largest is longer than a piece.
fn model() -> Vec<Raw> {
    let formats = [
        (WeightFormat::Bf16, [70, 40]),
        (WeightFormat::Bf16, [70, 40]),
        (WeightFormat::Q4_1, [33, 64]),
        (WeightFormat::Q6K, [32, 256]),
        (WeightFormat::F32, [1500, 512]),
        (WeightFormat::F16, [9, 33]),
    ];
    let raw = |(index, (format, shape)): (usize, (WeightFormat, [usize; 2]))| {
        let len = shape[0] * format.row_bytes(shape[1]).unwrap();
        let bytes = (0..len).map(|i| (i * 131 + i / 251 + index * 7) as u8 & 0x3f).collect();
        Raw { format, shape, bytes }
    };
    formats.into_iter().enumerate().map(raw).collect()
}

/// What a load gives: the matrices' bytes, what is left to write, and why the file was not used.
struct Loaded {
    matrices: Vec<Vec<u8>>,
    unwritten: Option<PackedCopies>,
    error: Option<PackedFileError>,
}

fn load(model: &[Raw], file: &PackedFile, threads: usize) -> Loaded {
    let ops = CpuOps::new(&CpuOptions { threads, ..CpuOptions::default() }).unwrap();
    let error = ops.begin_packing(file).err();
    let matrices = model
        .iter()
        .map(|Raw { format, shape, bytes }| {
            let raw = RawWeight { bytes, format: *format, shape: Shape::from(*shape) };
            let weight = ops.load_weight(raw, WeightRole::Matrix).unwrap();
            let Some(Packed::Matrix(panels)) = weight.packed::<Packed>() else { panic!("a matrix") };
            (0..panels.n_panels()).flat_map(|panel| panels.panel(panel).to_vec()).collect()
        })
        .collect();
    Loaded { matrices, unwritten: ops.finish_packing(), error }
}

fn write(copies: PackedCopies, file: &PackedFile) {
    copies.write(file, &AtomicBool::new(false)).unwrap();
}

/// A folder, a file in it with the model's matrices, and these.
fn written() -> (tempfile::TempDir, PackedFile, Vec<Vec<u8>>) {
    let folder = tempfile::tempdir().unwrap();
    // Nobody has made it yet.
    let file = PackedFile::in_folder(&folder.path().join("packed"), b"model", ComputeDtype::Stored);
    let cold = load(&model(), &file, 1);
    assert!(matches!(cold.error, Some(PackedFileError::Io(error)) if error.kind() == io::ErrorKind::NotFound));
    write(cold.unwritten.expect("nothing was kept"), &file);
    (folder, file, cold.matrices)
}

fn names(folder: &Path) -> Vec<String> {
    fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn a_second_load_takes_the_same_bytes_from_the_file() {
    let (_folder, file, cold) = written();
    for threads in 1..=3 {
        let warm = load(&model(), &file, threads);
        assert!(warm.error.is_none() && warm.unwritten.is_none(), "{:?}", warm.error);
        assert!(warm.matrices == cold, "on {threads} threads");
    }
    assert_eq!(names(file.path().parent().unwrap()), [file.path().file_name().unwrap().to_str().unwrap()]);
}

#[test]
fn what_the_file_says_is_what_is_computed_with() {
    let (_folder, file, cold) = written();
    // Change a weight and sign it: a load that packed again would not show it.
    let mut copies = load(&model(), &PackedFile { path: "/absent/file".into(), ..file.clone() }, 1).unwrapped();
    let Copied { digest, .. } = copies.copies[0];
    let mut region = crate::cpu::weight_memory::WeightMemory::default().take(cold[0].len()).unwrap();
    region.as_mut_slice().fill(0x11);
    copies.copies[0] = Copied { digest, region: Arc::new(region) };
    write(copies, &file);
    let warm = load(&model(), &file, 1);
    assert!(warm.matrices[0].iter().all(|&byte| byte == 0x11) && warm.matrices[1..] == cold[1..]);
}

impl Loaded {
    fn unwrapped(self) -> PackedCopies {
        self.unwritten.expect("matrices were packed")
    }
}

#[test]
fn damage_is_noticed_wherever_it_is_and_mended() {
    let (_folder, file, cold) = written();
    let good = fs::read(file.path()).unwrap();
    let mut damaged: Vec<(String, Vec<u8>)> = [0, 1, 55, 56, 4096, good.len() / 2, good.len() - 1]
        .map(|len| (format!("cut to {len}"), good[..len].to_vec()))
        .into();
    damaged.push(("longer".to_owned(), [&good[..], &[0]].concat()));
    let header = header_len(model().len(), number(&good[16..24]));
    let data = header.next_multiple_of(ALIGNMENT);
    // Padding of the header and between matrices holds nothing: the latter is covered, the former is not.
    for at in (0..header).step_by(11).chain((data..good.len()).step_by(good.len() / 40)).chain([good.len() - 1]) {
        let mut bytes = good.clone();
        bytes[at] ^= 0x40;
        damaged.push((format!("bit flipped at {at}"), bytes));
    }
    damaged.push(("foreign".to_owned(), vec![0xaa; 100_000]));
    damaged.push(("of the other order".to_owned(), [&good[..8], &[0xff; 16], &good[24..]].concat()));
    for (what, bytes) in damaged {
        fs::write(file.path(), bytes).unwrap();
        let ops = CpuOps::new(&CpuOptions::default()).unwrap();
        assert!(matches!(ops.begin_packing(&file), Err(PackedFileError::Damaged(_))), "{what}");
    }
    let mended = load(&model(), &file, 2);
    assert!(mended.error.is_some() && mended.matrices == cold);
    write(mended.unwrapped(), &file);
    assert!(fs::read(file.path()).unwrap() == good);
}

#[test]
fn another_model_dtype_or_folder_in_its_place_is_not_taken() {
    let (folder, file, cold) = written();
    let packed = folder.path().join("packed");
    for other in [
        PackedFile::in_folder(&packed, b"other", ComputeDtype::Stored),
        PackedFile::in_folder(&packed, b"model", ComputeDtype::Bf16),
    ] {
        assert_ne!(other.path(), file.path());
        fs::copy(file.path(), other.path()).unwrap();
        let loaded = load(&model(), &other, 1);
        assert!(matches!(loaded.error, Some(PackedFileError::Damaged(_))) && loaded.matrices == cold);
    }
    fs::remove_file(file.path()).unwrap();
    fs::create_dir(file.path()).unwrap();
    let loaded = load(&model(), &file, 1);
    assert!(loaded.error.is_some() && loaded.matrices == cold);
    let error = loaded.unwrapped().write(&file, &AtomicBool::new(false));
    assert!(error.is_err() && names(&packed).iter().all(|name| !name.starts_with(PackedFile::TEMPORARY)));
}

#[test]
fn a_pipe_in_its_place_is_refused_and_not_waited_for() {
    let (_folder, file, cold) = written();
    fs::remove_file(file.path()).unwrap();
    let path = std::ffi::CString::new(file.path().to_str().unwrap()).unwrap();
    // SAFETY: the path is a string that ends with a zero.
    assert_eq!(unsafe { libc::mkfifo(path.as_ptr(), 0o600) }, 0);
    let loaded = load(&model(), &file, 1);
    assert!(matches!(loaded.error, Some(PackedFileError::Damaged(_))) && loaded.matrices == cold);
    write(loaded.unwrapped(), &file);
    assert!(load(&model(), &file, 1).unwritten.is_none());
}

#[test]
fn matrices_in_another_order_changed_or_missing_are_packed() {
    let (_folder, file, cold) = written();
    let mut swapped = model();
    swapped.swap(0, 1);
    let loaded = load(&swapped, &file, 1);
    assert!(loaded.matrices[0] == cold[1] && loaded.matrices[1] == cold[0] && loaded.matrices[2..] == cold[2..]);
    assert_eq!(loaded.unwrapped().copies.len(), cold.len());
    let mut changed = model();
    changed[2].bytes[0] ^= 1;
    let loaded = load(&changed, &file, 1);
    assert!(loaded.matrices[2] != cold[2] && loaded.matrices[3..] == cold[3..]);
    // Those before the change came from the file, and are written with the others.
    write(loaded.unwrapped(), &file);
    assert!(load(&changed, &file, 1).unwritten.is_none());
    let longer: Vec<Raw> = changed.iter().chain(&changed).map(copy).collect();
    for other in [&changed[..5], &[], &longer] {
        assert_eq!(load(other, &file, 1).unwrapped().copies.len(), other.len());
    }
}

fn copy(raw: &Raw) -> Raw {
    Raw { format: raw.format, shape: raw.shape, bytes: raw.bytes.clone() }
}

#[test]
fn two_that_load_and_write_at_once_both_work() {
    let folder = tempfile::tempdir().unwrap();
    let file = PackedFile::in_folder(folder.path(), b"model", ComputeDtype::Stored);
    let both = std::sync::Barrier::new(2);
    let one = || {
        both.wait();
        let loaded = load(&model(), &file, 1);
        let matrices = loaded.matrices;
        if let Some(copies) = loaded.unwritten {
            write(copies, &file);
        }
        assert!(load(&model(), &file, 1).unwritten.is_none(), "what stands there is whole");
        matrices
    };
    let [first, second] = std::thread::scope(|scope| [scope.spawn(one), scope.spawn(one)].map(|t| t.join().unwrap()));
    assert!(first == second);
    assert_eq!(names(folder.path()).len(), 1);
}

#[test]
fn a_write_that_is_stopped_or_not_possible_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let file = PackedFile::in_folder(folder.path(), b"model", ComputeDtype::Stored);
    let copies = load(&model(), &file, 1).unwrapped();
    let error = copies.write(&file, &AtomicBool::new(true)).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::Interrupted);
    assert!(names(folder.path()).is_empty());
    // The folder would have to be made inside a file, which even root cannot do.
    let blocked = folder.path().join("file");
    fs::write(&blocked, b"").unwrap();
    let file = PackedFile::in_folder(&blocked, b"model", ComputeDtype::Stored);
    let loaded = load(&model(), &file, 1);
    assert!(matches!(loaded.error, Some(PackedFileError::Io(_))));
    assert!(loaded.unwrapped().write(&file, &AtomicBool::new(false)).is_err());
}
