//! Queries, keys and values of a step in one call: the three projections are one loop over all their panels.
//!
//! # Shapes
//! `x: [tokens, in]` f32; see [`Qkv`].

use crate::cpu::Machine;
use crate::cpu::access::{Access, Shared};
use crate::error::{Error, Result};
use crate::op::matmul::{self, Operand};
use crate::op::{kv, norm, rope};
use crate::ops::Qkv;
use crate::step::StepInputs;
use crate::tensor::{DType, Tensor};

/// Checks the contracts of all parts and computes.
pub(crate) fn run(machine: &mut Machine, access: &Access, step: &StepInputs, x: &Tensor, args: &Qkv<'_>) -> Result<()> {
    project(machine, access, x, args)?;
    for (tensor, norm) in [(args.query_out, args.query_norm), (args.key_scratch, args.key_norm)] {
        if let Some(norm) = norm {
            norm::run_heads(machine, access, tensor, norm)?;
        }
        rope::run(machine, access, tensor, args.positions, args.rope)?;
    }
    kv::run(machine, access, step, [args.key_scratch, args.value_scratch], args.cache)
}

fn project(machine: &mut Machine, access: &Access, x: &Tensor, args: &Qkv<'_>) -> Result<()> {
    let outs = [args.query_out, args.key_scratch, args.value_scratch];
    // `[tokens, heads, dim]` as `[tokens, heads * dim]`.
    let flat = |name: &'static str, tensor: &Tensor| match *tensor.dims() {
        [tokens, heads, dim] => tensor.view([tokens, heads * dim]),
        _ => {
            let (op, expected) = (access.op, "[tokens, heads, dim]".to_owned());
            Err(Error::Shape { op, tensor: name, expected, actual: tensor.shape() })
        }
    };
    let [query, key, value] =
        [flat("query_out", outs[0])?, flat("key_scratch", outs[1])?, flat("value_scratch", outs[2])?];
    let operands = [
        Operand::new(access, x, args.query, &query)?,
        Operand::new(access, x, args.key, &key)?,
        Operand::new(access, x, args.value, &value)?,
    ];
    let input = access.read::<f32>("x", x, DType::F32)?;
    // SAFETY: these are all tensors that this part makes slices of, and each output names the others.
    let outs = unsafe {
        [
            Shared::new(access.write::<f32>("query_out", &query, DType::F32, &[x, &key, &value])?),
            Shared::new(access.write::<f32>("key_scratch", &key, DType::F32, &[x, &query, &value])?),
            Shared::new(access.write::<f32>("value_scratch", &value, DType::F32, &[x, &query, &key])?),
        ]
    };
    matmul::multiply(machine, input, &operands, &outs);
    Ok(())
}
