//! Bad arguments are typed errors, never a panic, and nothing is computed.

use kernels::{Activation, Arena, ComputeDtype, CpuOps, CpuOptions, DType, DryRun, Error, Isa, Norm, Ops, RawWeight};
use kernels::{RopeStyle, RopeTable, Shape, WeightFormat, WeightRole};

use crate::support::{Device, MAIN};

#[test]
fn an_instruction_set_is_known_and_present_or_refused() {
    let unknown = "sse9".parse::<Isa>().unwrap_err();
    assert!(matches!(&unknown, Error::IsaUnknown { name, .. } if name == "sse9"), "{unknown}");
    for isa in Isa::ALL {
        let made = CpuOps::new(&CpuOptions { isa: Some(isa), ..CpuOptions::default() });
        match isa.check() {
            Ok(()) => assert_eq!(made.unwrap().isa(), isa),
            Err(error) => assert_eq!(made.unwrap_err(), error),
        }
    }
}

#[test]
fn shapes_that_do_not_fit_are_refused() {
    let device = Device::scalar(ComputeDtype::F32);
    let ops = &device.ops;
    let x = device.zeros([2, 8], DType::F32);
    let weight = device.weight([4, 9], &[0.0; 36], WeightRole::Matrix);
    let vector = device.weight([4], &[0.0; 4], WeightRole::VECTOR);
    let out = device.zeros([2, 4], DType::F32);
    let shape = |result: kernels::Result<()>| assert!(matches!(result, Err(Error::Shape { .. })), "{result:?}");
    shape(ops.matmul(MAIN, &x, &weight, None, &out));
    let x = device.zeros([2, 9], DType::F32);
    assert_eq!(ops.matmul(MAIN, &x, &weight, Some(&vector), &out), Ok(()));
    shape(ops.matmul(MAIN, &x, &weight, None, &device.zeros([3, 4], DType::F32)));
    shape(ops.matmul(MAIN, &x, &weight, None, &device.zeros([2, 5], DType::F32)));
    shape(ops.rms_norm(MAIN, &x, &Norm { weight: vector.clone(), epsilon: 1e-5 }, &x));
    shape(ops.add(MAIN, &x, &out));
    shape(ops.upload(MAIN, &[0; 3], &x));
    shape(ops.read_back(MAIN, &x, &mut [0; 3]));
    let role = |result: kernels::Result<()>| assert!(matches!(result, Err(Error::WeightRole { .. })), "{result:?}");
    role(ops.matmul(MAIN, &x, &vector, None, &out));
    role(ops.matmul(MAIN, &x, &weight, Some(&weight), &out));
}

#[test]
fn formats_devices_and_overlaps_are_refused() {
    let (device, other) = (Device::scalar(ComputeDtype::F32), Device::scalar(ComputeDtype::F32));
    let x = device.zeros([4, 4], DType::F32);
    let half = device.zeros([4, 4], DType::Bf16);
    let foreign = other.zeros([4, 4], DType::F32);
    let add = |y| device.ops.add(MAIN, &x, y);
    assert!(matches!(add(&half), Err(Error::Dtype { tensor: "y", actual: DType::Bf16, .. })));
    assert!(matches!(add(&foreign), Err(Error::Device { tensor: "y", .. })));
    assert!(matches!(add(&x), Err(Error::Overlap { .. })));
    let (first, last) = (x.rows(0..3).unwrap(), x.rows(1..4).unwrap());
    assert!(matches!(device.ops.add(MAIN, &first, &last), Err(Error::Overlap { .. })));
    assert_eq!(device.ops.add(MAIN, &x.rows(0..2).unwrap(), &x.rows(2..4).unwrap()), Ok(()));
    let dry = DryRun.alloc(Shape::from([4, 4]), DType::F32).unwrap();
    assert!(matches!(add(&dry), Err(Error::Device { .. })));
    let result = device.ops.gated_activation(MAIN, Activation::Silu, &x, &device.zeros([4, 4], DType::F32), &x);
    assert!(matches!(result, Err(Error::Overlap { tensor: "out", .. })));
    let odd = device.zeros([9], DType::U8).carve(1, Shape::from([2]), DType::F32).unwrap();
    assert!(matches!(device.ops.scale(MAIN, &odd, 1.0), Err(Error::Unsupported { .. })));
}

#[test]
fn indices_from_outside_are_bounded() {
    let device = Device::scalar(ComputeDtype::F32);
    let table = device.weight([5, 4], &[0.0; 20], WeightRole::Embedding);
    let (x, out) = (device.zeros([3, 4], DType::F32), device.zeros([1, 4], DType::F32));
    let index =
        |result: kernels::Result<()>, v| assert!(matches!(result, Err(Error::Index { value, .. }) if value == v));
    index(device.ops.embed(MAIN, &device.u32(&[5]), &table, 1.0, &out), 5);
    index(device.ops.gather_rows(MAIN, &x, &device.u32(&[3]), &out), 3);
    let rope = RopeTable::build(&device.ops, &[1.0], 1.0, 10, RopeStyle::HalfSplit).unwrap();
    let heads = device.zeros([1, 2, 2], DType::F32);
    index(device.ops.rope(MAIN, &heads, &device.u32(&[10]), &rope), 10);
}

#[test]
fn raw_weights_are_checked_against_their_size() {
    let device = Device::scalar(ComputeDtype::Bf16);
    let load = |bytes: &[u8], format, shape: &[usize], role| {
        device.ops.load_weight(RawWeight { bytes, format, shape: Shape::new(shape).unwrap() }, role).err()
    };
    let bytes = load(&[0; 15], WeightFormat::F32, &[2, 2], WeightRole::Matrix);
    assert!(matches!(bytes, Some(Error::WeightBytes { expected: 16, actual: 15, .. })));
    let huge = load(&[0; 15], WeightFormat::Q4_0, &[1 << 20, 1 << 35], WeightRole::Matrix);
    assert!(matches!(huge, Some(Error::WeightBytes { .. })));
    let row = load(&[0; 18], WeightFormat::Q4_0, &[1, 31], WeightRole::Matrix);
    assert!(matches!(row, Some(Error::WeightRow { row: 31, block: 32, .. })));
    assert!(matches!(load(&[0; 4], WeightFormat::F32, &[1], WeightRole::Matrix), Some(Error::Shape { .. })));
    assert!(matches!(load(&[0; 4], WeightFormat::F32, &[1, 1], WeightRole::VECTOR), Some(Error::Shape { .. })));
    assert!(matches!(load(&[], WeightFormat::F32, &[4, 0], WeightRole::Matrix), Some(Error::Shape { .. })));
    assert_eq!(Shape::new(&[usize::MAX, 2]), None);
    assert_eq!(Shape::new(&[1, 1, 1, 1, 1]), None);
}

#[test]
fn matrices_that_padding_would_multiply_are_refused() {
    let bytes = vec![0; 33 * 4096 * 4];
    for (dtype, element) in [(ComputeDtype::Bf16, 2), (ComputeDtype::F32, 4)] {
        let device = Device::scalar(dtype);
        let load = |format: WeightFormat, [n_out, n_in]: [usize; 2], role| {
            let bytes = &bytes[..n_out * format.row_bytes(n_in).unwrap()];
            let weight = device.ops.load_weight(RawWeight { bytes, format, shape: Shape::from([n_out, n_in]) }, role);
            weight.map(|weight| weight.n_bytes())
        };
        for (format, role) in [(WeightFormat::Q4_0, WeightRole::Matrix), (WeightFormat::F32, WeightRole::Embedding)] {
            for n_out in [1, 7] {
                let padded = 32 * 4096 * element;
                let own = n_out * 4096 * element;
                let shape = Shape::from([n_out, 4096]);
                let expected = Err(Error::WeightPadding { shape, own, padded, factor_max: 4 });
                assert_eq!(load(format, [n_out, 4096], role), expected);
            }
            for (n_out, padded) in [(8, 32), (32, 32), (33, 64)] {
                assert_eq!(load(format, [n_out, 4096], role), Ok(padded * 4096 * element));
            }
            assert_eq!(load(format, [1, 128], role), Ok(32 * 128 * element), "a few pages are no harm");
        }
    }
}

#[test]
fn an_arena_holds_what_its_dry_run_measured() {
    let take = |arena: &mut Arena| {
        arena.clear();
        let a = arena.take([3, 5], DType::F32)?;
        let mark = arena.mark();
        arena.take([1000], DType::U8)?;
        arena.release(mark);
        let b = arena.take([7], DType::F32)?;
        assert!(!a.overlaps(&b));
        Ok::<_, Error>(b)
    };
    let mut dry = Arena::measuring();
    take(&mut dry).unwrap();
    assert_eq!(dry.peak(), 256 + 1024);
    let device = Device::scalar(ComputeDtype::F32);
    let mut arena = Arena::with_capacity(&device.ops, dry.peak()).unwrap();
    for _ in 0..3 {
        let b = take(&mut arena).unwrap();
        assert_eq!(device.ops.scale(MAIN, &b, 1.0), Ok(()));
    }
    let mut small = Arena::with_capacity(&device.ops, dry.peak() - 256).unwrap();
    assert_eq!(take(&mut small).err(), Some(Error::ArenaFull { capacity: 1024, wanted: 1280 }));
}
