//! An instruction set that this CPU lacks is refused by name and never executed, however it is asked for.
#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs, reason = "a test")]

use std::process::{Command, Output};

use kernels::tensor::{as_bytes, as_bytes_mut};
use kernels::{
    ComputeDtype, CpuOps, CpuOptions, DType, Error, Isa, Ops, RawWeight, Result, Shape, StreamId, WeightFormat,
    WeightRole,
};

/// Environment variable that chooses the instruction set where nothing else does.
const VARIABLE: &str = "TESSERA_CPU";
/// Tells the test below that it runs in a process of its own.
const CHILD: &str = "TESSERA_TEST_CHILD";
/// Names that no kernels are written for.
const UNKNOWN: [&str; 4] = ["neon", "AVX2", "avx5120", "amx-bf16 "];

fn options(isa: Option<Isa>) -> CpuOptions {
    CpuOptions { dtype: ComputeDtype::default(), threads: 2, isa }
}

fn is_available(isa: Isa) -> bool {
    Isa::available().any(|other| other == isa)
}

/// Names what is lacking and what there is.
fn assert_refused(isa: Isa, message: &str) {
    assert!(message.contains(&format!("cannot run {isa}")), "{message}");
    Isa::available().for_each(|isa| assert!(message.contains(isa.name()), "{message} does not offer {isa}"));
}

#[test]
fn those_that_are_lacking_are_typed_errors_and_the_others_start() {
    for isa in Isa::ALL {
        match CpuOps::new(&options(Some(isa))) {
            Ok(ops) => assert_eq!((ops.isa(), is_available(isa)), (isa, true)),
            Err(error) => {
                assert!(matches!(error, Error::IsaMissing { wanted, .. } if wanted == isa.name()), "{error:?}");
                assert!(!is_available(isa), "{error}");
                assert_refused(isa, &error.to_string());
            }
        }
    }
    for name in UNKNOWN {
        let error = name.parse::<Isa>().unwrap_err();
        assert!(matches!(&error, Error::IsaUnknown { name: named, .. } if named == name), "{error:?}");
        Isa::ALL.iter().for_each(|isa| assert!(error.to_string().contains(isa.name()), "{error}"));
    }
}

/// Runs in a process of its own, with the variable set; says on which instruction set it multiplied, or why it did not.
#[test]
fn child() {
    if std::env::var_os(CHILD).is_some() {
        match multiply() {
            Ok(isa) => println!("multiplied on {isa}"),
            Err(error) => println!("refused: {error}"),
        }
    }
}

/// One product in each format, so that the kernels of the instruction set have run.
fn multiply() -> Result<Isa> {
    let ops = CpuOps::new(&options(None))?;
    let (rows, depth, columns) = (9, 256, 64);
    let x = ops.alloc(Shape::from([rows, depth]), DType::F32)?;
    ops.upload(StreamId::MAIN, as_bytes(&vec![1.0f32; rows * depth]), &x)?;
    for format in [WeightFormat::F32, WeightFormat::F16, WeightFormat::Bf16, WeightFormat::Q8_0, WeightFormat::Q4K] {
        let bytes = vec![0; columns * format.row_bytes(depth)?];
        let raw = RawWeight { bytes: &bytes, format, shape: Shape::from([columns, depth]) };
        let weight = ops.load_weight(raw, WeightRole::Matrix)?;
        let out = ops.alloc(Shape::from([rows, columns]), DType::F32)?;
        ops.matmul(StreamId::MAIN, &x, &weight, None, &out)?;
        let mut values = vec![1.0f32; rows * columns];
        ops.read_back(StreamId::MAIN, &out, as_bytes_mut(&mut values))?;
        assert!(values.iter().all(|&value| value == 0.0), "{format:?}");
    }
    Ok(ops.isa())
}

fn run_child(name: &str) -> Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "child", "--nocapture"]).env(CHILD, "1").env(VARIABLE, name);
    command.output().unwrap()
}

/// Whether the child ended well, however it decided, and not by an illegal instruction.
fn said(name: &str) -> String {
    let output = run_child(name);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{name}: {}\n{text}\n{}", output.status, String::from_utf8_lossy(&output.stderr));
    text
}

#[test]
fn the_environment_chooses_among_those_there_are_and_nothing_else_runs() {
    for isa in Isa::ALL {
        let text = said(isa.name());
        match is_available(isa) {
            true => assert!(text.contains(&format!("multiplied on {isa}\n")), "{isa}: {text}"),
            false => assert_refused(isa, &text),
        }
    }
    for name in UNKNOWN {
        let text = said(name);
        assert!(text.contains("refused: unknown instruction set") && text.contains(name), "{name}: {text}");
    }
    assert!(said("").contains(&format!("multiplied on {}\n", Isa::best())), "an empty name chooses nothing");
}
